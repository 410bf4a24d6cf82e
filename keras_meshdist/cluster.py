"""Several local processes with virtual CPU devices, for tests and trials."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from keras_meshdist.processes import Failure
from keras_meshdist.processes import Processes
from keras_meshdist.processes import first_failure
from keras_meshdist.processes import named
from keras_meshdist.scripts import run_script
from keras_meshdist.virtual_devices import check_count
from keras_meshdist.virtual_devices import environment
from keras_meshdist.virtual_devices import use_virtual_devices

__all__ = [
    "Cluster",
    "ClusterError",
    "environment",
    "run_script",
    "use_virtual_devices",
]

# Four processes that import Keras on a busy computer with few cores.
_START_TIMEOUT = 300.0


class ClusterError(RuntimeError):
    """A process of a cluster failed, ended, or did not answer in time.

    Args:
        message: string. The whole message.
        process_id: integer. The process that failed first.
        traceback: string. Its traceback, empty if it ended without one.
        failures: dictionary. The text of every process that failed.
        closed: boolean. Whether the cluster had to be closed.
    """

    def __init__(
        self,
        message: str,
        process_id: int,
        traceback: str = "",
        failures: dict[int, str] | None = None,
        closed: bool = True,
    ):
        super().__init__(message)
        self.process_id = process_id
        self.traceback = traceback
        self.failures = failures or {}
        self.closed = closed


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
        ValueError: If `processes` or `devices` is not a positive integer.
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
        self.settle = settle
        self._closed_because = ""
        self._workers = Processes(processes, devices, {}, forward)
        self._collect(range(processes), "its start", _START_TIMEOUT)

    @property
    def processes(self) -> list[subprocess.Popen]:
        """The processes, by process number."""
        return self._workers.popen

    @property
    def closed(self) -> bool:
        """Whether the processes have been ended."""
        return bool(self._closed_because)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> list:
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
        """
        return self._call(range(len(self)), function, args, kwargs)

    def call_on(
        self, process_id: int, function: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a function on one process, like `call` on all."""
        return self._call([process_id], function, args, kwargs)[0]

    def kill(self, process_id: int) -> None:
        """Kills one process with SIGKILL; the next call tells."""
        self._workers.signal(signal.SIGKILL, [process_id])

    def close(self) -> None:
        """Ends the processes."""
        if not self.closed:
            for process in range(len(self)):
                self._workers.send(process, "close")
            self._workers.wait(15.0)
            self._end("it was closed by `close()`")

    def _end(self, why: str) -> None:
        self._closed_because = why
        self._workers.close()

    def _call(
        self,
        processes: Sequence[int],
        function: Callable,
        args: tuple,
        kwargs: dict,
    ) -> list:
        if self.closed:
            raise RuntimeError(
                "A cluster runs no calls once it is closed. Received: a call "
                f"of {function!r}, while {self._closed_because}."
            )
        payload = pickle.dumps((function, args, kwargs))
        for process in processes:
            self._workers.send(process, "call", sys.path, payload)
        name = f"`{getattr(function, '__qualname__', function)}`"
        results = self._collect(processes, name, self.timeout)
        return [pickle.loads(results[process]) for process in processes]

    def _collect(
        self, processes: Sequence[int], name: str, timeout: float
    ) -> dict[int, bytes]:
        """Waits for the answers of processes, and raises the first failure."""
        waiting, answers, failures = set(processes), {}, []
        limit = time.monotonic() + timeout
        try:
            while waiting and (event := self._workers.next_event(limit)):
                process, message = event
                waiting.discard(process)
                if message[0] == "result":
                    answers[process] = message[1]
                else:
                    failures.append(self._workers.failure(process, message))
                    limit = min(limit, time.monotonic() + self.settle)
            if failures:
                self._raise_failure(failures, waiting, name)
            if waiting:
                self._raise_timeout(waiting, name, timeout)
        except ClusterError:
            raise
        except BaseException:
            # Ctrl-C, or a test's own time limit: the processes are amid work.
            self._end("a call was interrupted")
            raise
        return answers

    def _raise_failure(
        self, failures: list[Failure], waiting: set[int], name: str
    ) -> None:
        first = first_failure(failures)
        if waiting:
            self._end(f"{named(waiting)} still ran {name} and was ended")
        elif any(failure.exited for failure in failures):
            self._end(f"{named({first.process})} {first.how}")
        elif len(self) > 1 and not self._in_step():
            self._end("the processes were not in step after a failure")
        raise ClusterError(
            f"{named({first.process})} of {len(self)} {first.how} in {name}"
            + (
                f"; the cluster is closed: {self._closed_because}."
                if self.closed
                else "; the cluster can be used on."
            )
            + _indented(first.text or first.output),
            first.process,
            first.text,
            {f.process: f.text or f.output or f.how for f in failures},
            self.closed,
        )

    def _raise_timeout(
        self, waiting: set[int], name: str, timeout: float
    ) -> None:
        self._workers.dump_stacks(sorted(waiting))
        self._end(f"{name} did not end in time")
        first = min(waiting)
        seen = {
            process: "\n".join(self._workers.output.last_lines(process))
            for process in sorted(waiting)
        }
        raise ClusterError(
            f"{name} must end within {timeout:g} seconds on every process. "
            f"Received: no answer from {named(waiting)} of {len(self)}; the "
            "cluster is closed. Give `timeout=` a larger value if it is only "
            f"slow. The last output of process {first}, with the place where "
            f"it was:{_indented(seen[first])}",
            first,
            "",
            seen,
        )

    def _in_step(self) -> bool:
        """Whether all processes can still run a collective together.

        One that raised may have left out a collective that the others have
        started.
        """
        limit = time.monotonic() + self.settle + 10.0
        waiting = set(range(len(self)))
        for process in waiting:
            self._workers.send(process, "meet")
        while waiting and (event := self._workers.next_event(limit)):
            process, message = event
            if message[0] != "result":
                return False
            waiting.discard(process)
        return not waiting

    def __len__(self) -> int:
        return len(self.processes)


def _indented(text: str) -> str:
    return "\n" + textwrap.indent(text.rstrip(), "  ") if text else ""
