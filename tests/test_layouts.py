"""Layout rules made from a model: what is split, and that it trains right."""

import itertools
import math

import jax
import keras
import numpy as np
import pytest

import keras_meshdist as kmd
from keras_meshdist.planner import products, program
from tests import models

MESHES = (
    {"batch": 2, "model": 4},
    {"model": 4, "batch": 2},
    {"batch": 4, "model": 2},
    {"model": 2, "batch": 4},
)

WHOLE = list(itertools.product(sorted(models.ALL), MESHES, (None, "batch")))
# Each model on one mesh, each mesh with both.
COVERING = [WHOLE[9 * n % len(WHOLE)] for n in range(len(models.ALL))]
REST = [case for case in WHOLE if case not in COVERING]


def axes_of(layout_map, build):
    """The layout of each variable of a model, by path."""
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with dist.scope():
        model = build()
    return {
        v.path: tuple(v.value.sharding.spec) + (None,) * len(v.shape)
        for v in model.variables
    }


def spec(layouts, end, rank):
    found = {v[:rank] for path, v in layouts.items() if path.endswith(end)}
    assert len(found) == 1, (end, found)
    return found.pop()


def train_and_compare(name, axes, optimizer="sgd", rows="batch", **arguments):
    expected = models.train(name, optimizer)
    keras.utils.clear_session()
    mesh = kmd.make_mesh(axes)
    if "model" not in axes:
        arguments["model_axis"] = None
    layout_map = kmd.layouts.auto(models.ALL[name], mesh, **arguments)
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name=rows)
    found = models.train(name, optimizer, dist)
    for one, other in zip(expected, found, strict=True):
        scale = max(np.max(np.abs(one)), 1e-3)
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * scale)


