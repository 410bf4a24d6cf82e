"""What a program's arguments take, with and without the compiler's padding.

An array lies on a TPU in tiles, its smallest dimensions filled up to whole
ones: of 8 x 128 elements, for instance, and a scalar to 128. The text of a
program has the tiles in the layout of each array (https://openxla.org/xla/
tiled_layout).
"""

import math
import re

from keras_meshdist.planner.program import bytes_of

# A dtype, dimensions, their order from the fastest varying, and the tile.
_TILED = re.compile(
    r"\b[a-z][a-z0-9]*\[([0-9,]*)\]\{([0-9,]*):T\(([0-9,]+)\)[^}]*\}"
)


def argument_bytes(program):
    """Returns the bytes of a program's arguments on one device.

    Those that it doesn't use are not among its parameters, nor in what the
    compiler counts: JAX leaves them out.

    Args:
        program: `Program`.

    Returns:
        Tuple of two int: without padding, and with it.
    """
    shapes = [
        line.shape
        for line in program.computations[program.entry]
        if line.opcode == "parameter"
    ]
    return sum(map(bytes_of, shapes)), sum(map(padded_bytes, shapes))


def padded_bytes(shape):
    """Bytes of an array as it lies on a device.

    Args:
        shape: str, an array's, as in a program's text.

    Returns:
        Int; of an array without tiles, what it has by itself.
    """
    match = _TILED.search(shape)
    if not match:
        return bytes_of(shape)
    dims, order, tile = (
        [int(number) for number in text.split(",") if number]
        for text in match.groups()
    )
    from_slowest = [dims[d] for d in reversed(order)]
    missing = max(0, len(tile) - len(from_slowest))
    lie = [1] * missing + from_slowest
    first = len(lie) - len(tile)
    filled = [
        size if d < first else -(-size // tile[d - first]) * tile[d - first]
        for d, size in enumerate(lie)
    ]
    elements = math.prod(dims)
    if not elements:
        return 0
    return bytes_of(shape) * math.prod(filled) // elements
