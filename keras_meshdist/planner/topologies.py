"""Topologies by name: which chips, in which grid, on how many hosts."""

import dataclasses
import difflib
import math
import re

from keras_meshdist.planner.chips import CHIPS, CPU, Chip

# Grids by the number of chips, of Google's tables of configurations
# (https://docs.cloud.google.com/tpu/docs/v5e, …/v6e; …/v4, …/v5p).
_FLAT = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
_CUBES = [
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8"),
    *("8x8x8", "8x8x16", "8x16x16"),
]
_LARGEST = {"v5p": ["16x16x16", "16x16x24"]}
_SPOKEN = re.compile(r"(?:(\d+)x)?(v\d\w*)-(\d+)")
_WRITTEN = re.compile(r"(?:(\d+)x)?(v\d\w*):(\d+(?:x\d+)+)")
_VIRTUAL = re.compile(r"cpu:(\d+)")
# What Google's command line calls it.
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e"}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips that need not be there.

    Args:
        name: str, as it was given.
        chip: `Chip`.
        grid: tuple of int, the chips of a slice along each dimension.
        host: tuple of int, the chips of a host along each dimension; `None`
            for what libtpu takes by itself.
        slices: int.
    """

    name: str
    chip: Chip
    grid: tuple[int, ...]
    host: tuple[int, ...] | None = None
    slices: int = 1

    @property
    def num_devices(self):
        """Number of devices: chips, whatever cores they have."""
        return math.prod(self.grid) * self.slices

    @property
    def is_virtual(self):
        """Whether the devices are virtual CPU devices."""
        return self.chip.kind == CPU.kind

    @property
    def grid_name(self):
        """The grid as libtpu writes it, for instance `"v5e:2x4"`."""
        return f"{self.chip.kind}:{'x'.join(map(str, self.grid))}"

    def devices(self):
        """Returns the list of `jax.Device`s; loads libtpu.

        Raises:
            RuntimeError: if libtpu isn't installed, or is not the one that
                belongs to this jaxlib.
            ValueError: if libtpu knows no such topology.
        """
        from keras_meshdist.planner import libtpu

        return libtpu.devices_of(self)


def topology_of(name, slices=None, chips_per_host=None):
    """Returns the topology of a name.

    Example:

    ```python
    topology_of("v5e-8").grid  # (2, 4): on one host
    topology_of("v5p-128").grid  # (4, 4, 4): 128 TensorCores are 64 chips
    topology_of("2xv6e-256").slices  # 2
    topology_of("v5e:2x4")  # as libtpu says it, on two hosts of 2x2
    ```

    Args:
        name: str, as people say it: version and number, which counts chips of
            v5e and v6e, and TensorCores, two a chip, of v4 and v5p. Or as
            libtpu says it, version and grid. `"cpu:8"` for virtual devices.
        slices: int, number of slices. Defaults to that in the name, or 1.
        chips_per_host: int, 1, 4 or 8. Defaults to 4; to all of them for up to
            8 chips of v5e or v6e named as people say it.

    Returns:
        A `Topology`.

    Raises:
        ValueError: if there is no such topology; the message has the nearest.
    """
    text = str(name).strip().lower()
    virtual = _VIRTUAL.fullmatch(text)
    if virtual and int(virtual[1]) > 0 and not slices and not chips_per_host:
        return Topology(text, CPU, (int(virtual[1]),))
    match = _SPOKEN.fullmatch(text)
    if match:
        kind = _ALIASES.get(match[2], match[2])
        grid = _named_grids().get(f"{kind}-{match[3]}")
    else:
        match = _WRITTEN.fullmatch(text)
        kind = _ALIASES.get(match[2], match[2]) if match else None
        grid = match and tuple(int(d) for d in match[3].split("x"))
    chip = CHIPS.get(kind)
    if not grid or chip is None or len(grid) != chip.dimensions:
        raise ValueError(
            f"There is no such topology. Received: topology={name!r}. Nearest: "
            f"{_nearest(text)}. Valid: a version and a number ('v5e-8', "
            "'v5p-128'), a version and a grid ('v5e:2x4'), either with a "
            "number of slices in front ('2xv6e-256'), or 'cpu:8'."
        )
    host = _host(chip, grid, chips_per_host, bool(_SPOKEN.fullmatch(text)))
    return Topology(text, chip, grid, host, slices or int(match[1] or 1))


def _named_grids():
    found = {}
    for kind, chip in CHIPS.items():
        names = _FLAT if chip.dimensions == 2 else _CUBES
        for text in (*names, *_LARGEST.get(kind, ())):
            grid = tuple(int(d) for d in text.split("x"))
            number = math.prod(grid) * (2 if chip.cores_named else 1)
            found[f"{kind}-{number}"] = grid
    return found


def _nearest(text):
    """The names nearest to one, by their number if the version is known."""
    names = list(_named_grids())
    match = _SPOKEN.fullmatch(text)
    kind = _ALIASES.get(match[2], match[2]) if match else text[:3]
    if kind in CHIPS:
        same = [name for name in names if name.startswith(f"{kind}-")]
        if match:
            number = int(match[3])

            def distance(name):
                return abs(math.log(int(name.split("-")[1]) / max(number, 1)))

            same.sort(key=distance)
        return same[:3]
    return difflib.get_close_matches(text, names, 3, 0)


def _host(chip, grid, chips_per_host, spoken):
    """The chips of a host along each dimension, or `None` for libtpu's own."""
    flat = chip.dimensions == 2
    if chips_per_host is None:
        if not (spoken and flat and math.prod(grid) <= 8):
            return None
        return (*grid, 1)
    known = {1: (1, 1, 1), 4: (2, 2, 1)}
    if flat:
        known[8] = (2, 4, 1)
    host = known.get(chips_per_host)
    if host is None or any(g % h for g, h in zip(grid, host, strict=False)):
        raise ValueError(
            "A host has 1 or 4 chips, of v5e and v6e also 8, and a grid is "
            f"made of whole hosts. Received: chips_per_host={chips_per_host} "
            f"for a grid of {'x'.join(map(str, grid))} chips."
        )
    return host
