"""Running a user's script on several local processes."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from keras_meshdist.cluster.failures import Failure, first_failure, named
from keras_meshdist.cluster.output import write_lines
from keras_meshdist.cluster.processes import Processes

_TIMED_OUT = 124
_INTERRUPTED = 128 + signal.SIGINT

# For how long failures are gathered to find the one that caused the others;
# longer while all seen so far look like consequences.
_GATHER = 0.5
_GATHER_LONGER = 3.0

# How long scripts get to end by themselves after Ctrl-C.
_INTERRUPT_GRACE = 3.0


def run_script(
    argv: Sequence[str],
    processes: int,
    devices: int,
    timeout: float | None = None,
) -> int:
    """Runs a script on several local processes with virtual CPU devices.

    Every process runs the whole script, as `python script.py` would, with
    the Keras distribution initialized. Lines that they print get `[process] `
    in front. When one fails, the others are ended and its traceback is shown
    last. Ctrl-C ends all.

    ```python
    status = kmd.cluster.run_script(["train.py", "--epochs=2"], 4, 2)
    ```

    Args:
        argv: list of strings: the script and its arguments, or `"-m"`, a
            module and its arguments.
        processes: integer, number of processes.
        devices: integer, number of virtual CPU devices of each.
        timeout: float, time limit in seconds. Defaults to `None`, without
            limit.

    Returns:
        Integer: `0`, or the exit status of the process that failed first
        (128 + number for a signal), `124` at the time limit, `130` after
        Ctrl-C.

    Raises:
        ValueError: If `processes`, `devices` or `timeout` is not positive,
            or there is nothing to run.
        FileNotFoundError: If the script does not exist.
    """
    argv = [os.fspath(argument) for argument in argv]
    if not argv or argv == ["-m"]:
        raise ValueError(
            f"`argv` must name a script or a module. Received: argv={argv}. "
            'Valid are ["train.py", "--epochs=2"] or ["-m", "package.train"].'
        )
    if argv[0] != "-m" and not os.path.exists(argv[0]):
        raise FileNotFoundError(
            f"The script must exist. Received: {argv[0]!r} in the folder "
            f"{os.getcwd()!r}. To run a module, give '-m' and its name."
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(
            "`timeout` must be a positive number of seconds, or None. "
            f"Received: timeout={timeout!r}."
        )
    try:
        workers = Processes(processes, devices, {"script": argv})
        try:
            return _Run(workers, timeout).status()
        finally:
            workers.close()
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Run:
    """One run of a script, watched until its end."""

    def __init__(self, workers: Processes, timeout: float | None):
        self._workers = workers
        self._timeout = timeout
        self._all = set(range(len(workers)))
        # Processes whose script has ended well, and those that are gone.
        self._finished: set[int] = set()
        self._gone: set[int] = set()
        self._failures: list[Failure] = []

    def status(self) -> int:
        started = time.monotonic()
        limit = started + (self._timeout or float("inf"))
        try:
            if not self._watch(limit):
                return self._time_limit()
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                self._interrupt()
            return _INTERRUPTED
        return self._fail() if self._failures else 0

    def _watch(self, limit: float) -> bool:
        """Watches to the end or the first failure; False at the limit."""
        together = False
        while self._gone != self._all:
            event = self._workers.next_event(limit)
            if event is None:
                return False
            self._note(*event)
            if self._failures:
                self._gather()
                return True
            if not together and self._finished | self._gone == self._all:
                # None leaves before all are here: when process 0 does, the
                # others are aborted.
                together = True
                for process in self._finished:
                    self._workers.send(process, "leave")
        return True

    def _note(self, process: int, message: tuple) -> None:
        if message[0] == "finished":
            self._finished.add(process)
            return
        if message[0] == "exited":
            self._gone.add(process)
        if message != ("exited", 0):
            self._failures.append(self._workers.failure(process, message))

    def _gather(self) -> None:
        """Waits a little for failures that may have come earlier."""
        start = time.monotonic()
        while True:
            unclear = first_failure(self._failures).consequence
            limit = start + (_GATHER_LONGER if unclear else _GATHER)
            event = self._workers.next_event(limit)
            if event is None:
                return
            self._note(*event)

    def _fail(self) -> int:
        # All output of the others comes first: what is seen last is the cause.
        self._workers.close()
        first = first_failure(self._failures)
        if first.text:
            write_lines(sys.stderr, first.process, first.text)
        else:
            _tell(f"{named([first.process])} {first.how}.")
        return first.status

    def _time_limit(self) -> int:
        working = self._all - self._finished - self._gone
        self._workers.dump_stacks(sorted(working or self._all))
        self._workers.close()
        _tell(
            f"the time limit of {self._timeout:g} seconds has passed; "
            f"{named(working or self._all)} of {len(self._all)} still ran, at "
            "the lines shown above, and had to be ended."
        )
        return _TIMED_OUT

    def _interrupt(self) -> None:
        """Lets the scripts see Ctrl-C, and a little time to react."""
        working = self._all - self._finished - self._gone
        self._workers.signal(signal.SIGINT, sorted(working))
        limit = time.monotonic() + _INTERRUPT_GRACE
        while working and (event := self._workers.next_event(limit)):
            working.discard(event[0])


def _tell(message: str) -> None:
    print(f"meshdist run: {message}", file=sys.stderr)
