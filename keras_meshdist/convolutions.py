"""Convolutions, split so that XLA's partitioner gets them right.

Seen with JAX 0.4.38, 0.10.2 and 0.12.0.1, with both partitioners, without an
error or a warning; each fault is a factor, the size of a mesh axis:

- Where a spatial dimension is split, the result or a gradient is wrong as soon
  as the devices are divided over anything else, or the strides aren't 1. It
  needn't be split by a rule: a split of the matrix behind a `Flatten`
  propagates to it.
- The kernel's gradient of a grouped (or depthwise) convolution is a sum over
  rows, and counted once for every device that holds the same rows. It is right
  where every device holds other rows.

So windows stay whole, and the rows of a grouped convolution lie over all axes
of the mesh. Both are constraints, which hold for all derivatives too.
"""

import functools

import jax
import keras
from jax.sharding import NamedSharding, PartitionSpec

_OPEN = PartitionSpec.UNCONSTRAINED


def convolve(function, inputs, kernel, settings, mesh, batch_axes):
    """Calls a convolution of Keras' JAX backend under layout constraints.

    Args:
        function: `keras.src.backend.jax.nn.conv`, `depthwise_conv` or
            `conv_transpose`.
        inputs: array of rank n + 2, for n spatial dimensions.
        kernel: array of rank n + 2, spatial dimensions first.
        settings: dict, the other arguments; hashable values.
        mesh: `jax.sharding.Mesh`.
        batch_axes: tuple of str, the axes over which rows are split.

    Returns:
        What the function returns.
    """
    inputs = keras.ops.convert_to_tensor(inputs)
    kernel = keras.ops.convert_to_tensor(kernel)
    data_format = settings.get("data_format")
    if data_format is None:
        data_format = keras.config.image_data_format()
    if _manual_axes() or not (_on_mesh(inputs) or _on_mesh(kernel)):
        return function(inputs, kernel, **settings)
    whole = [None] * (inputs.ndim - 2)
    if data_format == "channels_last":
        channels, data = inputs.shape[-1], (_OPEN, *whole, _OPEN)
    else:
        channels, data = inputs.shape[1], (_OPEN, _OPEN, *whole)
    # A kernel ends with (channels of a group, outputs), a depthwise one with
    # (channels, multiplier); transposed ones have no groups.
    if function.__name__ == "depthwise_conv" or (
        function.__name__ == "conv" and kernel.shape[-2] != channels
    ):
        others = [axis for axis in mesh.axis_names if axis not in batch_axes]
        data = ((*batch_axes, *others), *[None] * (inputs.ndim - 1))
    return _convolve(
        function,
        tuple(sorted(settings.items())),
        NamedSharding(mesh, PartitionSpec(*data)),
        NamedSharding(mesh, PartitionSpec(*whole, _OPEN, _OPEN)),
        inputs,
        kernel,
    )


# Its own program outside of one, since only there rows need not divide and
# the constraints reach the derivatives.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _convolve(function, settings, data, weights, inputs, kernel):
    constrain = jax.lax.with_sharding_constraint
    outputs = function(
        constrain(inputs, data), constrain(kernel, weights), **dict(settings)
    )
    return constrain(outputs, data)


def _on_mesh(tensor):
    """Not so for what is computed on one device, on a user's way to a batch."""
    if isinstance(tensor, jax.core.Tracer):
        return True
    return len(tensor.sharding.device_set) > 1


def _manual_axes():
    """Axes over which the user splits the work himself, with `shard_map`."""
    current = getattr(jax.sharding, "get_abstract_mesh", None)
    return current().manual_axes if current else ()
