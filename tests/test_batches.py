"""Logical and physical batches."""

import operator

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from packaging.version import Version

from keras_meshdist.batches import place
from keras_meshdist.padded import PaddedBatch


def sharding(shape=(4, 2), spec=("a",)):
    devices = np.reshape(jax.devices(), shape)
    mesh = jax.sharding.Mesh(devices, tuple("abc"[: len(shape)]))
    return NamedSharding(mesh, PartitionSpec(*spec))


def rows(n, *rest):
    return np.arange(1.0, n * np.prod(rest, dtype=int) + 1).reshape(n, *rest)


@pytest.fixture
def padded():
    batch = place(rows(13, 3), sharding())
    assert isinstance(batch, PaddedBatch)
    return batch


@settings(max_examples=40)
@given(
    st.integers(0, 20),
    st.sampled_from(["a", "b", ("a", "b"), ("b", "a")]),
    st.sampled_from([(4, 2), (2, 4), (8, 1)]),
    st.sampled_from([(), (3,), (2, 2)]),
)
def test_the_rows_come_back(n, axes, shape, rest):
    data = rows(n, *rest).astype("float32")
    where = sharding(shape, (axes,))
    batch = place(data, where)
    np.testing.assert_array_equal(np.asarray(batch), data)
    np.testing.assert_array_equal(jax.jit(lambda b: b)(batch), data)
    sizes = dict(where.mesh.shape)
    shards = np.prod([sizes[a] for a in axes])
    assert isinstance(batch, PaddedBatch) == bool(n % shards)
    physical = getattr(batch, "physical", batch)
    assert physical.sharding.is_equivalent_to(where, physical.ndim)
    assert physical.shape == (-(-n // shards) * shards, *rest)
    np.testing.assert_array_equal(np.asarray(physical)[n:], 0.0)


def test_it_looks_like_its_logical_rows(padded):
    assert padded.shape == (13, 3)
    assert padded.ndim == 2
    assert padded.size == 39
    assert padded.dtype == np.float32
    assert len(padded) == 13
    assert padded.physical.shape == (16, 3)
    assert "shape=(13, 3)" in repr(padded)


@pytest.mark.parametrize(
    "function",
    [
        jnp.asarray,
        jnp.array,
        np.asarray,
        keras.ops.convert_to_tensor,
        keras.ops.convert_to_numpy,
        lambda b: b[:],
        lambda b: jnp.concatenate([b[:5], b[5:]]),
        lambda b: jnp.stack([b])[0],
        lambda b: jnp.stack(list(b)),
        lambda b: b.reshape(39).reshape(13, 3),
        lambda b: jax.jit(lambda x: x)(b),
        lambda b: jax.jit(jax.vmap(lambda row: row))(b),
        lambda b: jax.jit(lambda x: jax.lax.map(lambda row: row, x))(b),
        lambda b: jax.tree.map(lambda leaf: leaf, b),
        lambda b: jax.checkpoint(lambda x: x)(b),
        lambda b: jax.lax.cond(True, lambda x: x, lambda x: x + 1, b),
        lambda b: jax.jit(jax.grad(lambda x: jnp.sum(x**2) / 2))(b),
    ],
)
def test_everybody_gets_the_logical_rows(padded, function):
    np.testing.assert_array_equal(np.asarray(function(padded)), rows(13, 3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda b: b * 2.0,
        lambda b: 2.0 * b,
        lambda b: b / 255.0,
        lambda b: 1.0 - b,
        lambda b: b + b,
        lambda b: -b,
        lambda b: b**2,
        lambda b: b > 5.0,
        lambda b: jnp.ones((13, 3)) + b,
        lambda b: b @ jnp.ones((3, 2)),
        lambda b: b.astype("int32"),
        lambda b: b.sum(axis=0),
        lambda b: b.T,
        operator.itemgetter(slice(2, 4)),
        operator.itemgetter(-1),
        lambda b: jnp.mean(jnp.asarray(b)),
    ],
)
def test_eager_arithmetic(padded, operation):
    expected = operation(jnp.asarray(rows(13, 3)))
    got = operation(padded)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, expected)


def test_eager_gradients_are_of_the_rows_alone(padded):
    grad = jax.grad(lambda x: jnp.mean(x**2))(padded)
    np.testing.assert_allclose(grad, 2 * rows(13, 3) / 39, rtol=1e-6)
    shape = jax.eval_shape(lambda x: x, padded).shape
    assert shape == (13, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda b: jax.vmap(lambda row: row)(b),
        lambda b: jax.lax.map(lambda row: row, b),
        lambda b: jax.lax.scan(lambda c, row: (c, row), 0, b),
    ],
)
def test_eager_mapping_is_refused(padded, function):
    with pytest.raises(TypeError, match=r"of 13 rows.*Wrap.*`jax\.jit`"):
        function(padded)


@pytest.mark.skipif(
    Version(jax.__version__) < Version("0.6.2"),
    reason="XLA gets uneven rows wrong there, so they go to every device",
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.grad])
def test_inside_jit_the_rows_stay_split(padded, transform):
    """Each device multiplies its own four rows; none are sent before."""

    def loss(kernel, x):
        return jnp.mean((x @ kernel) ** 2)

    program = jax.jit(transform(loss)).lower(jnp.ones((3, 5)), padded)
    text = program.compile().as_text()
    products = [line for line in text.splitlines() if " dot(" in line]
    assert products
    assert "f32[4,5]" in products[0].split(" dot(")[0]
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_a_nan_in_a_row_stays_in_its_row():
    data = rows(13, 3)
    data[4, 1] = np.nan
    batch = place(data, sharding())
    out = jax.jit(lambda x: x @ jnp.ones((3, 2)))(batch)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(np.asarray(out), 4, axis=0)).all()


@pytest.mark.parametrize("n", [8, 13])
@pytest.mark.parametrize(
    "convert",
    [
        jnp.asarray,
        lambda x: jax.device_put(x, jax.devices()[3]),
        lambda x: place(x, sharding((2, 4), ("b",))),
        lambda x: x.astype("float64"),
    ],
)
def test_whatever_the_batch_comes_as(n, convert):
    data = rows(n, 3).astype("float32")
    batch = place(convert(data), sharding())
    assert batch.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(batch), data)


@pytest.mark.parametrize("value", [3.0, np.float32(3.0), np.array(3.0)])
def test_a_scalar_is_replicated(value):
    scalar = place(value, sharding(spec=()))
    assert scalar.shape == ()
    assert scalar.sharding.is_fully_replicated
    assert float(scalar) == 3.0


def test_a_sparse_batch_is_refused():
    batch = jax.experimental.sparse.BCOO.fromdense(rows(8, 3))
    with pytest.raises(ValueError, match=r"BCOO of shape \(8, 3\)"):
        place(batch, sharding())


def test_rows_and_sequence_over_different_axes():
    where = sharding(spec=("a", "b"))
    batch = place(rows(13, 4), where)
    assert batch.physical.addressable_shards[0].data.shape == (4, 2)
    np.testing.assert_array_equal(np.asarray(batch), rows(13, 4))
    with pytest.raises(ValueError, match=r"dimension 1 is split over 'b' in 2"):
        place(rows(13, 3), where)
    with pytest.raises(ValueError, match=r"as many entries.*shape=\(13,\)"):
        place(rows(13), where)
