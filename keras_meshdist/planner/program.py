"""The text of a compiled program: its computations, and how often each runs.

What XLA prints of an optimised program is read here as plain text, so that it
can be tested without a compiler. The grammar is that of XLA's HLO text
(https://openxla.org/xla/operation_semantics).
"""

import collections
import dataclasses
import functools
import math
import re

# Bits of an element, by XLA's names (xla/xla_data.proto).
_BITS = {
    "pred": 8,
    **{
        f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)
    },
    **{f"f{bits}": bits for bits in (16, 32, 64)},
    "bf16": 16,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_REPLICAS = re.compile(r"\breplica_count=(\d+)")
# What follows an operation that has begun, and calls what it called.
_FOLLOWING = ("-done", "-update")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def called(self):
        """Names of the computations that it calls, by how it calls them."""
        found = [(how, name) for how, name in _CALLED.findall(self.attributes)]
        for branches in _BRANCHES.findall(self.attributes):
            names = re.findall(r"[\w.\-]+", branches)
            found += [("branch", name) for name in names]
        return found

    @property
    def cycles(self):
        """Cycles that the compiler estimates, or 0."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else 0

    @property
    def op_name(self):
        """Where in the traced function it comes from, or ''."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
        computations: dict from name to the list of its `Instruction`s, in the
            order in which they run if the compiler has scheduled them.
        entry: str, name of the computation that runs first.
        partitions: int, number of devices that run it together.
        replicas: int, number of copies of all those; 1 under GSPMD.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    partitions: int = 1
    replicas: int = 1

    @functools.cached_property
    def runs(self):
        """How often each computation runs in a step, by name.

        Computations within a fused or asynchronous operation count as their
        operation does. The body of a loop runs as often as the loop turns,
        and each branch of a conditional counts once.
        """
        counts = collections.Counter()
        loops = {}

        def visit(name, times):
            counts[name] += times
            for instruction in self.computations.get(name, ()):
                if instruction.opcode.endswith(_FOLLOWING):
                    continue
                trips = 1
                if instruction.opcode == "while":
                    if instruction.name not in loops:
                        loops[instruction.name] = self._trips(instruction)
                    trips = loops[instruction.name] or 1
                for how, called in instruction.called:
                    inner = trips if how in ("body", "condition") else 1
                    if how != "to_apply" or instruction.opcode == "call":
                        visit(called, times * inner)

        visit(self.entry, 1)
        return dict(counts)

    @functools.cached_property
    def loops_of_unknown_length(self):
        """Names of loops whose number of turns the program doesn't say."""
        return [
            instruction.name
            for name in self.runs
            for instruction in self.computations.get(name, ())
            if instruction.opcode == "while" and not self._trips(instruction)
        ]

    def _trips(self, loop):
        match = _TRIPS.search(loop.attributes)
        if match:
            return int(match[1])
        condition = dict(loop.called).get("condition")
        return self._compared_constant(condition)

    def _compared_constant(self, condition):
        """The constant below which a loop's counter stays, or `None`."""
        lines = self.computations.get(condition, ())
        constants = {
            line.name: int(line.operands[0])
            for line in lines
            if line.opcode == "constant"
            and line.operands
            and line.operands[0].isdigit()
        }
        compared = [
            constants[operand]
            for line in lines
            if (line.opcode == "compare" and "direction=LT" in line.attributes)
            or line.opcode == "fusion"
            for operand in line.operands
            if operand in constants
        ]
        return compared[0] if len(compared) == 1 else None


def parse(text):
    """Reads the text of a compiled program.

    Example:

    ```python
    program = parse(jax.jit(f).lower(x).compile().as_text())
    program.computations[program.entry][0].opcode  # "parameter"
    ```

    Args:
        text: str, an HLO module as XLA prints it.

    Returns:
        A `Program`.

    Raises:
        ValueError: if there is no entry computation.
    """
    computations, entry, current = {}, None, None
    header = text.partition("\n")[0]
    for line in text.splitlines():
        if current is None:
            match = _COMPUTATION.match(line)
            if match:
                current = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            found = _instruction(line.strip())
            if found:
                current.append(found)
    if entry is None:
        raise ValueError(
            "The text of a compiled program has an ENTRY computation. "
            f"Received: {len(text)} characters that begin {text[:60]!r}."
        )
    partitions = _PARTITIONS.search(header)
    replicas = _REPLICAS.search(header)
    return Program(
        computations,
        entry,
        int(partitions[1]) if partitions else 1,
        int(replicas[1]) if replicas else 1,
    )


def _instruction(line):
    match = _NAME.match(line)
    if not match:
        return None
    rest = line[match.end() :]
    is_tuple = rest.startswith("(")
    end = _closing(rest, 0) + 1 if is_tuple else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _closing(rest, opening)
    operands = tuple(_operands(rest[opening + 1 : closing]))
    attributes = rest[closing + 1 :]
    return Instruction(match[1], shape, rest[:opening], operands, attributes)


def _closing(text, opening):
    """Place of the parenthesis that closes the one at a place."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _operands(text):
    """Names of operands, or what stands there instead, as in constants."""
    names = re.findall(r"%([\w.\-]+)", text)
    if names:
        return names
    return [part.strip().rpartition(" ")[2] for part in text.split(",") if part]


def arrays_of(shape):
    """The arrays of a shape, a tuple or not, as pairs of dtype and dimensions.

    Example:

    ```python
    arrays_of("(bf16[8,4]{1,0}, s32[])")  # [("bf16", (8, 4)), ("s32", ())]
    ```

    Args:
        shape: str, as in a program's text; layouts are left out.

    Returns:
        List of pairs of str and tuple of int.
    """
    shape = re.sub(r"\{[^{}]*\}", "", shape)
    return [
        (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(shape)
    ]


def bytes_of(shape):
    """Bytes of a shape, without padding.

    Args:
        shape: str, as in a program's text.

    Returns:
        Int.

    Raises:
        ValueError: if a dtype is unknown.
    """
    return sum(_array_bytes(*array) for array in arrays_of(shape))


def _array_bytes(dtype, dims):
    bits = (
        8 if dtype.startswith("f8") else 4 if dtype.startswith("f4") else None
    )
    bits = bits or _BITS.get(dtype)
    if bits is None:
        raise ValueError(
            "The size of a dtype must be known to count bytes. Received: "
            f"{dtype!r}. Known: {sorted(_BITS)}, f8…, f4…."
        )
    return -(-math.prod(dims) * bits // 8)
