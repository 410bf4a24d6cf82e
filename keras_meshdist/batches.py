"""Logical and physical batches as JAX arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from keras_meshdist import scatters
from keras_meshdist.arrays import ArrayRows
from keras_meshdist.feeds import physical_rows
from keras_meshdist.padded import PaddedBatch


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
    batch = _dense(batch)
    shape = tuple(batch.shape)
    counts = _shard_counts(sharding)
    _check_divides(shape, counts, sharding)
    if not shape or not counts:
        return _assemble(batch, shape, sharding)
    physical = physical_rows(shape[0], counts[0])
    array = _assemble(batch, (physical, *shape[1:]), sharding)
    return _padded(array, ((0, shape[0]),), counts[0])


def shape_of_placed(shape, dtype, sharding):
    """Returns what `place` would, without memory, for devices not there.

    Args:
        shape: tuple of int, `(rows, ...)`, or `()`.
        dtype: str or NumPy dtype.
        sharding: `jax.sharding.NamedSharding`.

    Returns:
        A `jax.ShapeDtypeStruct`, or a `PaddedBatch` with one, as JAX's `trace`
        and `lower` take them.

    Raises:
        ValueError: if another dimension than the first doesn't divide.
    """
    counts = _shard_counts(sharding)
    _check_divides(shape, counts, sharding)
    rows = shape[0] if shape and counts else None
    if rows is not None:
        shape = (physical_rows(rows, counts[0]), *shape[1:])
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return array if rows is None else _padded(array, ((0, rows),), counts[0])


def place_feed(feed, sharding, shards, size, runs):
    """Puts the rows of this process on its devices, as a part of a batch.

    Every process of the mesh calls this with its own rows.

    Args:
        feed: array of shape `(rows, ...)`, or a scalar.
        sharding: `jax.sharding.NamedSharding` of the batch.
        shards: tuple of int, the batch shards that this process holds.
        size: int, physical rows of a batch shard.
        runs: tuple of pairs of int, where in the physical batch the logical
            rows of all feeds stand; see `Feeds.own_runs`.

    Returns:
        A `jax.Array`, or a `PaddedBatch` if there is padding.

    Raises:
        ValueError: if another dimension than the first doesn't divide, or the
            feed is sparse.
    """
    feed = np.asarray(_dense(feed))
    counts = _shard_counts(sharding)
    _check_divides(feed.shape, counts, sharding)
    if not feed.ndim or not counts:
        return _assemble(feed, feed.shape, sharding)
    shape = (counts[0] * size, *feed.shape[1:])

    def piece(index):
        start, stop, _ = index[0].indices(shape[0])
        if stop > start:
            place = shards.index(start // size) * size
            start, stop = place, place + stop - start
        return _piece(feed, (slice(start, stop), *index[1:]))

    array = _from_pieces(shape, sharding, piece)
    return _padded(array, runs, counts[0])


def _padded(array, runs, shards):
    if runs == ((0, array.shape[0]),):
        return array
    scatters.expect(shards)
    return PaddedBatch(array, runs)


def _dense(batch):
    if isinstance(batch, PaddedBatch):
        return batch.__jax_array__()
    if isinstance(batch, sparse.JAXSparse):
        raise ValueError(
            "A sparse batch can't be split over devices. Received: "
            f"{type(batch).__name__} of shape {batch.shape}. Make it dense "
            "before it is batched."
        )
    return batch if hasattr(batch, "shape") else np.asarray(batch)


def _assemble(batch, shape, sharding):
    whole = tuple(batch.shape) == shape
    if isinstance(batch, jax.Array) and (
        whole or not batch.is_fully_addressable
    ):
        # It may lie on the devices of other processes already.
        return _relayout(batch, shape, sharding)
    if not isinstance(batch, ArrayRows):
        if whole and sharding.is_fully_addressable:
            return jax.device_put(batch, sharding)
        batch = np.asarray(batch)
    return _from_pieces(shape, sharding, functools.partial(_piece, batch))


def _relayout(batch, shape, sharding):
    if tuple(batch.shape) != shape:
        pad = [(0, n - m) for n, m in zip(shape, batch.shape, strict=True)]
        return jax.jit(lambda b: jnp.pad(b, pad), out_shardings=sharding)(batch)
    if batch.is_fully_addressable and not sharding.is_fully_addressable:
        piece = functools.partial(_piece, np.asarray(batch))
        return _from_pieces(shape, sharding, piece)
    return jax.device_put(batch, sharding)


def _from_pieces(shape, sharding, piece):
    """Assembles a batch of what `piece` gives for each device's place."""
    read = {}

    def once(index):
        bounds = tuple(i.indices(n) for i, n in zip(index, shape, strict=True))
        if bounds not in read:
            read[bounds] = piece(tuple(slice(*b) for b in bounds))
        return read[bounds]

    return jax.make_array_from_callback(shape, sharding, once)


def _piece(batch, index):
    """The part of the physical batch that one device holds."""
    if not index:
        return batch
    rows, *rest = index
    piece = batch[(rows, *rest)]
    missing = rows.stop - rows.start - piece.shape[0]
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
