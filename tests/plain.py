"""What the table of the README says, run with plain Keras and with ours.

These functions run in the processes of a cluster, each on the same data. An
exception is returned as its name, so that the processes can go on.
"""

import contextlib
import warnings

import numpy as np


@contextlib.contextmanager
def library(ours):
    """Gives `keras.distribution` without any hook, or this package."""
    import jax
    import keras

    import keras_meshdist as kmd

    jax.config.update("jax_enable_x64", False)
    keras.config.set_floatx("float32")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if not ours:
        kmd.keras_hooks.remove()
    try:
        yield kmd if ours else keras.distribution
    finally:
        keras.distribution.set_distribution(None)
        kmd.keras_hooks.install()


def attempt(ours, task, axes=None, batch="batch"):
    """Returns what a task gives on a mesh, or the name of what it raises."""
    import keras

    with library(ours) as kind:
        try:
            dist = None
            if axes:
                mesh = keras.distribution.DeviceMesh(
                    tuple(axes.values()), tuple(axes)
                )
                layout_map = kind.LayoutMap(mesh)
                layout_map[".*hidden/kernel"] = (None, "model")
                dist = kind.ModelParallel(
                    layout_map=layout_map, batch_dim_name=batch
                )
            keras.distribution.set_distribution(dist)
            return globals()[task](dist)
        except Exception as error:
            return type(error).__name__


def model():
    import keras

    built = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="last"),
        ]
    )
    built.compile("sgd", "mse")
    return built


def rows(count):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 16)).astype("float32")
    return x, x[:, :1] ** 2


def dataset(count, batch):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(rows(count)).batch(batch)


def losses(history):
    return [float(loss) for loss in history.history["loss"]]


def fit_dataset(dist):
    return losses(model().fit(dataset(64, 16), epochs=3, verbose=0))


def fit_short_dataset(dist):
    return losses(model().fit(dataset(40, 16), epochs=2, verbose=0))


def fit_mapped_dataset(dist):
    mapped = dataset(64, 16).map(lambda x, y: (2 * x, y))
    return losses(model().fit(mapped, epochs=2, verbose=0))


def fit_arrays(dist):
    x, y = rows(64)
    return losses(model().fit(x, y, 16, epochs=2, shuffle=False, verbose=0))


def fit_thirteen(dist):
    return losses(model().fit(*rows(13), batch_size=13, verbose=0))


def predict(dist):
    import tensorflow as tf

    inputs = tf.data.Dataset.from_tensor_slices(rows(64)[0]).batch(16)
    return np.asarray(model().predict(inputs, verbose=0))


def fit_different(dist):
    import jax

    x, y = rows(64 - 16 * jax.process_index())
    return losses(model().fit(x, y, 16, shuffle=False, verbose=0))


def save_weights(dist):
    import pathlib
    import tempfile

    path = pathlib.Path(tempfile.gettempdir()) / "meshdist.weights.h5"
    model().save_weights(path)
    return path.exists()


def nested_layout(ours):
    """A dimension over two axes."""
    import keras

    with library(ours) as kind:
        mesh = keras.distribution.DeviceMesh((2, 4), ("fsdp", "model"))
        try:
            layout = kind.TensorLayout((None, ("fsdp", "model")), mesh)
        except ValueError as error:
            return type(error).__name__
        return layout.axes


def split_by(ours, rule):
    """Into how many pieces a rule splits a kernel, and what is warned of."""
    import keras

    with library(ours) as kind, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        layout_map = kind.LayoutMap(mesh)
        layout_map[rule] = (None, "model")
        keras.distribution.set_distribution(
            kind.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        )
        built = model()
        built.fit(*rows(16), verbose=0)
        kernel = built.get_layer("hidden").kernel.value
        columns = kernel.addressable_shards[0].data.shape[1]
        found = [str(w.message) for w in caught]
        return 32 // columns, [m for m in found if rule in m]
