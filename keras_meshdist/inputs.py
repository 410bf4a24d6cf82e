"""From a dataset to batches on devices: one ahead, agreed on by all processes.

A batch is read, agreed on, and put on devices while the step before it runs.
"""

import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_meshdist import agreement, weights
from keras_meshdist.datasets import GlobalDataset, OwnFeeds, Said

# Contents are compared at the first batch of a pass, and at every so many.
_CONTENTS_EVERY = 64
# A thread costs a tenth of a millisecond, and the interpreter's lock more;
# steps run beside a quicker read anyhow, for JAX is asynchronous.
_WORTH_A_THREAD = 0.0005


class Reader:
    """Iterates over the batches of a dataset, put on devices.

    The first two batches are read when they are asked for: Keras takes one to
    build a model from, and drops the iterator. From then on one batch is read
    ahead if that takes time, in a thread that lives for this batch. So an
    iterator that is dropped leaves no thread.

    Args:
        source: iterator of batches, nested structures of arrays.
        kind: `GlobalDataset` or `OwnFeeds`, which says what is compared, and
            puts batches on the devices.
        board: `agreement.Board`, or `None` on one process.
        epoch_steps: int, how many batches an epoch takes; none is read ahead
            behind it, since a generator would lose it. `None` if not known.
        scope: function that returns a context in which another thread reads.
        assigned: `weights.Assigned`, compared before the first batch.
        followed: `positions.Pass`, which says how many batches to pass over,
            and is told how many were taken.
        known: what gives the rows of all batches of the pass, such as those of
            an array and of a batch; `None` if only reading them does.
    """

    def __init__(
        self,
        source: Iterator,
        kind: GlobalDataset | OwnFeeds,
        board: agreement.Board | None = None,
        epoch_steps: int | None = None,
        scope: Callable[[], Any] = contextlib.nullcontext,
        assigned: weights.Assigned | None = None,
        followed: Any = None,
        known: Any = None,
    ):
        source = iter(source)
        self._epoch_steps = epoch_steps
        self._read = _Pass(
            source, kind, board, epoch_steps, assigned, followed, known
        )
        self.followed = followed
        if followed:
            followed.reader = weakref.ref(self)
        self._scope = scope
        self._ahead: _Ahead | None = None
        self._taken = self._first = followed.taken if followed else 0
        self._ended = False

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        ahead, self._ahead = self._ahead, None
        try:
            with self._read.awaited(self._taken):
                batch = ahead.result() if ahead else self._read(self._taken)
            if isinstance(batch, _Unplaced):
                batch = batch.place()
        except BaseException:
            self._ended = True
            self.close()
            raise
        self._taken += 1
        if self.followed:
            self.followed.taken = self._taken
        steps = self._epoch_steps
        at_end = bool(steps) and self._taken % steps == 0
        self._read.went(self._taken, at_end)
        slow = self._read.took > _WORTH_A_THREAD
        if self._taken > self._first + 1 and slow and not at_end:
            self._ahead = _Ahead(self._read, self._taken, self._scope)
            self._ahead.start()
        return batch

    def at_end(self) -> bool:
        """Whether there is no further batch; the next one is read for that."""
        if self._ahead is None and not self._ended:
            self._ahead = _Ahead(self._read, self._taken, self._scope)
            with self._read.awaited(self._taken):
                self._ahead.run()
        return self._ended or self._ahead.ended()

    def close(self) -> None:
        """Gives the pass up; a thread that waits for others ends."""
        self._read.close(self._taken)

    def __del__(self):
        if hasattr(self, "_read"):  # or it never began
            self.close()


@dataclasses.dataclass(frozen=True)
class _Unplaced:
    """A batch that the main thread has to put on the devices."""

    place: Callable[[], Any]


class _Ahead(threading.Thread):
    def __init__(self, read: Callable[[int], Any], step: int, scope: Any):
        super().__init__(name="meshdist-read-ahead", daemon=True)
        self._read, self._step, self._scope = read, step, scope
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._scope():
                self._result = self._read(self._step)
        except BaseException as error:
            self._error = error
        # What is read may hold the reader, and so this thread itself.
        del self._read

    def ended(self) -> bool:
        if self.ident is not None:
            self.join()
        return isinstance(self._error, StopIteration)

    def result(self) -> Any:
        if self.ident is not None:
            self.join()
        if self._error is not None:
            raise self._error
        return self._result


