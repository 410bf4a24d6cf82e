"""A cluster of local processes."""

import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_meshdist.cluster.failures import (
    ClusterError,
    Failure,
    cluster_error,
    first_failure,
    indented,
    named,
)
from keras_meshdist.cluster.processes import Processes

# Four processes that import Keras on a busy computer with few cores.
_START_TIMEOUT = 300.0

# How long the way out of a job may take before the processes are killed.
_CLOSE_TIMEOUT = 15.0


class Local:
    """Runs calls on local processes.

    Args:
        processes: integer, how many.
        devices: integer, virtual CPU devices of each.
        settle: float, for how many seconds the others may go on when one has
            failed.
        forward: boolean, whether what they print is passed on.
    """

    def __init__(
        self, processes: int, devices: int, settle: float, forward: bool
    ):
        self.closed_because = ""
        self._settle = settle
        self._workers = Processes(processes, devices, {}, forward)
        self.popen = self._workers.popen
        self._collect(range(processes), "its start", _START_TIMEOUT)

    def run(
        self,
        processes: Sequence[int],
        name: str,
        payload: tuple[Callable, tuple, dict],
        timeout: float,
    ) -> list[Any]:
        """Runs a function on processes, and gives the results of these."""
        data = pickle.dumps(payload)
        for process in processes:
            self._workers.send(process, "call", sys.path, data)
        results = self._collect(processes, name, timeout)
        return [pickle.loads(results[process]) for process in processes]

    def kill(self, process: int) -> None:
        self._workers.signal(signal.SIGKILL, [process])

    def close(self) -> None:
        for process in range(len(self.popen)):
            self._workers.send(process, "close")
        self._workers.wait(_CLOSE_TIMEOUT)
        self._end("it was closed by `close()`")

    def _end(self, why: str) -> None:
        self.closed_because = why
        self._workers.close()

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
                    limit = min(limit, time.monotonic() + self._settle)
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
            self._end(f"{named(waiting)} still ran {name}, and had to be ended")
        elif any(failure.exited for failure in failures):
            self._end(f"{named([first.process])} {first.how}")
        elif len(self.popen) > 1 and not self._in_step():
            self._end("the processes were not in step after a failure")
        raise cluster_error(
            failures, name, len(self.popen), self.closed_because
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
            f"Received: no answer from {named(waiting)} of "
            f"{len(self.popen)}; the cluster is closed. Give `timeout=` a "
            "larger value if it is only slow. The last output of process "
            f"{first}, with the place where it was:{indented(seen[first])}",
            first,
            "",
            seen,
        )

    def _in_step(self) -> bool:
        """Whether all processes can still run a collective together.

        One that raised may have left out a collective that the others have
        started.
        """
        limit = time.monotonic() + self._settle + 10.0
        waiting = set(range(len(self.popen)))
        for process in waiting:
            self._workers.send(process, "meet")
        while waiting and (event := self._workers.next_event(limit)):
            process, message = event
            if message[0] != "result":
                return False
            waiting.discard(process)
        return not waiting
