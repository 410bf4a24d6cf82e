"""Calls of `fit` for test_fit.py; they run in the processes of a cluster."""

import functools
import itertools

import numpy as np

from tests.kept import kept
from tests.kinds import Batches

ROWS, SIZE = 29, 16


def _data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4))
    return x, rng.integers(0, 2, size=(ROWS, 1)).astype(float)


def _model():
    import keras

    model = keras.Sequential(
        [
            keras.Input((4,)),
            # Keras computes tanh in float32, whose rounding depends on shapes.
            keras.layers.Dense(6, "silu"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "binary_crossentropy",
        metrics=["mae"],
        weighted_metrics=["mse"],
    )
    return model


def run(variant, axes):
    """Returns the history of a variant, and the weights after it."""
    import warnings

    import jax
    import keras

    warnings.simplefilter("ignore")  # some generators have no length
    # Which other tests set, and which rounds float64 otherwise.
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # which may have been made before
    keras.utils.set_random_seed(7)
    keras.distribution.set_distribution(_distribution(*axes.items()))
    try:
        model, history = variant()
        weights = {str(i): np.asarray(v) for i, v in enumerate(model.variables)}
        return {k: np.array(v) for k, v in history.items()} | weights
    finally:
        keras.distribution.set_distribution(None)


@functools.cache
def _distribution(*axes):
    import keras_meshdist as kmd

    if not axes:
        return None
    return kmd.DataParallel(kmd.make_mesh(dict(axes)), batch_dim_name="b")


def _fit(*arguments, model=None, **further):
    import keras

    if model is None:
        key = keras.distribution.distribution()
        (model,) = kept(key, lambda: (_model(),))
    history = model.fit(*arguments, epochs=3, verbose=0, **further)
    return model, history.history


def shuffled_arrays():
    return _fit(*_data(), batch_size=SIZE, shuffle=True)


def shuffled_in_batches():
    return _fit(*_data(), batch_size=SIZE, shuffle="batch")


def shuffled_py_dataset():
    return _fit(Batches(_batches()), shuffle=True)


def py_dataset_in_processes():
    """Whose batches other processes read, and Keras puts in order."""
    settings = {"workers": 2, "use_multiprocessing": True}
    return _fit(Batches(_batches(), **settings), shuffle=False)


def class_weight():
    return _fit(*_data(), batch_size=SIZE, class_weight={0: 0.3, 1: 2.0})


def sample_weight():
    weight = np.linspace(0, 2, ROWS)
    return _fit(*_data(), batch_size=SIZE, sample_weight=weight)


def validation_split():
    return _fit(*_data(), batch_size=SIZE, validation_split=0.31)


def validation_arrays():
    x, y = _data()
    return _fit(x, y, batch_size=SIZE, validation_data=(x[:11], y[:11]))


def validation_tf():
    import tensorflow as tf

    x, y = _data()
    validation = tf.data.Dataset.from_tensor_slices((x[:11], y[:11])).batch(5)
    return _fit(x, y, batch_size=SIZE, validation_data=validation)


def validation_generator():
    x, y = _data()

    def endless():
        while True:
            yield x[:5], y[:5]
            yield x[5:11], y[5:11]

    return _fit(
        x, y, batch_size=SIZE, validation_data=endless(), validation_steps=2
    )


def validation_py_dataset():
    batches = Batches(_batches(5))
    return _fit(*_data(), batch_size=SIZE, validation_data=batches)


def short_batches():
    """Several in an epoch, as a loader of several files gives them."""
    x, y = _data()
    bounds = (0, 7, 8, 20, 23, ROWS)
    pairs = itertools.pairwise(bounds)
    return _fit(Batches([(x[a:b], y[a:b]) for a, b in pairs]), shuffle=False)


def no_weights():
    """A leaf that is None."""
    return _fit(Batches([(x, y, None) for x, y in _batches()]), shuffle=False)


def nested_with_scalar():
    """A dict of inputs, one of them without rows."""
    import keras

    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, "sigmoid")

        def call(self, inputs):
            return self.dense(inputs["rows"] * inputs["scale"])

    model = Scaled()
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    batches = [
        ({"rows": x, "scale": np.float64(0.5 + i)}, y)
        for i, (x, y) in enumerate(_batches())
    ]
    return _fit(Batches(batches), model=model, shuffle=False)


def endless_with_steps():
    def endless():
        while True:
            yield from _batches()

    return _fit(endless(), steps_per_epoch=3)


def _batches(size=SIZE):
    x, y = _data()
    return [(x[i : i + size], y[i : i + size]) for i in range(0, ROWS, size)]


VARIANTS = (
    shuffled_arrays,
    shuffled_in_batches,
    shuffled_py_dataset,
    py_dataset_in_processes,
    class_weight,
    sample_weight,
    validation_split,
    validation_arrays,
    validation_tf,
    validation_generator,
    validation_py_dataset,
    short_batches,
    no_weights,
    nested_with_scalar,
    endless_with_steps,
)


def resident_sizes(epochs):
    """Bytes after each epoch, of batch sizes that take turns; and threads."""
    import pathlib
    import resource
    import threading

    import keras_meshdist as kmd

    mesh = kmd.make_mesh({"m": 2, "b": 4})
    sizes = itertools.cycle((16, 13, 5, 3, 8, 1))
    memory = []
    x = np.random.default_rng(0).normal(size=(61, 4))
    with kmd.DataParallel(mesh, batch_dim_name="b").scope():
        model = _model()
        for size in itertools.islice(sizes, epochs):
            slow = Batches([(b, b[:, :1]) for b in np.array_split(x, size)])
            model.fit(x, x[:, :1], batch_size=size, verbose=0)
            model.fit(slow, verbose=0)
            pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
            memory.append(int(pages) * resource.getpagesize())
    names = [t.name for t in threading.enumerate()]
    return memory, [name for name in names if "read-ahead" in name]


class Counted(np.ndarray):
    """An array that notes which rows were read of it."""

    read = None

    def __getitem__(self, key):
        if Counted.read is not None:
            Counted.read += np.arange(len(self))[key].ravel().tolist()
        return np.asarray(self)[key]


def rows_read():
    """The rows that this process reads in three epochs, in order."""
    import keras

    import keras_meshdist as kmd

    dist = kmd.DataParallel(kmd.make_mesh({"b": 2, "m": 4}), batch_dim_name="b")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # which may have been made before
    x, y = _data()
    with dist.scope():
        keras.utils.set_random_seed(7)
        model = _model()
        Counted.read = []
        try:
            _fit(
                x.view(Counted), y, model=model, batch_size=SIZE, shuffle=False
            )
            return Counted.read
        finally:
            Counted.read = None


def sharded_array():
    """As somebody does who knows other libraries."""
    import jax
    import keras

    import keras_meshdist as kmd

    dist = kmd.DataParallel()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # which may have been made before
    x, y = _data()
    mine = slice(jax.process_index(), 28, 2)
    with dist.scope():
        keras.utils.set_random_seed(7)
        try:
            _fit(x[mine], y[mine], batch_size=8, shuffle=False)
        except RuntimeError as error:
            return str(error)
    return "no error"
