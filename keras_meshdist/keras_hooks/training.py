"""Hooks on how Keras feeds a step, and what it does with predictions."""

import functools

from keras_meshdist.keras_hooks.base import ours


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
        return distribution.read(self.data_adapter.get_jax_iterator(), steps)

    return hook


def make_function(keras_method):
    """Keras keeps predictions on the devices, and concatenates them there.

    That fails when some of the devices are another process', and gives wrong
    numbers (sums over replicas) on JAX 0.4. Wraps `JAXTrainer._make_function`
    (Keras 3.7 to 3.16), which is asked to concatenate by `predict` only.
    """

    @functools.wraps(keras_method)
    def hook(self, step_function, concatenate_outputs=False):
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
            outputs = distribution.fetch(outputs, wait=several)
        return outputs, state

    return step
