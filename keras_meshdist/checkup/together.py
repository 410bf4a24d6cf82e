"""What processes do together: a collective that counts, and a clock."""

import threading
import time

import jax
import numpy as np

from keras_meshdist import coordination


def within(function, seconds):
    """Calls a function in a thread; raises `TimeoutError` if it takes longer.

    The thread can't be stopped: it waits in C++.
    """
    result = []

    def call():
        try:
            result.append((function(), None))
        except Exception as error:
            result.append((None, error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise TimeoutError(f"no end within {seconds:g} seconds")
    value, error = result[0]
    if error is not None:
        raise error
    return value


def collective():
    """Adds up 1, 2, 3, … of all devices, and says how it went.

    Each device gives its place, so that one that is left out, or counted
    twice, shows.
    """
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("all",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    places = np.arange(1, len(devices) + 1, dtype="int32")
    began = time.monotonic()
    array = jax.make_array_from_callback(
        places.shape, split, lambda index: places[index]
    )
    total = jax.jit(lambda x: x.sum(), out_shardings=whole)(array)
    sums = [int(np.asarray(shard.data)) for shard in total.addressable_shards]
    seconds = time.monotonic() - began
    return {"sums": sums, "collective_seconds": round(seconds, 3)}


def clock(timeout):
    """Returns this clock's time before and after all processes have met."""
    coordination.barrier("doctor/clock", timeout)
    before = time.time()
    coordination.barrier("doctor/clock", timeout)
    return {"clock": [before, time.time()]}
