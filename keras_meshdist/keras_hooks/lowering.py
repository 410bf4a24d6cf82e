"""Hooks on how JAX turns some operations into programs that XLA gets wrong."""

import contextvars
import dataclasses
import functools

from jax._src.interpreters import mlir
from jax._src.lax import fft, lax, slicing

from keras_meshdist import scatters
from keras_meshdist.keras_hooks.base import ours

concatenation = lax.concatenate_p
fourier_transform = fft.fft_p

_SCATTERS = (
    "scatter",
    "scatter_add",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
)


def primitives():
    """Returns JAX's primitives for scatters, by name.

    Raises:
        ImportError: if JAX has changed.
    """
    found = {name: getattr(slicing, f"{name}_p", None) for name in _SCATTERS}
    # Only newer versions have it.
    if hasattr(slicing, "scatter_sub_p"):
        found["scatter_sub"] = slicing.scatter_sub_p
    lost = [n for n, p in found.items() if p not in mlir._lowerings]
    if lost:
        raise ImportError(
            "This version of keras_meshdist doesn't fit JAX: it has no rule "
            f"for {lost}. Nothing was changed. Install an older JAX or a newer "
            "keras_meshdist."
        )
    return found


def hook(primitive):
    """XLA gets scatters over rows that don't divide wrong.

    Wraps the rule by which JAX lowers a primitive (JAX 0.4.38 to 0.12), after
    all that differentiates, vectorizes and caches. It does nothing before this
    package has put the first padded batch on devices.

    Returns:
        What was registered before.
    """
    before = mlir._lowerings[primitive]
    rule = getattr(before, "rule", before)
    padded = mlir.lower_fun(
        functools.partial(scatters.scatter_evenly, primitive),
        multiple_results=False,
    )

    def lower(context, operand, indices, updates, **params):
        uneven = scatters.is_uneven(
            context.avals_in[1], params["dimension_numbers"]
        )
        chosen = padded if uneven else rule
        return chosen(context, operand, indices, updates, **params)

    mlir.register_lowering(primitive, lower)
    return before


def unhook(primitive, before):
    """Registers again what was registered before."""
    mlir._lowerings[primitive] = before


_inside = contextvars.ContextVar("inside_what_is_whole", default=False)


def hook_concatenation():
    """XLA concatenates wrongly along a dimension that is split.

    On JAX before 0.6.2: the gradient of an LSTM, whose gates are cut out of
    one product and come together again, is too large or too small. So that
    dimension is kept whole there, whatever the others are. Wraps the rule by
    which JAX lowers `concatenate`, in programs for the devices of a mesh.

    Returns:
        Function that takes it away again.
    """
    return _keep_whole(
        concatenation, lambda rank, dimension, **params: [dimension]
    )


def hook_fourier_transform():
    """XLA ends the process where what is transformed is split.

    Seen with JAX 0.10.2 ("Check failed: size_per_partition % num_partitions",
    in F-Net with weights split over two axes). Wraps the rule by which JAX
    lowers `fft` (JAX 0.4.38 to 0.12), as for concatenations.

    Returns:
        Function that takes it away again.
    """
    return _keep_whole(
        fourier_transform,
        lambda rank, fft_lengths, **params: range(
            rank - len(fft_lengths), rank
        ),
    )


def _keep_whole(primitive, dimensions_of):
    """Keeps dimensions of what a primitive takes and gives whole.

    Args:
        primitive: JAX's primitive, with one result.
        dimensions_of: function from the rank and the primitive's parameters to
            the dimensions.
    """

    def bind(distribution, *arrays, **params):
        dimensions = dimensions_of(arrays[0].ndim, **params)

        def whole(array):
            for dimension in dimensions:
                array = distribution.keep_whole(array, dimension)
            return array

        return whole(primitive.bind(*map(whole, arrays), **params))

    def lower(rule, context, *arrays, **params):
        distribution = ours()
        around = context.module_context.axis_context
        if (
            distribution is None
            or _inside.get()
            or getattr(around, "manual_axes", None)
            or getattr(around, "num_devices", 1) != distribution.num_devices
        ):
            return rule(context, *arrays, **params)
        token = _inside.set(True)
        try:
            return mlir.lower_fun(
                functools.partial(bind, distribution), multiple_results=False
            )(context, *arrays, **params)
        finally:
            _inside.reset(token)

    # There may be a rule for each platform besides the one for all.
    undo = []
    for table in (mlir._lowerings, *mlir._platform_specific_lowerings.values()):
        if primitive in table:
            before = table[primitive]
            rule = getattr(before, "rule", before)
            after = functools.partial(lower, rule)
            if rule is not before:
                after = dataclasses.replace(before, rule=after)
            table[primitive] = after
            undo.append(functools.partial(table.__setitem__, primitive, before))
    return lambda: [put_back() for put_back in undo]
