"""What arrays of a traced program are made of, and what is done with them."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Use:
    """What an operation does along a dimension.

    Args:
        kind: `"contracted"`, `"reduced"`, `"gathered"`, `"batched"` (both
            operands of a product have it) or `"cut"` (a slice, or a part of
            what is put together).
        elements: int, size of the result.
        weights: frozenset of the numbers of the weights of which the operand
            is made that has the dimension; empty for an activation.
    """

    kind: str
    elements: int
    weights: frozenset = frozenset()


@dataclasses.dataclass
class Array:
    dims: list[int]
    # The weights that it is made of, and nothing else; None if there is more.
    weights: frozenset | None


def made_of(operands: Sequence[Array]) -> frozenset | None:
    if any(array.weights is None for array in operands):
        return None
    return frozenset().union(*(array.weights for array in operands))
