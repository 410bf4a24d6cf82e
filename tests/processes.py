"""What the processes of a cluster run for test_processes.py."""

import warnings

import numpy as np


def _dist(axes, devices=None, batch="b"):
    import keras_meshdist as kmd

    layout_map = kmd.LayoutMap(kmd.make_mesh(axes, devices))
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def properties(axes, batch="b", rows=13):
    import jax

    dist = _dist(axes, batch=batch)
    return {
        "process": jax.process_index(),
        "processes": dist.num_processes,
        "shards": dist.batch_shard_ids,
        "feed": dist.feed_rows(rows).tolist(),
        "other": dist.feed_rows(rows, process_id=0).tolist(),
        "data_shards": (dist.num_data_shards, dist.data_shard_id),
    }


def rows_on_devices(axes, rows, batch="b"):
    """What each device of this process holds, by its place in the mesh."""
    import jax
    import keras
    from keras.src.backend.jax import distribution_lib

    dist = _dist(axes, batch=batch)
    data = np.arange(rows, dtype="float32") + 1
    with dist.scope():
        layout = dist.get_data_layout(data.shape)
        batch = distribution_lib.distribute_data_input(
            data, layout, *(["b"] if keras.__version__ >= "3.8" else [])
        )
    physical = getattr(batch, "physical", batch)
    assert len(batch) == rows
    return {
        jax.devices().index(shard.device): np.array(shard.data).tolist()
        for shard in physical.addressable_shards
    }


def forget_to_set(axes):
    """Fits twice without a distribution, then in its scope; all warnings."""
    import keras

    keras.utils.set_random_seed(3)
    dist = _dist(axes)
    x, y = np.ones((5, 4)), np.ones((5, 2))

    def fit():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, y, verbose=0)
        return [(str(w.message), w.filename == __file__) for w in caught]

    said = [fit(), fit()]
    with dist.scope():
        said.append(fit())
    return [*said, fit()]


def forget_seeds():
    """A process as it was before any seed was set."""
    import random

    import keras

    random.seed()
    np.random.seed()
    keras.utils.clear_session()
    from keras.src.utils import rng_utils

    if hasattr(rng_utils, "GLOBAL_RANDOM_SEED"):
        from keras.src.backend.common import global_state

        global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, None)


def seeds(mine):
    """Two distributions one after the other, each with fresh weights."""
    import jax
    import keras

    forget_seeds()
    if mine is not None:
        keras.utils.set_random_seed(mine[jax.process_index()])
    try:
        dist = _dist({"m": 2, "b": -1})
        with dist.scope():
            layer = keras.layers.Dense(3)
            layer.build((None, 4))
            shuffled = np.random.permutation(100)
    finally:
        keras.utils.set_random_seed(0)
    weights = layer.kernel.value.addressable_shards
    return [np.array(s.data).tobytes() for s in weights], shuffled.tolist()


def mesh_without_the_last_process():
    import jax

    devices = [d for d in jax.devices() if d.process_index == 0]
    return str(_dist({"b": len(devices)}, devices))


def predictions(rows, steps_per_execution):
    import keras

    def run():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(steps_per_execution=steps_per_execution)
        x = np.linspace(0, 1, rows * 4).reshape(rows, 4)
        return (
            model.predict(x, batch_size=8, verbose=0),
            model.predict_on_batch(x),
        )

    expected = run()
    with _dist({"m": 2, "b": -1}).scope():
        return expected, run()


def local_predictions(rows):
    """All predictions, this process' own, and which these should be."""
    import keras

    import keras_meshdist as kmd

    dist = _dist({"b": 4, "m": 2})
    with dist.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        x = np.linspace(0, 1, rows * 4).reshape(rows, 4)
        everything = model.predict(x, batch_size=16, verbose=0)
        with kmd.local_predictions():
            own = model.predict(x, batch_size=16, verbose=0)
    which = [
        start + dist.feed_rows(min(16, rows - start))
        for start in range(0, rows, 16)
    ]
    return everything, own, np.concatenate(which)


