"""Virtual CPU devices: one computer that looks like many devices."""

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping

from keras_meshdist import hardware

_COUNT_FLAG = "--xla_force_host_platform_device_count"

# Whether `meshdist run` has started this process, with its devices.
started_by_run = False


def environment(
    devices: int, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment variables of a process with virtual CPU devices.

    ```python
    env = {**os.environ, **kmd.cluster.environment(8)}
    subprocess.run([sys.executable, "train.py"], env=env)
    ```

    Args:
        devices: integer, number of virtual CPU devices.
        base: mapping, the environment to which the variables are added.
            Other flags in its `XLA_FLAGS` are kept. Defaults to
            `os.environ`.

    Returns:
        A dictionary of the variables to set.

    Raises:
        ValueError: If `devices` is not a positive integer.
    """
    check_count("devices", devices)
    base = os.environ if base is None else base
    flags = re.sub(rf"{_COUNT_FLAG}=\S*", "", base.get("XLA_FLAGS", ""))
    variables = {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags.split(), f"{_COUNT_FLAG}={devices}"]),
        # XLA sizes its thread pool by this. With fewer threads than devices,
        # those of one collective wait for each other for ever.
        "NPROC": str(max(16, 2 * devices)),
    }
    if "JAX_NUM_CPU_DEVICES" in base:
        # It would win over the flag.
        variables["JAX_NUM_CPU_DEVICES"] = str(devices)
    return variables


def use_virtual_devices(devices: int) -> None:
    """Gives this process a number of virtual CPU devices.

    For test configurations and notebooks. Call it first: devices are fixed
    once JAX has started. Called again with the same number it does nothing,
    nor does it in a script that `meshdist run` has given its devices.

    ```python
    kmd.cluster.use_virtual_devices(8)
    mesh = keras.distribution.DeviceMesh((4, 2), ("model", "batch"))
    ```

    Args:
        devices: integer, number of virtual CPU devices.

    Raises:
        ValueError: If `devices` is not a positive integer.
        RuntimeError: If JAX has started already with other devices, or Keras
            was imported with another backend.
    """
    variables = environment(devices)
    if started_by_run:
        return
    if "keras" in sys.modules:
        _check_keras_backend()
    if "jax" in sys.modules:
        import jax

        from keras_meshdist import coordination

        if coordination.backend_started():
            found = [d for d in jax.local_devices() if d.platform == "cpu"]
            if len(found) == devices:
                return
            raise RuntimeError(
                "Virtual devices must be asked for before JAX starts (its "
                "first computation, or the first look at its devices). "
                f"Received: devices={devices}, while JAX runs with "
                f"{jax.local_devices()}. Call it at the top of the program, "
                "or restart the notebook's kernel."
            )
        # JAX reads this variable when it is imported, the others later.
        jax.config.update("jax_platforms", "cpu")
        if "JAX_NUM_CPU_DEVICES" in variables:
            jax.config.update("jax_num_cpu_devices", devices)
    os.environ.update(variables)


def accelerator_count() -> int:
    """The number of TPU chips or GPUs of this computer that JAX can use.

    It is found without starting JAX, so virtual devices can still be asked
    for, as in a notebook that takes what it finds:

    ```python
    if kmd.cluster.accelerator_count() < 2:
        kmd.cluster.use_virtual_devices(8)
    ```

    Returns:
        Integer, `0` if JAX has only the CPU: there is nothing else, the JAX
        for it isn't installed, or `JAX_PLATFORMS=cpu` is set.
    """
    from keras_meshdist import coordination

    if coordination.backend_started():
        import jax

        return sum(d.platform != "cpu" for d in jax.local_devices())
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    if importlib.util.find_spec("libtpu") and hardware.tpu_chips():
        return hardware.tpu_chips()
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not any("cuda" in plugin.name for plugin in plugins):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return hardware.gpus()
    return min(hardware.gpus(), len([n for n in visible.split(",") if n]))


def check_count(name: str, value: int) -> None:
    """Raises unless a number of processes or devices is one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`{name}` must be a positive integer. Received: {name}={value!r}. "
            "Valid are 1, 2, 4, 8, ..."
        )


def _check_keras_backend() -> None:
    import keras

    if keras.config.backend() != "jax":
        raise RuntimeError(
            "Keras must run on JAX. Received: Keras was imported with "
            f"backend {keras.config.backend()!r}. Set the environment "
            "variable KERAS_BACKEND=jax before Keras is imported."
        )
