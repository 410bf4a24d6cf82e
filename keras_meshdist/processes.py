"""Local processes that form one JAX job: starting, watching and ending them.

The parent's side of what `worker.py` does in each process.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any
from typing import TextIO

from keras_meshdist import virtual_devices

# The worker takes over the parent's module search path before anything else.
_BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_meshdist import worker; worker.main(int(sys.argv[2]))"
)

# Variables of an enclosing job must not leak into this one.
_NOT_INHERITED = re.compile(
    "MESHDIST_CLUSTER|KERAS_DISTRIBUTION_.*|JAX_COORDINATOR_.*"
    "|JAX_PROCESS_ID|JAX_NUM_PROCESSES|JAX_LOCAL_DEVICE_IDS"
)

# What libraries print merely because they are there.
_NOISE = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to"
    rb"|WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I0000 .*oneDNN custom operations are on"
)

# How a process fails because another one has failed or gone away.
_CONSEQUENCE = re.compile(
    "UNAVAILABLE|Connection (reset|closed|refused)|[Cc]oordination ?[Ss]ervice"
    "|Gloo|[Hh]eartbeat|CANCELLED|ABORTED|Socket closed|MissingProcessError"
)

_LINES_KEPT = 30


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one process failed.

    Args:
        process: integer, its number.
        status: integer, its exit status as a shell gives it.
        text: string. Its traceback, or what else it said.
        time: float, when, in seconds of `time.monotonic()`.
        exited: boolean, whether it is gone.
        output: string. Its last lines of output, if it is gone.
    """

    process: int
    status: int
    text: str
    time: float
    exited: bool = False
    output: str = ""

    @property
    def consequence(self) -> bool:
        """Whether it looks as if another process' failure was the cause."""
        return bool(_CONSEQUENCE.search(self.text + self.output))

    @property
    def how(self) -> str:
        """What happened, in a few words."""
        if self.text:
            return "failed"
        if self.status > 128:
            with contextlib.suppress(ValueError):
                name = signal.Signals(self.status - 128).name
                return f"was killed by {name} (status {self.status})"
        return f"ended with status {self.status}"


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that brought about the others."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


class Processes:
    """Processes of one JAX job on this computer, with virtual CPU devices.

    Args:
        processes: integer, how many.
        devices: integer, virtual CPU devices of each.
        setup: dictionary for `worker.main`, besides what is added here.
        forward: boolean. Whether what they print is passed on, each line
            with `[process] ` in front.
    """

    def __init__(
        self,
        processes: int,
        devices: int,
        setup: dict[str, Any],
        forward: bool = True,
    ):
        virtual_devices.check_count("processes", processes)
        self.port = _reserve_port()
        self.popen: list[subprocess.Popen] = []
        self.connections: list[connection.Connection] = []
        self.output = Output(forward)
        self._ended: set[int] = set()
        address = f"127.0.0.1:{self.port.getsockname()[1]}"
        setup = {
            "parent": os.getpid(),
            # The kernel tells children when the thread that started them
            # ends; only the main thread's end is the parent's.
            "end_with_thread": threading.current_thread()
            is threading.main_thread(),
            "address": address,
            "processes": processes,
            "seed": random.SystemRandom().randrange(2**31),
            **setup,
        }
        try:
            for process in range(processes):
                self._start(process, {**setup, "process": process}, devices)
        except BaseException:
            self.close()
            raise
        self.output.start()

    def _start(self, process: int, setup: dict[str, Any], devices: int):
        ours, theirs = connection.Pipe()
        self.connections.append(ours)
        env = {
            name: value
            for name, value in os.environ.items()
            if not _NOT_INHERITED.fullmatch(name)
        }
        env |= virtual_devices.environment(devices, env)
        env |= {
            "PYTHONUNBUFFERED": "1",
            "JAX_COORDINATOR_BIND_ADDRESS": setup["address"],
            "KERAS_DISTRIBUTION_JOB_ADDRESSES": setup["address"],
            "KERAS_DISTRIBUTION_NUM_PROCESSES": str(setup["processes"]),
            "KERAS_DISTRIBUTION_PROCESS_ID": str(process),
        }
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if any("proxy" in name.lower() for name in env):
            env.setdefault("no_grpc_proxy", "127.0.0.1")
        fd = theirs.fileno()
        with theirs:
            popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(fd)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[fd],
                # A group of its own: Ctrl-C reaches the parent alone, which
                # ends the workers together with whatever they have started.
                start_new_session=True,
            )
        self.popen.append(popen)
        self.output.add(process, popen)
        ours.send(setup)

    def __len__(self) -> int:
        return len(self.popen)

    def status(self, process: int) -> int | None:
        """Exit status as a shell gives it (128 + signal), None if alive."""
        code = self.popen[process].poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int, only: Sequence[int] | None = None) -> None:
        """Sends a signal to the living processes' groups."""
        for process in range(len(self)) if only is None else only:
            if self.popen[process].poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.popen[process].pid, number)

    def dump_stacks(self, only: Sequence[int]) -> None:
        """Lets processes print where they are, on their standard error."""
        for process in only:
            if self.popen[process].poll() is None:
                self.popen[process].send_signal(signal.SIGUSR1)
        time.sleep(0.3)

    def send(self, process: int, *message: Any) -> None:
        """Sends a message; that a process is gone shows as an event."""
        with contextlib.suppress(OSError):
            self.connections[process].send(message)

    def next_event(self, until: float) -> tuple[int, tuple] | None:
        """The next message, or end, of a process; None at the time limit.

        Args:
            until: float, time limit in seconds of `time.monotonic()`.

        Returns:
            `(process, message)`; the message of a process that has ended is
            `("exited", status)`, and comes once.
        """
        while True:
            for process, conn in enumerate(self.connections):
                if process in self._ended:
                    continue
                status = self.status(process)
                # In this order, no message sent right before the end is lost.
                with contextlib.suppress(EOFError, OSError):
                    if conn.poll():
                        return process, conn.recv()
                if status is not None:
                    self._ended.add(process)
                    return process, ("exited", status)
            left = until - time.monotonic()
            if left <= 0:
                return None
            alive = [
                conn
                for process, conn in enumerate(self.connections)
                if process not in self._ended
            ]
            connection.wait(alive, timeout=min(left, 0.1))
            time.sleep(0.005)

    def failure(self, process: int, message: tuple) -> Failure:
        """Makes a failure of a `failed` or `exited` message."""
        if message[0] == "failed":
            return Failure(process, *message[1:])
        # It may have printed more than has been read so far.
        time.sleep(0.1)
        output = "\n".join(self.output.last_lines(process))
        return Failure(process, message[1], "", time.monotonic(), True, output)

    def wait(self, timeout: float) -> bool:
        """Waits for all to end; says whether they did."""
        end = time.monotonic() + timeout
        for popen in self.popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, end - time.monotonic()))
        return all(popen.poll() is not None for popen in self.popen)

    def close(self) -> None:
        """Kills what is still alive, and passes on what it has printed."""
        self.signal(signal.SIGKILL)
        for popen in self.popen:
            popen.wait()
        self.output.finish()
        for conn in self.connections:
            conn.close()
        self.port.close()


