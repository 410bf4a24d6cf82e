"""From a dataset to batches on devices: one ahead, agreed on by all processes.

A batch is read, agreed on, and put on devices while the step before it runs.
"""

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from keras_meshdist import agreement

# A thread costs a tenth of a millisecond, and the interpreter's lock more;
# steps run beside a quicker read anyhow, for JAX is asynchronous.
_WORTH_A_THREAD = 0.0005
# Contents are compared at the first batch of a pass, and at every so many.
_CONTENTS_EVERY = 64


@dataclasses.dataclass(frozen=True)
class Said:
    """What a process says of a batch; `rows` is `None` at a dataset's end."""

    rows: int | None
    structure: str = ""
    digest: str | None = None
    epoch_steps: int | None = None


class Reader:
    """Iterates over the batches of a dataset, put on devices.

    The first two batches are read when they are asked for: Keras takes one to
    build a model from, and drops the iterator. From then on one batch is read
    ahead if that takes time, in a thread that lives for this batch. So an
    iterator that is dropped leaves no thread.

    Args:
        source: iterator of batches, nested structures of arrays.
        place: function that puts a batch on the devices.
        board: `agreement.Board`, or `None` on one process.
        epoch_steps: int, how many batches an epoch takes; none is read ahead
            behind it, since a generator would lose it. `None` if not known.
        scope: function that returns a context in which another thread reads.
    """

    def __init__(
        self,
        source: Iterator,
        place: Callable[[Any], Any],
        board: agreement.Board | None = None,
        epoch_steps: int | None = None,
        scope: Callable[[], Any] = contextlib.nullcontext,
    ):
        self._epoch_steps = epoch_steps
        self._read = _Pass(iter(source), place, board, epoch_steps)
        self._place = place
        self._scope = scope
        self._ahead: _Ahead | None = None
        self._taken = 0
        self._ended = False

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        ahead, self._ahead = self._ahead, None
        try:
            with self._read.awaited(self._taken):
                batch, placed = (
                    ahead.result() if ahead else self._read(self._taken)
                )
            if not placed:
                batch = self._place(batch)
        except BaseException:
            self._ended = True
            self.close()
            raise
        self._taken += 1
        steps = self._epoch_steps
        at_end = bool(steps) and self._taken % steps == 0
        self._read.went(self._taken, at_end)
        slow = self._read.took > _WORTH_A_THREAD
        if self._taken > 1 and slow and not at_end:
            self._ahead = _Ahead(self._read, self._taken, self._scope)
            self._ahead.start()
        return batch

    def close(self) -> None:
        """Gives the pass up; a thread that waits for others ends."""
        self._read.close(self._taken)

    def __del__(self):
        self.close()


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

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._result


class _Pass:
    """Reads one batch after the other, of one pass over a dataset."""

    def __init__(self, source, place, board, epoch_steps):
        self._source = source
        self._place = place
        self._board = board
        self._epoch_steps = epoch_steps
        self._number: int | None = None
        self._closed = False
        self.took = 0.0

    def __call__(self, step: int) -> tuple[Any, bool]:
        """Returns a batch, and whether it is placed already."""
        began = time.perf_counter()
        batch, ended = self._next(step)
        self._agree(step, batch, ended)
        self.took = time.perf_counter() - began
        if ended is not None:
            raise ended
        if self._needs_program(batch):
            return batch, False
        return self._place(batch), True

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

    def _next(self, step: int) -> tuple[Any, StopIteration | None]:
        if self._board is None:
            return next(self._source), None
        self._board.reading(True)
        try:
            return next(self._source), None
        except StopIteration as end:
            return None, end
        except BaseException as error:
            self._board.fail(self._number, step, error)
            raise
        finally:
            self._board.reading(False)

    def _agree(self, step, batch, ended) -> None:
        if self._board is None:
            return
        if ended:
            said = Said(None, epoch_steps=self._epoch_steps)
        else:
            said = describe(batch, step, self._epoch_steps)
        answers = self._board.agree(
            self._number, step, said, lambda: self._closed
        )
        check(step, answers)

    def close(self, step: int) -> None:
        if not self._closed:
            self._closed = True
            if self._number is not None:
                self._board.close(self._number, step)


def describe(batch: Any, step: int, epoch_steps: int | None = None) -> Said:
    """Returns what there is to say of a batch.

    Args:
        batch: nested structure of arrays.
        step: int, which batch it is; the first one's contents are said too.
        epoch_steps: int, how many batches an epoch takes, if it is known.

    Returns:
        A `Said`.
    """
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    rows = next((len(leaf) for leaf in leaves if np.ndim(leaf)), 1)
    structure = str(keras.tree.map_structure(_described, batch))
    digest = None
    if step % _CONTENTS_EVERY == 0:
        hashed = hashlib.blake2b(digest_size=8)
        for leaf in leaves:
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                hashed.update(np.ascontiguousarray(leaf).tobytes())
        digest = hashed.hexdigest()
    return Said(rows, structure, digest, epoch_steps)


def check(step: int, answers: list[Said]) -> None:
    """Compares what all processes say of a batch of a global dataset.

    Args:
        step: int, which batch it is, counted from 0.
        answers: list of `Said`, by process number.

    Raises:
        agreement.DisagreementError: if they differ.
    """
    counted = [
        "no batch, its dataset has ended"
        if said.rows is None
        else f"{said.rows} rows"
        for said in answers
    ]
    lengths = [f"{said.epoch_steps} batches" for said in answers]
    for what, seen in (
        ("number of batches in an epoch", lengths),
        ("number of rows", counted),
        ("structure, dtypes or shapes", [said.structure for said in answers]),
        ("contents", [f"contents {said.digest}" for said in answers]),
    ):
        if len(set(seen)) > 1:
            raise agreement.DisagreementError(
                "All processes must iterate over the same global dataset, in "
                f"the same order. Received: batch {step} (counted from 0) "
                f"with different {what}: {agreement.grouped(seen)}. Give "
                "every process the same whole dataset, none that is sharded "
                "already, and the same seeds."
            )


def _described(leaf: Any) -> str | None:
    if leaf is None:
        return None
    shape = np.shape(leaf)
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}[{', '.join(map(str, ('rows', *shape[1:])[: len(shape)]))}]"
