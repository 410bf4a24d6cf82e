"""Digests of arrays, the same for the same bits on any mesh.

Each is two sums modulo 2^32 of the elements' bits, times odd numbers that
depend on the element's place, so that elements which are exchanged are noticed.
Sums are added up shard by shard. On CPUs, where XLA is slow at that, NumPy
does it, and training goes on; other devices do it themselves.
"""

import concurrent.futures
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np

from keras_meshdist import coordination

# Odd constants of a multiplicative hash: 2^32 divided by the golden ratio
# (Knuth, The Art of Computer Programming, volume 3, section 6.4), and that of
# Murmur3's finalizer.
_GOLDEN, _MIX = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
_HALF = np.uint32(15)
# Elements that NumPy adds up at a time, which stay in a core's cache.
_AT_A_TIME = 2**16
_SMALL_INTEGERS = ("int4", "uint4", "int2", "uint2")
_THREADS = min(8, os.cpu_count() or 1)
# What is exchanged is counted, since all processes restore the same.
_numbers = itertools.count()


def begin(arrays):
    """Takes hold of the values of arrays, which may be donated afterwards.

    Args:
        arrays: dict of `jax.Array`s.

    Returns:
        Function that returns this process' shares of the digests: a uint32
        array of shape `(len(arrays), 2)`. The sum over all processes that have
        the arrays is the digests.
    """
    on_cpu = all(
        device.platform == "cpu"
        for array in arrays.values()
        for device in array.sharding.device_set
    )
    if not on_cpu:
        totals = on_devices(arrays)
        return lambda: _share(arrays, totals)
    parts = [
        (row, np.asarray(shard.data), shard.index)
        for row, array in enumerate(arrays.values())
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    return lambda: _add_up(len(arrays), parts)


def of_arrays(arrays):
    """Returns the digests of a dict of arrays, on all processes.

    Args:
        arrays: dict of `jax.Array`s.

    Returns:
        Dict of uint32 arrays of shape `(2,)`.
    """
    digests = begin(arrays)()
    spread = [not array.is_fully_addressable for array in arrays.values()]
    if any(spread):
        shares = coordination.exchange(
            f"digests_{next(_numbers)}", digests[spread].tobytes()
        )
        added = np.sum([np.frombuffer(s, np.uint32) for s in shares], 0)
        digests[spread] = added.astype(np.uint32).reshape(-1, 2)
    return dict(zip(arrays, digests, strict=True))


def _share(arrays, totals):
    digests = np.stack([np.asarray(totals[key]) for key in arrays])
    for row, array in enumerate(arrays.values()):
        if not array.is_fully_addressable and jax.process_index():
            digests[row] = 0  # of which all have the sum
    return digests


def _add_up(count, parts):
    digests = np.zeros((count, 2), np.uint32)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda part: _of_part(*part[1:]), parts)
        for (row, *_), sums in zip(parts, found, strict=True):
            digests[row] += sums
    return digests


def _of_part(part, index):
    """Returns what a part of an array adds to its digest."""
    words = _words(part)
    starts = [piece.start or 0 for piece in index] or [0]
    starts[-1] *= words.shape[-1] // part.shape[-1] if part.ndim else 1
    first, *others = (
        np.arange(start, start + size, dtype=np.uint32)
        for start, size in zip(starts, words.shape, strict=True)
    )
    rows = np.stack([_weights(first, 0), _weights(first, 1)])
    others = [_weights(place, 2 + i) for i, place in enumerate(others)]
    columns = others.pop() if others else np.ones(1, np.uint32)
    for weights in others:
        rows = (rows[:, :, None] * weights).reshape(2, -1)
    words = words.reshape(rows.shape[1], len(columns))
    width = max(1, min(len(columns), _AT_A_TIME))
    height = _AT_A_TIME // width
    sums, room = np.zeros(2, np.uint32), np.empty(_AT_A_TIME, np.uint32)
    for top in range(0, len(words), height):
        down = slice(top, top + height)
        for left in range(0, len(columns), width):
            across = slice(left, left + width)
            some = words[down, across].astype(np.uint32, copy=False)
            mixed = room[: some.size].reshape(some.shape)
            np.right_shift(some, _HALF, out=mixed)
            mixed ^= some
            if len(columns) > 1:
                mixed = np.einsum("ij,j->i", mixed, columns[across])
            else:
                mixed = mixed[:, 0] * columns
            sums += np.einsum("ki,i->k", rows[:, down], mixed)
    return sums


def _words(part):
    """The bits of each element, in numbers of up to 32 bits."""
    part = np.ascontiguousarray(part).reshape(part.shape or (1,))
    if part.dtype == bool or part.dtype.name in _SMALL_INTEGERS:
        return part.astype(np.int32).view(np.uint32)
    return part.view(f"uint{min(part.dtype.itemsize, 4) * 8}")


def _weights(place, number):
    """Odd numbers for places along a dimension, of NumPy or JAX."""
    mixed = place * _GOLDEN + np.uint32(int(_MIX) * number % 2**32)
    return (mixed ^ (mixed >> _HALF)) * _MIX | np.uint32(1)


def on_devices(arrays):
    """Returns what `of_arrays` does, computed on the arrays' devices."""
    everywhere = {
        key: jax.sharding.NamedSharding(
            array.sharding.mesh, jax.sharding.PartitionSpec()
        )
        if isinstance(array.sharding, jax.sharding.NamedSharding)
        else None
        for key, array in arrays.items()
    }
    return jax.jit(_digests, out_shardings=everywhere)(arrays)


def _digests(arrays):
    return {key: _digest(array) for key, array in arrays.items()}


def _digest(array):
    words = _bits(array)
    # The highest bits of two elements would cancel each other out.
    mixed = words ^ (words >> _HALF)
    places = [
        jax.lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
        for dimension in range(words.ndim)
    ]
    for dimension, place in enumerate(places[1:]):
        mixed = mixed * _weights(place, 2 + dimension)
    return jnp.stack(
        [
            jnp.sum(mixed * _weights(places[0], number), dtype=jnp.uint32)
            for number in (0, 1)
        ]
    )


def _bits(array):
    dtype = array.dtype
    if dtype == jnp.bool_ or dtype.name in _SMALL_INTEGERS:
        bits = array.astype(jnp.int32).astype(jnp.uint32)
        return bits if bits.ndim else bits.reshape(1)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], -1)
    width = min(array.dtype.itemsize, 4) * 8
    bits = jax.lax.bitcast_convert_type(array, f"uint{width}")
    bits = bits.astype(jnp.uint32)
    # An element of several words is as many elements of the last dimension.
    shape = array.shape[: array.ndim - (dtype.kind == "c")] or (1,)
    words = dtype.itemsize // 4 or 1
    return bits.reshape(*shape[:-1], shape[-1] * words)


def different(expected, found):
    """Returns the keys under which two dicts of digests differ."""
    return [
        key
        for key, digest in found.items()
        if not np.array_equal(digest, expected.get(key, ()))
    ]
