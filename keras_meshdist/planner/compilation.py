"""From a step to a compiled program's text and figures, or from the cache."""

import importlib.metadata
import os
import re

from keras_meshdist.planner import cache
from keras_meshdist.planner.libtpu import first_line

# What changes the compiler's work from outside.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LARGEST = re.compile(
    r"Size: ([\d.]+[KMGT]?)\s*\n(?:\s*Operator: op_name=\"([^\"]*)\")?"
)


class RefusedError(Exception):
    """The compiler refuses a program.

    Args:
        message: str, in plain words.
        used: int, bytes of a chip's memory that the program takes, or `None`.
        available: int, bytes that there are, or `None`.
    """

    def __init__(self, message, used=None, available=None):
        super().__init__(message)
        self.used, self.available = used, available


def compiled(lowered, topology, mesh, names):
    """Compiles a step, unless the same has been compiled before.

    Args:
        lowered: what JAX's `lower` gives.
        topology: `Topology`.
        mesh: `keras.distribution.DeviceMesh` over its devices.
        names: list of str, paths of variables: names in the program follow
            them, though its text doesn't.

    Returns:
        Tuple of a dict with the program's `text` and the compiler's `memory`
        and `cost`, and whether it was compiled now.

    Raises:
        RefusedError: if the compiler refuses.
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
    try:
        program = lowered.compile()
    except Exception as error:
        raise refused(error) from error
    memory = program.memory_analysis()
    cost = program.cost_analysis() or {}
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
    }
    cache.store(key, found)
    return found, True


def refused(error):
    """Returns a `RefusedError` that says in plain words what is wrong."""
    text = str(error)
    match = _USED.search(text)
    if match:
        used = float(match[1]) * _UNITS[match[2]]
        available = float(match[3]) * _UNITS[match[4]]
        largest = [
            f"{size}iB{f' ({name})' if name else ''}"
            for size, name in _LARGEST.findall(text)[:3]
        ]
        return RefusedError(
            f"out of memory at compile time: {used / 2**30:.2f} GiB of "
            f"{available / 2**30:.2f} GiB on each chip"
            + (f"; the largest: {', '.join(largest)}" if largest else ""),
            int(used),
            int(available),
        )
    return RefusedError(
        f"the compiler refuses: {type(error).__name__}: {first_line(error)}"
    )


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
