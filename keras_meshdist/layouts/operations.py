"""What each of JAX's operations does to the dimensions of its operands."""

import math

from keras_meshdist import keras_hooks
from keras_meshdist.layouts.uses import Array, Use, made_of


def _body(equation):
    """The program of a call: what is compiled, differentiated or repeated."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in equation.params:
            return equation.params[name]
    return None


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _factors(before, after):
    """Pairs of dimensions of a reshaped array that vary together.

    Where one is split in several, or several become one, that is the slowest
    varying of them: what is split over devices there is split in blocks.
    """
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1 != after[j]:
            i += 1
            continue
        if after[j] == 1 != before[i]:
            j += 1
            continue
        yield i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1


def _results(equation, operands, dims):
    return [Array(dims, made_of(operands))]


def _other(of, equation, operands):
    """An operation of which nothing is known but the shapes."""
    results = [Array(of.fresh(v), made_of(operands)) for v in equation.outvars]
    shapes = [tuple(v.aval.shape) for v in equation.invars]
    for variable, result in zip(equation.outvars, results, strict=True):
        shape = tuple(variable.aval.shape)
        for operand, other in zip(operands, shapes, strict=True):
            if len(other) == len(shape):
                for d, size in enumerate(other):
                    if size == shape[d] > 1:
                        of.join(operand.dims[d], result.dims[d])
    return results


def _dot(of, equation, operands):
    left, right = operands
    (cl, cr), (bl, br) = equation.params["dimension_numbers"]
    elements = math.prod(equation.outvars[0].aval.shape)
    shape = equation.invars[0].aval.shape
    work = elements * math.prod(shape[d] for d in cl)
    weights = [array.weights or frozenset() for array in operands]
    for one, other in (
        *zip(cl, cr, strict=True),
        *zip(bl, br, strict=True),
    ):
        of.join(left.dims[one], right.dims[other])
    both = weights[0] | weights[1]
    of.count(both, work)
    for kind, places in (("contracted", cl), ("batched", bl)):
        for d in places:
            use = Use(kind, elements, both)
            of.found.append((left.dims[d], use))
    if weights[0] and weights[1]:
        of.inner.extend(left.dims[d] for d in cl)
    dims = [
        *(left.dims[d] for d in bl),
        *(d for i, d in enumerate(left.dims) if i not in (*cl, *bl)),
        *(d for i, d in enumerate(right.dims) if i not in (*cr, *br)),
    ]
    return _results(equation, operands, dims)


def _convolution(of, equation, operands):
    inputs, kernel = operands
    numbers = equation.params["dimension_numbers"]
    elements = math.prod(equation.outvars[0].aval.shape)
    dims = of.fresh(equation.outvars[0])
    of.join(inputs.dims[numbers.lhs_spec[0]], dims[numbers.out_spec[0]])
    out, within = kernel.dims[numbers.rhs_spec[0]], numbers.rhs_spec[1]
    of.join(out, dims[numbers.out_spec[1]])
    features = inputs.dims[numbers.lhs_spec[1]]
    if equation.params["feature_group_count"] > 1:
        # Each group of channels for itself, as in a depthwise one.
        of.join(out, features)
    else:
        of.join(kernel.dims[within], features)
        weights = kernel.weights or frozenset()
        shape = equation.invars[1].aval.shape
        work = elements * math.prod(shape) // shape[numbers.rhs_spec[0]]
        of.count(weights, work)
        use = Use("contracted", elements, weights)
        of.found.append((features, use))
    return _results(equation, operands, dims)


def _broadcast(of, equation, operands):
    dims = of.fresh(equation.outvars[0])
    before = equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    places = equation.params["broadcast_dimensions"]
    for d, place in enumerate(places):
        if before[d] == after[place]:
            of.join(operands[0].dims[d], dims[place])
    return _results(equation, operands[:1], dims)


def _transpose(of, equation, operands):
    dims = [operands[0].dims[d] for d in equation.params["permutation"]]
    return _results(equation, operands, dims)


def _reshape(of, equation, operands):
    before = equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    dims = of.fresh(equation.outvars[0])
    for one, other in _factors(before, after):
        of.join(operands[0].dims[one], dims[other])
    return _results(equation, operands[:1], dims)


def _squeeze(of, equation, operands):
    gone = equation.params["dimensions"]
    dims = [d for i, d in enumerate(operands[0].dims) if i not in gone]
    return _results(equation, operands, dims)


def _reduce(of, equation, operands):
    axes = equation.params["axes"]
    elements = math.prod(equation.outvars[0].aval.shape)
    for d in axes:
        of.found.append((operands[0].dims[d], Use("reduced", elements)))
    dims = [d for i, d in enumerate(operands[0].dims) if i not in axes]
    return [Array(dims, made_of(operands)) for _ in equation.outvars]


def _cut(of, equation, operands):
    """Slices, pads and concatenations: what keeps its size is the same."""
    results = []
    for variable in equation.outvars:
        dims = of.fresh(variable)
        shape = variable.aval.shape
        elements = math.prod(shape)
        for operand, atom in zip(operands, equation.invars, strict=True):
            if len(operand.dims) != len(dims):
                continue  # where a dynamic slice begins
            for d, size in enumerate(atom.aval.shape):
                if size == shape[d]:
                    of.join(operand.dims[d], dims[d])
                else:
                    of.found.append((operand.dims[d], Use("cut", elements)))
                    of.found.append((dims[d], Use("cut", elements)))
        results.append(Array(dims, made_of(operands)))
    return results


def _name(of, equation, operands):
    name = keras_hooks.output_of(equation.params["name"])
    if name:
        of.named.append((name, operands[0].dims, equation.invars[0].aval.shape))
    return operands


def _stack(of, equation, operands):
    axis = equation.params["axis"]
    first, *others = operands
    for other in others:
        _join_all(of, first, other)
    dims = [*first.dims[:axis], of.new(), *first.dims[axis:]]
    return _results(equation, operands, dims)


def _gather(of, equation, operands):
    array, indices = operands
    numbers = equation.params["dimension_numbers"]
    sizes = equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    dims = of.fresh(equation.outvars[0])
    elements = math.prod(equation.outvars[0].aval.shape)
    tied = getattr(numbers, "operand_batching_dims", ())
    gone = (*numbers.collapsed_slice_dims, *tied)
    kept = [d for d in range(len(shape)) if d not in gone]
    for d, place in zip(kept, numbers.offset_dims, strict=True):
        if sizes[d] == shape[d]:
            of.join(array.dims[d], dims[place])
        else:
            of.found.append((array.dims[d], Use("cut", elements)))
    weights = array.weights or frozenset()
    for d in numbers.collapsed_slice_dims:
        of.count(weights, elements * shape[d])
        use = Use("gathered", elements, weights)
        of.found.append((array.dims[d], use))
    rest = [d for d in range(len(dims)) if d not in numbers.offset_dims]
    for d, place in zip(indices.dims[:-1], rest, strict=True):
        of.join(d, dims[place])
    return [Array(dims, made_of(operands))]


def _scatter(of, equation, operands):
    return _results(equation, operands, operands[0].dims)


def _call(of, equation, operands):
    body = _body(equation)
    return of.run(_open(body), (), operands[-len(_open(body).invars) :])


def _scan(of, equation, operands):
    body = _open(equation.params["jaxpr"])
    # Constants, what is carried, and what is gone through, which within has a
    # dimension less. (How parameters count them differs between versions.)
    through = [
        len(outer.aval.shape) > len(inner.aval.shape)
        for outer, inner in zip(equation.invars, body.invars, strict=True)
    ]
    each = [
        Array(array.dims[1:], array.weights) if part else array
        for array, part in zip(operands, through, strict=True)
    ]
    results = of.run(body, (), each)
    carried = sum(
        len(outer.aval.shape) == len(inner.aval.shape)
        for outer, inner in zip(equation.outvars, body.outvars, strict=True)
    )
    first = [a for a, part in zip(operands, through, strict=True) if not part]
    for one, other in zip(
        first[len(first) - carried :], results[:carried], strict=True
    ):
        _join_all(of, one, other)
    return [
        *results[:carried],
        *(Array([of.new(), *a.dims], a.weights) for a in results[carried:]),
    ]


def _while(of, equation, operands):
    body = _open(equation.params["body_jaxpr"])
    skipped = equation.params["cond_nconsts"]
    consts = equation.params["body_nconsts"]
    arguments = operands[skipped:]
    results = of.run(body, (), arguments)
    for one, other in zip(arguments[consts:], results, strict=True):
        _join_all(of, one, other)
    return results


def _cond(of, equation, operands):
    branches = [
        of.run(_open(branch), (), operands[1:])
        for branch in equation.params["branches"]
    ]
    for results in branches[1:]:
        for one, other in zip(branches[0], results, strict=True):
            _join_all(of, one, other)
    return branches[0]


def _join_all(of, one, other):
    for a, b in zip(one.dims, other.dims, strict=True):
        of.join(a, b)


_RULES = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "slice": _cut,
    "dynamic_slice": _cut,
    "dynamic_update_slice": _cut,
    "split": _cut,
    "pad": _cut,
    "concatenate": _cut,
    "stack": _stack,
    "name": _name,
    "gather": _gather,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "scatter": _scatter,
    "scatter-add": _scatter,
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_prod",
            "reduce_and",
            "reduce_or",
            "argmax",
            "argmin",
        ),
        _reduce,
    ),
}


def rule_of(equation):
    """Returns the rule for an operation."""
    rule = _RULES.get(equation.primitive.name)
    return rule or (_call if _body(equation) else _other)
