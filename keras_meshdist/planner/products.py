"""Operations of a program's products, as often as each is made.

The compiler's own count takes a loop for one turn of it, so that what a product
that is made piece by piece costs is missing from it.
"""

import functools
import math
import re

from keras_meshdist.planner.program import arrays_of

_DIMS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def flops_of_loops(program):
    """Returns the operations of products that the compiler leaves out.

    Those of loops, but for one turn of each.

    Args:
        program: `Program`.

    Returns:
        Int, multiplications and additions.
    """
    return sum(
        (times - 1) * flops_of_products(program.computations.get(name, ()))
        for name, times in program.runs.items()
        if times > 1
    )


def flops_of_products(lines):
    """Returns the operations of the products in one computation.

    Args:
        lines: list of `Instruction`.

    Returns:
        Int.
    """
    shapes = {line.name: line.shape for line in lines}
    makers = {"dot": _of_dot, "convolution": _of_convolution}
    return sum(
        2 * makers[line.opcode](line, shapes)
        for line in lines
        if line.opcode in makers
    )


def _of_dot(line, shapes):
    """Multiplications of a product of matrices."""
    dims = _CONTRACTED.search(line.attributes)
    (lhs,) = arrays_of(shapes[line.operands[0]])
    places = [int(d) for d in dims[1].split(",") if d] if dims else []
    contracted = math.prod(lhs[1][place] for place in places)
    return contracted * sum(math.prod(d) for _, d in arrays_of(line.shape))


def _of_convolution(line, shapes):
    """Multiplications of a convolution, without those with padding.

    The compiler also writes products of many matrices so, as windows of which
    but one place holds anything.
    """
    labels = _DIMS.search(line.attributes)
    ((_, lhs),) = arrays_of(shapes[line.operands[0]])
    ((_, kernel),) = arrays_of(shapes[line.operands[1]])
    ((_, output),) = arrays_of(line.shape)
    count = kernel[labels[2].index("i")]
    count *= output[labels[3].index("b")] * output[labels[3].index("f")]
    window = _window(line.attributes)
    for place, dim in enumerate(sorted(filter(str.isdigit, labels[3]))):
        count *= _met(
            lhs[labels[1].index(dim)],
            kernel[labels[2].index(dim)],
            output[labels[3].index(dim)],
            *(values[place] for values in window),
        )
    return count


def _window(attributes):
    """Strides, padding in front, and dilations of each dimension."""
    match = _WINDOW.search(attributes)
    found = dict(part.split("=") for part in match[1].split()) if match else {}
    rank = len(found.get("size", "").split("x"))

    def values(name, default):
        parts = found.get(name, "x".join([default] * rank)).split("x")
        return [int(part.split("_")[0]) for part in parts]

    return (
        values("stride", "1"),
        values("pad", "0_0"),
        values("lhs_dilate", "1"),
        values("rhs_dilate", "1"),
    )


@functools.lru_cache(maxsize=4096)
def _met(size, kernel, output, stride, pad, dilation, kernel_dilation):
    """How often an element of the kernel meets one of the input."""
    last = (size - 1) * dilation
    count = 0
    for place in range(kernel):
        offset = place * kernel_dilation - pad
        # Outputs o with 0 <= o * stride + offset <= last.
        first = max(0, -(offset // stride))
        final = min(output - 1, (last - offset) // stride)
        if final < first:
            continue
        if dilation == 1:
            count += final - first + 1
        else:
            count += sum(
                (o * stride + offset) % dilation == 0
                for o in range(first, final + 1)
            )
    return count
