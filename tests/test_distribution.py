"""ModelParallel as an object: properties, arguments, scopes, messages."""

import jax
import keras
import numpy as np
import pytest

import keras_meshdist as kmd


def make(axes=None, batch="batch", **rules):
    layout_map = kmd.LayoutMap(kmd.make_mesh(axes or {"model": 4, "batch": 2}))
    for rule, layout in rules.items():
        layout_map[f".*{rule}"] = layout
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def test_properties():
    dist = make()
    assert isinstance(dist, keras.distribution.ModelParallel)
    assert dist.batch_dim_name == "batch"
    assert dist.num_model_replicas == 2
    assert dist.num_processes == 1
    assert dist.batch_shard_ids == (0, 1)
    assert dist.feed_rows(13).tolist() == list(range(13))
    assert dist.feed_rows(13, process_id=0).tolist() == list(range(13))
    assert (dist.num_data_shards, dist.data_shard_id) == (1, 0)
    assert dist.auto_shard_dataset is True
    assert "ModelParallel" in repr(dist)


@pytest.mark.parametrize(
    ("axes", "batch", "name", "replicas"),
    [
        ({"model": 4, "batch": 2}, None, "batch", 2),
        ({"batch": 2, "model": 4}, None, "batch", 2),
        ({"data": 2, "fsdp": 4}, "fsdp", "fsdp", 4),
        ({"data": 2, "fsdp": 4}, ("data", "fsdp"), ("data", "fsdp"), 8),
        ({"data": 2, "fsdp": 4}, ["fsdp", "data"], ("fsdp", "data"), 8),
        ({"data": 2, "fsdp": 4}, ["fsdp"], "fsdp", 4),
        ({"a": 2, "b": 1, "c": 4}, "b", "b", 1),
    ],
)
def test_batch_axes(axes, batch, name, replicas):
    dist = make(axes, batch)
    assert dist.batch_dim_name == name
    assert dist.num_model_replicas == replicas
    layout = dist.get_data_layout((16, 5, 3))
    assert layout.axes == (name, None, None)
    assert dist.get_data_layout(()).axes == ()


def test_without_a_name_the_first_axis_splits_rows_as_in_keras():
    layout_map = kmd.LayoutMap(kmd.make_mesh({"x": 4, "y": 2}))
    layout_map[".*kernel"] = (None, "y")
    assert kmd.ModelParallel(layout_map=layout_map).batch_dim_name == "x"


