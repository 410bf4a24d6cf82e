"""Running clusters that tests share, one of each shape."""

import atexit
import os
from collections import OrderedDict

import pytest

from keras_meshdist import cluster

# Most time goes into compiling, for programs of tests run once or twice.
_COMPILE_QUICKLY = (
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_llvm_disable_expensive_passes=true"
)
# Memory allows no more processes at a time: clusters of one, two, three and
# four, which most tests share.
_MOST_PROCESSES = 10

_alive: OrderedDict[tuple[int, int], cluster.Cluster] = OrderedDict()


def configure(devices: int = 8) -> None:
    """Gives the test process its devices: virtual ones, or those of a pod."""
    if cluster.on_pod():
        cluster.join_pod()
    else:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} {_COMPILE_QUICKLY}"
        cluster.use_virtual_devices(devices)


def shared_cluster(processes: int, devices: int) -> cluster.Cluster:
    """A running cluster; the test is skipped on a pod of another shape.

    A cluster that a failed call has closed is started anew. A test that
    closes or kills on purpose starts its own.
    """
    shape = (processes, devices)
    found = _alive.pop(shape, None)
    if found is None or found.closed:
        while _alive and (
            processes + sum(n for n, _ in _alive) > _MOST_PROCESSES
        ):
            _alive.popitem(last=False)[1].close()
        try:
            found = cluster.Cluster(*shape)
        except ValueError as error:
            if cluster.on_pod():
                pytest.skip(str(error))
            raise
    _alive[shape] = found
    return found


def close_all() -> None:
    """Ends all shared clusters; happens at the latest when the tests end."""
    while _alive:
        _alive.popitem()[1].close()


atexit.register(close_all)

local_only = pytest.mark.skipif(
    cluster.on_pod(), reason="starts processes of its own, not for a pod"
)
