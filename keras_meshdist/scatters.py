"""Scatters over rows that don't divide, which XLA gets wrong.

XLA pads what doesn't divide over the devices. Where a scatter (the gradient of
an embedding or of a sort, `segment_sum`, the histogram of an AUC) runs over
such rows, and the mesh has another axis, XLA lets the padding take part: sums
are too large, or XLA ends the process. With JAX 0.4.38 to 0.12.0, on both of
its partitioners; 0.12.1 gets all scatters of our tests right by itself. So the
rows of a scatter are padded here, to a number that divides, with rows that
scatter nowhere.
"""

import math

import jax
import jax.numpy as jnp

# What the rows of a scatter must divide by: the batch shards of all meshes on
# which this process has put a padded batch. What is compiled before has no
# rows that don't divide.
_divisor = 1


def expect(shards):
    """Says that rows are split over so many batch shards, unevenly."""
    global _divisor
    _divisor = math.lcm(_divisor, shards)


def is_uneven(indices, dimension_numbers):
    """Whether a scatter has to be padded.

    Args:
        indices: array, or whatever has a shape, of shape `(..., k)`.
        dimension_numbers: `jax.lax.ScatterDimensionNumbers`.

    Returns:
        bool.
    """
    return bool(_missing(indices, dimension_numbers))


def scatter_evenly(
    primitive, operand, indices, updates, *, dimension_numbers, mode, **params
):
    """Does what a scatter does, over rows that divide.

    Args:
        primitive: JAX's primitive for this kind of scatter.
        operand: array.
        indices: int array of shape `(..., k)`.
        updates: array.
        dimension_numbers: `jax.lax.ScatterDimensionNumbers`.
        mode: `jax.lax.GatherScatterMode`.
        **params: the primitive's other parameters.

    Returns:
        Array of the operand's shape.
    """
    missing = _missing(indices, dimension_numbers)
    windows = dimension_numbers.update_window_dims
    places = [d for d in range(updates.ndim) if d not in windows]
    if jnp.iinfo(indices.dtype).bits < 32:
        indices = indices.astype("int32")
    clipped = mode == jax.lax.GatherScatterMode.CLIP
    for dimension, count in missing.items():
        place = places[dimension]
        if clipped:
            # Nowhere is out of reach: the last row comes again, or, where
            # that would count, nothing is added.
            indices = _extend(indices, dimension, count)
            updates = _extend(updates, place, count, _NEUTRAL[primitive.name])
        else:
            nowhere = jnp.iinfo(indices.dtype).max
            indices = _extend(indices, dimension, count, nowhere)
            updates = _extend(updates, place, count, 0)
    params |= {"unique_indices": False, "indices_are_sorted": False}
    return primitive.bind(
        operand,
        indices,
        updates,
        dimension_numbers=dimension_numbers,
        mode=mode,
        **params,
    )


# What leaves a sum or a product as it is; `None` where to do the last row's
# again changes nothing.
_NEUTRAL = {
    "scatter": None,
    "scatter-add": 0,
    "scatter-sub": 0,
    "scatter-mul": 1,
    "scatter-min": None,
    "scatter-max": None,
}


def _missing(indices, dimension_numbers):
    tied = dimension_numbers.scatter_indices_batching_dims
    missing = {
        dimension: -size % _divisor
        for dimension, size in enumerate(indices.shape[:-1])
        if dimension not in tied and size
    }
    return {d: count for d, count in missing.items() if count}


def _extend(array, dimension, count, value=None):
    if value is None:
        pads = [(0, 0)] * array.ndim
        pads[dimension] = (0, count)
        return jnp.pad(array, pads, mode="edge")
    pads = [(0, 0, 0)] * array.ndim
    pads[dimension] = (0, count, 0)
    return jax.lax.pad(array, jnp.asarray(value, array.dtype), pads)
