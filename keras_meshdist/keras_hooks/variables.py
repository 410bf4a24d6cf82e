"""Hooks on values of variables: onto the mesh, to NumPy, and into files."""

import contextvars
import functools

import jax
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope

from keras_meshdist.arrays import FileArray
from keras_meshdist.keras_hooks import values
from keras_meshdist.keras_hooks.base import ours

_storing = contextvars.ContextVar("storing", default=False)


def direct_assign(keras_method):
    """Keras puts a whole value on one device, and compares it on all.

    Wraps `_direct_assign` of the JAX backend's `Variable` (Keras 3.7 to 3.16),
    which every new value of a variable goes through.
    """

    @functools.wraps(keras_method)
    def hook(self, value):
        distribution = ours()
        layout = self._layout
        traced = isinstance(value, jax.core.Tracer)
        if distribution is None or layout is None or traced:
            return keras_method(self, value)
        value = distribution.place_variable(self, value, layout)
        if isinstance(getattr(type(self), "_value", None), property):
            return keras_method(self, value)  # the variables of Flax NNX
        self._value = value
        return None

    return hook


def initialize(keras_method):
    """Keras draws a whole value on one device, and then splits it.

    Wraps `_initialize_with_initializer` of the JAX backend's `Variable`
    (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, initializer):
        distribution = ours()
        of_flax = isinstance(getattr(type(self), "_value", None), property)
        done = (
            distribution is not None
            and not of_flax
            and not values.is_traced()
            and distribution.initialize_variable(self, initializer)
        )
        return None if done else keras_method(self, initializer)

    return hook


def to_tensor(keras_method):
    """Keras makes a whole JAX array of what is assigned, on one device.

    Wraps `_convert_to_tensor` of the JAX backend's `Variable` (Keras 3.7 to
    3.16): NumPy stays NumPy until each device takes its part.
    """

    @functools.wraps(keras_method)
    def hook(self, value, dtype=None):
        from_file = type(value).__module__.startswith("h5py")
        on_host = from_file or isinstance(value, np.ndarray)
        if ours() is None or not on_host or in_stateless_scope():
            return keras_method(self, value, dtype)
        dtype = jax.dtypes.canonicalize_dtype(dtype or value.dtype)
        if FileArray.takes(value):
            return FileArray(value, dtype)
        return np.asarray(value).astype(dtype, copy=False)

    return hook


def to_array(keras_method):
    """Keras can't bring a variable together that lies on several processes.

    Wraps `Variable.__array__` (Keras 3.7 to 3.16), which `numpy()` and
    `get_weights` use.
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        distribution = ours()
        if distribution is None or not is_scattered(self.value):
            return keras_method(self, *args, **kwargs)
        whole = distribution.gather(self.value, self.path)
        return np.asarray(whole, *args, **kwargs)

    return hook


def is_scattered(value):
    """Whether a value lies on several processes, and none has all of it."""
    return isinstance(value, jax.Array) and not (
        isinstance(value, jax.core.Tracer)
        or value.is_fully_addressable
        or value.is_fully_replicated
    )


def save(keras_function):
    """Keras saves on every process, to the same file, and fails.

    Wraps `save_model` and `save_weights_only` (Keras 3.7 to 3.16), and
    `save_model_to_hdf5`.
    """

    @functools.wraps(keras_function)
    def hook(model, filepath, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return keras_function(model, filepath, *args, **kwargs)
        return distribution.save(
            lambda path: keras_function(model, path, *args, **kwargs), filepath
        )

    return hook


def store_value(keras_method):
    """Keras can't bring a value together, and writes it on every process.

    Wraps `__setitem__` of what weights are saved to: `H5Entry` of Keras 3.7,
    `H5IOStore` and `ShardedH5IOStore` of newer versions up to 3.16.
    """

    @functools.wraps(keras_method)
    def hook(self, key, value):
        distribution = ours()
        # One kind of store calls the other's method.
        if distribution is None or _storing.get():
            return keras_method(self, key, value)
        value = distribution.value_to_save(value, key)
        if value is None:  # written by another process
            return None
        token = _storing.set(True)
        try:
            return keras_method(self, key, value)
        finally:
            _storing.reset(token)

    return hook
