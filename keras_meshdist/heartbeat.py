"""Signs of life between processes, and an end for one that hears none.

A process that waits in a collective for one that died, or makes other calls,
waits in C++, where no exception reaches it.
"""

import atexit
import functools
import os
import sys
import threading
import time

from keras_meshdist import coordination
from keras_meshdist.agreement import Board

# Seconds that an error has, once a process died, to end this one by itself.
_GRACE = 10.0


class Heartbeat(threading.Thread):
    """Posts this process' state now and then, and watches the others'.

    Args:
        board: `agreement.Board`.
    """

    def __init__(self, board: Board):
        super().__init__(name="meshdist-heartbeat", daemon=True)
        self._board = board
        self._seen: dict[int, tuple[int, float]] = {}
        self._stop_now = threading.Event()
        atexit.register(self._leave)

    def run(self) -> None:
        while not self._stop_now.wait(min(2.0, self._board.limit / 8)):
            try:
                self._board.post()
                states = self._board.states()
            except Exception as error:  # the service is another process'
                text = str(error).splitlines()[0]
                self._died(0, f"it holds the coordination service: {text}")
                continue
            for process, state in states.items():
                if process != coordination.process_id():
                    self._look_at(process, state)

    def _look_at(self, process: int, state: dict) -> None:
        limit, now = self._board.limit, time.monotonic()
        newest = max(self._board.open_passes(), default=None)
        verdict = state["verdict"]
        gave_up = verdict and newest is not None and verdict[0] >= newest
        if state["left"] or gave_up:
            self._end_if_stuck(process, limit)
            return
        beat, since = self._seen.get(process, (None, now))
        if beat != state["beat"]:
            self._seen[process] = (state["beat"], now)
        elif now - since > limit:
            self._died(process, f"silent for {now - since:.0f} seconds")

    def _died(self, process: int, how: str) -> None:
        me = coordination.process_id()
        if process == me or self._stop_now.is_set():
            return
        if self._board.dead is None:
            self._board.dead = (
                f"All processes must stay alive. Received: process {process} "
                f"has died ({how}); seen by process {me}."
            )
            _say(self._board.dead)
            # Python starts no thread any more when it ends.
            threading.Thread(target=self._end_late, daemon=True).start()
        self._end_if_stuck(process, _GRACE)

    def _end_if_stuck(self, process: int, patience: float) -> None:
        in_step = self._board.step_since()
        if in_step is not None and in_step > patience:
            _say(
                f"process {coordination.process_id()} ends: its step waits "
                f"for process {process}, which has failed or makes other calls."
            )
            os._exit(1)

    def _end_late(self) -> None:
        """JAX waits for all processes at the end, and so for the dead one."""
        self._stop_now.wait()
        time.sleep(_GRACE)
        os._exit(1)

    def _leave(self) -> None:
        self._stop_now.set()
        if self._board.dead:
            return
        self.join(5.0)
        try:
            self._board.leave()
        except Exception:  # nobody is left to be told
            return


def _say(message: str) -> None:
    print(f"keras_meshdist: {message}", file=sys.stderr, flush=True)


@functools.cache
def _start() -> Board:
    board = Board(60.0)
    Heartbeat(board).start()
    return board


def start(limit: float) -> Board | None:
    """Returns this process' board, or `None` if there is one process only.

    Args:
        limit: float, seconds that a read, or the silence of a process, may
            last.

    Returns:
        An `agreement.Board`; the same one at every call.
    """
    if coordination.process_count() == 1:
        return None
    board = _start()
    board.limit = limit
    return board
