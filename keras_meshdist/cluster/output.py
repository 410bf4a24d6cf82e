"""What processes print: passed on line by line, and the last lines kept."""

import contextlib
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from typing import IO, TextIO

# What libraries print merely because they are there: their informational
# messages from before logging is set up, which no setting turns off.
_NOISE = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I0000 00:00:[\d.]+ +\d+ \S+:\d+\] "
    rb"|Extension modules: "
)

# The CPU collectives' library prints such lines on standard output, piece by
# piece, so that those of several threads get mixed up.
_GLOO_START = b"[Gloo] Rank "
_GLOO = re.compile(
    rb"(\[Gloo\] Rank | is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : |\d)*"
)

_LINES_KEPT = 30


class Output:
    """Passes on the output of processes line by line, and keeps the last.

    A thread of its own reads it, so that no process ever waits for a full
    pipe.
    """

    def __init__(self, forward: bool):
        self._forward = forward
        self._selector = selectors.DefaultSelector()
        self._streams: list[IO[bytes]] = []
        self._last: list[deque[str]] = []
        self._gloo_lines_to_come: Counter[int] = Counter()
        self._rest: dict[int, bytes] = {}
        self._stop_at = float("inf")
        self._thread = threading.Thread(target=self._read_all, daemon=True)

    def add(
        self, process: int, popen: subprocess.Popen, printed: IO[bytes]
    ) -> None:
        """Reads what a process prints from now on.

        Args:
            process: integer, its number.
            popen: `subprocess.Popen` with pipes.
            printed: file, another pipe of its standard output.
        """
        self._last.append(deque(maxlen=_LINES_KEPT))
        streams = (
            (popen.stdout, "stdout"),
            (printed, "stdout"),
            (popen.stderr, "stderr"),
        )
        for stream, name in streams:
            self._streams.append(stream)
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
        self._selector.close()
        for stream in self._streams:
            stream.close()

    def _read_all(self) -> None:
        while self._selector.get_map() and time.monotonic() < self._stop_at:
            for key, _ in self._selector.select(timeout=0.2):
                data = os.read(key.fd, 65536)
                *lines, rest = (self._rest.pop(key.fd, b"") + data).split(b"\n")
                if data:
                    self._rest[key.fd] = rest
                else:
                    self._selector.unregister(key.fileobj)
                    lines += [rest] if rest else []
                for line in lines:
                    if not self._is_noise(key.fd, line):
                        self._pass_on(*key.data, line)

    def _pass_on(self, process: int, name: str, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._last[process].append(text)
        if self._forward:
            write_lines(getattr(sys, name), process, text)

    def _is_noise(self, fd: int, line: bytes) -> bool:
        begun = line.count(_GLOO_START) + self._gloo_lines_to_come[fd]
        from_gloo = begun > 0 and _GLOO.fullmatch(line) is not None
        self._gloo_lines_to_come[fd] = begun - 1 if from_gloo else 0
        return from_gloo or _NOISE.match(line) is not None


def write_lines(stream: TextIO, process: int, text: str) -> None:
    """Writes lines with the process in front."""
    # The stream may be gone by now: a closed pipe, a test's capture.
    with contextlib.suppress(OSError, ValueError):
        for line in text.splitlines() or [""]:
            stream.write(f"[{process}] {line}\n")
        stream.flush()