def test_keras_own_layout_map_works():
    mesh = keras.distribution.DeviceMesh((4, 2), ["model", "batch"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "model")
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with dist.scope():
        layer = keras.layers.Dense(8, name="up")
        layer.build((None, 4))
    assert tuple(layer.kernel.value.sharding.spec) == (None, "model")
    assert dist.num_model_replicas == 2


def bad(**kwargs):
    mesh = kmd.make_mesh({"model": 4, "batch": 2})
    layout_map = kmd.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    return kmd.ModelParallel(**{"layout_map": layout_map, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"batch_dim_name": "data"},
            r"'data'\. Valid axes: \['model', 'batch'\]",
        ),
        ({"batch_dim_name": ("batch", "batch")}, r"different ones.*Valid axes"),
        ({"batch_dim_name": ("batch", "x")}, r"\('batch', 'x'\)\. Valid axes"),
        ({"batch_dim_name": ()}, r"Received: batch_dim_name=\(\)\. Valid axes"),
        ({"batch_dim_name": ""}, r"Received: batch_dim_name=''\. Valid axes"),
        ({"batch_dim_name": 1}, r"Received: batch_dim_name=1\. Valid axes"),
        ({"batch_dim_nam": "x"}, r"no argument.*Did you mean `batch_dim_name`"),
        ({"foo": 1}, r"no argument `foo`\. Received: foo=1\. Valid argum"),
        ({"layout_map": None}, "must be a `LayoutMap`.*layout_map=None"),
        ({"layout_map": {}}, r"must be a `LayoutMap`.*layout_map=\{\}"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        bad(**kwargs)


def test_the_mesh_as_an_argument():
    mesh = kmd.make_mesh({"model": 4, "batch": 2})
    layout_map = kmd.LayoutMap(mesh)
    dist = kmd.ModelParallel(device_mesh=mesh, layout_map=layout_map)
    assert dist.device_mesh is mesh
    other = kmd.make_mesh({"batch": 8})
    with pytest.raises(ValueError, match=r"layout map's.*Leave `device_mesh`"):
        kmd.ModelParallel(device_mesh=other, layout_map=layout_map)
    with pytest.raises(ValueError, match=r"keyword arguments.*DeviceMesh\."):
        kmd.ModelParallel(mesh, layout_map)


def test_an_empty_map_on_a_mesh_without_a_batch_axis():
    layout_map = kmd.LayoutMap(kmd.make_mesh({"x": 4, "y": 2}))
    with pytest.raises(ValueError, match=r"nothing says.*one of \['x', 'y'\]"):
        kmd.ModelParallel(layout_map=layout_map)
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="y")
    assert dist.num_model_replicas == 2


def test_keras_map_with_bad_axes():
    mesh = keras.distribution.DeviceMesh((4, 2), ["a", "a"])
    layout_map = keras.distribution.LayoutMap(mesh)
    with pytest.raises(ValueError, match=r"distinct.*\['a', 'a'\]"):
        kmd.ModelParallel(layout_map=layout_map, batch_dim_name="a")
    mesh = keras.distribution.DeviceMesh((4, 2), ["a", "b"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["kernel"] = ("a", "a")
    with pytest.raises(ValueError, match=r"axis once.*\('a', 'a'\)"):
        kmd.ModelParallel(layout_map=layout_map, batch_dim_name="a")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (("model",), "1 entries, the shape has 2 dimensions"),
        ((None, "model", None), "3 entries, the shape has 2 dimensions"),
        (("model", None), r"dimension 0 of size 6 doesn't divide by the 4"),
        ((("batch", "model"), None), "size 6 doesn't divide by the 8 pieces"),
    ],
)
def test_a_layout_that_does_not_fit(layout, message):
    with (
        make(kernel=layout).scope(),
        pytest.raises(ValueError, match=message) as caught,
    ):
        keras.layers.Dense(8, name="up").build((None, 6))
    text = str(caught.value)
    assert "variable 'up/kernel' of shape (6, 8)" in text
    assert "rule '.*kernel'" in text
    assert "shape=(4, 2)" in text


def test_two_rules_for_a_variable():
    dist = make(**{"kernel": (None, "model"), "up/.*": (None, "model")})
    layer = keras.layers.Dense(8, name="up")
    with (
        dist.scope(),
        pytest.raises(ValueError, match=r"At most one.*'up/kernel'"),
    ):
        layer.build((None, 4))


def test_slots_lie_as_their_weights_do():
    dist = make({"model": 4, "batch": 2}, kernel=("batch", "model"))
    with dist.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])
        for optimizer in ("adam", "adafactor", "nadam", "adamw"):
            model.compile(optimizer, "mse")
            model.optimizer.build(model.trainable_variables)
            for slot in model.optimizer.variables:
                spec = tuple(slot.value.sharding.spec)
                if tuple(slot.shape) == (6, 8):
                    assert spec == ("batch", "model"), slot.path
                else:
                    assert not any(spec), slot.path


def test_a_part_of_a_path_does_not_match_optimizer_variables():
    """Adafactor's rows and columns have the kernel's path in theirs."""
    layout_map = kmd.LayoutMap(kmd.make_mesh({"model": 4, "batch": 2}))
    layout_map["p.*kernel"] = (None, "model")
    layer = keras.layers.Dense(8, name="up")
    with kmd.ModelParallel(layout_map=layout_map).scope():
        with pytest.warns(UserWarning, match="only a part.*'up/kernel'"):
            layer.build((None, 6))
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile("adafactor", "mse")
        model.optimizer.build(model.trainable_variables)
    assert tuple(layer.kernel.value.sharding.spec) == (None, "model")
    slots = [s for s in model.optimizer.variables if "kernel" in s.path]
    assert any(len(slot.shape) == 1 for slot in slots)
    for slot in slots:
        if len(slot.shape) == 1:
            assert not any(slot.value.sharding.spec), slot.path


