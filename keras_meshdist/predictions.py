"""Predictions of the devices of all processes, as NumPy."""

import contextlib
import contextvars

import jax
import keras
import numpy as np

_local = contextvars.ContextVar("local_predictions", default=False)


@contextlib.contextmanager
def local_predictions():
    """Context in which `predict` returns this process' own rows only.

    Otherwise every process gets all rows, which takes memory, and time on the
    network. The own rows are those that `feed_rows` of the distribution
    names, batch by batch, or those of the process' own feed. On one process
    nothing changes.

    Example:

    ```python
    with kmd.local_predictions():
        mine = model.predict(dataset)
    ```
    """
    token = _local.set(True)
    try:
        yield
    finally:
        _local.reset(token)


def fetch(array):
    """Returns all of an array as NumPy, on every process that holds a part.

    Args:
        array: `jax.Array`, perhaps on the devices of several processes. All
            of these must call this, in the same order.

    Returns:
        NumPy array.
    """
    if not array.is_fully_addressable and not array.is_fully_replicated:
        whole = jax.sharding.NamedSharding(
            array.sharding.mesh, jax.sharding.PartitionSpec()
        )
        array = jax.jit(lambda a: a, out_shardings=whole)(array)
    return np.asarray(array)


def fetch_outputs(outputs, rows):
    """Brings a model's outputs to this process.

    Args:
        outputs: nested structure of arrays of shape `(rows, ...)`.
        rows: dict from process number to the sorted int array of the rows that
            are its own.

    Returns:
        The same structure of NumPy arrays: all rows, or within
        `local_predictions` this process' own.
    """
    if not _local.get():
        return keras.tree.map_structure(fetch, outputs)
    return keras.tree.map_structure(lambda array: _own(array, rows), outputs)


def _own(array, rows):
    mine = rows[jax.process_index()]
    count = len(np.unique(np.concatenate(list(rows.values()))))
    if not array.ndim or len(array) != count:
        return fetch(array)  # no rows
    # All processes must decide alike, since `fetch` takes all of them.
    held = {process: np.zeros(len(array), bool) for process in rows}
    for device, index in array.sharding.devices_indices_map(
        array.shape
    ).items():
        if all(
            i.indices(n)[:2] == (0, n)
            for i, n in zip(index[1:], array.shape[1:], strict=True)
        ):
            held[device.process_index][index[0]] = True
    if not all(held[process][own].all() for process, own in rows.items()):
        return fetch(array)[mine]
    result = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        result[shard.index] = shard.data
    return result[mine]
