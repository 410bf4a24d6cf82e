"""Agreement between processes, over JAX's coordination service.

A thin layer over the key-value store and the barriers that every JAX job of
several processes has. It needs no device and may be used from a side thread.
On one process every function returns at once.

Of all modules only this one imports `jax._src`: JAX has no public way to the
client of its coordination service.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge

# JAX 0.4 refuses messages above 4 MiB. A listing carries the piece of every
# process, so that a piece's share is this, divided by their number.
_LARGEST_MESSAGE = 3 * 2**20

_FOREVER = 10 * 365 * 24 * 3600.0


class MissingProcessError(TimeoutError):
    """Some processes did not come to where all have to meet.

    Args:
        message: string. The whole message.
        name: string. What was waited for.
        missing: tuple of integers. The processes that did not arrive.
    """

    def __init__(
        self, message: str, name: str = "", missing: tuple[int, ...] = ()
    ):
        super().__init__(message)
        self.name = name
        self.missing = missing


def backend_started() -> bool:
    """Says whether JAX has started its client, so that devices are fixed."""
    return xla_bridge.backends_are_initialized()


def initialized() -> bool:
    """Says whether this process takes part in a coordination service."""
    return distributed.global_state.client is not None


def process_count() -> int:
    """The number of processes of the coordination service, or 1."""
    return distributed.global_state.num_processes if initialized() else 1


def process_id() -> int:
    """This process' number in the coordination service, or 0."""
    return distributed.global_state.process_id if initialized() else 0


def address() -> str | None:
    """Where process 0 of the coordination service is, or `None`."""
    return distributed.global_state.coordinator_address


