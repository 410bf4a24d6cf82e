"""Which dimensions of a model's weights are one: read off its computation.

A traced model says of each weight what is done with each of its dimensions.
Dimensions that an operation puts together (the inner ones of a product, those
of a sum) are one, and so a model falls into few: the hidden size, the heads of
each layer, its feed-forward width, the vocabulary. What is split over a mesh
axis is such a dimension, wherever it appears.
"""

import collections
from typing import Any

from keras_meshdist.layouts.operations import rule_of
from keras_meshdist.layouts.uses import Array, Use


class Dimensions:
    """The dimensions of all arrays of a program, equal ones as one number.

    Args:
        jaxpr: `jax.core.ClosedJaxpr` of a model's call.
        weights: int, how many of its arguments are weights; they come first.
    """

    def __init__(self, jaxpr: Any, weights: int):
        self._parent: list[int] = []
        self.found: list[tuple[int, Use]] = []
        self.inner: list[int] = []
        self.named: list[tuple[str, list[int], tuple[int, ...]]] = []
        self._work: collections.Counter = collections.Counter()
        arguments = [Array(self.fresh(v), None) for v in jaxpr.jaxpr.invars]
        for number, array in enumerate(arguments[:weights]):
            array.weights = frozenset([number])
        self._arguments = arguments
        self._weights = weights
        self.run(jaxpr.jaxpr, jaxpr.consts, arguments)

    def of_weight(self, number: int) -> tuple[int, ...]:
        """The dimensions of a weight."""
        return tuple(map(self._find, self._arguments[number].dims))

    def of_data(self, place: int | None = None) -> set[int]:
        """The dimensions of what the model is called with.

        All of them, or those that stand at one place.
        """
        places = slice(place, None if place is None else place + 1)
        return {
            self._find(dim)
            for array in self._arguments[self._weights :]
            for dim in array.dims[places]
        }

    def outputs(self) -> dict[str, list[tuple[tuple[int, ...], int]]]:
        """What layers return, by their names.

        The dimensions of each array, and the size of the last.
        """
        found = collections.defaultdict(list)
        for name, dims, shape in self.named:
            if dims:
                found[name].append((tuple(map(self._find, dims)), shape[-1]))
        return dict(found)

    def between_weights(self) -> set[int]:
        """Dimensions over which weights are multiplied with each other."""
        return set(map(self._find, self.inner))

    def between_activations(self) -> set[int]:
        """Dimensions over which activations are multiplied with each other.

        Such as the size of a head, for the scores of attention.
        """
        return {
            self._find(dim)
            for dim, use in self.found
            if use.kind == "contracted" and not use.weights
        }

    def uses(self) -> dict[int, list[Use]]:
        """What is done along each dimension."""
        found = collections.defaultdict(list)
        for dim, use in self.found:
            found[self._find(dim)].append(use)
        return dict(found)

    def work(self, number: int) -> int:
        """Multiplications that are made with a weight.

        A look-up counts as the product with ones and zeros that it equals.
        """
        return self._work[number]

    def count(self, weights, work):
        for number in weights:
            self._work[number] += work

    # Numbers of dimensions: a forest in which each points to an equal one.

    def new(self) -> int:
        self._parent.append(len(self._parent))
        return self._parent[-1]

    def fresh(self, variable: Any) -> list[int]:
        return [self.new() for _ in variable.aval.shape]

    def _find(self, dim: int) -> int:
        while self._parent[dim] != dim:
            self._parent[dim] = self._parent[self._parent[dim]]
            dim = self._parent[dim]
        return dim

    def join(self, one: int, other: int) -> None:
        self._parent[self._find(one)] = self._find(other)

    # The program.

    def run(self, jaxpr, consts, arguments) -> list[Array]:
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable in jaxpr.constvars:
            known[variable] = Array(self.fresh(variable), frozenset())

        def read(atom):
            if hasattr(atom, "val"):  # a literal
                return Array(self.fresh(atom), frozenset())
            return known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = rule_of(equation)(self, equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]
