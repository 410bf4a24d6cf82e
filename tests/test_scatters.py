"""Scatters over padded batches: XLA counts padding rows if it is let to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from packaging.version import Version

from keras_meshdist import keras_hooks
from keras_meshdist.batches import place
from keras_meshdist.padded import PaddedBatch

CLIP = jax.lax.GatherScatterMode.CLIP
TABLE = np.linspace(-1, 1, 40).reshape(10, 4).astype("float32")


def loss(outputs):
    return (
        outputs * jnp.cos(jnp.arange(outputs.size)).reshape(outputs.shape)
    ).sum()


def segment_sum(x, ids):
    return jax.ops.segment_sum(x, ids, 10)


def segment_max(x, ids):
    return jnp.full((10, x.shape[1]), -9.0).at[ids].max(x)


def product(x, ids):
    return jnp.ones((10, x.shape[1])).at[ids].multiply(1 + x)


def set_last(x, ids):
    """Equal rows, for which of several is set isn't said."""
    rows = jnp.broadcast_to(x[:1], x.shape)
    return jnp.zeros((10, x.shape[1])).at[ids].set(rows)


def clipped(operation):
    def scatter(x, ids):
        start = jnp.full((5, x.shape[1]), 0.5)
        # Rows beyond the end count for the last one.
        return getattr(start.at[ids], operation)(x[:1] + 0 * x, mode=CLIP)

    scatter.__name__ = f"clipped_{operation}"
    return scatter


def small_ids(x, ids):
    """255 is no place out of reach here."""
    return jnp.zeros((300, x.shape[1])).at[ids.astype("uint8")].add(x)


def embedding_gradient(x, ids):
    return jax.grad(lambda table: loss(table[ids] * x))(jnp.asarray(TABLE))


def pairs_gradient(x, ids):
    return jax.grad(lambda x: loss(x[jnp.arange(len(x)), ids % 4]))(x)


def sort_gradient(x, ids):
    return jax.grad(lambda x: loss(jnp.sort(x, 0)))(x)


def median_gradient(x, ids):
    return jax.grad(lambda x: loss(jnp.median(x, 0)))(x)


def count(x, ids):
    return jnp.bincount(ids, length=10)


def of_each_row(x, ids):
    def one(row, i):
        return jnp.zeros(10).at[i].add(row[0])

    return jax.vmap(one)(x, ids)


SCATTERS = (
    segment_sum,
    segment_max,
    product,
    set_last,
    *map(clipped, ("add", "multiply", "min", "max", "set")),
    small_ids,
    embedding_gradient,
    pairs_gradient,
    sort_gradient,
    median_gradient,
    count,
    of_each_row,
)


def batches(rows, shape, axis, gaps):
    """The same rows on one device and, padded, on a mesh."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 4)).astype("float32")
    ids = rng.integers(0, 10, size=rows).astype("int32")
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), shape), ("a", "b"))
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    placed = [place(leaf, sharding) for leaf in (x, ids)]
    if gaps:
        placed = [with_gaps(leaf, sharding) for leaf in (x, ids)]
    return (x, ids), placed


def with_gaps(rows, sharding):
    """As own feeds lie: with padding behind the rows of each shard."""
    shards = sharding.mesh.shape[sharding.spec[0]]
    pieces = np.array_split(rows, shards)
    size = len(pieces[0]) + 1
    physical = np.full((shards * size, *rows.shape[1:]), 3, rows.dtype)
    runs = []
    for shard, piece in enumerate(pieces):
        start = shard * size
        physical[start : start + len(piece)] = piece
        if len(piece):
            runs.append((start, start + len(piece)))
    return PaddedBatch(jax.device_put(physical, sharding), tuple(runs))


@pytest.mark.parametrize("scatter", SCATTERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("rows", "shape", "axis", "gaps"),
    [
        (13, (4, 2), "a", False),
        (13, (2, 4), "b", True),
        (1, (2, 4), "b", False),
        (3, (4, 2), "a", False),
        (3, (2, 4), "a", True),
    ],
)
def test_they_equal_one_device(scatter, rows, shape, axis, gaps):
    plain, placed = batches(rows, shape, axis, gaps)
    assert all(isinstance(leaf, PaddedBatch) for leaf in placed)
    expected = scatter(*plain)
    got = jax.jit(scatter)(*placed)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_what_was_traced_before_is_right_too():
    """JAX keeps the trace of a function that is jitted within another."""

    @jax.jit
    def inner(x, ids):
        return segment_sum(x, ids)

    plain, placed = batches(11, (4, 2), "a", False)
    expected = inner(*plain)
    got = jax.jit(lambda *batch: inner(*batch))(*placed)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.skipif(
    Version(jax.__version__) < Version("0.6.2"),
    reason="padded batches aren't split there, so that none is uneven",
)
def test_the_hook_is_what_makes_it_right():
    plain, placed = batches(13, (4, 2), "a", False)
    keras_hooks.remove()
    try:
        got = jax.jit(lambda *batch: count(*batch))(*placed)
    finally:
        keras_hooks.install()
    # XLA of JAX 0.12.1 is right by itself.
    right = Version(jax.__version__) >= Version("0.12.1")
    assert np.array_equal(got, count(*plain)) == right, (
        "XLA has changed: see which versions need the hook"
    )
