"""How long an exchange between chips takes, by the links that it uses.

The formulas are those of "How to Scale Your Model" (Austin et al., 2025,
https://jax-ml.github.io/scaling-book/sharding/), for rings that close and
lines that don't: to gather or to scatter moves what a device has at the end,
or the beginning, once over the links of each dimension that the devices
differ in; to reduce is both; in an exchange of all with all the middle of a
dimension is passed by half of everything. Where several groups share a link,
each has its part.
"""

import collections
import dataclasses
import functools
import itertools

import numpy as np

# Seconds from a chip to the next, of the same source.
HOP = 1e-6


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How a collective uses the network.

    Args:
        seconds: float, what it takes.
        neighbours: bool, whether those that follow each other in a ring are
            neighbours in the grid of chips.
        rings: bool, whether each dimension that it uses closes to a ring.
        between_slices: bool, whether it crosses slices.
    """

    seconds: float
    neighbours: bool
    rings: bool
    between_slices: bool


class Network:
    """The links between the chips of a mesh.

    Args:
        chip: `Chip`.
        grid: tuple of int, chips of a slice along each dimension.
        coords: sequence of tuples of int, where each device of the flattened
            mesh stands in its slice's grid.
        slices: sequence of int, the slice of each device. Defaults to one
            slice.
    """

    def __init__(self, chip, grid, coords, slices=None):
        self.chip, self.grid = chip, tuple(grid)
        self.coords = [tuple(c[: len(self.grid)]) for c in coords]
        self.slices = list(slices) if slices is not None else [0] * len(coords)
        self._known = {}

    def exchange(self, collective):
        """Returns the `Exchange` of a `Collective`."""
        key = collective.kind, collective.bytes, collective.groups
        if key not in self._known:
            self._known[key] = self.exchange_of(*key)
        return self._known[key]

    def ring(self, groups):
        """Returns how groups of devices lie, as the `Exchange` of a byte."""
        return self.exchange_of("all-gather", 1, groups)

    def exchange_of(self, kind, size, groups):
        """Returns the `Exchange` of so many bytes between groups of devices.

        Args:
            kind: str, as in `Collective`.
            size: int, bytes, as in `Collective`.
            groups: tuple of tuples of int, as in `Collective`.
        """
        if kind == "collective-permute":
            return self._permute(size, groups)
        members = len(groups[0]) if groups else 1
        if members < 2:
            return Exchange(0.0, True, True, False)
        way = self._way(groups)
        within = members // way.slices
        seconds = 0.0
        if within > 1:
            moved = size * (within - 1) / within
            if kind.endswith("all-to-all"):
                seconds = size * way.middle / self.chip.link_bandwidth
            else:
                seconds = moved / way.bandwidth
            seconds += way.hops * HOP
        if way.slices > 1:
            # What each chip has after a scatter within its slice.
            share = size / within * (way.slices - 1) / way.slices
            seconds += share / self.chip.network_bandwidth
        if kind == "all-reduce":
            seconds *= 2
        apart = way.slices > 1
        near = way.neighbours and not apart
        return Exchange(seconds, near, way.rings and not apart, apart)

    def _permute(self, size, pairs):
        loads, apart, hops = collections.Counter(), False, 0
        for source, target in pairs:
            apart |= self.slices[source] != self.slices[target]
            links = self._route(self.coords[source], self.coords[target])
            loads.update((self.slices[source], link) for link in links)
            hops = max(hops, len(links))
        busiest = max(loads.values(), default=0)
        seconds = size * busiest / self.chip.link_bandwidth + hops * HOP
        if apart:
            seconds += size / self.chip.network_bandwidth
        return Exchange(seconds, hops <= 1 and not apart, True, apart)

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def _way(self, groups):
        """How the rings of groups run through the grid."""
        loads, hops, neighbours = collections.Counter(), 0, True
        spread = {}
        for group in groups:
            by_slice = collections.defaultdict(list)
            for device in group:
                by_slice[self.slices[device]].append(self.coords[device])
            for number, coords in by_slice.items():
                ring = _snake(coords)
                for here, there in itertools.pairwise(ring):
                    links = self._route(here, there)
                    neighbours &= len(links) == 1
                    loads.update((number, *link) for link in links)
                hops = max(hops, len(ring) - 1)
                for d, values in enumerate(zip(*coords, strict=True)):
                    spread[d] = max(spread.get(d, 1), len(set(values)))
        slices = len({self.slices[device] for device in groups[0]})
        shared = max(loads.values(), default=1)
        used = [d for d, count in spread.items() if count > 1]
        rings = [self._closes(d) and spread[d] == self.grid[d] for d in used]
        link = self.chip.link_bandwidth / shared
        # Dimensions work together only if the devices fill a rectangle.
        full = np.prod([spread[d] for d in used]) == len(groups[0]) // slices
        if full:
            bandwidth = sum(link * (2 if ring else 1) for ring in rings)
        else:
            bandwidth = link
        middle = max(
            (
                spread[d] * shared / (8 if ring else 4)
                for d, ring in zip(used, rings, strict=True)
            ),
            default=0,
        )
        halves = sum(
            spread[d] // 2 if ring else spread[d] - 1
            for d, ring in zip(used, rings, strict=True)
        )
        return _Way(
            bandwidth or link,
            middle,
            halves if full else hops,
            neighbours,
            bool(rings) and all(rings),
            slices,
        )

    def _closes(self, dimension):
        return self.grid[dimension] % self.chip.wraps_at == 0

    def _route(self, here, there):
        """The links from chip to chip, one dimension after the other."""
        links, at = [], list(here)
        for d, goal in enumerate(there):
            while at[d] != goal:
                step = 1 if goal > at[d] else -1
                if self._closes(d) and abs(goal - at[d]) > self.grid[d] / 2:
                    step = -step
                before = tuple(at)
                at[d] = (at[d] + step) % self.grid[d]
                links.append((before, tuple(at)))
        return links


@dataclasses.dataclass(frozen=True)
class _Way:
    bandwidth: float
    middle: float
    hops: int
    neighbours: bool
    rings: bool
    slices: int


def _snake(coords):
    """Orders chips so that those of a rectangle follow as neighbours."""
    if not coords or not coords[0]:
        return list(coords)
    ordered = []
    for turn, value in enumerate(sorted({c[-1] for c in coords})):
        row = [c[:-1] for c in coords if c[-1] == value]
        row = _snake(row)
        if turn % 2:
            row.reverse()
        ordered += [(*c, value) for c in row]
    return ordered