class TestAuto:
    def test_dense_layers_take_turns(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.mlp, mesh)
        layouts = axes_of(layout_map, models.mlp)
        assert spec(layouts, "dense/kernel", 2) == (None, "model")
        assert spec(layouts, "dense/bias", 1) == ("model",)
        assert spec(layouts, "dense_1/kernel", 2) == ("model", None)
        assert spec(layouts, "dense_1/bias", 1) == (None,)

    def test_attention_and_feed_forward_are_megatron_s(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.transformer, mesh)
        layouts = axes_of(layout_map, models.transformer)
        for name in ("query", "key", "value"):
            found = spec(layouts, f"{name}/kernel", 3)
            assert found == (None, "model", None), name
        found = spec(layouts, "attention_output/kernel", 3)
        assert found == ("model", None, None)
        assert spec(layouts, "up/kernel", 2) == (None, "model")
        assert spec(layouts, "gate/kernel", 2) == (None, "model")
        assert spec(layouts, "down/kernel", 2) == ("model", None)
        assert spec(layouts, "embeddings", 2) == ("model", None)

    def test_few_key_heads_stay_whole(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.grouped, mesh)
        layouts = axes_of(layout_map, models.grouped)
        assert spec(layouts, "query/kernel", 3) == (None, "model", None)
        assert spec(layouts, "key/kernel", 3) == (None, None, None)
        assert any(
            "key/kernel" in path and "2 doesn't divide" in why
            for path, why in layout_map.notes.items()
        )

    def test_a_vocabulary_that_does_not_divide(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.odd_vocabulary, mesh)
        layouts = axes_of(layout_map, models.odd_vocabulary)
        assert spec(layouts, "embeddings", 2) == (None, "model")

    def test_experts_over_the_model_axis_or_their_own(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"expert": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.experts, mesh)
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="expert")
        with dist.scope():
            up, down = models.experts().layers[1].weights[1:]
        assert tuple(up.value.sharding.spec) == ("model", None, None)
        layout_map = kmd.layouts.auto(
            models.experts, mesh, expert_axis="expert"
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="expert")
        with dist.scope():
            up, down = models.experts().layers[1].weights[1:]
        assert tuple(up.value.sharding.spec) == ("expert", None, "model")
        assert tuple(down.value.sharding.spec) == ("expert", "model", None)

    def test_further_over_a_batch_axis(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(
            models.grouped, mesh, fsdp_axis="batch", min_size=0
        )
        layouts = axes_of(layout_map, models.grouped)
        assert spec(layouts, "query/kernel", 3) == ("batch", "model", None)
        found = spec(layouts, "key/kernel", 3)
        assert found == (("batch", "model"), None, None)

    def test_rules_hold_for_another_build(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(models.mlp, mesh)
        first = axes_of(layout_map, models.mlp)
        with kmd.DataParallel().scope():
            keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        second = axes_of(layout_map, models.mlp)
        assert list(first.values()) == list(second.values())
        assert not set(first) & set(second)

    def test_a_large_variable_that_no_longer_fits_is_told(self):
        def build(units):
            layers = [keras.Input((512,)), keras.layers.Dense(units, name="up")]
            return keras.Sequential(layers, name="one")

        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(lambda: build(512), mesh)
        with pytest.warns(UserWarning, match="stays whole.*'one/up/kernel'"):
            layouts = axes_of(layout_map, lambda: build(510))
        assert not any(layouts["one/up/kernel"])
        # Small ones aren't worth a word; warnings are errors here.
        axes_of(layout_map, lambda: build(6))

    def test_a_model_that_exists_is_only_read(self):
        keras.utils.clear_session()
        model = models.mlp()
        before = [np.asarray(w) for w in model.weights]
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(model, mesh)
        rules = kmd.layouts.auto(models.mlp, mesh)
        assert [layout_map[k].axes for k in layout_map] == [
            rules[k].axes for k in rules
        ]
        for weight, value in zip(model.weights, before, strict=True):
            np.testing.assert_array_equal(weight, value)

    @pytest.mark.parametrize(("name", "axes", "further"), COVERING)
    def test_trains_as_on_one_device(self, name, axes, further):
        self.check(name, axes, further)

    @pytest.mark.full
    @pytest.mark.parametrize(("name", "axes", "further"), REST)
    def test_trains_as_on_one_device_full(self, name, axes, further):
        self.check(name, axes, further)

    def check(self, name, axes, further):
        train_and_compare(name, axes, fsdp_axis=further, min_size=0)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"model_axis": "modle"}, ["modle", "'model'"]),
            ({"fsdp_axis": ("batch", "x")}, ["fsdp_axis", "'batch'"]),
            ({"fsdp_axis": "model"}, ["one purpose", "model"]),
        ],
    )
    def test_what_is_no_axis(self, arguments, words):
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        with pytest.raises(ValueError, match="Received: ") as error:
            kmd.layouts.auto(models.mlp, mesh, **arguments)
        for word in words:
            assert word in str(error.value)


SEQUENCES = [
    ("transformer", {"batch": 2, "sequence": 2, "model": 2}, "sequence"),
    pytest.param(
        "grouped",
        {"model": 2, "sequence": 2, "batch": 2},
        "sequence",
        marks=pytest.mark.extra,
    ),
    pytest.param(
        "recurrent",
        {"sequence": 2, "batch": 4},
        "sequence",
        marks=pytest.mark.extra,
    ),
    ("transformer", {"model": 2, "batch": 4}, "model"),
    ("convolutions", {"batch": 2, "sequence": 2, "model": 2}, "sequence"),
]


