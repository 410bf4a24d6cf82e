"""Initial values of variables: drawn where they lie, or not drawn at all.

Keras draws a value on one device and then splits it. A large one is drawn in
shards here.
"""

import contextlib
import contextvars
import copy
import math
import weakref

import jax
import jax.numpy as jnp
import keras

from keras_meshdist import drawing, keras_hooks
from keras_meshdist.layout import sharding_of

# Bytes up to which a value may be whole on one device for a moment: to compile
# programs for it would take longer.
_SMALL = 2**22

_CONSTANT = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)
_RANDOM = (
    keras.initializers.RandomNormal,
    keras.initializers.RandomUniform,
    keras.initializers.TruncatedNormal,
    keras.initializers.VarianceScaling,
)

# The variables that have no value yet, within `skip_initializers`.
_skipped = contextvars.ContextVar("skipped", default=None)


@contextlib.contextmanager
def skip_initializers():
    """Context in which variables are created without their initial values.

    For a model whose weights are loaded at once: no time and no memory goes
    into values that nobody sees. A variable that was given no value gets its
    initial one at the end of the context, or when it is read; it is the one
    that it would have had otherwise. Variables are skipped under a
    distribution of this package and with Keras' own initializers; others are
    initialized as always.

    Example:

    ```python
    with kmd.skip_initializers():
        model = build_model()
        model.load_weights("model.weights.h5")
    ```

    KerasHub's `from_preset` in it loads a preset that way.
    """
    created = []
    token = _skipped.set(created)
    try:
        yield
    finally:
        _skipped.reset(token)
    for reference in created:
        variable = reference()
        if variable is not None and not keras_hooks.has_value(variable):
            variable.value  # noqa: B018


class _Later:
    """What Keras calls when it wants the value of a variable without one."""

    def __init__(self, variable, initializer, layout, distribution):
        self._variable = weakref.ref(variable)
        self._initializer = initializer
        self._layout, self._distribution = layout, distribution

    def __call__(self, shape, dtype=None):
        if keras_hooks.is_symbolic():
            return jnp.zeros(shape, dtype)
        variable = self._variable()
        with jax.ensure_compile_time_eval():
            if _size(shape, dtype) > _SMALL:
                sharding = sharding_of(self._layout)
                value = draw(self._initializer, shape, dtype, sharding)
            else:
                value = self._distribution.place_variable(
                    variable, self._initializer(shape, dtype), self._layout
                )
        keras_hooks.set_value(variable, value, self._layout)
        return value


def initialize(variable, initializer, layout, distribution):
    """Gives a variable its initial value in shards, or leaves it without.

    Args:
        variable: `keras.Variable` that is being created.
        initializer: callable.
        layout: `keras.distribution.TensorLayout` of the variable.
        distribution: `HookedDistribution`.

    Returns:
        bool, whether it is done. If not, it is left to Keras.
    """
    shape, dtype = tuple(variable.shape), variable.dtype
    skipped = _skipped.get()
    is_small = _size(shape, dtype) <= _SMALL
    if not _is_known(initializer) or (skipped is None and is_small):
        return False
    if _is_random(initializer):
        initializer = _with_drawn_seed(initializer)
    if skipped is None:
        value = draw(initializer, shape, dtype, sharding_of(layout))
        keras_hooks.set_value(variable, value, layout)
    else:
        later = _Later(variable, initializer, layout, distribution)
        keras_hooks.set_no_value(variable, later, layout)
        skipped.append(weakref.ref(variable))
    return True


def _size(shape, dtype):
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def draw(initializer, shape, dtype, sharding):
    """Returns the value of a known initializer, whose seed was drawn.

    Args:
        initializer: one of Keras'.
        shape: tuple of int.
        dtype: str.
        sharding: `jax.sharding.NamedSharding`.

    Returns:
        `jax.Array`.
    """
    if not _is_random(initializer):
        one = initializer((), dtype=dtype)
        return drawing.fill(shape, str(one.dtype), sharding)(one)
    return drawing.draw(initializer, shape, dtype, sharding)


def _is_known(initializer):
    # A class of its own may draw otherwise.
    of_keras = {kind.__call__ for kind in (*_CONSTANT, *_RANDOM)}
    if getattr(type(initializer), "__call__", None) not in of_keras:  # noqa: B004
        return False
    if isinstance(initializer, keras.initializers.Constant):
        return not jnp.ndim(initializer.value)
    return True


def _is_random(initializer):
    return isinstance(initializer, _RANDOM)


def _with_drawn_seed(initializer):
    drawn = copy.copy(initializer)
    drawn.seed = drawing.DrawnSeed(keras_hooks.draw_seed(initializer.seed))
    return drawn
