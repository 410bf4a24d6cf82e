"""Initial values that are drawn in shards, later, or never."""

import jax
import keras
import numpy as np
import pytest
from parameterized import parameterized

import keras_meshdist as kmd
from keras_meshdist import blocks, drawing, initial_values
from tests import initialized, saved
from tests.clusters import shared_cluster


@pytest.fixture(autouse=True)
def _usual():
    saved.with_scope(None)


@pytest.fixture
def always_in_shards(monkeypatch):
    monkeypatch.setattr(initial_values, "_SMALL", 0)


def equal(expected, got):
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert value.dtype == got[name].dtype, name
        np.testing.assert_array_equal(value, got[name], err_msg=name)


class TestInShards:
    @pytest.mark.extra
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_values_of_one_device(self, always_in_shards, dtype):
        expected = initialized.values(initialized.build(dtype))
        with saved.distribution("first").scope():
            model = initialized.build(dtype)
            spread = model.get_layer("up").kernel.value
            assert spread.sharding.shard_shape(spread.shape) == (16, 16)
            equal(expected, initialized.values(model))

    @pytest.mark.extra
    def test_no_whole_value_on_a_device(self):
        shape, largest = (4096, 1024), 4096 * 1024 * 4
        for initializer in ("glorot_uniform", "zeros", "he_normal"):
            with saved.distribution("first").scope():
                seen = initialized.largest_on_a_device(shape, initializer)
            # The mesh has two pieces of it; one device has all otherwise.
            assert seen <= largest // 2
        assert initialized.largest_on_a_device(shape, "zeros") == largest


LAYOUTS = (
    ((256, 40), ("a", "b")),
    ((250, 48), (None, ("b", "a"))),
    ((1000,), ("b",)),
    ((30, 8, 52), (None, "b", "a")),
    ((2, 3000, 2), (None, None, "b")),
    ((17, 3), (None, None)),
)
KINDS = ("GlorotUniform", "TruncatedNormal", "RandomNormal", "RandomUniform")


