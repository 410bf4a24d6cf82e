"""Training that is run on a mesh and on one device, to be compared.

The functions here run in the processes of a cluster; `check` runs in the test.
"""

import functools

import numpy as np

FEATURES, HIDDEN = 16, 16


def train(case, optimize=True, everything=True):
    """Trains as a case says; on one device if it has no mesh.

    Without `optimize` XLA compiles faster, to slower code; how it partitions
    programs, which is what is tested, is the same. Without `everything` the
    model is fitted and predicts, and that's all.

    Returns what a user sees of it: numbers, predictions, and what lies on
    each device of this process.
    """
    import jax
    import keras

    jax.config.update("jax_disable_most_optimizations", not optimize)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    keras.distribution.set_distribution(_distribution(case))
    try:
        return _train(case, everything)
    finally:
        keras.distribution.set_distribution(None)


def _distribution(case):
    import jax

    import keras_meshdist as kmd

    if not case.shape:
        return None
    devices = np.array(jax.devices())
    if case.permutation is not None:
        rng = np.random.default_rng(case.permutation)
        devices = rng.permutation(devices)
    axes = dict(zip(case.axes, case.shape, strict=True))
    layout_map = kmd.LayoutMap(kmd.make_mesh(axes, devices))
    others = tuple(axis for axis in case.axes if axis not in case.batch)
    rows = case.batch if case.layout == "fsdp" else None
    if case.layout != "none":
        layout_map[".*up/kernel"] = (rows, others or None)
        layout_map[".*up/bias"] = (others or None,)
        layout_map[".*down/kernel"] = (others or None, None)
    if case.layout != "none" and others:
        # Channels over one axis, and what is behind `Flatten` over another.
        layout_map[".*conv.*/kernel"] = (None, None, None, others[0])
        layout_map[".*pointwise_kernel"] = (None, None, None, others[0])
        layout_map[".*hidden/kernel"] = (others[-1], None)
    batch = case.batch if len(case.batch) > 1 else case.batch[0]
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def _train(case, everything):
    x, y, weight = _data(case)
    model = MODELS[case.model](case)
    fit = {"batch_size": case.batch_size, "epochs": 2, "verbose": 0}
    if case.dataset == "tf":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices((x, y, weight))
        dataset = dataset.batch(case.batch_size).map(lambda *leaves: leaves)
        arguments, fit["batch_size"] = (dataset,), None
    else:
        arguments, fit["sample_weight"] = (x, y), weight
    history = model.fit(*arguments, shuffle=False, **fit).history
    del fit["epochs"]
    numbers = {name: np.array(values) for name, values in history.items()}
    if everything:
        numbers["evaluate"] = np.array(model.evaluate(*arguments, **fit))
        last = (case.rows - 1) // case.batch_size * case.batch_size
        batch = x[last:], y[last:], weight[last:]
        numbers["train_on_batch"] = np.array(model.train_on_batch(*batch))
        numbers["test_on_batch"] = np.array(model.test_on_batch(*batch))
    numbers["predict"] = model.predict(x, batch_size=case.batch_size, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    return {"numbers": numbers, **on_devices(variables)}


def on_devices(variables):
    """What each device of this process holds of variables."""
    shards = [
        [(_bounds(s.index, v.shape), np.array(s.data)) for s in v_shards]
        for v in variables
        for v_shards in [v.value.addressable_shards]
    ]
    return {"shards": shards, "shapes": [tuple(v.shape) for v in variables]}


def _bounds(index, shape):
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _data(case):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(case.rows, FEATURES))
    y = rng.normal(size=(case.rows, 2))
    return x, y, rng.uniform(0.5, 2.0, size=case.rows)


def _dense(case):
    import keras

    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, activation="relu", name="up"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2, name="down"),
        ]
    )
    # Unlike Adam, SGD with momentum has slots that hold no rounding noise.
    optimizers = {
        "adam": keras.optimizers.Adam(0.01),
        "sgd": keras.optimizers.SGD(0.01, momentum=0.9),
    }
    model.compile(
        optimizers[case.optimizer],
        "mse",
        metrics=["mae"],
        weighted_metrics=["mse"],
    )
    return model


