"""Devices of a topology, by libtpu, on a machine that has none.

Only a process of the planner's own comes here: a process into which libtpu is
loaded has it for good.
"""

import importlib.metadata
import os
import re

import jax
from jax.experimental import topologies


def devices_of(topology):
    """Returns the devices of a `Topology`, to compile for.

    Args:
        topology: `Topology`.

    Returns:
        List of `jax.Device`.

    Raises:
        RuntimeError: if libtpu isn't installed, or isn't the one that belongs
            to this jaxlib.
        ValueError: if libtpu knows no such topology.
    """
    if topology.is_virtual:
        return jax.devices("cpu")[: topology.num_devices]
    check_version()
    # Else libtpu asks the machine which chips it has, for minutes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    options = {}
    if topology.chip.cores_named:
        # Both cores of a chip as one device.
        options["chip_config_name"] = "megacore"
    if topology.host is not None:
        options["chips_per_host_bounds"] = topology.host
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.grid_name, **options
        )
    except Exception as error:
        raise ValueError(
            "libtpu must know the topology. Received: topology="
            f"{topology.name!r}, as {topology.grid_name!r} with {options}: "
            f"{first_line(error)}"
        ) from error
    return list(found.devices)


def check_version():
    """Raises a RuntimeError unless the right libtpu is installed."""
    version = importlib.metadata.version("jax")
    install = f"Run: pip install 'jax[tpu]=={version}'"
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "Compiling for a TPU takes libtpu, of the extra 'plan', on Linux "
            f"with an x86 processor. Received: none installed. {install}. "
            "The topology 'cpu:8' works without it."
        ) from None
    wanted = needed_version()
    if wanted and not matches(installed, wanted):
        raise RuntimeError(
            "libtpu must be the one that belongs to this JAX; another fails "
            f"somewhere in the compiler. Received: libtpu {installed} with "
            f"JAX {version}, which needs libtpu {wanted}. {install}."
        )


def needed_version():
    """Returns the version of libtpu that JAX asks for, or `None`."""
    for line in importlib.metadata.requires("jax") or ():
        match = re.match(r"libtpu\s*\(?==\s*([\w.*]+)", line)
        if match:
            return match[1]
    return None


def matches(installed, wanted):
    """Whether a version is the wanted one, `*` at its end being any."""
    if wanted.endswith(".*"):
        prefix = wanted.removesuffix("*")
        return f"{installed}.".startswith(prefix)
    return installed == wanted


def first_line(error):
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
