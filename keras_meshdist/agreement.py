"""Processes agree on each batch before the step that takes it.

Each process shows its state on a board of JAX's coordination service: what it
read for the last steps, whether it is reading, and a heartbeat. Before a step
it waits until all show what they read for that step. All then compare the same
answers, so that all come to the same verdict.
"""

import collections
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from keras_meshdist import coordination

_BOARD = "batches"
# Looks at the board are this far apart at first, and at most, in seconds.
_SHORTEST, _LONGEST = 0.0003, 0.02
# How many passes over a dataset that have ended, and how many steps of each,
# stay on the board: a process is never more than one ahead of another.
_PASSES, _STEPS = 8, 2


class DisagreementError(RuntimeError):
    """Processes do not do the same: one died, raised, or has another batch."""


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
        self.dead: str | None = None
        self.post()

    def open(self) -> int:
        """Returns the number of a new pass, the same on every process."""
        with self._lock:
            self._opened += 1
            self._passes[self._opened] = {
                "steps": {},
                "closed": None,
                "taken": 0,
                "resting": True,
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
        pause = _SHORTEST
        while True:
            states = self.states()
            passes = {p: s["passes"].get(number) for p, s in states.items()}
            found = {
                p: shown["steps"][step]
                for p, shown in passes.items()
                if shown and step in shown["steps"]
            }
            count = coordination.process_count()
            if len(found) == count:
                return [found[p] for p in range(count)]
            if closed():
                raise ClosedError
            missing = [p for p in range(count) if p not in found]
            try:
                for process in missing:
                    self._judge(process, states.get(process), number, step)
            except DisagreementError as error:
                # The others come to it later, perhaps for another reason.
                self._state["verdict"] = (number, str(error))
                self.post()
                raise
            if not warned and time.monotonic() - began > 2 * self.limit:
                warned = True
                print(
                    f"keras_meshdist: process {coordination.process_id()} has "
                    f"waited for {2 * self.limit:g} seconds for batch {step} "
                    f"of processes {missing}. It goes on waiting, since they "
                    "are alive and busy with something else.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def ask(self, value: Any) -> list[Any]:
        """Returns the values of all processes, outside of any step."""
        number = self.open()
        try:
            self.await_batch(number)
            return self.agree(number, 0, value, lambda: False)
        finally:
            self.await_batch(None)
            self.close(number, 1)

    def _judge(
        self, process: int, state: dict | None, number: int, step: int
    ) -> None:
        """Raises if a process will not read what it is waited for."""
        if self.dead:
            raise DisagreementError(self.dead)
        if state is None:
            return
        if state["verdict"] and state["verdict"][0] == number:
            raise DisagreementError(state["verdict"][1])
        if state["failed"] and state["failed"][0] == number:
            _, at, text = state["failed"]
            raise DisagreementError(
                f"No process may raise in its dataset. Received: process "
                f"{process} raised at batch {at}: {text}"
            )
        shown = state["passes"].get(number)
        if shown and shown["closed"] is not None:
            raise DisagreementError(
                "All processes must take equally many batches. Received: "
                f"process {process} took {shown['closed']} batches and went "
                f"on, while process {coordination.process_id()} has a batch "
                f"{step} (counted from 0)."
            )
        if state["left"]:
            raise DisagreementError(
                "All processes must make the same calls. Received: process "
                f"{process} has ended, while process "
                f"{coordination.process_id()} has a batch {step} (counted "
                "from 0) to train on, evaluate or predict."
            )
        mine, other = self._awaited, state["awaited"]
        if (
            mine
            and other
            and mine[:2] == (number, step) != other[:2]
            and min(time.monotonic() - mine[2], other[2]) > self.limit
        ):
            raise DisagreementError(
                "All processes must make the same calls. Received: process "
                f"{coordination.process_id()} needs batch {step} (counted "
                f"from 0) of pass {number} over a dataset, and process "
                f"{process} batch {other[1]} of pass {other[0]}; each has "
                f"waited for more than {self.limit:g} seconds."
            )
        behind = [
            older
            for older, theirs in state["passes"].items()
            if older < number
            and not theirs["resting"]
            and older in self._passes
            and theirs["taken"] > self._passes[older]["taken"]
        ]
        if behind and mine and time.monotonic() - mine[2] > self.limit:
            raise DisagreementError(
                "All processes must make the same calls. Received: process "
                f"{coordination.process_id()} needs batch {step} (counted "
                f"from 0) of pass {number} over a dataset, while process "
                f"{process} is in a step of pass {behind[0]} that process "
                f"{coordination.process_id()} has not come to. Each has "
                f"waited for more than {self.limit:g} seconds."
            )
        if state["reading"] > self.limit:
            raise DisagreementError(
                f"A batch must be read within {self.limit:g} seconds "
                "(`data_timeout` of the distribution). Received: process "
                f"{process} is reading one for {state['reading']:.0f} "
                f"seconds, at batch {step} or before."
            )

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


def grouped(answers: list[Any], processes: Sequence[int] | None = None) -> str:
    """Names what the processes say, equal answers together.

    Args:
        answers: list with a text for each process.
        processes: sequence of int, whose answers these are. Defaults to all
            processes by their numbers.

    Returns:
        string, such as `"processes 0, 2: 16 rows; process 1: 13 rows"`.
    """
    groups: dict[Any, list[int]] = {}
    who = range(len(answers)) if processes is None else processes
    for process, answer in zip(who, answers, strict=True):
        groups.setdefault(answer, []).append(process)
    return "; ".join(
        f"process{'es' if len(who) > 1 else ''} "
        f"{', '.join(map(str, who))}: {answer}"
        for answer, who in groups.items()
    )