class Output:
    """Passes on the output of processes line by line, and keeps the last.

    A thread of its own reads it, so that no process ever waits for a full
    pipe.
    """

    def __init__(self, forward: bool):
        self._forward = forward
        self._selector = selectors.DefaultSelector()
        self._last: list[deque[str]] = []
        self._rest: dict[int, bytes] = {}
        self._stop_at = float("inf")
        self._thread = threading.Thread(target=self._read_all, daemon=True)

    def add(self, process: int, popen: subprocess.Popen) -> None:
        self._last.append(deque(maxlen=_LINES_KEPT))
        for stream, name in ((popen.stdout, "stdout"), (popen.stderr, "stderr")):
            self._selector.register(
                stream, selectors.EVENT_READ, (process, name)
            )

    def start(self) -> None:
        self._thread.start()

    def last_lines(self, process: int) -> list[str]:
        return list(self._last[process])

    def finish(self) -> None:
        """Reads the rest and ends; call it when the processes have ended."""
        # What a process started may outlive it and hold its pipes open.
        self._stop_at = time.monotonic() + 2.0
        if self._thread.is_alive():
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _read_all(self) -> None:
        while self._selector.get_map() and time.monotonic() < self._stop_at:
            for key, _ in self._selector.select(timeout=0.2):
                data = os.read(key.fd, 65536)
                *lines, rest = (self._rest.pop(key.fd, b"") + data).split(
                    b"\n"
                )
                if data:
                    self._rest[key.fd] = rest
                else:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
                    lines += [rest] if rest else []
                for line in lines:
                    self._pass_on(*key.data, line)

    def _pass_on(self, process: int, name: str, line: bytes) -> None:
        if _NOISE.match(line):
            return
        text = line.decode(errors="replace")
        self._last[process].append(text)
        if self._forward:
            write_lines(getattr(sys, name), process, text)


def write_lines(stream: TextIO, process: int, text: str) -> None:
    """Writes lines with the process in front."""
    # The stream may be gone by now: a closed pipe, a test's capture.
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines() or [""]:
            stream.write(f"[{process}] {line}\n")
        stream.flush()


def named(processes: set[int]) -> str:
    """`process 1`, or `processes 0, 2`."""
    word = "process" if len(processes) == 1 else "processes"
    return f"{word} {', '.join(map(str, sorted(processes)))}"


def _reserve_port() -> socket.socket:
    """Takes a port for the coordinator, for as long as the socket is open.

    gRPC binds with SO_REUSEPORT: it gets the port although this socket has
    it (which never listens), while nobody is given the port by chance. A
    port that was merely free a moment ago could silently be shared by two
    jobs.
    """
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
