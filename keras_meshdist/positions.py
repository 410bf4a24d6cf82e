"""Where in its data a `fit` is, and how another one gets there again."""

import dataclasses
import random
from typing import Any

import numpy as np

from keras_meshdist import keras_hooks


@dataclasses.dataclass(frozen=True)
class Position:
    """A place in the data of a `fit`, which can be written as JSON.

    Args:
        epoch: int, the epoch that goes on, or comes next.
        step: int, how many of its batches were trained on.
        ended: int, how many epochs a dataset was told the end of.
        passes: int, how many passes over the dataset came before.
        taken: int, how many batches were taken of the pass that goes on. It
            may be several epochs long, if `steps_per_epoch` is given.
        random_state: what `random_state` returned when this pass began.
    """

    epoch: int = 0
    step: int = 0
    ended: int = 0
    passes: int = 0
    taken: int = 0
    random_state: Any = None


def random_state() -> dict[str, Any]:
    """Returns the states of the generators that Keras shuffles with."""
    version, numbers, gauss = random.getstate()
    name, key, *rest = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, key.tolist(), *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Brings back what `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, np.uint32), *rest))


class Pass:
    """One pass over the data; the reader tells it how far it is."""

    def __init__(self, progress: "Progress", resumed: Position | None):
        self._progress = progress
        self._resumed = resumed
        self.taken = resumed.taken if resumed else 0
        self.passes_before = resumed.passes if resumed else 0
        self.random_state: dict[str, Any] | None = None
        # A weak reference to the reader, which holds this.
        self.reader: Any = None

    def begin(self) -> None:
        """Goes on with the random numbers of the `fit` before."""
        if self._resumed and self._resumed.random_state:
            set_random_state(self._resumed.random_state)
        self.random_state = random_state()
        self._progress.began(self)

    def wants_to_leave(self) -> bool:
        """Whether this process was asked to end."""
        return self._progress.leaving

    def leave_after(self, taken: int) -> None:
        """All processes know that one was asked to end, at this batch."""
        if self._progress.leave_at is None:
            self._progress.leave_at = (self, taken)


class Progress:
    """Follows a `fit`, which callbacks alone can't: which batches it took.

    Args:
        resumed: `Position` to begin at, `None` for the beginning.
        trained: int, how many batches were trained on before.
    """

    def __init__(self, resumed: Position | None = None, trained: int = 0):
        self._resumed = resumed
        self._trained = trained - (resumed.taken if resumed else 0)
        self._ended = resumed.ended if resumed else 0
        self._passes = resumed.passes if resumed else 0
        self._armed = False
        self._epoch_iterator = None
        self._pass: Pass | None = None
        self._epoch = 0
        self.leaving = False
        self.leave_at: tuple[Pass, int] | None = None

    def begin_epoch(self, epoch: int) -> None:
        """The next iterator over an epoch is that of the training data."""
        self._armed, self._epoch = True, epoch

    def end_epoch(self) -> None:
        self._ended += 1

    def steps(self, epoch_iterator: Any, steps: Any) -> Any:
        """Returns the steps of an epoch, without those that were done."""
        if not self._armed:  # those of an evaluation
            return steps
        self._armed, self._epoch_iterator = False, epoch_iterator
        resumed = self._resumed
        if resumed is None:
            return steps
        for _ in range(resumed.ended):
            keras_hooks.end_epoch(epoch_iterator)
        return keras_hooks.without_first_steps(
            epoch_iterator, steps, resumed.step, resumed.taken
        )

    def start_pass(self, epoch_iterator: Any) -> Pass | None:
        """Returns what a new reader is to tell, `None` for an evaluation's."""
        if epoch_iterator is not self._epoch_iterator:
            return None
        return Pass(self, self._resumed)

    @property
    def trained(self) -> int:
        """How many batches were trained on, in all passes."""
        return self._trained + (self._pass.taken if self._pass else 0)

    def began(self, begun: Pass) -> None:
        """A reader takes its first batch."""
        self._resumed = None
        self._trained = self.trained
        self._pass = begun
        self._passes += 1

    def at_end(self) -> bool:
        """Whether the pass has no further batch, which is read for that."""
        reader = self._pass.reader()
        return reader is not None and reader.at_end()

    def must_leave(self, alone: bool) -> bool:
        """Whether to end before the next step, on all processes alike."""
        if alone:
            return self.leaving
        if self.leave_at is None:
            return False
        begun, taken = self.leave_at
        return begun is not self._pass or begun.taken >= taken

    def within(self, step: int) -> Position:
        """Returns the position after so many steps of the epoch."""
        return Position(
            self._epoch,
            step,
            self._ended,
            self._passes - 1,
            self._pass.taken,
            self._pass.random_state,
        )

    def between(self) -> Position:
        """Returns the position at the end of an epoch."""
        reader = keras_hooks.current_iterator(self._epoch_iterator)
        if self._pass and getattr(reader, "followed", None) is self._pass:
            place = (
                self._passes - 1,
                self._pass.taken,
                self._pass.random_state,
            )
        else:
            place = (self._passes, 0, random_state())
        return Position(self._epoch + 1, 0, self._ended, *place)
