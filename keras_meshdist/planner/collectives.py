"""What devices exchange in a step: every collective of a compiled program."""

import collections
import dataclasses
import re

from keras_meshdist.planner.groups import (
    axes_of_groups,
    replica_groups,
    source_target_pairs,
)
from keras_meshdist.planner.program import bytes_of

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_START = "-start"
# Steps of a path in a traced function that aren't layers.
_LOOP = ("while", "body")
# What Keras puts behind the names of layers that have none of their own.
_NUMBER = re.compile(r"_\d+$")
_WRAPPERS = re.compile(r"^(?:jit|jvp|transpose|vmap|pmap|remat|checkpoint)\b")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Args:
        name: str, its name in the program.
        computation: str, the computation in which it stands.
        kind: str, one of `KINDS`.
        bytes: int, of the whole of what a device has at the end of a gather,
            else at the beginning; not what goes over the network.
        groups: tuple of tuples of int, places in the flattened mesh that
            exchange with each other; of a permutation, pairs.
        axes: tuple of str, the mesh axes along which they differ.
        count: int, how often it runs in a step.
        source: str, the path of the layer that it comes from, or `""`.
    """

    name: str
    computation: str
    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    count: int
    source: str


def collectives_of(program, axis_names, shape):
    """Returns all collectives of a program that runs on a mesh.

    One that is begun and ended apart counts once.

    Args:
        program: `Program`.
        axis_names: sequence of str, the mesh's axes in order.
        shape: sequence of int, their sizes.

    Returns:
        List of `Collective`, in the order of the program's text.
    """
    found = []
    for computation, times in program.runs.items():
        lines = program.computations.get(computation, ())
        shapes = {line.name: line.shape for line in lines}
        for line in lines:
            kind = kind_of(line)
            if kind is None or not times:
                continue
            size = sum(
                bytes_of(shapes[name])
                for name in line.operands
                if name in shapes
            )
            if kind == "collective-permute":
                groups = source_target_pairs(line.attributes)
            else:
                groups = replica_groups(line.attributes, program.partitions)
            if kind == "all-gather":
                size *= len(groups[0])
            found.append(
                Collective(
                    line.name,
                    computation,
                    kind,
                    size,
                    groups,
                    axes_of_groups(groups, axis_names, shape),
                    times,
                    layer_path(line.op_name),
                )
            )
    return found


def kind_of(instruction):
    """Returns which of `KINDS` an instruction is, or `None`."""
    opcode = instruction.opcode.removesuffix(_START)
    return opcode if opcode in KINDS else None


def layer_path(op_name):
    """Returns the layer from which an operation comes.

    Keras names what it traces by its layers; the names of JAX's functions
    around them, and of the operation itself, are left out.

    Example:

    ```python
    layer_path("jit(train_step)/jvp(model)/dense/dot_general")  # "model/dense"
    ```

    Args:
        op_name: str, as the compiler keeps it.

    Returns:
        Str; `""` if there is no layer in it.
    """
    names = []
    # The last one is the operation.
    for part in op_name.split("/")[:-1]:
        while _WRAPPERS.match(part) and part.endswith(")"):
            part = part[part.index("(") + 1 : -1]
            if part in ("train_step", "test_step", "predict_step"):
                part = ""
        if part and part != "closed_call" and not _WRAPPERS.match(part):
            names.append(part)
        if tuple(names[-2:]) == _LOOP:
            del names[-2:]
    return "/".join(names)


def _of_any_block(source, blocks):
    """A path in which blocks that are alike have one name, and theirs none."""
    names, inside = [], False
    for name in source.split("/"):
        inside |= name in blocks
        plain = _NUMBER.sub("", name) if inside else name
        names.append(blocks.get(name, plain))
    return "/".join(names)


def summed(collectives, blocks=()):
    """Returns what a report lists: equal collectives together.

    Args:
        collectives: list of `Collective`.
        blocks: dict from the name of a block to one for all that are alike.
            Defaults to none.

    Returns:
        List of dicts with `kind`, `bytes` of each, `axes`, `count` in a step
        and `source`; those that move the most first.
    """
    counts = collections.Counter()
    for c in collectives:
        source = _of_any_block(c.source, dict(blocks))
        counts[c.kind, c.bytes, c.axes, source] += c.count
    order = sorted(counts.items(), key=lambda i: (-i[0][1] * i[1], i[0]))
    return [
        {
            "kind": kind,
            "bytes": size,
            "axes": list(axes),
            "count": count,
            "source": source,
        }
        for (kind, size, axes, source), count in order
    ]
