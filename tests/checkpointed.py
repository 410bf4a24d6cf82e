"""Runs that are saved and resumed, in the processes of a cluster."""

import os
import pathlib
import signal

import numpy as np

from tests import saved

ROWS = 61


def data():
    x = np.random.default_rng(5).normal(size=(ROWS, 16)).astype("float32")
    return x, x[:, :8]


def batches(size):
    x, y = data()
    return [(x[i : i + size], y[i : i + size]) for i in range(0, ROWS, size)]


def kinds(name, size=8):
    """What `fit` takes for a kind of dataset."""
    from tests.kinds import Batches

    x, y = data()
    if name == "arrays":
        return (x, y), {"batch_size": size}
    if name == "tf":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return (rows.shuffle(ROWS).batch(size),), {}
    if name == "tf with steps":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((x, y))
        endless = rows.shuffle(ROWS).batch(size).repeat()
        return (endless,), {"steps_per_epoch": 5}
    if name == "PyDataset":
        return (Batches(batches(size)),), {"shuffle": True}
    if name == "generator":

        def endless():
            while True:
                yield from batches(size)

        return (endless(),), {"steps_per_epoch": 6}
    if name == "several steps":
        return (x, y), {"batch_size": size}
    raise ValueError(name)


def recorder(stop_after=None, asked=None):
    """Notes losses; may end the run in the middle, or ask it to end."""
    import keras

    class Recorder(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.losses, self.epochs = [], []

        def on_train_batch_end(self, batch, logs=None):
            self.losses.append(float(logs["loss"]))
            if len(self.losses) == stop_after:
                raise KeyboardInterrupt
            if len(self.losses) == asked:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append({k: float(v) for k, v in logs.items()})

    return Recorder()


def run(
    where,
    folder,
    kind="arrays",
    stop_after=None,
    asked=None,
    dtype="float32",
    epochs=3,
    **settings,
):
    """Returns losses, logs of epochs, and all values after a run."""
    import jax
    import keras

    import keras_meshdist as kmd

    saved.with_scope(where)
    try:
        model = saved.build(1, dtype)
        if kind == "several steps":
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=3)
        if asked is not None and jax.process_index() != 0:
            asked = None  # one of them is asked, and all end
        watched = recorder(stop_after, asked)
        callbacks = [watched]
        if folder:
            callbacks.append(kmd.callbacks.Checkpoint(folder, **settings))
        arguments, more = kinds(kind)
        ended = None
        try:
            model.fit(
                *arguments,
                epochs=epochs,
                verbose=0,
                callbacks=callbacks,
                validation_data=data(),
                validation_batch_size=16,
                **more,
            )
        except (KeyboardInterrupt, SystemExit, RuntimeError) as error:
            ended = f"{type(error).__name__}: {error}"
        if folder and ended:
            callbacks[1]._close()  # as the end of the process does
        return watched.losses, watched.epochs, saved.values(model), ended
    finally:
        keras.distribution.set_distribution(None)


def save(where, folder, dtype="float32"):
    """Trains, saves, and returns what there is then."""
    _, _, values, _ = run(where, folder, epochs=1, dtype=dtype)
    return values


def digest(where):
    """Returns digests by NumPy and by the devices, of all variables."""
    import keras

    from keras_meshdist.checkpoints import digests
    from keras_meshdist.checkpoints.keys import variables_of

    saved.with_scope(where)
    try:
        model = saved.build(2, "bfloat16")
        arrays = {k: v.value for k, v in variables_of(model).items()}
        found = digests.of_arrays(arrays), digests.on_devices(arrays)
        return [{k: np.asarray(v) for k, v in each.items()} for each in found]
    finally:
        keras.distribution.set_distribution(None)


def restore(where, folder, dtype="float32"):
    """Restores into a model with other values; returns what it has then.

    The model has another number in Keras' automatic names.
    """
    import keras

    import keras_meshdist as kmd

    saved.with_scope(where)
    try:
        saved.build(4, dtype)
        model = saved.build(2, dtype)
        # Metrics exist once a batch was seen.
        model.evaluate(*data(), batch_size=16, verbose=0)
        step = kmd.restore(model, folder)
        return step, saved.values(model)
    finally:
        keras.distribution.set_distribution(None)


def steps_in(folder):
    names = [p.name for p in pathlib.Path(folder).iterdir()]
    return sorted(int(n) for n in names if n.isdigit())
