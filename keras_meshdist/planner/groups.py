"""Replica groups: which devices of a mesh exchange data with each other."""

import itertools
import math
import re

import numpy as np

_IOTA = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}"
)
_SUB_AXIS = re.compile(r"(.+?)(?::\((\d+)\)(\d+))?")
_COUNTED = re.compile(r"(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,\s]*\},?\s*)*)\}")


def replica_groups(attributes, devices):
    """Reads the groups of devices of a collective operation.

    All forms of XLA's text are read: the list, the short form in which numbers
    are counted through a grid that may be transposed, and the axes of a mesh,
    or parts of them (https://openxla.org/xla/operation_semantics).

    Example:

    ```python
    replica_groups("replica_groups={{0,1},{2,3}}", 4)  # ((0, 1), (2, 3))
    replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)  # ((0, 2), (1, 3))
    replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
    # ((0, 1), (2, 3))
    ```

    Args:
        attributes: str, what follows the operands in the program's text.
        devices: int, number of devices; one group holds all of them if the
            text names none.

    Returns:
        Tuple of tuples of int, places in the device order of the program.

    Raises:
        ValueError: if the groups are written in a way that isn't known.
    """
    match = _IOTA.search(attributes)
    if match:
        shape, grid = _numbers(match[1]), _numbers(match[2])
        numbers = np.arange(math.prod(grid)).reshape(grid)
        if match[3]:
            numbers = numbers.transpose(_numbers(match[3]))
        return _tuples(numbers.reshape(shape[0], -1))
    match = _MESH.search(attributes)
    if match:
        return _of_mesh(*match.groups())
    match = _LISTED.search(attributes)
    if match:
        groups = [_numbers(g) for g in re.findall(r"\{([\d,\s]*)\}", match[1])]
        return tuple(groups) if groups else (tuple(range(devices)),)
    if "replica_groups=" in attributes:
        start = attributes.index("replica_groups=")
        raise ValueError(
            "Replica groups are a list of lists, a grid that is counted "
            "through, or axes of a mesh. Received: "
            f"{attributes[start : start + 60]!r}."
        )
    return (tuple(range(devices)),)


def source_target_pairs(attributes):
    """Reads which device sends to which in a collective permutation.

    Args:
        attributes: str, what follows the operands in the program's text.

    Returns:
        Tuple of pairs of int.
    """
    match = _PAIRS.search(attributes)
    pairs = re.findall(r"\{([\d,\s]*)\}", match[1]) if match else []
    return tuple(_numbers(pair) for pair in pairs)


def axes_of_groups(groups, axis_names, shape):
    """Returns the mesh axes along which the devices of groups differ.

    Example:

    ```python
    axes_of_groups(((0, 2), (1, 3)), ("batch", "model"), (2, 2))  # ("batch",)
    ```

    Args:
        groups: sequence of sequences of int, places in the flattened mesh.
        axis_names: sequence of str, the mesh's axes in order.
        shape: sequence of int, their sizes.

    Returns:
        Tuple of str, in the order of the mesh; empty if each device is alone.
    """
    apart = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group, int), shape))
        apart |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)))
    return tuple(name for i, name in enumerate(axis_names) if i in apart)


def _of_mesh(axes, device_ids, used):
    """Groups of the devices along some axes of a mesh, or parts of them.

    A part of an axis, `a:(2)4`, is a factor of its size: what varies slower
    is before, in parentheses.
    """
    pairs = [axis.rpartition("=") for axis in axes.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    sizes = [int(size) for _, _, size in pairs]
    numbers = np.arange(math.prod(sizes))
    counted = _COUNTED.fullmatch(device_ids or "")
    if counted:
        numbers = numbers.reshape(_numbers(counted[1]))
        if counted[2]:
            numbers = numbers.transpose(_numbers(counted[2]))
    elif device_ids:
        numbers = np.array([int(n) for n in re.findall(r"\d+", device_ids)])
    # Each axis is cut into all of its parts, those used and those between.
    cuts = [{1, size} for size in sizes]
    wanted = []
    for part in filter(None, (axis.strip() for axis in used.split(","))):
        name, before, size = _SUB_AXIS.fullmatch(part).groups()
        number = names.index(name)
        start = int(before or 1)
        stop = start * int(size or sizes[number])
        cuts[number] |= {start, stop}
        wanted.append((number, start, stop))
    factors, where = [], {}
    for number, places in enumerate(cuts):
        ordered = sorted(places)
        for start, stop in itertools.pairwise(ordered):
            where[number, start] = len(factors)
            factors.append(stop // start)
    inside = []
    for number, start, stop in wanted:
        starts = [s for s in sorted(cuts[number]) if start <= s < stop]
        inside += [where[number, s] for s in starts if (number, s) in where]
    outside = [d for d in range(len(factors)) if d not in inside]
    width = math.prod(factors[d] for d in inside)
    numbers = numbers.reshape(factors).transpose(outside + inside)
    return _tuples(numbers.reshape(-1, width))


def _numbers(text):
    return tuple(int(number) for number in text.split(",") if number.strip())


def _tuples(numbers):
    return tuple(tuple(int(n) for n in row) for row in numbers)
