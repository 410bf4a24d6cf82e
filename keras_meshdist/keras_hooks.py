"""Every touch on a private part of Keras, each a small function.

A hook does nothing but call Keras unless the current distribution is one of
ours. All hooks are checked before the first is installed: on a Keras that
doesn't fit, importing this package raises, and nothing is patched.
"""

import abc
import functools
import inspect
import pickle
import random

import jax
import keras
import numpy as np
from packaging.version import Version

from keras_meshdist import coordination

OLDEST_KERAS = Version("3.7.0")
OLDEST_JAX = Version("0.4.38")

# Before anything of Keras' JAX backend is imported, which fails elsewhere with
# errors that name no remedy.
if keras.backend.backend() != "jax":
    raise ImportError(
        "keras_meshdist needs the JAX backend of Keras. Received: backend "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=jax before Keras is imported."
    )
if Version(keras.__version__) < OLDEST_KERAS or (
    Version(jax.__version__) < OLDEST_JAX
):
    raise ImportError(
        f"keras_meshdist needs Keras {OLDEST_KERAS} or newer and JAX "
        f"{OLDEST_JAX} or newer. Received: Keras {keras.__version__}, JAX "
        f"{jax.__version__}. Run: pip install -U keras jax."
    )

from keras.src.backend.jax import (  # noqa: E402
    distribution_lib as jax_distribution,
)
from keras.src.backend.jax import trainer as jax_trainer  # noqa: E402
from keras.src.distribution import distribution_lib  # noqa: E402
from keras.src.optimizers import base_optimizer  # noqa: E402
from keras.src.utils import rng_utils  # noqa: E402


class HookedDistribution(abc.ABC):
    """What the hooks call on a distribution of ours."""

    @abc.abstractmethod
    def place_leaf(self, leaf, layout=None):
        """Puts one array of a global batch on the devices."""

    @abc.abstractmethod
    def place_output(self, tensor, layout):
        """Applies a rule for a layer's output to a tensor."""

    @abc.abstractmethod
    def fetch(self, outputs, wait):
        """Brings predictions to this process, if they aren't or if `wait`."""

    @abc.abstractmethod
    def creating_slot(self, reference):
        """Context in which an optimizer creates a variable.

        `reference` is the weight that it belongs to, or `None`.
        """


def _ours():
    distribution = keras.distribution.distribution()
    if isinstance(distribution, HookedDistribution):
        return distribution
    return None


def _distribute_data_input(keras_function):
    """Keras splits a batch by arithmetic on process ids, evenly.

    Replaces `distribute_data_input` of the JAX backend, which takes (batch,
    layout) in Keras 3.7 and also `batch_dim_name` since 3.8.
    """

    @functools.wraps(keras_function)
    def hook(per_process_batch, layout, *args, **kwargs):
        ours = _ours()
        if ours is None:
            return keras_function(per_process_batch, layout, *args, **kwargs)
        return ours.place_leaf(per_process_batch, layout)

    return hook


def _distribute_data(keras_function):
    """Keras 3.7 fails on a leaf that is None, and all versions on a scalar.

    Replaces `_distribute_data` of the JAX trainer (Keras 3.7 to 3.16), which
    `fit`, `train_on_batch` and their like call with a whole batch.
    """

    @functools.wraps(keras_function)
    def hook(data, layouts=None):
        ours = _ours()
        if ours is None:
            return keras_function(data, layouts)
        return keras.tree.map_structure(ours.place_leaf, data)

    return hook


def _get_iterator(keras_method):
    """Keras computes layouts from the first batch, and fails there on None.

    Replaces `JAXEpochIterator._get_iterator` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self):
        if _ours() is None:
            return keras_method(self)
        return map(
            jax_trainer._distribute_data, self.data_adapter.get_jax_iterator()
        )

    return hook


def _make_function(keras_method):
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
        ours = _ours()
        if ours is not None:
            outputs = ours.fetch(outputs, wait=model.steps_per_execution > 1)
        return outputs, state

    return step


def _distribute_tensor(keras_function):
    """Keras can't lay out an eager output whose rows don't divide.

    Replaces `distribute_tensor` where a layer's output gets the layout of a
    rule `…/output` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_function)
    def hook(tensor, layout):
        ours = _ours()
        if ours is None or not isinstance(
            layout, keras.distribution.TensorLayout
        ):
            return keras_function(tensor, layout)
        return keras.tree.map_structure(
            lambda t: (
                t
                if keras.utils.is_keras_tensor(t)
                else ours.place_output(t, layout)
            ),
            tensor,
        )

    return hook


