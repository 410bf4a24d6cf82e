"""What the package reads of Keras' private state."""

import contextlib
import copy
import pickle
import random

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.backend.jax import distribution_lib as jax_distribution
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.utils import file_utils, rng_utils

from keras_meshdist import coordination
from keras_meshdist.arrays import ArrayRows

# Seconds for the slowest process to import its libraries and data.
_PATIENCE = 600.0


def num_processes():
    """Returns the number of processes, as Keras counts them."""
    return jax_distribution.num_processes()


def rows_of_arrays(adapter):
    """Returns Keras' iterator over arrays, with rows that are read later.

    Args:
        adapter: `ArrayDataAdapter`.

    Returns:
        A tuple: iterator of batches of `ArrayRows`, sparse arrays as Keras
        gives them; and the numbers that tell how many rows each batch has.
    """

    def rows(sliceable, indices):
        if sliceable is None:
            return None

        def read(numbers):
            return sliceable.convert_to_jax_compatible(sliceable[numbers])

        return (
            ArrayRows(read, indices) if _is_dense(sliceable) else read(indices)
        )

    arrays = array_slicing.convert_to_sliceable(
        adapter._inputs, target_backend="jax"
    )
    known = adapter._num_samples, adapter._batch_size, adapter._size
    return adapter._get_iterator(rows, arrays), known


def _is_dense(sliceable):
    return isinstance(
        sliceable,
        (array_slicing.NumpySliceable, array_slicing.PandasSliceable),
    )


def shuffle_again(adapter, passes):
    """Brings a new dataset to where it is after so many passes.

    `tf.data` shuffles with a seed that every iterator draws from the dataset.
    """
    if isinstance(adapter, data_adapters.TFDatasetAdapter):
        for _ in range(passes):
            iter(adapter._dataset)


def current_iterator(epoch_iterator):
    """Returns the iterator that goes on in the next epoch, or `None`."""
    if epoch_iterator.steps_per_epoch is None:
        return None
    return epoch_iterator._current_iterator


def end_epoch(epoch_iterator):
    """Tells a dataset that an epoch is over."""
    epoch_iterator.data_adapter.on_epoch_end()


def without_first_steps(epoch_iterator, steps, number, taken):
    """Iterates over the steps of an epoch but for the first ones.

    Args:
        epoch_iterator: `EpochIterator`.
        steps: iterator over all steps; each is a tuple with its number first.
        number: int, how many of them were done before.
        taken: int, how many batches were taken then, also in other epochs.
    """
    is_first = True
    for step in steps:
        if is_first:
            epoch_iterator._steps_seen += taken - number
            is_first = False
        if step[0] >= number:
            yield step


def set_initial_epoch(model, epoch):
    """Lets `fit` begin with an epoch; `None` is what the caller says."""
    model._initial_epoch = epoch


def is_fitting(model, frame):
    """Whether a frame is one of `fit` of a model, or was called by one."""
    while frame is not None:
        here = frame.f_code.co_name == "fit"
        if here and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def random_seed():
    """Returns the seed that was set, or `None`; also before Keras 3.9."""
    get = getattr(rng_utils, "get_random_seed", None)
    return get() if get else None


def agree_on_seed(timeout=_PATIENCE):
    """Makes sure that all processes draw the same random numbers.

    Weights are initialized and data is shuffled from them on each process by
    itself. `keras.distribution.initialize` sees to it, but only on newer
    versions of Keras, and not everybody calls it.

    Args:
        timeout: float, seconds to wait for the slowest process.

    Raises:
        ValueError: if processes were given different seeds.
    """
    if coordination.process_count() == 1:
        return
    if not hasattr(rng_utils, "get_random_seed"):
        # Keras draws its seeds from Python's generator there.
        state = pickle.dumps((random.getstate(), np.random.get_state()))
        states = coordination.exchange("random_state", state, timeout)
        if len(set(states)) > 1:
            python_state, numpy_state = pickle.loads(states[0])
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        return
    seed = rng_utils.get_random_seed()
    drawn = random.SystemRandom().randrange(1, 2**31)
    answers = coordination.exchange(
        "seed", pickle.dumps((seed, drawn)), timeout
    )
    answers = [pickle.loads(answer) for answer in answers]
    seeds = [seed for seed, _ in answers]
    if len(set(seeds)) > 1:
        raise ValueError(
            "All processes must use the same random seed, or none: weights "
            f"are initialized from it on each. Received seeds: {seeds}, by "
            "process. Call `keras.utils.set_random_seed` with one value on "
            "every process."
        )
    if seed is None:
        keras.utils.set_random_seed(answers[0][1])


@contextlib.contextmanager
def untouched_names():
    """Context after which Keras counts names and draws seeds as before it."""
    drawn = random.getstate(), np.random.get_state()
    state = {
        name: copy.copy(global_state.get_global_attribute(name))
        for name in ("object_name_uids", "global_seed_generator")
    }
    try:
        yield
    finally:
        for name, value in state.items():
            global_state.set_global_attribute(name, value)
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def forget_functions(model):
    """Lets a model compile its steps again, for another distribution."""
    for layer in [model, *layers_of(model)]:
        for name in ("train", "test", "predict", "generate"):
            if getattr(layer, f"{name}_function", None) is not None:
                setattr(layer, f"{name}_function", None)


def is_remote_path(path):
    """Whether a path isn't one of the local file system."""
    return bool(file_utils.is_remote_path(str(path)))


def input_structure(model):
    """Returns the symbolic inputs of a model, or `None` if it has none."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is None and getattr(model, "_functional", None) is not None:
        structure = model._functional._inputs_struct
    return structure


def layers_of(model):
    """Returns all layers of a model, also those within layers."""
    return list(model._flatten_layers())