class TestSequences:
    def test_data_and_outputs_are_split(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"sequence": 2, "batch": 2, "model": 2})
        layout_map = kmd.layouts.auto(
            models.transformer, mesh, sequence_axis="sequence"
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        assert dist.sequence_dim_name == "sequence"
        batch = dist.place_batch(np.zeros((16, 6)))
        assert batch.addressable_shards[0].data.shape == (8, 3)
        layout = dist.get_tensor_layout("down/output")
        assert layout.axes == ("batch", "sequence", None)
        # Heads and the feed-forward width stay with the model axis.
        layout = dist.get_tensor_layout("up/output")
        assert layout.axes == ("batch", "sequence", "model")
        # The sequence is gone there.
        assert dist.get_tensor_layout("head/output") is None

    def test_over_the_model_axis_where_nothing_else_is(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(
            models.transformer, mesh, sequence_axis="model"
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        layout = dist.get_tensor_layout("down/output")
        assert layout.axes == ("batch", "model", None)
        layout = dist.get_tensor_layout("up/output")
        assert layout.axes == ("batch", None, "model")

    def test_a_hand_written_map(self):
        mesh = kmd.make_mesh({"rows": 2, "a": 2, "b": 2})
        dist = kmd.ModelParallel(
            layout_map=kmd.LayoutMap(mesh),
            batch_dim_name="rows",
            sequence_dim_name=("a", "b"),
        )
        assert dist.sequence_dim_name == ("a", "b")
        assert dist.get_data_layout((8, 12)).axes == ("rows", ("a", "b"))
        # What doesn't divide, such as labels, stays whole.
        assert dist.get_data_layout((8, 1)).axes == ("rows", None)
        assert dist.get_data_layout((8,)).axes == ("rows",)

    @pytest.mark.parametrize("name", ["rows", "nope", ("a", "a")])
    def test_what_is_no_sequence_axis(self, name):
        mesh = kmd.make_mesh({"rows": 2, "a": 2, "b": 2})
        with pytest.raises(ValueError, match=r"Valid axes: \['a', 'b'\]"):
            kmd.ModelParallel(
                layout_map=kmd.LayoutMap(mesh),
                batch_dim_name="rows",
                sequence_dim_name=name,
            )

    def test_a_step_takes_less_memory(self):
        def build():
            ids = keras.Input((128,), dtype="int32")
            x = keras.layers.Embedding(40, 32)(ids)
            attention = keras.layers.MultiHeadAttention(2, 16)
            x = keras.layers.Add()([x, attention(x, x)])
            return keras.Model(ids, keras.layers.Dense(40)(x))

        def temporaries(axis):
            keras.utils.clear_session()
            mesh = kmd.make_mesh({"batch": 2, "sequence": 4})
            layout_map = kmd.layouts.auto(
                build, mesh, model_axis=None, sequence_axis=axis
            )
            layout_map.on_unmatched = "ignore"
            dist = kmd.ModelParallel(
                layout_map=layout_map, batch_dim_name="batch"
            )
            with dist.scope():
                model = build()
                call = jax.jit(model.stateless_call)
                return (
                    call.lower(
                        [v.value for v in model.trainable_variables],
                        [v.value for v in model.non_trainable_variables],
                        dist.place_batch(np.zeros((8, 128), "int32")),
                    )
                    .compile()
                    .memory_analysis()
                    .temp_size_in_bytes
                )

        assert temporaries("sequence") < 0.4 * temporaries(None)

    @pytest.mark.parametrize(("name", "axes", "sequence"), SEQUENCES)
    def test_trains_as_on_one_device(self, name, axes, sequence):
        train_and_compare(name, axes, sequence_axis=sequence)


class TestRows:
    """Where weights are split over the batch axes, rows stay so as well."""

    def test_outputs_keep_their_rows(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.auto(
            models.transformer, mesh, fsdp_axis="batch", min_size=0
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        found = {
            name: tuple(
                dist.get_tensor_layout(f"{name}/output")
                .sharding_for((13, *shape))
                .spec
            )
            for name, shape in (("up", (6, 128)), ("down", (6, 64)))
        }
        assert found["up"] == ("batch", free, "model")
        # The axis of the weight's columns splits rows already.
        assert found["down"] == ("batch", free, free)

    def test_a_layer_that_returns_one_thing_or_another(self):
        class Table(keras.layers.Layer):
            def build(self, shape):
                self.embeddings = self.add_weight(shape=(96, 64), name="e")

            def call(self, x, reverse=False):
                if reverse:
                    return keras.ops.matmul(
                        x, keras.ops.transpose(self.embeddings)
                    )
                return keras.ops.take(self.embeddings, x, axis=0)

        def build():
            table = Table(name="table")
            ids = keras.Input((8,), dtype="int32")
            x = keras.layers.Dense(256, name="up")(table(ids))
            x = keras.layers.Dense(64, name="down")(x)
            return keras.Model(ids, table(x, reverse=True))

        mesh = kmd.make_mesh({"fsdp": 2, "model": 4})
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        for sequence, tokens, logits in (
            (None, ("fsdp", free, free), ("fsdp", free, "model")),
            ("model", ("fsdp", "model", None), ("fsdp", None, "model")),
        ):
            layout_map = kmd.layouts.auto(
                build,
                mesh,
                fsdp_axis="fsdp",
                sequence_axis=sequence,
                min_size=0,
            )
            dist = kmd.ModelParallel(
                layout_map=layout_map, batch_dim_name="fsdp"
            )
            layout = dist.get_tensor_layout("table/output")
            found = layout.sharding_for((16, 8, 64)).spec
            assert tuple(found) == tokens
            # Gathered in parts, not the whole table on each device.
            found = layout.sharding_for((16, 8, 96)).spec
            assert tuple(found) == logits
            assert layout.sharding_for((16, 8, 7)) is None

    @pytest.mark.parametrize("kind", ["auto", "fsdp"])
    def test_of_weights_over_no_batch_axis_nothing_is_said(self, kind):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "more": 4})
        if kind == "auto":
            layout_map = kmd.layouts.auto(
                models.mlp, mesh, model_axis=None, fsdp_axis="more", min_size=0
            )
        else:
            layout_map = kmd.layouts.fsdp(models.mlp, mesh, "more", min_size=0)
        path = models.mlp().layers[0].path + "/output"
        for rows, is_said in (("batch", False), ("more", True)):
            dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name=rows)
            assert (dist.get_tensor_layout(path) is not None) == is_said

    def test_of_one_piece_there_are_no_rules(self):
        mesh = kmd.make_mesh({"fsdp": 1, "model": 8})
        for layout_map in (
            kmd.layouts.auto(models.mlp, mesh, fsdp_axis="fsdp", min_size=0),
            kmd.layouts.fsdp(models.mlp, mesh, min_size=0),
            kmd.layouts.auto(models.mlp, mesh),
        ):
            assert not layout_map.activations

    @pytest.mark.parametrize("axes", [{"fsdp": 8}, {"model": 2, "fsdp": 4}])
    def test_no_device_computes_more_than_its_rows(self, axes):
        """Products of the compiled program, by an independent count."""

        def build():
            x = inputs = keras.Input((256,))
            for number in range(2):
                x = keras.layers.Dense(1024, name=f"up_{number}")(x)
                x = keras.layers.Dense(256, name=f"down_{number}")(x)
            return keras.Model(inputs, x)

        keras.utils.clear_session()
        mesh = kmd.make_mesh(axes)
        model_axis = "model" if "model" in axes else None
        layout_map = kmd.layouts.auto(
            build, mesh, model_axis=model_axis, fsdp_axis="fsdp", min_size=0
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="fsdp")
        with dist.scope():
            model = build()

            def loss(weights, rows):
                outputs, _ = model.stateless_call(weights, [], rows)
                return outputs.sum()

            text = (
                jax.jit(jax.grad(loss))
                .lower(
                    [v.value for v in model.trainable_variables],
                    dist.place_batch(np.zeros((32, 256), "float32")),
                )
                .compile()
                .as_text()
            )
        made = sum(
            map(
                products.flops_of_products,
                program.parse(text).computations.values(),
            )
        )
        # Forwards, and for the gradients of weights and of inputs. Nobody
        # asks for what the last layer returns, nor for the first's latter.
        once = 2 * 32 * 256 * 1024
        assert made == (3 * 4 - 2) * once // 8

    @pytest.mark.parametrize(
        ("name", "axes", "rows"),
        [
            (
                "transformer",
                {"fsdp": 2, "data": 2, "model": 2},
                ("data", "fsdp"),
            ),
            ("recurrent", {"fsdp": 8}, "fsdp"),
        ],
    )
    def test_trains_as_on_one_device(self, name, axes, rows):
        train_and_compare(name, axes, rows=rows, fsdp_axis="fsdp", min_size=0)


class TestOptimizer:
    def test_slots_are_split_further_than_weights(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"model": 2, "batch": 4})

        def build():
            model = models.mlp()
            model.compile(keras.optimizers.Adam(), "mse")
            return model

        layout_map = kmd.layouts.auto(
            build, mesh, optimizer_axis="batch", min_size=65
        )
        report = kmd.inspect(build, layout_map)
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        with dist.scope():
            model = build()
            model.fit(np.zeros((8, 20)), np.zeros((8, 3)), verbose=0)
        kernel, bias = model.variables[:2]
        assert kernel.value.addressable_shards[0].data.shape == (20, 32)
        momentum = next(
            v
            for v in model.optimizer.variables
            if v.path.endswith("dense_kernel_momentum")
        )
        assert momentum.value.addressable_shards[0].data.shape == (5, 32)
        # Small ones lie as their weights do.
        momentum = next(
            v
            for v in model.optimizer.variables
            if v.path.endswith("dense_bias_momentum")
        )
        assert momentum.value.sharding == bias.value.sharding
        held = sum(
            v.value.addressable_shards[0].data.nbytes
            for v in model.optimizer.variables
            if v.path.endswith(("momentum", "velocity"))
        )
        assert report.slots_bytes == held
        kinds = {finding.kind for finding in report.findings}
        assert kinds <= {"large and replicated"}

    @pytest.mark.parametrize("name", ["transformer"])
    def test_trains_as_on_one_device(self, name):
        axes = {"model": 2, "batch": 4}
        train_and_compare(
            name, axes, "adam", optimizer_axis="batch", min_size=0
        )


class TestFSDP:
    def test_the_largest_dimension_that_divides(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 8})
        layout_map = kmd.layouts.fsdp(
            models.odd_vocabulary, mesh, "batch", min_size=65
        )
        layouts = axes_of(layout_map, models.odd_vocabulary)
        # (101, 64): 101 doesn't divide by 8.
        assert spec(layouts, "embeddings", 2) == (None, "batch")
        assert "fewer than 65" in layout_map.notes["head/bias"]

    def test_over_two_axes(self):
        keras.utils.clear_session()
        mesh = kmd.make_mesh({"batch": 2, "model": 4})
        layout_map = kmd.layouts.fsdp(
            models.mlp, mesh, ("batch", "model"), min_size=0
        )
        layouts = axes_of(layout_map, models.mlp)
        found = spec(layouts, "dense/kernel", 2)
        assert found == (None, ("batch", "model"))


