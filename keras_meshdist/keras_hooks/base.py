"""What hooks know of a distribution of ours."""

import abc
import warnings
import weakref

import jax
import keras

# The distribution that was constructed last, while it has not been in effect.
_waiting = None


class HookedDistribution(abc.ABC):
    """What the hooks call on a distribution of ours."""

    # A `positions.Progress` while a callback follows a `fit`.
    progress = None

    @abc.abstractmethod
    def place_leaf(self, leaf, layout=None):
        """Puts one array of a global batch on the devices."""

    @abc.abstractmethod
    def place_batch(self, batch):
        """Puts a structure of arrays on the devices, agreed on by all."""

    @abc.abstractmethod
    def read(self, source, epoch_steps, followed=None):
        """Iterates over the batches of a dataset, put on the devices.

        `followed` is told how far it is.
        """

    @property
    @abc.abstractmethod
    def reads_rows(self):
        """Whether a process needs but a part of the rows of an array."""

    @abc.abstractmethod
    def epoch_length(self, batches):
        """Returns how many batches an epoch takes, given this process'."""

    @abc.abstractmethod
    def place_output(self, tensor, layout):
        """Applies a rule for a layer's output to a tensor."""

    @abc.abstractmethod
    def convolve(self, function, inputs, kernel, settings):
        """Calls Keras' function for a convolution; `settings` are the rest."""

    @abc.abstractmethod
    def keep_whole(self, array, dimension):
        """Constrains an array in a program not to be split along a dimension.

        `dimension` is a number; how the others are split is XLA's affair.
        """

    @property
    @abc.abstractmethod
    def num_devices(self):
        """Number of devices in the mesh."""

    @abc.abstractmethod
    def fetch(self, outputs, batch, wait):
        """Brings predictions to this process, if they aren't or if `wait`."""

    @abc.abstractmethod
    def gather(self, array, path=None):
        """Returns an array that lies on several processes as NumPy.

        `path` is the variable's whose value it is.
        """

    @abc.abstractmethod
    def initialize_variable(self, variable, initializer):
        """Gives a new variable its value, if not by Keras; returns whether."""

    @abc.abstractmethod
    def place_variable(self, variable, value, layout):
        """Puts a value of a variable on the devices."""

    @abc.abstractmethod
    def save(self, write, target, among_others=False):
        """Calls a function that saves to a path, on all processes.

        `among_others` means a folder whose other files stay.
        """

    @abc.abstractmethod
    def with_whole_values(self, model, function):
        """Calls a function, on the process that writes, without the mesh."""

    @abc.abstractmethod
    def save_files(self, path, write, take_part):
        """Saves several files on one process, while the others take part."""

    @abc.abstractmethod
    def value_to_save(self, value, key):
        """Returns a value as NumPy, or `None` if it isn't written here."""

    @abc.abstractmethod
    def ask(self, value, what):
        """Returns the values of all processes; `what` says what for."""

    @abc.abstractmethod
    def model_is_whole(self, model):
        """Judges layout rules, now that a model has all its variables."""

    @abc.abstractmethod
    def check_place(self, model):
        """Raises unless a model lies on the mesh."""

    @abc.abstractmethod
    def creating_slot(self, reference):
        """Context in which an optimizer creates a variable.

        `reference` is the weight that it belongs to, or `None`.
        """

    @property
    @abc.abstractmethod
    def lays_out_slot(self):
        """Whether the variable that is created then is a weight's slot."""


def ours():
    """Returns the current distribution if it is one of ours, or `None`."""
    global _waiting
    distribution = keras.distribution.distribution()
    if isinstance(distribution, HookedDistribution):
        _waiting = None
        return distribution
    return None


def constructed(distribution):
    """Takes note of a distribution that should be in effect sooner or later."""
    global _waiting
    _waiting = weakref.ref(distribution)


def warn_if_forgotten():
    """Warns, once, on several processes of a distribution that isn't set.

    On one process a model may well be tried on one device first.
    """
    global _waiting
    waiting = _waiting and _waiting()
    if waiting is None or jax.process_count() == 1:
        return
    if keras.distribution.distribution() is None:
        _waiting = None
        warnings.warn(
            "A distribution is in effect only once it has been set. Received: "
            f"a {type(waiting).__name__} that wasn't, on {jax.process_count()} "
            "processes; each of them uses a model of its own, on one device. "
            "Call `keras.distribution.set_distribution(distribution)` before "
            "the model is built.",
            stacklevel=5,
        )
