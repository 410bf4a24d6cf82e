"""What is read of files, and written to them, in the processes of a cluster."""

import contextlib
import pathlib

import numpy as np

from tests import saved

ROWS, COLUMNS = 256, 512


def build(seed=1, dtype="float32"):
    """With a kernel that is large enough to be read in parts."""
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((ROWS,)),
            keras.layers.Dense(COLUMNS, name="up", dtype=dtype),
            keras.layers.Dense(4, name="down", dtype=dtype),
        ],
        name="written",
    )
    model.compile("sgd", "mse")
    return model


@contextlib.contextmanager
def counted():
    """Counts the bytes of arrays that are read from files."""
    from keras_meshdist.arrays import FileArray

    read, getitem = [], FileArray.__getitem__

    def counting(self, index):
        piece = getitem(self, index)
        read.append(piece.nbytes)
        return piece

    FileArray.__getitem__ = counting
    try:
        yield read
    finally:
        FileArray.__getitem__ = getitem


def load(where, path, dtype="float32"):
    """Loads; returns values, and the bytes of each part that was read."""
    import keras

    saved.with_scope(where)
    try:
        with counted() as read:
            if path.endswith(".keras"):
                model = keras.saving.load_model(path)
            else:
                model = build(2, dtype)
                model.load_weights(path)
        return [np.asarray(v) for v in model.weights], read
    finally:
        keras.distribution.set_distribution(None)


def load_different(where, folder):
    """Each process has a file of its own."""
    import jax
    import keras

    saved.with_scope(where)
    dist = keras.distribution.distribution()
    try:
        model = build(2)
        model.load_weights(f"{folder}/{jax.process_index()}.weights.h5")
        try:
            dist.compare_assigned()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"
    finally:
        keras.distribution.set_distribution(None)


def export(where, folder):
    """Exports; returns a weight, what there is, and what the model gives."""
    import keras

    saved.with_scope(where)
    try:
        model = saved.build(1)
        model.fit(*saved.data(), batch_size=8, verbose=0)
        path = pathlib.Path(folder) / "exported"
        model.export(str(path), verbose=False)
        names = sorted(p.name for p in path.parent.iterdir())
        tree = model.get_state_tree(value_format="numpy_array")
        kernel = tree["trainable_variables"]["saved"]["up"]["kernel"]
        predicted = model.predict(saved.data()[0], batch_size=8, verbose=0)
        # The model itself goes on.
        model.fit(*saved.data(), batch_size=8, verbose=0)
        return kernel, names, predicted
    finally:
        keras.distribution.set_distribution(None)


@contextlib.contextmanager
def small_disk(size=100_000):
    """No file becomes larger, as if the disk were full."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SAVED = {
    "weights": "model.weights.h5",
    "model": "model.keras",
    "pieces": "model.weights.json",
}


def fill(where, file, folder):
    """Saves to a disk that is full; returns the error, and what there is."""
    import keras

    saved.with_scope(where)
    try:
        model = build(1)
        folder = pathlib.Path(folder)
        path = folder / SAVED[file]
        more = {"max_shard_size": 6e-4} if file == "pieces" else {}
        save = model.save if file == "model" else model.save_weights
        save(path, **more)
        # It may be that another process still looks.
        keras.distribution.distribution().ask(None, "to look")
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        keras.distribution.distribution().ask(None, "to look")
        error = "none"
        try:
            with small_disk():
                save(path, **more)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        after = {p.name: p.read_bytes() for p in folder.iterdir()}
        return error, before == after
    finally:
        keras.distribution.set_distribution(None)


def fail_to_checkpoint(where, folder, asynchronous, failing):
    """One process' disk is full after a while; returns what each raises."""
    import jax
    import keras

    import keras_meshdist as kmd

    saved.with_scope(where)
    try:
        model = build(1)
        path = pathlib.Path(folder) / "c"
        steps = []

        class Fill(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                steps.append(batch)
                if len(steps) == 6 and jax.process_index() == failing:
                    limit.enter_context(small_disk(20_000))

        callback = kmd.callbacks.Checkpoint(
            path, save_freq=4, asynchronous=asynchronous
        )
        x = np.random.default_rng(0).normal(size=(64, ROWS)).astype("float32")
        with contextlib.ExitStack() as limit:
            try:
                model.fit(
                    x,
                    x[:, :4],
                    batch_size=8,
                    epochs=50,
                    verbose=0,
                    callbacks=[callback, Fill()],
                )
            except Exception as error:
                return f"{type(error).__name__}: {error}", len(steps)
        return "none", len(steps)
    finally:
        keras.distribution.set_distribution(None)


def no_directory(where, path):
    """Checkpoints go to a path where no directory can be."""
    import keras

    import keras_meshdist as kmd

    saved.with_scope(where)
    try:
        model = saved.build(1)
        callback = kmd.callbacks.Checkpoint(path)
        try:
            model.fit(*saved.data(), verbose=0, callbacks=[callback])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"
    finally:
        keras.distribution.set_distribution(None)
