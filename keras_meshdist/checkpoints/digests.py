"""Digests of arrays, the same for the same bits on any mesh.

Each is two sums modulo 2^32: of the elements' bits, and of these bits times an
odd number that depends on the element's place, so that elements which are
exchanged are noticed. Sums can be computed shard by shard, on the devices.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Odd constants of a multiplicative hash: 2^32 divided by the golden ratio
# (Knuth, The Art of Computer Programming, volume 3, section 6.4), and that of
# Murmur3's finalizer.
_GOLDEN, _MIX = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)


@jax.jit
def of_arrays(arrays):
    """Returns the digests of a dict of arrays.

    Args:
        arrays: dict of `jax.Array`s.

    Returns:
        Dict of uint32 arrays of shape `(2,)`.
    """
    return {key: _digest(array) for key, array in arrays.items()}


def _digest(array):
    bits = _bits(array)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dimension in range(bits.ndim):
        place = place * _MIX + jax.lax.broadcasted_iota(
            jnp.uint32, bits.shape, dimension
        )
    weight = place * _GOLDEN
    weight = (weight ^ (weight >> 15)) * _MIX | np.uint32(1)
    return jnp.stack(
        [
            jnp.sum(bits, dtype=jnp.uint32),
            jnp.sum(bits * weight, dtype="uint32"),
        ]
    )


def _bits(array):
    """The bits of each element as uint32, two of them for 64 bits."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    dtype = array.dtype
    if dtype == jnp.bool_ or dtype.name in ("int4", "uint4", "int2", "uint2"):
        return array.astype(jnp.int32).astype(jnp.uint32)
    width = min(dtype.itemsize, 4) * 8
    bits = jax.lax.bitcast_convert_type(array, f"uint{width}")
    return bits.astype(jnp.uint32)


def different(expected, found):
    """Returns the keys under which two dicts of digests differ."""
    return [
        key
        for key, digest in found.items()
        if not np.array_equal(np.asarray(digest), np.asarray(expected[key]))
    ]
