"""Random values in shards, of each shard a block at a time.

One program for the whole of an initializer would round otherwise than Keras
does on one device, operation by operation. So it is a program for each
operation. What a program for random numbers works in is several times the size
of what it makes: it makes a block, which is put where it belongs.
"""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import Literal
from jax.extend.random import threefry2x32_p

from keras_meshdist import keras_hooks

# Bytes of a block, unless an eighth of the shard is more.
_BLOCK = 2**22
# Operations whose result at a place needs what their operands have there.
_BY_ELEMENTS = {
    *("add", "and", "bitcast_convert_type", "clamp", "convert_element_type"),
    *("copy", "div", "erf", "erf_inv", "max", "min", "mul", "nextafter"),
    *("or", "shift_left", "shift_right_logical", "sqrt", "stop_gradient"),
    *("sub", "broadcast_in_dim"),
}
# Operations that are programs of operations.
_CALLS = {"closed_call", "custom_jvp_call", "jit", "pjit"}


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


class _Blocks:
    """Where the blocks of a value's shards begin, and what computes one."""

    def __init__(self, shape, dtype, sharding):
        self.shape, self.sharding = shape, sharding
        shard = sharding.shard_shape(shape)
        # Along the longest dimension, so that blocks can be small.
        self._cut = max(range(len(shard)), key=lambda d: shard[d])
        longest = shard[self._cut]
        size = math.prod(shard) * jnp.dtype(dtype).itemsize
        length = max(1, longest * _BLOCK // size, -(-longest // 8))
        self._length = min(length, longest)
        # The last one begins earlier where they don't divide.
        self.starts = [
            min(start, longest - self._length)
            for start in range(0, longest, self._length)
        ]
        entries = tuple(sharding.spec) + (None,) * len(shape)
        self._specs = [jax.sharding.PartitionSpec(e) for e in entries]
        # Along each dimension, which places each device has.
        self._places = [
            jax.make_array_from_callback(
                (size,),
                jax.sharding.NamedSharding(sharding.mesh, spec),
                np.arange(size, dtype=np.uint32).__getitem__,
            )
            for size, spec in zip(shape, self._specs, strict=False)
        ]

    def program(self, equation):
        """Returns what computes an equation for a block of each device."""

        def compute(start, places, *values):
            places = list(places)
            places[self._cut] = jax.lax.dynamic_slice_in_dim(
                places[self._cut], start, self._length
            )
            return _evaluate(equation, values, self.shape, places)

        run = self._on_each_device(
            compute,
            [v.aval.shape for v in equation.invars],
            [v.aval.shape for v in equation.outvars],
            self._specs[: len(self.shape)],
        )
        return lambda start, *values: run(start, self._places, *values)

    @functools.cached_property
    def put(self):
        """What puts a block of each device into its shard, in place."""

        def put(start, shard, block):
            return jax.lax.dynamic_update_slice_in_dim(
                shard, block, start, self._cut
            )

        shapes = [self.shape, self.shape]
        return self._on_each_device(put, shapes, self.shape, donate_argnums=1)

    def _on_each_device(self, function, takes, gives, *others, **settings):
        whole = jax.sharding.PartitionSpec()

        def spec(shape):
            return self.sharding.spec if shape == self.shape else whole

        one = isinstance(gives, tuple)
        mapped = _shard_map(
            function,
            self.sharding.mesh,
            (whole, *others, *map(spec, takes)),
            spec(gives) if one else [spec(shape) for shape in gives],
        )
        return jax.jit(mapped, **settings)


def _shard_map(function, mesh, takes, gives):
    if hasattr(jax, "shard_map"):
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=takes,
            out_specs=gives,
            check_vma=False,
        )
    from jax.experimental.shard_map import shard_map

    return shard_map(function, mesh, takes, gives, check_rep=False)


def _evaluate(equation, values, shape, places):
    """Computes an equation for a block of what has the shape of the value."""
    name, settings = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = _inner(equation)
        known = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
        known.update(zip(inner.jaxpr.invars, values, strict=True))
        for each in inner.jaxpr.eqns:
            read = [_read(known, v) for v in each.invars]
            found = _evaluate(each, read, shape, places)
            known.update(zip(each.outvars, found, strict=True))
        return [_read(known, v) for v in inner.jaxpr.outvars]
    if name == "random_bits":
        return [_bits(values[0], settings["bit_width"], shape, places)]
    if settings.get("shape") == shape:
        block = tuple(len(place) for place in places)
        settings = {**settings, "shape": block}
    return _bind(equation.primitive, settings, *values)


def _bits(key, width, shape, places):
    """Random bits as JAX draws them, which depend on the places only.

    That is what `jax_threefry_partitionable` means: Threefry of an element's
    number in the array.
    """
    number = jnp.uint32(0)
    for size, place in zip(shape, places, strict=True):
        number = number[..., None] * jnp.uint32(size) + place
    one, other = jax.random.key_data(key)
    # Not zeros, which would be made where a variable is read in a function
    # that JAX traces.
    high, low = threefry2x32_p.bind(one, other, number ^ number, number)
    if width == 64:
        high, low = high.astype(jnp.uint64), low.astype(jnp.uint64)
        return high << jnp.uint64(32) | low
    return (high ^ low).astype(f"uint{width}")


def _can_be_cut(jaxpr, shape):
    """Whether a block of the value needs nothing of other blocks."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
        if shape not in shapes:
            continue
        if name in _CALLS:
            inner = _inner(equation)
            good = inner is not None and _can_be_cut(inner.jaxpr, shape)
        elif name == "random_bits":
            good = str(equation.invars[0].aval.dtype) == "key<fry>"
        elif name == "broadcast_in_dim":
            good = equation.invars[0].aval.size == 1
        else:
            good = name in _BY_ELEMENTS
        if not good:
            return False
    return True


def _inner(equation):
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


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
        and _can_be_cut(jaxpr, shape)
    )
    blocks = _Blocks(shape, dtype, sharding) if cut else None
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
            read = [_read(values, v) for v in equation.invars]
            outputs = program(start, *read)
            for v in equation.invars:
                if not isinstance(v, Literal) and last[v] == i:
                    values.pop(v, None)
            values.update(zip(equation.outvars, outputs, strict=True))
        return _read(values, jaxpr.outvars[0])

    return run, blocks


def _read(values, v):
    # Known to the program, a number would be computed with otherwise.
    if isinstance(v, Literal):
        return jnp.asarray(v.val, v.aval.dtype)
    return values[v]


def _apply(primitive, settings, start, *values):
    return _bind(primitive, settings, *values)


def _bind(primitive, settings, *values):
    found = primitive.bind(*values, **settings)
    return list(found) if primitive.multiple_results else [found]


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
