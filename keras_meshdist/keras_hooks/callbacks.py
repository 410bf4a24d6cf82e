"""Hooks on callbacks: one of several processes writes and shows."""

import functools
import shutil
import tempfile
import weakref

import jax
import jax.numpy as jnp
import keras

from keras_meshdist.keras_hooks.base import ours, warn_if_forgotten

_TO_FILES = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def make_list(keras_method):
    """Keras shows a progress bar, and writes each log, on every process.

    It goes on with a step that was compiled for one device, too. Wraps
    `CallbackList.__init__` (Keras 3.7 to 3.16), with which `fit`, `evaluate`
    and `predict` begin.
    """

    @functools.wraps(keras_method)
    def hook(self, callbacks=None, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            warn_if_forgotten()
        elif kwargs.get("model") is not None:
            distribution.check_place(kwargs["model"])
        if distribution is None or jax.process_index() == 0:
            return keras_method(self, callbacks, *args, **kwargs)
        given = keras.tree.flatten(callbacks) if callbacks else []
        kept = [c for c in map(_elsewhere, given) if c is not None]
        kwargs["add_progbar"] = False
        return keras_method(self, kept, *args, **kwargs)

    return hook


def _elsewhere(callback):
    """Returns what a process that doesn't write has of a callback."""
    if isinstance(callback, keras.callbacks.TensorBoard) and (
        callback.histogram_freq or callback.embeddings_freq
    ):
        # All processes bring the weights together that it shows.
        callback.log_dir = tempfile.mkdtemp()
        weakref.finalize(callback, shutil.rmtree, callback.log_dir, True)
        return callback
    writes = isinstance(callback, (*_TO_FILES, keras.callbacks.ProgbarLogger))
    return None if writes else callback


def back_up(keras_method):
    """Keras copies and writes the same files on every process.

    Wraps `BackupAndRestore._save_model` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return keras_method(self, *args, **kwargs)
        return distribution.save_files(
            self._weights_path,
            lambda: keras_method(self, *args, **kwargs),
            self.model.save_weights,
        )

    return hook


def end_backup(keras_method):
    """Keras deletes the same files on every process.

    Wraps `BackupAndRestore.on_train_end` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        if ours() is None or jax.process_index() == 0:
            return keras_method(self, *args, **kwargs)
        return None

    return hook


class _Kept:
    """A model whose weights, for a callback, stay on the devices."""

    def __init__(self, model):
        vars(self)["_kept"] = model

    def get_weights(self):
        return [jnp.copy(weight.value) for weight in self._kept.weights]

    def __getattr__(self, name):
        return getattr(self._kept, name)

    def __setattr__(self, name, value):
        setattr(self._kept, name, value)


def keep_best(keras_method):
    """Keras brings all weights to every process whenever they are the best.

    Wraps `EarlyStopping.on_epoch_end` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        if ours() is None:
            return keras_method(self, *args, **kwargs)
        model, self._model = self._model, _Kept(self._model)
        try:
            return keras_method(self, *args, **kwargs)
        finally:
            self._model = model

    return hook


def make_folder(keras_function):
    """Keras fails if another process makes the same folder in between.

    Wraps `makedirs` of `file_utils` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_function)
    def hook(path):
        try:
            return keras_function(path)
        except FileExistsError:
            if ours() is None:
                raise
            return None

    return hook