def fit_on(
    axes,
    dataset,
    epochs=2,
    timeout=8.0,
    batch="b",
    auto_shard_dataset=True,
    **fit,
):
    """Trains on a dataset that a function makes of the process' number."""
    import jax
    import keras

    import keras_meshdist as kmd

    # A generator's length and order are not Keras' to say.
    warnings.simplefilter("ignore")
    keras.utils.set_random_seed(3)
    dist = kmd.ModelParallel(
        layout_map=kmd.LayoutMap(kmd.make_mesh(axes)),
        batch_dim_name=batch,
        data_timeout=timeout,
        auto_shard_dataset=auto_shard_dataset,
    )
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        try:
            history = model.fit(
                dataset(jax.process_index()), epochs=epochs, verbose=0, **fit
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return history.history["loss"]


def fit_late(axes, seconds):
    """Process 1 comes to `fit` late, longer than a read may take."""
    import time

    import jax

    from tests import datasets

    if jax.process_index() == 1:
        time.sleep(seconds)
    return fit_on(axes, datasets.same, epochs=1, timeout=2.0)


def predict_often(axes):
    """Trains for thirty steps, with a prediction after each."""
    import keras

    from tests import datasets

    dist = _dist(axes)
    with dist.scope():
        keras.utils.set_random_seed(3)
        model, other = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            for _ in range(2)
        )
        model.compile("sgd", "mse")
        seen = []

        class Predict(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                x, _ = next(datasets.batches(1, seed=batch))
                seen.append(float(other.predict(x, verbose=0).sum()))

        x = np.ones((240, 4), "float32")
        model.fit(x, x[:, :2], batch_size=8, verbose=0, callbacks=[Predict()])
        return seen


def fit_arrays(axes, arrays, batch_size=8, timeout=8.0):
    """Trains on arrays that a function makes of the process' number.

    Returns the losses, or the error, and how often the processes agreed.
    """
    import jax
    import keras

    import keras_meshdist as kmd

    keras.utils.set_random_seed(3)
    dist = kmd.ModelParallel(
        layout_map=kmd.LayoutMap(kmd.make_mesh(axes)),
        batch_dim_name="b",
        data_timeout=timeout,
    )
    agree, agreed = dist._board.agree, []
    dist._board.agree = lambda *a: agreed.append(a[1]) or agree(*a)
    try:
        with dist.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            arguments = {"batch_size": batch_size, "verbose": 0}
            x, y = arrays(jax.process_index())
            history = model.fit(x, y, shuffle=False, **arguments)
            return history.history["loss"], agreed
    except Exception as error:
        return f"{type(error).__name__}: {error}", agreed
    finally:
        del dist._board.agree


def count_rows(auto_shard_dataset, rows=37):
    """How often a metric sees each row, on all processes."""
    import keras

    import keras_meshdist as kmd

    class Seen(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="seen")
            self.counts = self.add_weight(shape=(rows,), initializer="zeros")

        def update_state(self, y, outputs, sample_weight=None):
            ids = keras.ops.cast(y[:, 0], "int32")
            one_hot = keras.ops.one_hot(ids, rows)
            self.counts.assign_add(keras.ops.sum(one_hot, 0))

        def result(self):
            return keras.ops.sum(self.counts)

        def reset_state(self):  # the counts of the last epoch stay
            pass

    dist = kmd.DataParallel(
        kmd.make_mesh({"m": 2, "b": -1}),
        batch_dim_name=("b", "m"),
        auto_shard_dataset=auto_shard_dataset,
    )
    ids = np.arange(rows, dtype="float32")[:, None]
    if not auto_shard_dataset:
        ids = np.array_split(ids, dist.num_data_shards)[dist.data_shard_id]
    with dist.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        seen = Seen()
        model.compile("sgd", "mse", metrics=[seen])
        model.fit(ids / rows, ids, batch_size=8, verbose=0)
        return np.asarray(seen.counts).tolist()


def overlapping_feeds():
    import keras_meshdist as kmd

    kmd.DataParallel(
        kmd.make_mesh({"m": 2, "b": 3}),
        batch_dim_name="b",
        auto_shard_dataset=False,
    )


def sharded_pipeline():
    """Reads but one of two shards with tf.data."""
    import keras
    import tensorflow as tf

    import keras_meshdist as kmd

    dist = kmd.DataParallel(
        kmd.make_mesh({"b": 2, "m": -1}),
        batch_dim_name="b",
        auto_shard_dataset=False,
    )
    read = []

    def note(n):
        read.append(int(n))
        return np.float32(n)

    dataset = (
        tf.data.Dataset.range(32)
        .shard(dist.num_data_shards, dist.data_shard_id)
        .map(
            lambda n: tf.ensure_shape(
                tf.numpy_function(note, [n], "float32"), []
            )
        )
        .map(lambda x: (x[None] / 32, x[None]))
        .batch(4)
    )
    with dist.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        losses = model.fit(dataset, verbose=0).history["loss"]
    return losses, sorted(set(read)), dist.data_shard_id
