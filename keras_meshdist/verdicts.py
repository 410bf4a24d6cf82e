"""What a process concludes from what the others show, while it waits.

All come to the same conclusion, since all see the same.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

_SAME_CALLS = "All processes must make the same calls. Received: "


class DisagreementError(RuntimeError):
    """Processes do not do the same: one died, raised, or has another batch."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """What a process waits for.

    Args:
        process: int, its number.
        number: int, of the pass over a dataset, or of the question to all.
        step: int, the batch, counted from 0.
        passes: dict from numbers to what this process shows of each pass.
        awaited: tuple of pass, step and the time since when the main thread
            needs it, or `None` if it doesn't yet.
        limit: float, seconds.
    """

    process: int
    number: int
    step: int
    passes: dict[int, dict]
    awaited: tuple[int, int, float] | None
    limit: float

    @property
    def _needs(self) -> str:
        needed = _needed(self.passes[self.number], self.number, self.step)
        return f"process {self.process} needs {needed}"

    @property
    def _too_long(self) -> bool:
        since = self.awaited and self.awaited[2]
        return bool(since) and time.monotonic() - since > self.limit

    def judge(self, process: int, state: dict | None) -> None:
        """Looks at a process that hasn't come to the same batch.

        Args:
            process: int, its number.
            state: dict, what it shows; `None` if it shows nothing yet.

        Raises:
            DisagreementError: if it will not come.
        """
        if state is None:
            return
        if state["verdict"] and state["verdict"][0] == self.number:
            raise DisagreementError(state["verdict"][1])
        if state["failed"] and state["failed"][0] == self.number:
            _, at, text = state["failed"]
            raise DisagreementError(
                f"No process may raise in its dataset. Received: process "
                f"{process} raised at batch {at}: {text}"
            )
        shown = state["passes"].get(self.number)
        if shown and shown["closed"] is not None:
            raise DisagreementError(
                "All processes must take equally many batches. Received: "
                f"process {process} took {shown['closed']} batches and went "
                f"on, while {self._needs}."
            )
        if state["left"]:
            raise DisagreementError(
                f"{_SAME_CALLS}process {process} has ended, while "
                f"{self._needs}."
            )
        self._judge_other_calls(process, state)
        if state["reading"] > self.limit:
            raise DisagreementError(
                f"A batch must be read within {self.limit:g} seconds "
                "(`data_timeout` of the distribution). Received: process "
                f"{process} is reading one for {state['reading']:.0f} "
                f"seconds, at batch {self.step} or before."
            )

    def _judge_other_calls(self, process: int, state: dict) -> None:
        if not self._too_long:
            return
        other = state["awaited"]
        if (
            other
            and self.awaited[:2] == (self.number, self.step) != other[:2]
            and other[2] > self.limit
        ):
            theirs = _needed(state["passes"].get(other[0]), *other[:2])
            raise DisagreementError(
                f"{_SAME_CALLS}{self._needs}, and process {process} {theirs}; "
                f"each has waited for more than {self.limit:g} seconds."
            )
        behind = [
            older
            for older, theirs in state["passes"].items()
            if older < self.number
            and not theirs["resting"]
            and older in self.passes
            and theirs["taken"] > self.passes[older]["taken"]
        ]
        if behind:
            raise DisagreementError(
                f"{_SAME_CALLS}{self._needs}, while process {process} is in a "
                f"step of pass {behind[0]} that process {self.process} has not "
                f"come to. Each has waited for more than {self.limit:g} "
                "seconds."
            )

    def check_kinds(self, passes: dict[int, dict]) -> None:
        """Looks at what all came with.

        Args:
            passes: dict from process numbers to what each shows of the pass.

        Raises:
            DisagreementError: if it is a batch for some, and not for others.
        """
        shown = [theirs for _, theirs in sorted(passes.items())]
        if len({theirs["what"] is None for theirs in shown}) > 1:
            needs = [
                _needed(theirs, self.number, self.step) for theirs in shown
            ]
            raise DisagreementError(
                f"{_SAME_CALLS}what they need is, {grouped(needs)}."
            )


def _needed(shown: dict | None, number: int, step: int) -> str:
    """Names what a process waits for."""
    if shown and shown["what"]:
        return f"the others {shown['what']}"
    return f"batch {step} (counted from 0) of pass {number} over a dataset"


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