class _Pass:
    """Reads one batch after the other, of one pass over a dataset."""

    def __init__(
        self, source, kind, board, epoch_steps, assigned, followed, known
    ):
        self._source = source
        self._kind = kind
        self._board = board
        self._epoch_steps = epoch_steps
        self._assigned = assigned
        self._followed = followed
        self._known = known
        self._meetings = agreement.Meetings()
        self._first: int | None = None
        self._number: int | None = None
        self._closed = False
        self._ended: StopIteration | None = None
        self.took = 0.0

    def __call__(self, step: int) -> Any:
        """Returns a batch on the devices, or an `_Unplaced` one."""
        began = time.perf_counter()
        if self._first is None:
            self._first = step
        batch, said = self._next(step)
        answers = self._agree(step, said)
        self.took = time.perf_counter() - began
        if self._ended and all(said.rows is None for said in answers or ()):
            raise self._ended
        place = functools.partial(self._kind.place, batch, answers)
        return _Unplaced(place) if self._needs_program(batch) else place()

    @contextlib.contextmanager
    def awaited(self, step: int) -> Iterator[None]:
        """Shows the others that the main thread needs this batch now."""
        if self._board is None:
            yield
            return
        self._open()
        self._board.await_batch(self._number, step)
        try:
            yield
        finally:
            self._board.await_batch(None)

    def went(self, taken: int, resting: bool) -> None:
        """Shows the others how many batches went to steps."""
        if self._board is not None:
            self._board.took(self._number, taken, resting)

    def _open(self) -> None:
        # Not before: Keras makes iterators that nobody reads.
        if self._number is None:
            self._number = self._board.open()

    def _needs_program(self, batch: Any) -> bool:
        """Whether placing it runs on all processes, so not in a thread.

        Programs must start in the same order on all processes.
        """
        return self._board is not None and any(
            isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
            for leaf in keras.tree.flatten(batch)
        )

    def _next(self, step: int) -> tuple[Any, Said | None]:
        """Returns a batch, and what to say of it; `None` at the end."""
        if self._board is None:
            return self._from_source(step), None
        self._board.reading(True)
        try:
            batch = None if self._ended else self._from_source(step)
            if self._meetings.may_skip(step):
                return batch, None
            if self._ended:
                return None, Said(None, epoch_steps=self._epoch_steps)
            first, known = step == self._first, self._known is not None
            contents = first or known or step % _CONTENTS_EVERY == 0
            return batch, self._kind.describe(
                batch, step, self._epoch_steps, contents
            )
        except BaseException as error:
            self._board.fail(self._number, step, error)
            raise
        finally:
            self._board.reading(False)

    def _from_source(self, step: int) -> Any:
        try:
            if self._followed and step == self._first:
                self._followed.begin()
                for _ in range(step):
                    next(self._source)
            return next(self._source)
        except StopIteration as end:
            self._ended = end
            return None

    def _agree(self, step: int, said: Said | None) -> list[Said] | None:
        if self._board is None or self._meetings.may_skip(step):
            return None
        first = step == self._first
        if self._known is not None:
            pace = self._meetings.pace(step)
            said = dataclasses.replace(said, known=self._known, pace=pace)
        if first and self._assigned:
            said = dataclasses.replace(said, assigned=self._assigned.take())
        if self._followed:
            leaving = self._followed.wants_to_leave()
            said = dataclasses.replace(said, leaving=leaving)
        answers = self._board.agree(
            self._number, step, said, lambda: self._closed
        )
        if first:
            weights.compare([said.assigned for said in answers])
        if self._followed and any(said.leaving for said in answers):
            self._followed.leave_after(step + 1)
        self._kind.check(step, answers)
        self._meetings.agreed(step, answers)
        return answers

    def close(self, step: int) -> None:
        if not self._closed:
            self._closed = True
            if self._number is not None:
                self._board.close(self._number, step)