def _rows(case):
    """All that depends on which rows there are, and on how many."""
    import keras

    class RowLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    inputs = keras.Input((FEATURES,))
    x = keras.layers.Reshape((4, 4))(inputs)
    x = keras.layers.Masking(mask_value=0.0)(x)
    x = keras.layers.SimpleRNN(8)(x)
    # A bias before BatchNormalization has gradient zero, which Adam's
    # division turns into noise.
    x = keras.layers.Dense(HIDDEN, use_bias=False, name="up")(x)
    x = keras.layers.BatchNormalization()(x)
    x = RowLoss(activity_regularizer="l2")(x)
    x = keras.layers.Dropout(0.3)(x)
    x = keras.layers.Dense(2, name="down", kernel_regularizer="l2")(x)
    model = keras.Model(inputs, x)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "mse",
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
        weighted_metrics=["mse"],
    )
    return model


def _windows(case):
    """Convolutions of every kind."""
    import keras

    layers = keras.layers
    same = {"padding": "same"}
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Reshape((4, 4, 1)),
            layers.Conv2D(8, 3, **same, name="conv"),
            layers.DepthwiseConv2D(3, **same, name="depthwise"),
            layers.Conv2D(16, 3, 2, groups=2, **same, name="conv_of_groups"),
            layers.Conv2DTranspose(8, 3, 2, **same, name="transposed"),
            layers.SeparableConv2D(8, 3, **same, name="separable"),
            layers.Flatten(),
            layers.Dense(HIDDEN, activation="relu", name="hidden"),
            layers.Dense(2, name="down"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


MODELS = {"dense": _dense, "rows": _rows, "windows": _windows}
TOLERANCES = {"dense": 1e-12, "rows": 1e-6, "windows": 1e-12}


@functools.cache
def oracle(data, everything):
    """What one device gives; computed once for each kind of case."""
    from keras_meshdist import cluster
    from tests.clusters import shared_cluster

    if cluster.on_pod():
        return train(data, everything=everything)
    return shared_cluster(1, 8).call(train, data, everything=everything)[0]


def check(case, results, everything=True):
    """Compares what all processes of a mesh saw with one device."""
    expected = oracle(case.data, everything)
    compare(expected, results, TOLERANCES[case.model])


def compare(expected, results, tolerance):
    """Compares what all processes saw with what was expected."""
    for process, result in enumerate(results):
        assert result["numbers"].keys() == expected["numbers"].keys()
        for name, value in expected["numbers"].items():
            got = result["numbers"][name]
            close(f"process {process}, {name}", got, value, tolerance)
    for i, shape in enumerate(expected["shapes"]):
        held = [shard for result in results for shard in result["shards"][i]]
        whole = _assemble(f"variable {i}", shape, held)
        ((_, value),) = expected["shards"][i]
        close(f"variable {i} of shape {shape}", whole, value, tolerance)


def _assemble(name, shape, held):
    """Puts the shards together; replicas must hold the same bytes."""
    seen = {}
    whole = np.zeros(shape, held[0][1].dtype)
    covered = np.zeros(shape, bool)
    for bounds, data in held:
        other = seen.setdefault(bounds, data.tobytes())
        assert other == data.tobytes(), f"{name}: replicas differ at {bounds}"
        place = tuple(slice(*b) for b in bounds)
        whole[place] = data
        covered[place] = True
    assert covered.all(), f"{name}: no device holds a part of it"
    return whole


def close(name, got, expected, tolerance):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{name}: {got.shape}"
    scale = max(np.max(np.abs(expected), initial=0.0), 1e-30)
    worst = np.max(np.abs(got - expected), initial=0.0) / scale
    assert worst <= tolerance, f"{name}: differs by {worst:.2e}"
