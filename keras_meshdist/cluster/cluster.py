"""`Cluster`: several processes that run functions together."""

import pickle
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from keras_meshdist.cluster.devices import check_count
from keras_meshdist.cluster.local import Local
from keras_meshdist.cluster.pod import Pod, on_pod


class Cluster:
    """Local processes with virtual CPU devices that run functions together.

    The processes start once and form one JAX job. A call sends a function to
    all of them and returns what it returned on each. The function is sent by
    name, so it must stand at the top level of a module that the processes can
    import; arguments and results are pickled.

    ```python
    with kmd.cluster.Cluster(processes=2, devices=4) as cluster:
        losses = cluster.call(train, mesh_shape=(4, 2))
    assert losses[0] == losses[1]
    ```

    With the environment variable `MESHDIST_CLUSTER=external` no process is
    started: the program itself must run on every host of a pod, and a call
    runs the function in it and exchanges the results. The same tests can so
    run on real devices.

    Args:
        processes: integer, number of processes.
        devices: integer, number of virtual CPU devices of each.
        timeout: float, time limit of a call in seconds. Defaults to `300`.
            It is also an attribute that can be changed.
        settle: float, for how many seconds the other processes may go on
            when one has failed, before they are ended. Defaults to `3`.
        forward: boolean, whether what the processes print is passed on,
            with `[process] ` in front of each line. Defaults to `True`.

    Raises:
        ValueError: If `processes` or `devices` is not a positive integer, or
            not that of the pod.
        ClusterError: If a process does not start.
    """

    def __init__(
        self,
        processes: int,
        devices: int,
        timeout: float = 300.0,
        settle: float = 3.0,
        forward: bool = True,
    ):
        check_count("processes", processes)
        check_count("devices", devices)
        self.timeout = timeout
        self._count = processes
        self._job: Pod | Local = (
            Pod(processes, devices)
            if on_pod()
            else Local(processes, devices, settle, forward)
        )

    @property
    def processes(self) -> list[subprocess.Popen]:
        """The processes, by process number; none of a pod."""
        return self._job.popen

    @property
    def closed(self) -> bool:
        """Whether the cluster runs no more calls."""
        return bool(self._job.closed_because)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a function on all processes at the same time.

        Args:
            function: callable at the top level of an importable module.
            *args: positional arguments for it.
            **kwargs: keyword arguments for it.

        Returns:
            List of what the function returned on each process.

        Raises:
            ClusterError: If a process raises, ends, or does not answer in
                time. It shows the failure that came first, and says whether
                the cluster had to be closed.
            ValueError: If the function cannot be sent by name.
            RuntimeError: If the cluster is closed.
        """
        return self._call(range(self._count), function, args, kwargs)

    def call_on(
        self, process_id: int, function: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a function on one process, as `call` does on all.

        Args:
            process_id: integer, number of the process.
            function: callable at the top level of an importable module.
            *args: positional arguments for it.
            **kwargs: keyword arguments for it.

        Returns:
            What the function returned.
        """
        self._check_process(process_id)
        return self._call([process_id], function, args, kwargs)[0]

    def kill(self, process_id: int) -> None:
        """Kills a process with SIGKILL; the call under way then fails.

        Args:
            process_id: integer, the process to kill.
        """
        self._check_process(process_id)
        self._job.kill(process_id)

    def close(self) -> None:
        """Ends the processes; they leave the job together."""
        if not self.closed:
            self._job.close()

    def _call(
        self,
        processes: Sequence[int],
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> list[Any]:
        if self.closed:
            raise RuntimeError(
                "A cluster runs no calls once it is closed. Received: "
                f"{function!r}, after {self._job.closed_because}."
            )
        _check_sendable(function)
        name = f"`{getattr(function, '__qualname__', function)}`"
        payload = (function, args, kwargs)
        return self._job.run(processes, name, payload, self.timeout)

    def _check_process(self, process_id: int) -> None:
        if process_id not in range(self._count):
            raise ValueError(
                f"`process_id` must be one of the cluster's. Received: "
                f"process_id={process_id!r}. Valid are 0 to "
                f"{self._count - 1}."
            )


def _check_sendable(function: Callable) -> None:
    problem = ""
    if getattr(function, "__module__", "") == "__main__":
        problem = "it stands in the main program"
    else:
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            problem = str(error)
    if problem:
        raise ValueError(
            "The function must stand at the top level of a module that the "
            f"processes can import. Received: {function!r} ({problem}). Move "
            "it into a module, and pass what it needs as arguments."
        )
