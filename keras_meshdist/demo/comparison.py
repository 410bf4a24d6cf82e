"""Compares training runs with that on one device, and names what happened."""

import dataclasses
import re
import signal
from collections.abc import Sequence

import numpy as np

from keras_meshdist.cluster import ClusterError
from keras_meshdist.demo.training import Trained

# Sums in another order make a few millionths in float32.
TOLERANCE = 1e-4
ACCURACY = 0.90

# The line of a traceback that names the exception.
_EXCEPTION = re.compile(
    r"^(?:\w+\.)*(\w*(?:Error|Exception))(?::|$)", re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training run with plain Keras came to.

    Args:
        kind: string, `"same"`, `"wrong"`, `"error"`, `"crash"` or `"hang"`.
        text: string, the same in a few words more.
        runs: list of `Trained`, by process; empty if it didn't end.
    """

    kind: str
    text: str
    runs: Sequence[Trained] = ()


def difference(run: Trained, reference: Trained) -> float:
    """The largest difference between two training runs.

    Args:
        run: `Trained`.
        reference: `Trained`, on one device.

    Returns:
        Float: the largest difference in the loss curve and in any of the final
        weights, relative to the largest magnitude in the reference's curve or
        weight. Infinite where there are numbers that aren't finite.
    """
    return max(
        _relative(np.asarray(got), np.asarray(wanted))
        for got, wanted in zip(
            [run.losses, *run.weights],
            [reference.losses, *reference.weights],
            strict=True,
        )
    )


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    if got.shape != wanted.shape or not np.isfinite(got).all():
        return float("inf")
    largest = np.abs(got - wanted).max()
    return float(largest / (np.abs(wanted).max() or 1.0))


def finished(runs: Sequence[Trained], reference: Trained) -> Outcome:
    """The outcome of a run of plain Keras that ended.

    Args:
        runs: list of `Trained`, by process.
        reference: `Trained`, on one device.

    Returns:
        An `Outcome`.
    """
    largest = max(difference(run, reference) for run in runs)
    if largest <= TOLERANCE:
        return Outcome("same", "same", runs)
    losses = list(dict.fromkeys(_short(run.losses[-1]) for run in runs))
    if losses == [_short(reference.losses[-1])]:
        text = f"wrong: off by {largest:.0e}"
    elif len(losses) <= 2:
        text = f"wrong: loss {' / '.join(losses)}"
    else:
        losses.sort(key=float)
        text = f"wrong: loss {losses[0]} to {losses[-1]}"
    return Outcome("wrong", text, runs)


def _short(loss: float) -> str:
    return f"{loss:.2f}" if loss < 10 else f"{loss:.0f}"


def failed(
    error: ClusterError, returncode: int | None, took: float, limit: float
) -> Outcome:
    """The outcome of a run of plain Keras that didn't end well.

    Args:
        error: `ClusterError`, how it failed.
        returncode: integer, exit code of the process that failed first, or
            `None`.
        took: float, seconds after which it failed.
        limit: float, seconds after which it was cut off.

    Returns:
        An `Outcome`.
    """
    if error.traceback:
        names = _EXCEPTION.findall(error.traceback)
        return Outcome("error", ": ".join(["error", *names[-1:]]))
    if took >= limit:
        return Outcome("hang", f"hang, cut off at {limit:.0f} s")
    if returncode is None:
        return Outcome("crash", "crash")
    if returncode < 0:
        how = signal.Signals(-returncode).name
    else:
        how = f"exit status {returncode}"
    return Outcome("crash", f"crash: {how}")
