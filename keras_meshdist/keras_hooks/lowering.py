"""The hook on how JAX turns scatters into programs."""

import functools

from jax._src.interpreters import mlir
from jax._src.lax import slicing

from keras_meshdist import scatters

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
