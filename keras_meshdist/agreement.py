"""Processes agree on each batch before the step that takes it.

Each process shows its state on a board of JAX's coordination service: what it
read for the last steps, whether it is reading, and a heartbeat. Before a step
it waits until all show what they read for that step. All then compare the same
answers, so that all come to the same verdict.
"""

import collections
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from keras_meshdist import coordination
from keras_meshdist.verdicts import DisagreementError, Waiting

_BOARD = "batches"
# Looks at the board are at least and at most so far apart, in seconds, and in
# between as far as a part of what was waited. Each takes the processors' time.
_SHORTEST, _LONGEST, _PART = 0.0003, 0.02, 0.25
# How many passes over a dataset that have ended, and how many steps of each,
# stay on the board: a process is never more than one ahead of another.
_PASSES, _STEPS = 8, 2


class ClosedError(Exception):
    """The pass was given up here while it waited for the others."""


class Board:
    """What this process shows to the others, and what it sees of them.

    Args:
        limit: float, seconds that a read, or the silence of a process, may
            last.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._lock = threading.RLock()
        self._passes: collections.OrderedDict = collections.OrderedDict()
        self._opened = 0
        self._state: dict[str, Any] = {
            "left": False,
            "failed": None,
            "verdict": None,
        }
        self._reading_since: float | None = None
        self._awaited: tuple[int, int, float] | None = None
        self._moved = time.monotonic()
        self._beat = 0
        # For how long it usually waits for the others, in seconds.
        self._usual = 0.0
        self.dead: str | None = None
        self.post()

    def open(self, what: str | None = None) -> int:
        """Returns the number of a new pass, the same on every process.

        `what` says for other processes what it is if it is no dataset.
        """
        with self._lock:
            self._opened += 1
            self._passes[self._opened] = {
                "steps": {},
                "closed": None,
                "taken": 0,
                "resting": True,
                "what": what,
            }
            ended = [
                n for n, s in self._passes.items() if s["closed"] is not None
            ]
            for number in ended[:-_PASSES]:
                del self._passes[number]
            return self._opened

    def close(self, number: int, step: int) -> None:
        """Says that this process reads no more in a pass, from a step on."""
        with self._lock:
            found = self._passes.get(number)
            if found is None or found["closed"] is not None:
                return
            found["closed"] = step
        if not self._state["left"]:
            self.post()

    def took(self, number: int, taken: int, resting: bool) -> None:
        """Says how many batches went to steps.

        `resting` means that an epoch ends with them, so that what comes next
        is no step that needs the others.
        """
        with self._lock:
            found = self._passes.get(number)
            if found is not None:
                found.update(taken=taken, resting=resting)
                self._moved = time.monotonic()

    def reading(self, on: bool) -> None:
        """Says that a read begins, or has ended."""
        self._reading_since = time.monotonic() if on else None

    def await_batch(self, number: int | None, step: int = 0) -> None:
        """Says which batch the main thread needs, or that it needs none."""
        since = time.monotonic()
        self._awaited = None if number is None else (number, step, since)

    def fail(self, number: int, step: int, error: BaseException) -> None:
        """Says that a read raised, so that all processes raise."""
        text = f"{type(error).__name__}: {error}"[:2000]
        self._state["failed"] = (number, step, text)
        self.post()

    def agree(
        self, number: int, step: int, said: Any, closed: Callable[[], bool]
    ) -> list[Any]:
        """Returns what every process says of a step, by process number."""
        with self._lock:
            steps = self._passes[number]["steps"]
            steps[step] = said
            while len(steps) > _STEPS:
                del steps[min(steps)]
        # Others may come to a process that hangs only now.
        began = time.monotonic()
        warned = False
        self.post()
        if step:
            time.sleep((1 - _PART) * self._usual)
        while True:
            states = self.states()
            passes = {p: s["passes"].get(number) for p, s in states.items()}
            found = {
                p: shown["steps"][step]
                for p, shown in passes.items()
                if shown and step in shown["steps"]
            }
            count = coordination.process_count()
            waited = time.monotonic() - began
            if len(found) == count:
                if step:
                    self._usual += (min(waited, _LONGEST) - self._usual) / 4
                self._waiting(number, step).check_kinds(passes)
                return [found[p] for p in range(count)]
            if closed():
                raise ClosedError
            missing = [p for p in range(count) if p not in found]
            try:
                if self.dead:
                    raise DisagreementError(self.dead)
                waiting = self._waiting(number, step)
                for process in missing:
                    waiting.judge(process, states.get(process))
            except DisagreementError as error:
                # The others come to it later, perhaps for another reason.
                self._state["verdict"] = (number, str(error))
                self.post()
                raise
            if not warned and waited > 2 * self.limit:
                warned = True
                print(
                    f"keras_meshdist: process {coordination.process_id()} has "
                    f"waited for {2 * self.limit:g} seconds for batch {step} "
                    f"of processes {missing}. It goes on waiting, since they "
                    "are alive and busy with something else.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(max(_SHORTEST, _PART * waited), _LONGEST))

    def ask(self, value: Any, what: str) -> list[Any]:
        """Returns the values of all processes, outside of any step.

        `what` says what for, behind "waits": `"to save model.keras"`.
        """
        number = self.open(what)
        try:
            self.await_batch(number)
            return self.agree(number, 0, value, lambda: False)
        finally:
            self.await_batch(None)
            self.close(number, 1)

    def _waiting(self, number: int, step: int) -> Waiting:
        with self._lock:
            passes = dict(self._passes)
        process = coordination.process_id()
        return Waiting(process, number, step, passes, self._awaited, self.limit)

    def states(self) -> dict[int, dict]:
        """What each process shows."""
        return {
            process: pickle.loads(value)
            for process, value in coordination.posts(_BOARD).items()
        }

    def post(self) -> None:
        """Shows the state of now."""
        with self._lock:
            since, now = self._reading_since, time.monotonic()
            awaited = self._awaited
            self._beat += 1
            value = {
                **self._state,
                "beat": self._beat,
                "reading": 0 if since is None else now - since,
                "awaited": awaited and (*awaited[:2], now - awaited[2]),
                "passes": dict(self._passes),
            }
            coordination.post(_BOARD, pickle.dumps(value))

    def open_passes(self) -> dict[int, dict]:
        """The passes whose batches this process still reads."""
        with self._lock:
            passes = dict(self._passes)
        return {
            n: shown for n, shown in passes.items() if shown["closed"] is None
        }

    def step_since(self) -> float | None:
        """For how many seconds the main thread may have been in one step."""
        running = any(not s["resting"] for s in self.open_passes().values())
        if self._awaited is not None or not running:
            return None
        return time.monotonic() - self._moved

    def leave(self) -> None:
        """Says that this process makes no more calls."""
        self._state["left"] = True
        self.post()


class Meetings:
    """At which batches of a pass the processes meet: at each, as a rule.

    If they know the rows of all batches beforehand, as of arrays, and reading
    can't fail, all go on alike without a word. They still meet about once a
    second: to compare what several hold, and for one that was asked to end.
    """

    _MOST, _SECONDS = 64, 1.0

    def __init__(self):
        self._met: tuple[int, float] | None = None
        self._steps = 1
        self._next = 0

    def may_skip(self, step: int) -> bool:
        """Whether all go on to this batch without a word."""
        return step < self._next

    def pace(self, step: int) -> float:
        """The seconds that a batch took here since the processes met."""
        if self._met is None:
            return math.inf
        before, then = self._met
        return (time.perf_counter() - then) / (step - before)

    def agreed(self, step: int, answers: list[Any]) -> None:
        """Reckons where they meet next, from what all said at this batch.

        Args:
            step: int, the batch.
            answers: list with `known` and `pace` of each process: what tells
                the rows of all batches, or `None`, and what `pace` returned.
        """
        known = {said.known for said in answers}
        if len(known) > 1 or None in known:
            return
        slowest = max(said.pace for said in answers)
        # Steps are only begun when their batches are read, so that the first
        # ones look quicker than they are.
        within = int(self._SECONDS / slowest) if slowest else self._MOST
        self._steps = max(1, min(2 * self._steps, within, self._MOST))
        self._met = step, time.perf_counter()
        self._next = step + self._steps
