"""Logical and physical batches as JAX arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from keras_meshdist.feeds import physical_rows


class PaddedBatch(np.lib.mixins.NDArrayOperatorsMixin):
    """Rows on a mesh that don't divide over it: physical array, logical rows.

    To everyone who looks at it, it is an array of the logical rows. It is a
    JAX pytree node, and when `jax.jit` (or `grad`, `eval_shape`, …) hands it a
    tracer of the physical array, what the traced function gets is that tracer
    cut to the logical rows. So a Keras step, or your own jitted function, sees
    just the rows that you gave, while on the devices the rows stay split.
    Eager code gets the logical rows as an ordinary array.

    Example:

    ```python
    batch = place(np.ones((13, 4)), sharding_over_four_devices)
    batch.shape, batch.physical.shape  # (13, 4), (16, 4)
    jax.jit(lambda x: x.shape)(batch)  # (13, 4)
    ```

    Args:
        physical: `jax.Array` of shape `(physical rows, ...)`.
        rows: int, number of logical rows; the other rows are padding.
    """

    def __init__(self, physical, rows):
        self.physical = physical
        self.rows = rows
        # What a traced function's code depends on.
        self._static = (physical.shape, rows)

    @property
    def shape(self):
        return (self.rows, *self.physical.shape[1:])

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def dtype(self):
        return self.physical.dtype

    def __len__(self):
        return self.rows

    def __repr__(self):
        return (
            f"<PaddedBatch shape={self.shape}, dtype={self.dtype}, "
            f"physical rows={self.physical.shape[0]}>"
        )

    def __jax_array__(self):
        return _logical(self)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(_logical(self), dtype=dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        # The arithmetic operators come here. The result is a jax.Array, as it
        # is for any other batch.
        if method != "__call__" or not hasattr(jnp, ufunc.__name__):
            return NotImplemented
        return getattr(jnp, ufunc.__name__)(
            *(_logical(i) if isinstance(i, PaddedBatch) else i for i in inputs),
            **kwargs,
        )

    def __getitem__(self, key):
        return _logical(self)[key]

    def __iter__(self):
        return iter(_logical(self))

    def __getattr__(self, name):
        # Only names that are not found otherwise: astype, reshape, sum, ...
        if name.startswith("_") or name in ("physical", "rows"):  # not set yet
            raise AttributeError(name)
        return getattr(_logical(self), name)


def _flatten(batch):
    return (batch.physical,), batch._static


def _unflatten(static, children):
    physical_shape, rows = static
    (child,) = children
    if isinstance(child, jax.core.Tracer):
        if child.shape != physical_shape:
            # vmap, scan and map hand out pieces; a piece of a padded batch may
            # be a padding row, and cutting it would give wrong numbers.
            raise TypeError(
                "A padded batch can be mapped or scanned over only inside "
                "`jax.jit`, where it has its logical rows. Received: a traced "
                f"piece of shape {child.shape} of a batch of {rows} rows, "
                f"padded to shape {physical_shape}. Wrap the call in "
                "`jax.jit`, for instance `jax.jit(jax.vmap(f))(batch)`."
            )
        return jax.lax.slice_in_dim(child, 0, rows)
    if isinstance(child, jax.Array):
        return PaddedBatch(child, rows)
    # JAX also unflattens with placeholders that are no arrays.
    batch = PaddedBatch.__new__(PaddedBatch)
    batch.physical, batch.rows, batch._static = child, rows, static
    return batch


jax.tree_util.register_pytree_node(PaddedBatch, _flatten, _unflatten)

_logical = jax.jit(lambda batch: batch)


@functools.lru_cache(maxsize=256)
def _shard_counts(sharding):
    """How many pieces each dimension named by the sharding's spec has."""
    sizes = dict(sharding.mesh.shape)
    return tuple(
        math.prod(
            sizes[axis]
            for axis in (entry if isinstance(entry, tuple) else (entry,))
        )
        if entry is not None
        else 1
        for entry in sharding.spec
    )


