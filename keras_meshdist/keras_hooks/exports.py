"""Hooks on what writes a whole model, or all that belongs to it."""

import functools

from keras_meshdist.keras_hooks.base import ours


def export(keras_method):
    """Keras exports on every process, a program for the whole mesh.

    Wraps `Model.export` (Keras 3.7 to 3.16): one process exports, and what it
    writes runs on one device.
    """

    @functools.wraps(keras_method)
    def hook(self, filepath, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return keras_method(self, filepath, *args, **kwargs)
        return distribution.save(
            lambda path: distribution.with_whole_values(
                self, lambda: keras_method(self, path, *args, **kwargs)
            ),
            filepath,
        )

    return hook


def save_preset(hub_method):
    """KerasHub writes the same files on every process.

    Wraps `save_to_preset` of KerasHub's `Backbone` and `Task` (0.32 and newer),
    as soon as KerasHub is there.
    """

    @functools.wraps(hub_method)
    def hook(self, preset_dir, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return hub_method(self, preset_dir, *args, **kwargs)
        return distribution.save(
            lambda path: hub_method(self, path, *args, **kwargs),
            preset_dir,
            among_others=True,
        )

    return hook
