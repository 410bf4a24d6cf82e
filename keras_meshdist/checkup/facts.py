"""What one process sees: all that the checks compare, as plain values."""

import glob
import hashlib
import importlib.metadata
import os
import platform
import socket
import sys

import jax
import keras

from keras_meshdist import coordination, environments, hardware, keras_hooks
from keras_meshdist.mesh import jax_mesh

# What a program's numbers may depend on.
PACKAGES = (
    "grain",
    "jax",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "jaxlib",
    "keras",
    "keras-hub",
    "keras-meshdist",
    "libtpu",
    "ml-dtypes",
    "numpy",
    "orbax-checkpoint",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
)
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_VARIABLES = ("LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO", "XLA_FLAGS")


def of_program():
    """Returns what can be seen without a look at devices."""
    return {
        "process": coordination.process_id(),
        "host": socket.gethostname(),
        "ip": _address(socket.gethostname()),
        "pid": os.getpid(),
        "versions": {"python": platform.python_version(), **versions()},
        "code": {
            "keras_meshdist": _package_digest(),
            "program": _program_digest(),
        },
        "settings": _settings(),
        "environment": {
            environment.name: dict(environment.variables)
            for environment in _around()
        },
        "hooks": keras_hooks.installed(),
        "seed": keras_hooks.random_seed(),
        "mesh": _mesh(),
    }


def of_devices():
    """Returns what is seen of devices; starts JAX, so it may wait."""
    local = jax.local_devices()
    return {
        "platform": jax.default_backend(),
        "jax_processes": jax.process_count(),
        "local_devices": [device.id for device in local],
        "device_kinds": sorted({device.device_kind for device in local}),
        "devices": [
            [device.process_index, device.platform, device.id]
            for device in jax.devices()
        ],
        "threads": threads(),
        "accelerators": {"gpu": hardware.gpus(), "tpu": hardware.tpu_chips()},
        "gpus": _gpus(local),
        "chosen": {
            name: os.environ.get(name)
            for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "NPROC")
        },
    }


def versions():
    """Returns the versions of installed packages that matter, by name."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def threads():
    """Returns how many threads XLA's CPU client takes for its pool."""
    given = os.environ.get("NPROC", "")
    if given.isdecimal() and int(given):
        return int(given)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _address(host):
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _gpus(devices):
    """The GPUs of this process as its host counts them."""
    numbers = [getattr(device, "local_hardware_id", None) for device in devices]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [
        visible[number]
        if isinstance(number, int) and number < len(visible) and visible[0]
        else str(number)
        for device, number in zip(devices, numbers, strict=True)
        if device.platform in ("gpu", "cuda", "rocm")
    ]


def _around():
    try:
        return environments.found()
    except ValueError:  # which `initialize` says
        return []


def _settings():
    settings = {name: jax.config.values.get(name) for name in _JAX_SETTINGS}
    settings |= {name: os.environ.get(name) for name in _VARIABLES}
    settings["floatx"] = keras.config.floatx()
    settings["dtype_policy"] = keras.config.dtype_policy().name
    settings["image_data_format"] = keras.config.image_data_format()
    return {name: None if v is None else str(v) for name, v in settings.items()}


def _mesh():
    """The current distribution's class and mesh, or `None`."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return None
    mesh = distribution.device_mesh
    kind = type(distribution)
    return {
        "distribution": f"{kind.__module__}.{kind.__name__}",
        "ours": isinstance(distribution, keras_hooks.HookedDistribution),
        "axes": list(mesh.axis_names),
        "shape": list(mesh.shape),
        "batch": str(getattr(distribution, "batch_dim_name", None)),
        "devices": [
            [device.process_index, device.platform, device.id]
            for device in jax_mesh(mesh).devices.flat
        ],
    }


def _package_digest():
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    digest = hashlib.sha256()
    for path in sorted(glob.glob(f"{folder}/**/*.py", recursive=True)):
        digest.update(os.path.relpath(path, folder).encode())
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _program_digest():
    """Of the script that runs, or `None` in a notebook or for a module."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if not path or not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]
