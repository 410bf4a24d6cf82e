"""Local processes that form one JAX job: starting, watching and ending them.

The parent's side of what `worker.py` does in each process.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

from keras_meshdist.cluster.devices import check_count, environment
from keras_meshdist.cluster.failures import Failure
from keras_meshdist.cluster.output import Output

# The worker takes over the parent's module search path before anything else.
_BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from keras_meshdist.cluster import worker; "
    "worker.main(*map(int, sys.argv[2:]))"
)

# Variables of an enclosing job must not leak into this one.
_NOT_INHERITED = re.compile(
    "MESHDIST_CLUSTER|KERAS_DISTRIBUTION_.*|JAX_COORDINATOR_.*"
    "|JAX_PROCESS_ID|JAX_NUM_PROCESSES|JAX_LOCAL_DEVICE_IDS"
)


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
        check_count("processes", processes)
        self.port = reserve_port()
        self.popen: list[subprocess.Popen] = []
        self.connections: list[connection.Connection] = []
        self.output = Output(forward)
        self._ended: set[int] = set()
        self._silent: set[int] = set()
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
        env |= environment(devices, env)
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
        # What Python prints comes by a pipe of its own: libraries write to
        # standard output piece by piece, into the midst of the script's lines.
        printed, printing = os.pipe()
        fds = [theirs.fileno(), printing]
        with theirs, os.fdopen(printing, "wb"):
            popen = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOT, json.dumps(sys.path)),
                    *map(str, fds),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                # A group of its own: Ctrl-C reaches the parent alone, which
                # ends the workers together with whatever they have started.
                start_new_session=True,
            )
        self.popen.append(popen)
        self.output.add(process, popen, os.fdopen(printed, "rb"))
        with contextlib.suppress(OSError):  # it is gone already: an event
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
                # In this order, no message sent right before the end is lost.
                status = self.status(process)
                try:
                    if process not in self._silent and conn.poll():
                        return process, conn.recv()
                except (EOFError, OSError):
                    self._silent.add(process)
                if status is not None:
                    self._ended.add(process)
                    return process, ("exited", status)
            left = until - time.monotonic()
            if left <= 0:
                return None
            # Not for longer, as a process' end is no event of its connection:
            # what it has started may hold that open.
            pause = min(left, 0.1)
            speaking = [
                conn
                for process, conn in enumerate(self.connections)
                if process not in self._ended | self._silent
            ]
            if speaking:
                connection.wait(speaking, pause)
            else:
                time.sleep(pause)

    def failure(self, process: int, message: tuple) -> Failure:
        """Makes a failure of a `failed` or `exited` message."""
        if message[0] == "failed":
            return Failure(process, *message[1:])
        # It may have printed more than has been read so far.
        time.sleep(0.1)
        output = "\n".join(self.output.last_lines(process))
        return Failure(process, message[1], "", time.monotonic(), True, output)

    def wait(self, timeout: float) -> None:
        """Waits for all to end, no longer than a number of seconds."""
        end = time.monotonic() + timeout
        for popen in self.popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Kills what is still alive, and passes on what it has printed."""
        self.signal(signal.SIGKILL)
        for popen in self.popen:
            popen.wait()
        self.output.finish()
        for conn in self.connections:
            conn.close()
        self.port.close()


def reserve_port() -> socket.socket:
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
