"""Random values in shards, of each shard a block at a time.

One program for the whole of an initializer would round otherwise than Keras
does on one device, operation by operation. So it is a program for each.
"""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import Literal

from keras_meshdist import keras_hooks
from keras_meshdist.blocks import Blocks, bind, can_be_cut, read


class DrawnSeed(keras.random.SeedGenerator):
    """A seed that was drawn before."""

    def __init__(self, value):
        self._value = value

    def next(self, ordered=True):
        return self._value


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
        seeded.seed = DrawnSeed(seed)
        return seeded(shape, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _steps(kind, shape, dtype, sharding, by_place):
    """Returns a function from a seed to a value, an operation after another."""
    whole = jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec()
    )
    traced = jax.make_jaxpr(lambda seed: kind.values(seed, shape, dtype))(
        jnp.zeros((2,), keras_hooks.seed_dtype())
    )
    jaxpr = traced.jaxpr
    cut = (
        0 < math.prod(shape) < 2**32  # elements are numbered with 32 bits
        and len(shape) > 0
        and by_place
        and can_be_cut(jaxpr, shape)
    )
    blocks = Blocks(shape, dtype, sharding) if cut else None
    programs = []
    for equation in jaxpr.eqns:
        shapes = [v.aval.shape for v in equation.outvars]
        if blocks and shape in shapes:
            programs.append(blocks.program(equation))
        else:
            apply = functools.partial(
                _apply, equation.primitive, equation.params
            )
            laid = [sharding if each == shape else whole for each in shapes]
            programs.append(jax.jit(apply, out_shardings=laid))
    last = {
        v: i
        for i, equation in enumerate(jaxpr.eqns)
        for v in equation.invars
        if not isinstance(v, Literal)
    }

    def run(seed, start):
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        # All processes have it, and a device of each isn't enough.
        values[jaxpr.invars[0]] = seed
        for i, (equation, program) in enumerate(
            zip(jaxpr.eqns, programs, strict=True)
        ):
            given = [read(values, v) for v in equation.invars]
            outputs = program(start, *given)
            for v in equation.invars:
                if not isinstance(v, Literal) and last[v] == i:
                    values.pop(v, None)
            values.update(zip(equation.outvars, outputs, strict=True))
        return read(values, jaxpr.outvars[0])

    return run, blocks


def _apply(primitive, settings, start, *values):
    return bind(primitive, settings, *values)


def draw(initializer, shape, dtype, sharding):
    """Returns the value of a random initializer of Keras, drawn in shards.

    Args:
        initializer: one whose value is made of one draw, operation by
            operation.
        shape: tuple of int.
        dtype: str.
        sharding: `jax.sharding.NamedSharding`.

    Returns:
        `jax.Array`.
    """
    seed = jax.device_get(initializer.seed.next())
    by_place = getattr(jax.config, "jax_threefry_partitionable", True)
    run, blocks = _steps(_Kind(initializer), shape, dtype, sharding, by_place)
    if blocks is None or len(blocks.starts) == 1:
        return run(seed, 0)
    value = None
    for start in blocks.starts:
        block = run(seed, start)
        if value is None:
            value = fill(shape, str(block.dtype), sharding)(0)
        # Before the next is begun, the memory of this one is free.
        value = jax.block_until_ready(blocks.put(start, value, block))
    return value


@functools.lru_cache(maxsize=256)
def fill(shape, dtype, sharding):
    """Returns a function from a number to an array of it in shards."""
    return jax.jit(
        lambda value: jnp.broadcast_to(jnp.asarray(value, dtype), shape),
        out_shardings=sharding,
    )
