"""Of a value in shards, a block at a time: what each device computes of it.

A block is computed by the operations of the whole, where each needs only what
lies at the same place. What programs for random numbers work in is several
times the size of what they make.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.random import threefry2x32_p

# Bytes of a block, unless a sixteenth of the shard is more.
BLOCK = 2**21
# Operations whose result at a place needs what their operands have there.
_BY_ELEMENTS = {
    *("add", "and", "bitcast_convert_type", "clamp", "convert_element_type"),
    *("copy", "div", "erf", "erf_inv", "max", "min", "mul", "nextafter"),
    *("or", "shift_left", "shift_right_logical", "sqrt", "stop_gradient"),
    *("sub", "broadcast_in_dim"),
}
# Operations that are programs of operations.
_CALLS = {"closed_call", "custom_jvp_call", "jit", "pjit"}


class Blocks:
    """Where the blocks of a value's shards begin, and what computes one.

    Args:
        shape: tuple of int.
        dtype: str.
        sharding: `jax.sharding.NamedSharding`.
    """

    def __init__(self, shape, dtype, sharding):
        self.shape, self.sharding = shape, sharding
        shard = sharding.shard_shape(shape)
        # Along the longest dimension, so that blocks can be small.
        self._cut = max(range(len(shard)), key=lambda d: shard[d])
        longest = shard[self._cut]
        size = math.prod(shard) * jnp.dtype(dtype).itemsize
        length = max(1, longest * BLOCK // size, -(-longest // 16))
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
            given = [read(known, v) for v in each.invars]
            found = _evaluate(each, given, shape, places)
            known.update(zip(each.outvars, found, strict=True))
        return [read(known, v) for v in inner.jaxpr.outvars]
    if name == "random_bits":
        return [_bits(values[0], settings["bit_width"], shape, places)]
    if settings.get("shape") == shape:
        block = tuple(len(place) for place in places)
        settings = {**settings, "shape": block}
    return bind(equation.primitive, settings, *values)


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


def can_be_cut(jaxpr, shape):
    """Whether a block of the value needs nothing of other blocks."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        shapes = [v.aval.shape for v in (*equation.invars, *equation.outvars)]
        if shape not in shapes:
            continue
        if name in _CALLS:
            inner = _inner(equation)
            good = inner is not None and can_be_cut(inner.jaxpr, shape)
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


def read(values, v):
    """Returns the value of a variable of a program, or of a number in it."""
    # Known to the program, a number would be computed with otherwise.
    if isinstance(v, Literal):
        return jnp.asarray(v.val, v.aval.dtype)
    return values[v]


def bind(primitive, settings, *values):
    """Applies an operation; returns the list of its results."""
    found = primitive.bind(*values, **settings)
    return list(found) if primitive.multiple_results else [found]