def _add_variable(keras_method):
    """An optimizer's variables have paths that layout rules weren't made for.

    Wraps `Optimizer.add_variable` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        ours = _ours()
        if ours is None:
            return keras_method(self, *args, **kwargs)
        with ours.creating_slot(None):
            return keras_method(self, *args, **kwargs)

    return hook


def _add_variable_from_reference(keras_method):
    """A slot lies as its weight does; older Keras doesn't see to it.

    Wraps `Optimizer.add_variable_from_reference` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, reference_variable, *args, **kwargs):
        ours = _ours()
        if ours is None:
            return keras_method(self, reference_variable, *args, **kwargs)
        with ours.creating_slot(reference_variable):
            return keras_method(self, reference_variable, *args, **kwargs)

    return hook


# place, name, wrapper, parameters that Keras' own must begin with
_HOOKS = (
    (
        jax_distribution,
        "distribute_data_input",
        _distribute_data_input,
        ("per_process_batch", "layout"),
    ),
    (jax_trainer, "_distribute_data", _distribute_data, ("data", "layouts")),
    (
        jax_trainer.JAXEpochIterator,
        "_get_iterator",
        _get_iterator,
        ("self",),
    ),
    (
        jax_trainer.JAXTrainer,
        "_make_function",
        _make_function,
        ("self", "step_function", "concatenate_outputs"),
    ),
    (
        distribution_lib,
        "distribute_tensor",
        _distribute_tensor,
        ("tensor", "layout"),
    ),
    (
        base_optimizer.BaseOptimizer,
        "add_variable",
        _add_variable,
        ("self", "shape"),
    ),
    (
        base_optimizer.BaseOptimizer,
        "add_variable_from_reference",
        _add_variable_from_reference,
        ("self", "reference_variable"),
    ),
)

_originals = {}
# Before JAX 0.5 random numbers depend on how an array is split, unless this
# is set; from 0.5 on it is JAX's default.
_THREEFRY = "jax_threefry_partitionable"
# Seconds for the slowest process to import its libraries and data.
_PATIENCE = 600.0


def install():
    """Installs all hooks, or none; importing the package calls it.

    Raises:
        ImportError: if a part of Keras that a hook replaces has changed.
    """
    if _originals:
        return
    for place, name, _, parameters in _HOOKS:
        found = getattr(place, name, None)
        signature = tuple(inspect.signature(found).parameters) if found else ()
        if signature[: len(parameters)] != parameters:
            raise ImportError(
                f"This version of keras_meshdist doesn't fit Keras "
                f"{keras.__version__}: `{_path(place, name)}` should take "
                f"{parameters}. Received: {signature or 'no such function'}. "
                "Nothing was changed. Install an older Keras or a newer "
                "keras_meshdist."
            )
    for place, name, wrapper, _ in _HOOKS:
        original = getattr(place, name)
        _originals[_path(place, name)] = (place, name, original)
        setattr(place, name, wrapper(original))
    if Version(jax.__version__) < Version("0.5"):
        _originals[_THREEFRY] = (
            None,
            _THREEFRY,
            getattr(jax.config, _THREEFRY),
        )
        jax.config.update(_THREEFRY, True)


def remove():
    """Puts everything back as Keras and JAX had it."""
    while _originals:
        _, (place, name, original) = _originals.popitem()
        if place is None:
            jax.config.update(name, original)
        else:
            setattr(place, name, original)


def installed():
    """Returns the list of what is replaced at the moment, as dotted paths."""
    return sorted(_originals)


def _path(place, name):
    module = getattr(place, "__module__", None)
    owner = f"{module}.{place.__name__}" if module else place.__name__
    return f"{owner}.{name}"


def layout_given(variable):
    """Returns the `TensorLayout` that a variable was given, or `None`."""
    layout = getattr(variable, "_layout", None)
    is_layout = isinstance(layout, keras.distribution.TensorLayout)
    return layout if is_layout else None


def num_processes():
    """Returns the number of processes, as Keras counts them."""
    return jax_distribution.num_processes()


def agree_on_seed():
    """Makes sure that all processes draw the same random numbers.

    Weights are initialized and data is shuffled from them on each process by
    itself. `keras.distribution.initialize` sees to it, but only on newer
    versions of Keras, and not everybody calls it.

    Raises:
        ValueError: if processes were given different seeds.
    """
    if jax.process_count() == 1:
        return
    if not hasattr(rng_utils, "get_random_seed"):
        # Keras draws its seeds from Python's generator there.
        state = pickle.dumps((random.getstate(), np.random.get_state()))
        states = coordination.exchange("random_state", state, _PATIENCE)
        if len(set(states)) > 1:
            python_state, numpy_state = pickle.loads(states[0])
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        return
    seed = rng_utils.get_random_seed()
    drawn = random.SystemRandom().randrange(1, 2**31)
    answers = coordination.exchange(
        "seed", pickle.dumps((seed, drawn)), _PATIENCE
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
