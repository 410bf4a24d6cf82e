"""Which dimensions of a model are split over a mesh axis.

Tensor parallelism splits a weight along one of its dimensions. If two weights
that follow each other are split along the dimension between them (the first by
its output, the second by its input), the devices exchange data once for both
of them: the pairing of columns and rows in Megatron-LM (Shoeybi et al., 2019,
https://arxiv.org/abs/1909.08053, section 3). So what is looked for is a set of
dimensions of which each weight has one, at the least exchange.
"""

import collections
import dataclasses

# What it is worth to split all weights, in units of what is exchanged when all
# dimensions are split.
_WORTH = 4.0
# Dimensions that many weights have, such as the hidden size, may hide a better
# choice; so many are tried without.
_BUSIEST = 8


@dataclasses.dataclass(frozen=True)
class Weight:
    """What the choice needs to know of a weight.

    Args:
        dims: tuple of int, its dimensions by the numbers of `Dimensions`.
        shape: tuple of int.
        work: int, multiplications that are made with it.
    """

    dims: tuple[int, ...]
    shape: tuple[int, ...]
    work: int


def weights_of(dimensions, variables):
    """Returns a `Weight` for each variable.

    Args:
        dimensions: `Dimensions` of the model.
        variables: list of variables, in the order of its weights.
    """
    return [
        Weight(dimensions.of_weight(n), tuple(v.shape), dimensions.work(n))
        for n, v in enumerate(variables)
    ]


def split_dimensions(weights, uses, pieces, excluded):
    """Chooses the dimensions to split over an axis.

    Args:
        weights: list of `Weight`.
        uses: dict from dimension to the list of its `Use`s.
        pieces: int, size of the mesh axis.
        excluded: set of dimensions that may not be split.

    Returns:
        Set of dimensions.
    """
    edges = []
    for weight in weights:
        dims = {
            d
            for d, size in zip(weight.dims, weight.shape, strict=True)
            if d not in excluded and size % pieces == 0 and size > 1
        }
        if len(weight.dims) > 1 and weight.work and dims:
            edges.append((dims, weight.work))
    exchanged = {
        d: sum(use.elements for use in uses.get(d, ()) if use.kind != "batched")
        for dims, _ in edges
        for d in dims
    }
    search = _Search(edges, exchanged)
    best, without = search.best(set()), set()
    busiest = search.busiest(_BUSIEST)
    # Each in turn, and, as an encoder and a decoder have a hidden size each,
    # several at once.
    for count, dim in enumerate(busiest, 1):
        for tried in (without | {dim}, set(busiest[:count])):
            other = search.best(tried)
            if other[0] < best[0]:
                best, without = other, tried
    return best[1]


class _Search:
    """Looks for the dimensions that are best split.

    Args:
        edges: list of pairs, the dimensions of a weight and its work.
        exchanged: dict from dimension to how many numbers devices exchange if
            it is split.
    """

    def __init__(self, edges, exchanged):
        total = sum(work for _, work in edges) or 1
        whole = sum(exchanged.values()) or 1
        self._edges = [(dims, _WORTH * work / total) for dims, work in edges]
        self._cost = {d: n / whole for d, n in exchanged.items()}
        self._of = collections.defaultdict(list)
        for edge in self._edges:
            for dim in edge[0]:
                self._of[dim].append(edge)

    def busiest(self, count):
        """The dimensions that the most weights have."""
        order = sorted(self._of, key=lambda d: (-len(self._of[d]), d))
        return order[:count]

    def best(self, without):
        """Returns what a choice costs, and the choice, a set of dimensions.

        Changes a dimension at a time, the one that gains the most.
        """
        chosen = set()
        gain = {d: self._gain(d, chosen) for d in self._of if d not in without}
        while gain:
            dim = max(gain, key=lambda d: (gain[d], -d))
            if gain[dim] <= 1e-12:
                break
            chosen ^= {dim}
            near = {d for dims, _ in self._of[dim] for d in dims} & set(gain)
            gain.update({d: self._gain(d, chosen) for d in near})
        cost = sum(self._cost[d] for d in chosen)
        return cost + sum(self._waste(e, chosen) for e in self._edges), chosen

    def _gain(self, dim, chosen):
        other = chosen ^ {dim}
        saved = sum(
            self._waste(edge, chosen) - self._waste(edge, other)
            for edge in self._of[dim]
        )
        sign = 1 if dim in chosen else -1
        return saved + sign * self._cost[dim]

    def _waste(self, edge, chosen):
        """A weight that isn't split, or is split twice, is done by all."""
        dims, worth = edge
        return 0.0 if len(chosen & dims) == 1 else worth
