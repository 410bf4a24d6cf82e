"""How processes fail, and which of several failures caused the others."""

import contextlib
import dataclasses
import re
import runpy
import signal
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

# How a process fails because another one has failed or gone away.
_CONSEQUENCE = re.compile(
    "UNAVAILABLE|Connection (reset|closed|refused)|[Cc]oordination ?[Ss]ervice"
    "|Gloo|[Hh]eartbeat|CANCELLED|ABORTED|Socket closed|MissingProcessError"
)


class ClusterError(RuntimeError):
    """A process of a cluster failed, ended, or did not answer in time.

    Args:
        message: string. The whole message.
        process_id: integer. The process that failed first.
        traceback: string. Its traceback, empty if it ended without one.
        failures: dictionary. By process, what is known of each that failed.
        closed: boolean. Whether the cluster had to be closed.
    """

    def __init__(
        self,
        message: str,
        process_id: int = 0,
        traceback: str = "",
        failures: dict[int, str] | None = None,
        closed: bool = True,
    ):
        super().__init__(message)
        self.process_id = process_id
        self.traceback = traceback
        self.failures = failures or {}
        self.closed = closed


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
    return min(
        failures, key=lambda failure: (failure.consequence, failure.time)
    )


def cluster_error(
    failures: Sequence[Failure], name: str, count: int, closed_because: str
) -> ClusterError:
    """Makes the error of a call in which processes have failed."""
    first = first_failure(failures)
    state = (
        f"the cluster is closed: {closed_because}."
        if closed_because
        else "the cluster can be used on."
    )
    return ClusterError(
        f"{named([first.process])} of {count} {first.how} in {name}; {state}"
        + indented(first.text or first.output),
        first.process,
        first.text,
        {f.process: f.text or f.output or f.how for f in failures},
        bool(closed_because),
    )


def user_traceback(error: BaseException) -> str:
    """The traceback as text, from the first line of the user's code on."""
    here = str(Path(__file__).parent)
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(
        (here, runpy.__file__, "<frozen runpy>")
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def named(processes: Iterable[int]) -> str:
    """`process 1`, or `processes 0, 2`."""
    numbers = sorted(processes)
    word = "process" if len(numbers) == 1 else "processes"
    return f"{word} {', '.join(map(str, numbers))}"


def indented(text: str) -> str:
    """A block of text under a message, if there is any."""
    return "\n" + textwrap.indent(text.rstrip(), "  ") if text else ""
