"""From a step to a compiled program's text and figures, or from the cache."""

import importlib.metadata
import os

from keras_meshdist.planner import cache
from keras_meshdist.planner.libtpu import first_line

# What changes the compiler's work from outside.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# libtpu then finishes a program that a chip has no memory for.
_EVEN_IF_TOO_LARGE = {"xla_tpu_no_crash_on_oom": "true"}
_TOO_LARGE = "RESOURCE_EXHAUSTED"


class RefusedError(Exception):
    """The compiler refuses a program."""


class OutOfMemoryError(RefusedError):
    """A chip has no memory for a program, nor even for a part of it."""


def compiled(lowered, topology, mesh, names):
    """Compiles a step, unless the same has been compiled before.

    Args:
        lowered: what JAX's `lower` gives.
        topology: `Topology`.
        mesh: `keras.distribution.DeviceMesh` over its devices.
        names: list of str, paths of variables: names in the program follow
            them, though its text doesn't.

    Returns:
        Tuple of a dict with the program's `text`, the compiler's `memory` and
        `cost`, and `too_large`, what it says if a chip has no memory for it;
        and whether it was compiled now.

    Raises:
        RefusedError: if the compiler refuses it for another reason.
    """
    key = cache.key_of(
        lowered.as_text(),
        topology.grid_name,
        [topology.slices, list(topology.host or ())],
        [_place(device) for device in mesh.devices.flat],
        [os.environ.get(name, "") for name in _FLAGS],
        [_version(package) for package in ("jax", "jaxlib", "libtpu")],
        names,
    )
    found = cache.load(key)
    if found is not None:
        return found, False
    too_large = None
    try:
        program = lowered.compile()
    except Exception as error:
        if topology.is_virtual or _TOO_LARGE not in str(error):
            raise refused(error) from error
        too_large = _plain(error)
        try:
            program = lowered.compile(compiler_options=_EVEN_IF_TOO_LARGE)
        except Exception as again:
            raise refused(again) from error
    memory = program.memory_analysis()
    cost = program.cost_analysis() or {}
    if isinstance(cost, list):
        cost = cost[0]  # before JAX 0.4.39
    found = {
        "text": program.as_text(),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "cost": {
            "flops": float(cost.get("flops", 0)),
            "bytes": float(cost.get("bytes accessed", 0)),
        },
        "too_large": too_large,
    }
    cache.store(key, found)
    return found, True


def refused(error):
    """Returns a `RefusedError` that says in plain words what is wrong."""
    if _TOO_LARGE in str(error):
        return OutOfMemoryError(_plain(error))
    return RefusedError(
        f"the compiler refuses: {type(error).__name__}: {first_line(error)}"
    )


def _plain(error):
    """The compiler's words about memory, in one line."""
    text = str(error).partition(_TOO_LARGE)[2].lstrip(": ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    largest = [
        line for line in lines if line.startswith(("Size:", "Operator:"))
    ][:4]
    return " ".join([*lines[:1], *largest]).rstrip(".")


def _place(device):
    return [
        *getattr(device, "coords", (device.id,)),
        getattr(device, "slice_index", 0),
        device.process_index,
    ]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
