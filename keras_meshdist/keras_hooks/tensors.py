"""Hooks on how tensors and variables lie on the mesh."""

import contextlib
import contextvars
import functools
import inspect

import jax
import keras
import numpy as np

from keras_meshdist.keras_hooks.base import ours
from keras_meshdist.keras_hooks.names import OutputName
from keras_meshdist.keras_hooks.steps import record_slot
from keras_meshdist.keras_hooks.variables import is_scattered

_without_values = contextvars.ContextVar("without_values", default=False)


@contextlib.contextmanager
def without_values():
    """Context in which an array without a value is NumPy zeros for Keras.

    A layer may ask for NumPy while it is built, of a table of frequencies for
    example, though nothing that has a value comes of it.
    """
    token = _without_values.set(True)
    try:
        yield
    finally:
        _without_values.reset(token)


def distribute_tensor(keras_function):
    """Keras can't lay out an eager output whose rows don't divide.

    Replaces `distribute_tensor` where a layer's output gets the layout of a
    rule `…/output` (Keras 3.7 to 3.16). Also names outputs in a program that
    is traced for its layouts.
    """

    @functools.wraps(keras_function)
    def hook(tensor, layout):
        if isinstance(layout, OutputName):
            return layout.give(tensor)
        distribution = ours()
        if distribution is None or not isinstance(
            layout, keras.distribution.TensorLayout
        ):
            return keras_function(tensor, layout)
        return keras.tree.map_structure(
            lambda t: (
                t
                if keras.utils.is_keras_tensor(t)
                else distribution.place_output(t, layout)
            ),
            tensor,
        )

    return hook


def convert_to_numpy(keras_function):
    """Keras can't bring an array together that lies on several processes.

    Wraps `convert_to_numpy` of the JAX backend (Keras 3.7 to 3.16), with which
    KerasHub's `generate` ends. Neither can it convert what has no value yet,
    in a model that is built without memory.
    """

    @functools.wraps(keras_function)
    def hook(x):
        if isinstance(x, jax.core.Tracer) and _without_values.get():
            return np.zeros(x.shape, x.dtype)
        distribution = ours()
        if distribution is not None and is_scattered(x):
            return distribution.gather(x)
        if distribution is not None and isinstance(x, keras.Variable):
            return np.asarray(x)
        return keras_function(x)

    return hook


def add_variable(keras_method):
    """An optimizer's variables have paths that layout rules weren't made for.

    And Keras gives a slot its weight's layout, whatever the distribution says.
    Wraps `Optimizer.add_variable` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return record_slot(keras_method(self, *args, **kwargs), None)
        with distribution.creating_slot(None):
            if distribution.lays_out_slot:
                kwargs.pop("layout", None)
            return keras_method(self, *args, **kwargs)

    return hook


def add_variable_from_reference(keras_method):
    """A slot lies as its weight does; older Keras doesn't see to it.

    Wraps `Optimizer.add_variable_from_reference` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, reference_variable, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            made = keras_method(self, reference_variable, *args, **kwargs)
            return record_slot(made, reference_variable)
        with distribution.creating_slot(reference_variable):
            return keras_method(self, reference_variable, *args, **kwargs)

    return hook


def convolution(keras_function):
    """XLA splits windows wrongly: a gradient times the size of an axis.

    Wraps `conv`, `depthwise_conv` and `conv_transpose` of the JAX backend
    (Keras 3.7 to 3.16), through which all of Keras' convolutions go.
    """
    signature = inspect.signature(keras_function)

    @functools.wraps(keras_function)
    def hook(inputs, kernel, *args, **kwargs):
        distribution = ours()
        if distribution is None:
            return keras_function(inputs, kernel, *args, **kwargs)
        given = signature.bind(inputs, kernel, *args, **kwargs).arguments
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if name not in ("inputs", "kernel")
        }
        return distribution.convolve(keras_function, inputs, kernel, settings)

    return hook


def attention(keras_function):
    """On TPU Keras takes a fused kernel that XLA can't split over a mesh.

    Compiling unmasked attention on a mesh then fails ("Mosaic kernels cannot
    be automatically partitioned"), and where it doesn't, the kernel has a
    causal mask that nobody asked for. Masked attention takes the plain path
    anyhow. Wraps `dot_product_attention` of the JAX backend (Keras 3.7 to
    3.16).
    """
    signature = inspect.signature(keras_function)

    @functools.wraps(keras_function)
    def hook(query, key, value, *args, **kwargs):
        if ours() is not None and jax.devices()[0].platform == "tpu":
            bound = signature.bind(query, key, value, *args, **kwargs)
            if bound.arguments.get("flash_attention") is None:
                bound.arguments["flash_attention"] = False
            return keras_function(*bound.args, **bound.kwargs)
        return keras_function(query, key, value, *args, **kwargs)

    return hook
