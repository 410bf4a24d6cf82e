"""Hooks on how Keras feeds a step, and what it does with predictions."""

import contextvars
import functools

from keras.src.trainers import data_adapters

from keras_meshdist.keras_hooks.access import rows_of_arrays, shuffle_again
from keras_meshdist.keras_hooks.base import ours

_making_adapter = contextvars.ContextVar("making_adapter", default=False)


def distribute_data_input(keras_function):
    """Keras splits a batch by arithmetic on process ids, evenly.

    Replaces `distribute_data_input` of the JAX backend, which takes (batch,
    layout) in Keras 3.7 and also `batch_dim_name` since 3.8.
    """

    @functools.wraps(keras_function)
    def hook(per_process_batch, layout, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return keras_function(per_process_batch, layout, *args, **kwargs)
        return distribution.place_leaf(per_process_batch, layout)

    return hook


def distribute_data(keras_function):
    """Keras 3.7 fails on a leaf that is None, and all versions on a scalar.

    Replaces `_distribute_data` of the JAX trainer (Keras 3.7 to 3.16), which
    `fit`, `train_on_batch` and their like call with a whole batch.
    """

    @functools.wraps(keras_function)
    def hook(data, layouts=None):
        distribution = ours()
        if distribution is None:
            return keras_function(data, layouts)
        return distribution.place_batch(data)

    return hook


def get_iterator(keras_method):
    """Keras places a batch when a step asks for it, and agrees on none.

    It also computes layouts from the first batch, and fails there on None.
    Replaces `JAXEpochIterator._get_iterator` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self):
        distribution = ours()
        if distribution is None:
            return keras_method(self)
        # Keras takes whole executions.
        steps = self.steps_per_epoch or self._num_batches
        if steps:
            steps = -(-steps // self.steps_per_execution)
            steps *= self.steps_per_execution
        progress = distribution.progress
        followed = progress and progress.start_pass(self)
        adapter, known = self.data_adapter, None
        if distribution.reads_rows and isinstance(
            adapter, data_adapters.ArrayDataAdapter
        ):
            source, known = rows_of_arrays(adapter)
        else:
            source = adapter.get_jax_iterator()
        if followed:
            shuffle_again(adapter, followed.passes_before)
        return distribution.read(source, steps, followed, known)

    return hook


def enumerate_steps(keras_method):
    """Keras begins an epoch with its first step, also when one is resumed.

    Wraps `EpochIterator._enumerate_iterator` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self):
        distribution = ours()
        steps = keras_method(self)
        if distribution is None or distribution.progress is None:
            return steps
        return distribution.progress.steps(self, steps)

    return hook


def make_adapter(keras_function):
    """Keras 3.16 deals whole batches to processes; 3.15 refuses most kinds.

    Wraps `get_data_adapter` (Keras 3.7 to 3.16), where it asks a distribution
    whether to shard datasets.
    """

    @functools.wraps(keras_function)
    def hook(*args, **kwargs):
        if ours() is None:
            return keras_function(*args, **kwargs)
        token = _making_adapter.set(True)
        try:
            return keras_function(*args, **kwargs)
        finally:
            _making_adapter.reset(token)

    return hook


def making_adapter():
    """Whether Keras is making a data adapter."""
    return _making_adapter.get()


def count_batches(keras_method):
    """Feeds of several processes may differ in length; the longest counts.

    Wraps `EpochIterator.__init__` and `EpochIterator.reset`, where Keras asks
    a dataset for its length (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        keras_method(self, *args, **kwargs)
        distribution = ours()
        if distribution is not None:
            self._num_batches = distribution.epoch_length(self._num_batches)

    return hook


def predict_on_batch(keras_method):
    """Keras gives every device, of each process its own, the whole batch.

    Wraps `JAXTrainer.predict_on_batch` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, x):
        distribution = ours()
        if distribution is None:
            return keras_method(self, x)
        return keras_method(self, distribution.place_batch(x))

    return hook


def make_function(keras_method):
    """Keras keeps predictions on the devices, and concatenates them there.

    That fails when some of the devices are another process', and gives wrong
    numbers (sums over replicas) on JAX 0.4. Wraps `JAXTrainer._make_function`
    (Keras 3.7 to 3.16), which is asked to concatenate by `predict` only. A
    model that gets here has all its variables.
    """

    @functools.wraps(keras_method)
    def hook(self, step_function, concatenate_outputs=False):
        distribution = ours()
        if distribution is not None and self.built:
            distribution.check_place(self)
            distribution.model_is_whole(self)
        if concatenate_outputs:
            step_function = _fetching(step_function, self)
        return keras_method(self, step_function, concatenate_outputs)

    return hook


def _fetching(step_function, model):
    def step(state, data):
        outputs, state = step_function(state, data)
        distribution = ours()
        if distribution is not None:
            several = model.steps_per_execution > 1
            outputs = distribution.fetch(outputs, data, wait=several)
        return outputs, state

    return step