def fit(rows=13, name="up", **compile_arguments):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, name=name),
            keras.layers.Dense(1, name="down"),
        ]
    )
    model.compile("sgd", "mse", **compile_arguments)
    x = np.linspace(0, 1, rows * 4).reshape(rows, 4)
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    return history.history["loss"], model


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "layout", [("batch", "model"), ["batch", None], (("batch", "model"), None)]
)
def test_rules_for_outputs(layout, eager):
    expected, _ = fit(run_eagerly=eager)
    dist = make(**{"up/output": layout})
    with dist.scope():
        loss, _ = fit(run_eagerly=eager)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_an_output_rule_of_the_wrong_rank():
    # Keras 3.7 wraps what fails while a model is built.
    errors = (ValueError, RuntimeError)
    with (
        make(**{"up/output": ("batch",)}).scope(),
        pytest.raises(errors, match=r"entry for each dim.*up/output"),
    ):
        fit()


def test_one_axis_for_rows_and_weights():
    expected, _ = fit()
    with make({"fsdp": 8}, "fsdp", **{"up/kernel": (None, "fsdp")}).scope():
        loss, model = fit()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert model.layers[0].kernel.value.addressable_shards[0].data.shape == (
        4,
        1,
    )


def test_distributions_back_and_forth_leave_nothing_behind():
    expected, _ = fit()
    one, two = make(), make({"batch": 8})
    plain = keras.distribution.DataParallel(devices=jax.devices())
    for dist in (one, two, None, one, None):
        keras.distribution.set_distribution(dist)
        loss, model = fit()
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        devices = model.layers[0].kernel.value.sharding.device_set
        assert len(devices) == (8 if dist else 1)
    with one.scope():
        with two.scope(), plain.scope():
            fit(rows=16)
        assert keras.distribution.distribution() is one
    assert keras.distribution.distribution() is None


def test_a_mesh_over_some_of_the_devices():
    expected, _ = fit()
    layout_map = kmd.LayoutMap(
        kmd.make_mesh({"model": 1, "batch": 3}, jax.devices()[2:5])
    )
    dist = kmd.ModelParallel(layout_map=layout_map)
    with dist.scope():
        loss, model = fit()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    devices = model.layers[0].kernel.value.sharding.device_set
    assert devices == set(jax.devices()[2:5])


def test_a_process_without_a_device(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"Every process must.*\[0\] only"):
        bad()


def test_data_parallel_takes_all_devices():
    dist = kmd.DataParallel()
    assert isinstance(dist, keras.distribution.DataParallel)
    assert dist.batch_dim_name == "batch"
    assert dist.num_model_replicas == 8
    assert tuple(dist.device_mesh.shape) == (8,)
    some = kmd.DataParallel(devices=keras.distribution.list_devices()[:3])
    assert some.num_model_replicas == 3


def test_data_parallel_takes_a_mesh_of_several_axes():
    mesh = kmd.make_mesh({"a": 2, "b": 4})
    dist = kmd.DataParallel(mesh)
    assert dist.batch_dim_name == ("a", "b")
    assert dist.num_model_replicas == 8
    assert kmd.DataParallel(mesh, batch_dim_name="b").num_model_replicas == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_mesh": "mesh", "devices": []}, "Leave one out"),
        ({"device_mesh": [8]}, "`device_mesh` must be"),
        ({"batch_dim": "b"}, "Did you mean `batch_dim_name`"),
        ({"batch_dim_name": "model"}, "Valid axes"),
        ({"batch_dim_name": ""}, "Valid axes"),
    ],
)
def test_bad_arguments_of_data_parallel(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmd.DataParallel(**arguments)


def test_data_parallel_trains_as_one_device():
    def train():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        x = np.linspace(0, 1, 116).reshape(29, 4)
        losses = model.fit(x, x[:, :2], 16, epochs=3, verbose=0).history
        return losses["loss"], model.get_weights()

    losses, weights = train()
    with kmd.DataParallel().scope():
        got, others = train()
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)