class TestAbstract:
    def test_a_large_model_takes_no_memory(self):
        def build():
            return keras.Sequential(
                [keras.Input((10**6,)), keras.layers.Dense(10**6)]
            )

        model = kmd.abstract(build)
        sizes = [math.prod(v.shape) for v in model.variables]
        assert sizes == [10**12, 10**6]

    def test_names_and_random_numbers_are_as_without(self):
        def state():
            keras.utils.clear_session()
            keras.utils.set_random_seed(3)

        state()
        expected = models.mlp()
        state()
        kmd.abstract(models.mlp)
        found = models.mlp()
        assert [v.path for v in found.variables] == [
            v.path for v in expected.variables
        ]
        for one, other in zip(expected.weights, found.weights, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    def test_a_compiled_model_has_its_slots(self):
        def build():
            model = models.mlp()
            model.compile("adam", "mse")
            return model

        model = kmd.abstract(build)
        shapes = [tuple(v.shape) for v in model.optimizer.variables]
        for variable in model.trainable_variables:
            assert shapes.count(tuple(variable.shape)) >= 2

    def test_a_subclassed_model_needs_inputs(self):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(4)

            def call(self, x):
                return self.dense(x)

        with pytest.raises(ValueError, match="needs `inputs`"):
            kmd.abstract(Model)
        model = kmd.abstract(Model, inputs=keras.KerasTensor((2, 3)))
        assert [tuple(v.shape) for v in model.variables] == [(3, 4), (4,)]

    def test_what_is_no_model(self):
        with pytest.raises(ValueError, match="must return a `keras.Model`"):
            kmd.abstract(lambda: 3)

    def test_nothing_lies_on_devices(self):
        before = len(jax.live_arrays())
        kmd.abstract(models.transformer)
        assert len(jax.live_arrays()) == before
