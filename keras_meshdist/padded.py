"""A batch with padding rows, which nobody who uses it sees."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from packaging.version import Version

_SPLITS_UNEVENLY = Version(jax.__version__) >= Version("0.6.2")


class PaddedBatch(np.lib.mixins.NDArrayOperatorsMixin):
    """Rows on a mesh that don't divide over it: physical array, logical rows.

    To everyone who looks at it, it is an array of the logical rows. It is a
    JAX pytree node, and when `jax.jit` (or `grad`, `eval_shape`, …) hands it a
    tracer of the physical array, what the traced function gets is that tracer
    cut to the logical rows. So a Keras step, or your own jitted function, sees
    just the rows that you gave, while on the devices the rows stay split.
    Eager code gets the logical rows as an ordinary array.

    Example:

    ```python
    batch = place(np.ones((13, 4)), sharding_over_four_devices)
    batch.shape, batch.physical.shape  # (13, 4), (16, 4)
    jax.jit(lambda x: x.shape)(batch)  # (13, 4)
    ```

    Args:
        physical: `jax.Array` of shape `(physical rows, ...)`.
        runs: tuple of pairs of int, `(start, stop)`: where in the physical
            array the logical rows stand, in order. What is between is padding.
    """

    def __init__(self, physical, runs):
        self.physical = physical
        self.runs = runs
        # What a traced function's code depends on.
        self._static = (physical.shape, runs, _where_cut(physical))

    @property
    def rows(self):
        return _count(self.runs)

    @property
    def shape(self):
        return (self.rows, *self.physical.shape[1:])

    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def dtype(self):
        return self.physical.dtype

    def __len__(self):
        return self.rows

    def __repr__(self):
        return (
            f"<PaddedBatch shape={self.shape}, dtype={self.dtype}, "
            f"physical rows={self.physical.shape[0]}>"
        )

    def __jax_array__(self):
        return _logical(self)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(_logical(self), dtype=dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        # The arithmetic operators come here. The result is a jax.Array, as it
        # is for any other batch.
        if method != "__call__" or not hasattr(jnp, ufunc.__name__):
            return NotImplemented
        return getattr(jnp, ufunc.__name__)(
            *(_logical(i) if isinstance(i, PaddedBatch) else i for i in inputs),
            **kwargs,
        )

    def __getitem__(self, key):
        return _logical(self)[key]

    def __iter__(self):
        return iter(_logical(self))

    def __getattr__(self, name):
        # Only names that are not found otherwise: astype, reshape, sum, ...
        if name.startswith("_") or name in ("physical", "runs"):  # not set yet
            raise AttributeError(name)
        return getattr(_logical(self), name)


def _count(runs):
    return sum(stop - start for start, stop in runs)


def _flatten(batch):
    return (batch.physical,), batch._static


def _unflatten(static, children):
    physical_shape, runs, where = static
    (child,) = children
    if isinstance(child, jax.core.Tracer):
        if child.shape != physical_shape:
            # vmap, scan and map hand out pieces; a piece of a padded batch may
            # be a padding row, and cutting it would give wrong numbers.
            raise TypeError(
                "A padded batch can be mapped or scanned over only inside "
                "`jax.jit`, where it has its logical rows. Received: a traced "
                f"piece of shape {child.shape} of a batch of {_count(runs)} "
                f"rows, padded to shape {physical_shape}. Wrap the call in "
                "`jax.jit`, for instance `jax.jit(jax.vmap(f))(batch)`."
            )
        return _cut(child, runs, where)
    if isinstance(child, jax.Array):
        return PaddedBatch(child, runs)
    # JAX also unflattens with placeholders that are no arrays.
    batch = PaddedBatch.__new__(PaddedBatch)
    batch.physical, batch.runs, batch._static = child, runs, static
    return batch


def _where_cut(physical):
    """The sharding in which padding is cut off, or `None` for any.

    Older versions of XLA get too much wrong on rows that don't divide: they
    concatenate them wrongly (JAX 0.4), or end with an error. There all rows
    of a padded batch go to every device.
    """
    sharding = getattr(physical, "sharding", None)
    if _SPLITS_UNEVENLY or not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec()
    )


def _cut(physical, runs, where):
    if where is not None:
        physical = jax.lax.with_sharding_constraint(physical, where)
    pieces = [
        jax.lax.slice_in_dim(physical, start, stop) for start, stop in runs
    ]
    if len(pieces) == 1:
        return pieces[0]
    return jnp.concatenate(pieces) if pieces else physical[:0]


jax.tree_util.register_pytree_node(PaddedBatch, _flatten, _unflatten)

_logical = jax.jit(lambda batch: batch)