def place(batch, sharding):
    """Puts a global batch on the devices of a mesh, padded where needed.

    Every process that calls this holds the same global batch; each puts on
    its own devices just the rows that belong there.

    Example:

    ```python
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (4, 2)), ("m", "b"))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("b"))
    place(np.ones((16, 8)), sharding)  # a jax.Array: 16 divides by 2
    place(np.ones((13, 8)), sharding)  # a PaddedBatch of 13 rows
    ```

    Args:
        batch: array of shape `(rows, ...)`, or a scalar.
        sharding: `jax.sharding.NamedSharding`.

    Returns:
        A `jax.Array`, or a `PaddedBatch` if the rows don't divide over the
        batch shards.

    Raises:
        ValueError: if another dimension than the first doesn't divide, or the
            batch is sparse.
    """
    if isinstance(batch, PaddedBatch):
        batch = batch.__jax_array__()
    if isinstance(batch, sparse.JAXSparse):
        raise ValueError(
            "A sparse batch can't be split over devices. Received: "
            f"{type(batch).__name__} of shape {batch.shape}. Make it dense "
            "before it is batched."
        )
    if not hasattr(batch, "shape"):
        batch = np.asarray(batch)
    shape = tuple(batch.shape)
    counts = _shard_counts(sharding)
    _check_divides(shape, counts, sharding)
    if not shape or not counts:
        return _assemble(batch, shape, sharding)
    physical = physical_rows(shape[0], counts[0])
    array = _assemble(batch, (physical, *shape[1:]), sharding)
    return array if physical == shape[0] else PaddedBatch(array, shape[0])


def fetch(array):
    """Returns all of an array as NumPy, on every process that holds a part.

    Args:
        array: `jax.Array`, perhaps on the devices of several processes. All
            of these must call this, in the same order.

    Returns:
        NumPy array.
    """
    if not array.is_fully_addressable and not array.is_fully_replicated:
        whole = jax.sharding.NamedSharding(
            array.sharding.mesh, jax.sharding.PartitionSpec()
        )
        array = jax.jit(lambda a: a, out_shardings=whole)(array)
    return np.asarray(array)


def _assemble(batch, shape, sharding):
    whole = tuple(batch.shape) == shape
    if isinstance(batch, jax.Array) and (
        whole or not batch.is_fully_addressable
    ):
        # It may lie on the devices of other processes already.
        return _relayout(batch, shape, sharding)
    if whole and sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    batch = np.asarray(batch)
    return jax.make_array_from_callback(
        shape, sharding, functools.partial(_piece, batch, shape)
    )


def _relayout(batch, shape, sharding):
    if tuple(batch.shape) != shape:
        pad = [(0, n - m) for n, m in zip(shape, batch.shape, strict=True)]
        return jax.jit(lambda b: jnp.pad(b, pad), out_shardings=sharding)(batch)
    if batch.is_fully_addressable and not sharding.is_fully_addressable:
        local = np.asarray(batch)
        return jax.make_array_from_callback(
            shape, sharding, functools.partial(_piece, local, shape)
        )
    return jax.device_put(batch, sharding)


def _piece(batch, shape, index):
    """The part of the physical batch that one device holds."""
    if not shape:
        return batch
    start, stop, _ = index[0].indices(shape[0])
    piece = batch[(slice(start, stop), *index[1:])]
    missing = stop - start - piece.shape[0]
    if missing:
        padding = np.zeros((missing, *piece.shape[1:]), piece.dtype)
        piece = np.concatenate([piece, padding])
    return piece


def _check_divides(shape, counts, sharding):
    if len(counts) > len(shape):
        raise ValueError(
            "The layout of a batch has as many entries as the batch has "
            f"dimensions, or fewer. Received: shape={shape}, "
            f"layout={tuple(sharding.spec)}."
        )
    for dimension, count in enumerate(counts):
        if dimension and shape[dimension] % count:
            raise ValueError(
                "Only the first dimension of a batch, its rows, is padded; "
                "any other must divide by the axes over which it is split. "
                f"Received: shape={shape}, whose dimension {dimension} is "
                f"split over {sharding.spec[dimension]!r} in {count} pieces. "
                f"Valid sizes: multiples of {count}."
            )