class TestBlocks:
    """What is drawn block by block is what Keras draws, bit for bit."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(blocks, "BLOCK", 2**10)
        drawing._steps.cache_clear()
        yield
        drawing._steps.cache_clear()

    def compare(self, kind, dtype, shape, axes):
        mesh = kmd.make_mesh({"a": 4, "b": 2})
        sharding = kmd.TensorLayout(axes, mesh).backend_layout
        make = getattr(keras.initializers, kind)
        expected = np.asarray(make(seed=3)(shape, dtype=dtype))
        drawn = initial_values._with_drawn_seed(make(seed=3))
        got = drawing.draw(drawn, shape, dtype, sharding)
        assert got.sharding.is_equivalent_to(sharding, len(shape))
        assert got.dtype == dtype
        assert np.asarray(got).tobytes() == expected.tobytes()
        by_place = jax.config.jax_threefry_partitionable
        return drawing._steps(
            drawing._Kind(drawn), shape, dtype, sharding, by_place
        )[1]

    @pytest.mark.parametrize("kind", KINDS)
    def test_kinds(self, kind):
        for dtype in ("float32", "bfloat16"):
            cut = self.compare(kind, dtype, *LAYOUTS[0])
            assert len(cut.starts) == (6 if dtype == "float32" else 3)

    @pytest.mark.extra
    @pytest.mark.parametrize(("shape", "axes"), LAYOUTS[1:])
    def test_layouts(self, shape, axes):
        for kind in KINDS[:2]:
            assert self.compare(kind, "float32", shape, axes) is not None

    @pytest.mark.extra
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_dtypes(self, dtype):
        assert self.compare(KINDS[1], dtype, *LAYOUTS[3]) is not None

    @pytest.mark.extra
    def test_random_bits_that_depend_on_more_than_the_place(self):
        with jax.threefry_partitionable(False):
            assert self.compare("GlorotUniform", "float32", (6, 8), ()) is None

    def test_memory_is_a_small_part_of_the_value(self, monkeypatch):
        monkeypatch.setattr(blocks, "BLOCK", 2**16)
        shape = (2048, 2048)
        mesh = kmd.make_mesh({"a": 4, "b": 2})
        sharding = kmd.TensorLayout(("a", "b"), mesh).backend_layout
        drawn = initial_values._with_drawn_seed(
            keras.initializers.GlorotUniform(seed=3)
        )
        sizes = []
        cut = blocks.Blocks(shape, "float32", sharding)
        traced = jax.make_jaxpr(
            lambda seed: drawing._Kind(drawn).values(seed, shape, "float32")
        )(jax.numpy.zeros(2, "uint32"))
        key = jax.random.wrap_key_data(jax.numpy.zeros(2, "uint32"))
        for equation in traced.jaxpr.eqns:
            if equation.outvars[0].aval.shape == shape:
                program = cut.program(equation)
                lowered = jax.jit(program).lower(0, key, -1.0, 1.0)
                analysis = lowered.compile().memory_analysis()
                sizes.append(analysis.temp_size_in_bytes)
        # A sixteenth of a shard is 128 KiB.
        assert 0 < max(sizes) < 8 * 2**17

    def test_what_needs_other_places_is_not_cut(self):
        def values(seed):
            return jax.numpy.cumsum(jax.random.uniform(seed, (8, 4)), 0)

        traced = jax.make_jaxpr(values)(jax.random.key(0))
        assert not blocks.can_be_cut(traced.jaxpr, (8, 4))


class TestSkipped:
    def test_nothing_is_drawn_for_what_is_loaded(self, tmp_path, monkeypatch):
        path = tmp_path / "model.weights.h5"
        model = initialized.build(seed=2)
        model.save_weights(path)
        expected = model.get_weights()

        def draw(*args, **kwargs):
            raise AssertionError("drawn")

        for name in ("uniform", "normal", "truncated_normal"):
            monkeypatch.setattr(jax.random, name, draw)
        with saved.distribution("first").scope():
            with kmd.skip_initializers():
                model = initialized.build(seed=1)
                model.load_weights(path)
            for one, other in zip(expected, model.get_weights(), strict=True):
                np.testing.assert_array_equal(one, other)
            with pytest.raises(AssertionError, match="drawn"):
                initialized.build(seed=1)

    @parameterized.expand([(2**22,), (0,)])
    @pytest.mark.extra
    def test_what_is_not_loaded_has_its_initial_value(self, small):
        before, initial_values._SMALL = initial_values._SMALL, small
        try:
            expected = initialized.values(initialized.build())
            with saved.distribution("first").scope():
                with kmd.skip_initializers():
                    model = initialized.build()
                    up = model.get_layer("up")
                    up.bias.assign(np.full(32, 3.0))
                expected["up/bias"] = np.full(32, 3.0, "float32")
                equal(expected, initialized.values(model))
        finally:
            initial_values._SMALL = before

    @pytest.mark.extra
    def test_what_is_read_has_its_initial_value(self):
        expected = initialized.values(initialized.build())
        with saved.distribution("first").scope(), kmd.skip_initializers():
            model = initialized.build()
            equal(expected, initialized.values(model))
            x = np.ones((8, 16), "float32")
            inside = np.asarray(model(x))
        saved.with_scope(None)
        np.testing.assert_allclose(
            inside, np.asarray(initialized.build()(x)), rtol=1e-5, atol=1e-6
        )

    @pytest.mark.extra
    def test_training_is_as_on_one_device(self):
        losses = []
        for name in (None, "first"):
            saved.with_scope(name)
            try:
                with kmd.skip_initializers():
                    model = saved.build(1)
                history = model.fit(*saved.data(), batch_size=8, verbose=0)
                losses.append(history.history["loss"])
            finally:
                keras.distribution.set_distribution(None)
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)

    def test_an_initializer_of_ones_own_is_called(self):
        with saved.distribution("first").scope(), kmd.skip_initializers():
            layer = keras.layers.Dense(
                4,
                kernel_initializer=lambda shape, dtype=None: keras.ops.full(
                    shape, 7.0, dtype
                ),
            )
            layer.build((None, 8))
            assert layer.kernel._value is not None
        np.testing.assert_array_equal(layer.kernel, np.full((8, 4), 7.0))

    @pytest.mark.extra
    def test_after_an_error_values_are_still_to_come(self):
        built = []

        def fail():
            with kmd.skip_initializers():
                built.append(initialized.build())
                raise KeyError

        with saved.distribution("first").scope():
            with pytest.raises(KeyError):
                fail()
            got = initialized.values(built[0])
        equal(initialized.values(initialized.build()), got)

    def test_without_a_distribution_nothing_is_skipped(self):
        with kmd.skip_initializers():
            model = initialized.build()
            assert all(v._value is not None for v in model.variables)

    @pytest.mark.extra
    def test_on_several_processes(self, tmp_path):
        model = initialized.build(seed=2)
        path = str(tmp_path / "model.weights.h5")
        model.save_weights(path)
        loaded = initialized.values(model)
        drawn = initialized.values(initialized.build())
        for got in shared_cluster(2, 4).call(initialized.skip, "last", path):
            equal(loaded, got[0])
            equal(drawn, got[1])
            equal(drawn, got[2])
