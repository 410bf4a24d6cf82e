"""Initial values of variables: drawn where they lie, or not drawn at all.

Keras draws a value on one device and then splits it. A large one is drawn in
shards here. One program for the whole of an initializer would round otherwise
than Keras does on one device, operation by operation; so it is a program for
each operation, and each device computes its part of it.
"""

import contextlib
import contextvars
import copy
import functools
import math
import weakref

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import Literal

from keras_meshdist import keras_hooks
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


class _Seed(keras.random.SeedGenerator):
    """A seed that was drawn before."""

    def __init__(self, value):
        self._value = value

    def next(self, ordered=True):
        return self._value


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
        return _fill(shape, str(one.dtype), sharding)(one)
    seed = initializer.seed.next()
    return _steps(_Kind(initializer), shape, dtype, sharding)(seed)


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
    drawn.seed = _Seed(keras_hooks.draw_seed(initializer.seed))
    return drawn


class _Kind:
    """Initializers that differ in their seeds only are equal."""

    def __init__(self, initializer):
        self.initializer = initializer
        settings = {
            name: repr(value)
            for name, value in vars(initializer).items()
            if name not in ("seed", "_init_seed")
        }
        self._key = type(initializer), tuple(sorted(settings.items()))

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return self._key == other._key

    def values(self, seed, shape, dtype):
        seeded = copy.copy(self.initializer)
        seeded.seed = _Seed(seed)
        return seeded(shape, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _fill(shape, dtype, sharding):
    return jax.jit(
        lambda value: jnp.broadcast_to(value.astype(dtype), shape),
        out_shardings=sharding,
    )


@functools.lru_cache(maxsize=256)
def _steps(kind, shape, dtype, sharding):
    """Returns a function from a seed to a value, an operation after another."""
    whole = jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec()
    )
    traced = jax.make_jaxpr(lambda seed: kind.values(seed, shape, dtype))(
        jnp.zeros((2,), keras_hooks.seed_dtype())
    )
    jaxpr = traced.jaxpr
    programs = [
        jax.jit(
            functools.partial(_apply, equation.primitive, equation.params),
            out_shardings=[
                sharding if v.aval.shape == shape else whole
                for v in equation.outvars
            ],
        )
        for equation in jaxpr.eqns
    ]
    last = {
        v: i
        for i, equation in enumerate(jaxpr.eqns)
        for v in equation.invars
        if not isinstance(v, Literal)
    }

    def run(seed):
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        # All processes have it, and a device of each isn't enough.
        values[jaxpr.invars[0]] = jax.device_get(seed)

        def read(v):
            # Known to the program, a number would be computed with otherwise.
            if isinstance(v, Literal):
                return jnp.asarray(v.val, v.aval.dtype)
            return values[v]

        for i, (equation, program) in enumerate(
            zip(jaxpr.eqns, programs, strict=True)
        ):
            outputs = program(*map(read, equation.invars))
            for v in equation.invars:
                if not isinstance(v, Literal) and last[v] == i:
                    values.pop(v, None)
            values.update(zip(equation.outvars, outputs, strict=True))
        return read(jaxpr.outvars[0])

    return run


def _apply(primitive, settings, *values):
    found = primitive.bind(*values, **settings)
    return list(found) if primitive.multiple_results else [found]