def detect(
    address: str | None, count: int | None, process: int | None, timeout: float
) -> tuple[str | None, int | None, int | None]:
    """Fills in what JAX finds of SLURM, Open MPI, Cloud TPU or Kubernetes.

    Args:
        address: string, `"host:port"` of process 0, or `None`.
        count: integer, number of processes, or `None`.
        process: integer, this process' number, or `None`.
        timeout: float, seconds that the search may last.

    Returns:
        The three, with `None` for what isn't found.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, count, process, [], None, math.ceil(timeout)
    )[:3]


def join(
    address: str,
    count: int,
    process: int,
    local_device_ids: Sequence[int] | None,
    timeout: float,
) -> None:
    """Takes part in a coordination service; process 0 holds it.

    Args:
        address: string, `"host:port"` of process 0.
        count: integer, number of processes.
        process: integer, this process' number.
        local_device_ids: sequence of integers, the GPUs of this process, or
            `None` for all.
        timeout: float, seconds until JAX ends the process.
    """
    jax.distributed.initialize(
        address,
        count,
        process,
        local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(timeout),
    )


def barrier(name: str, timeout: float | None = None) -> None:
    """Waits until every process has called it with the same name.

    ```python
    coordination.barrier("checkpoint written", timeout=60)
    ```

    Args:
        name: string. The same on every process; it may be used again.
        timeout: float, seconds to wait for the others. Defaults to `None`,
            without limit.

    Raises:
        MissingProcessError: If a process does not arrive in time. The others
            then find the barrier given up, which is a `RuntimeError` of JAX.
    """
    client = distributed.global_state.client
    if client is not None:
        _meet(client, name, name, timeout)


def exchange(
    name: str, value: bytes, timeout: float | None = None
) -> list[bytes]:
    """Gives every process the values of all.

    ```python
    rows = coordination.exchange("rows", str(len(batch)).encode())
    ```

    Args:
        name: string. The same on every process; it may be used again.
        value: bytes. This process' value.
        timeout: float, seconds to wait for the others. Defaults to `None`,
            without limit.

    Returns:
        A list of bytes: the value of each process, by process number.

    Raises:
        MissingProcessError: If a process does not arrive in time.
    """
    client = distributed.global_state.client
    if client is None:
        return [value]
    count, me = process_count(), process_id()
    piece = _LARGEST_MESSAGE // count
    pieces = max(1, -(-len(value) // piece))
    folder = f"meshdist/{name}"
    mine = [f"{folder}/size/{me}"]
    client.key_value_set_bytes(mine[0], str(pieces).encode())
    try:
        for i in range(pieces):
            mine.append(f"{folder}/{i}/{me}")
            client.key_value_set_bytes(
                mine[-1], value[i * piece : (i + 1) * piece]
            )
        _meet(client, f"{name}/written", name, timeout)
        sizes = _listing(client, f"{folder}/size/")
        parts: list[list[bytes]] = [[] for _ in range(count)]
        for i in range(max(int(size) for size in sizes.values())):
            for process, part in _listing(client, f"{folder}/{i}/").items():
                parts[process].append(part)
        # No process may take its keys away before all have read them.
        _meet(client, f"{name}/read", name, timeout)
    finally:
        for key in mine:
            client.key_value_delete(key)
    return [b"".join(part) for part in parts]


def broadcast(
    name: str, value: bytes | None, timeout: float | None = None
) -> bytes:
    """Gives every process the value of process 0.

    ```python
    seed = coordination.broadcast("seed", b"7" if process == 0 else None)
    ```

    Args:
        name: string. The same on every process; it may be used again.
        value: bytes on process 0, and ignored on the others.
        timeout: float, seconds to wait for the others. Defaults to `None`,
            without limit.

    Returns:
        Bytes: the value of process 0.

    Raises:
        ValueError: If process 0 has no value.
        MissingProcessError: If a process does not arrive in time.
    """
    if process_id() == 0 and value is None:
        raise ValueError(
            f"Process 0 must give the value of '{name}'. Received: value=None. "
            "Only the other processes may leave it out."
        )
    mine = value if process_id() == 0 else None
    return exchange(name, mine or b"", timeout)[0]


def post(board: str, value: bytes) -> None:
    """Shows a value to all processes, in place of the last one; never waits.

    ```python
    coordination.post("state", b"reading")
    ```

    Args:
        board: string. The same on every process.
        value: bytes, fewer than 3 MiB / number of processes.
    """
    client = distributed.global_state.client
    if client is not None:
        key = f"meshdist/board/{board}/{process_id()}"
        client.key_value_set_bytes(key, value, allow_overwrite=True)


def posts(board: str) -> dict[int, bytes]:
    """Returns what each process shows at the moment.

    ```python
    coordination.posts("state")  # {0: b"reading", 1: b"waiting"}
    ```

    Args:
        board: string. The same on every process.

    Returns:
        Dict from process number to bytes, without those that posted nothing.
    """
    client = distributed.global_state.client
    if client is None:
        return {}
    return _listing(client, f"meshdist/board/{board}/")


def _meet(
    client: Any, barrier_id: str, name: str, timeout: float | None
) -> None:
    milliseconds = int((_FOREVER if timeout is None else timeout) * 1000)
    try:
        client.wait_at_barrier(f"meshdist/{barrier_id}", max(1, milliseconds))
    except RuntimeError as error:
        here = f"this is process {process_id()} of {process_count()}"
        missing = _timed_out_processes(str(error))
        # A barrier that was given up tells so to those who come to it later,
        # or that the others are at its next use.
        if process_id() in missing or "invoked by the task" in str(error):
            raise RuntimeError(
                f"Every process must come to '{name}' in time. Received: "
                f"the others have given up waiting ({here}). Their output "
                "says for how long they waited."
            ) from error
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise MissingProcessError(
            f"Every process must come to '{name}' within {timeout:g} seconds. "
            f"Received: nothing from {named(missing)} ({here}). Look at the "
            "output of the missing ones: they failed, hang, or did not make "
            "the call that the others made.",
            name,
            missing,
        ) from error


def _listing(client: Any, folder: str) -> dict[int, bytes]:
    """The values in a folder whose keys end in a process number."""
    return {
        int(key.rsplit("/", 1)[1]): value
        for key, value in client.key_value_dir_get_bytes(folder)
    }


def named(processes: Sequence[int]) -> str:
    """`process 1`, or `processes 0, 2`."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    return f"processes {', '.join(map(str, processes)) or 'unknown'}"


def _timed_out_processes(message: str) -> tuple[int, ...]:
    """Reads the missing processes out of the barrier's message.

    They stand one a line, as `1` or as `/job:jax_worker/replica:0/task:1`.
    """
    _, _, names = message.partition("timed out task names:\n")
    names = names.split("\n\n", 1)[0]
    return tuple(sorted(map(int, re.findall(r"(\d+)\s*$", names, re.M))))
