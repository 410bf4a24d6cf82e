"""A cluster that is there already: each of its hosts runs this program."""

import atexit
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from keras_meshdist import coordination, joining
from keras_meshdist.cluster import failures

_VARIABLE = "MESHDIST_CLUSTER"
_END_TIMEOUT = 60.0


def on_pod() -> bool:
    """Says whether this program runs on every host of a pod.

    That is so when the environment variable `MESHDIST_CLUSTER` is
    `external`. A `Cluster` then starts no processes.

    Returns:
        Boolean.

    Raises:
        ValueError: If the variable has any other value than `external` or
            `local`.
    """
    value = os.environ.get(_VARIABLE, "") or "local"
    if value not in ("local", "external"):
        raise ValueError(
            f"The environment variable {_VARIABLE} must be 'local' or "
            f"'external', or not set. Received: {value!r}."
        )
    return value == "external"


def join_pod() -> None:
    """Initializes Keras' distribution on a pod, once.

    Call it before anything that uses JAX's devices. The address, number of
    processes and process number come from Keras' environment variables
    (`KERAS_DISTRIBUTION_JOB_ADDRESSES`, `..._NUM_PROCESSES`,
    `..._PROCESS_ID`), or are found by JAX, as on TPU. With
    `KERAS_DISTRIBUTION_NUM_PROCESSES=1` there is nothing to join.

    ```python
    if kmd.cluster.on_pod():
        kmd.cluster.join_pod()
    ```
    """
    if coordination.initialized():
        return
    joining.initialize()
    if coordination.initialized():
        # If process 0 just ended, the others would be aborted.
        atexit.register(coordination.barrier, "pod/end", _END_TIMEOUT)


class Pod:
    """Runs calls on the hosts of a pod, all of which make the same calls."""

    def __init__(self, processes: int, devices: int):
        join_pod()
        import jax

        found = (coordination.process_count(), jax.local_device_count())
        if found != (processes, devices):
            raise ValueError(
                "On a pod, a cluster must have the pod's shape. Received: "
                f"processes={processes}, devices={devices}, while the pod has "
                f"processes={found[0]} with devices={found[1]} each."
            )
        self.popen: list = []
        self.closed_because = ""
        self._calls = 0

    def run(
        self,
        processes: Sequence[int],
        name: str,
        payload: tuple[Callable, tuple, dict],
        timeout: float,
    ) -> list[Any]:
        """Runs a function here, and gives the results of all hosts."""
        function, args, kwargs = payload
        me = coordination.process_id()
        answer: tuple[str, Any] = ("result", None)
        data = pickle.dumps(answer)
        if me in processes:
            try:
                answer = ("result", function(*args, **kwargs))
                data = pickle.dumps(answer)
            except Exception as error:
                answer = ("failed", failures.user_traceback(error))
                data = pickle.dumps(answer)
        self._calls += 1
        try:
            values = coordination.exchange(f"pod/{self._calls}", data, timeout)
        except coordination.MissingProcessError:
            if answer[0] == "result":
                raise
            # The others hang where this process should have been.
            answers = {me: answer}
        else:
            answers = {i: pickle.loads(data) for i, data in enumerate(values)}
        failed = [
            failures.Failure(process, 1, value, 0.0)
            for process, (kind, value) in answers.items()
            if kind == "failed"
        ]
        if failed:
            count = coordination.process_count()
            raise failures.cluster_error(failed, name, count, "")
        return [answers[process][1] for process in processes]

    def kill(self, process: int) -> None:
        raise RuntimeError(
            "The processes of a pod cannot be killed from here. Received: "
            f"process_id={process}. Run this on a local cluster, with "
            f"{_VARIABLE} not set."
        )

    def close(self) -> None:
        self.closed_because = "it was closed by `close()`"
