"""Runs the cases, each with this package and with plain Keras."""

import contextlib
import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Sequence

from keras_meshdist.cluster import Cluster, ClusterError
from keras_meshdist.demo.cases import Case
from keras_meshdist.demo.comparison import (
    ACCURACY,
    TOLERANCE,
    Outcome,
    difference,
    failed,
    finished,
)
from keras_meshdist.demo.progress import Progress
from keras_meshdist.demo.training import (
    KERAS_NUMPY,
    KERAS_TF_DATA,
    OURS,
    Digits,
    Trained,
    import_tensorflow,
    train,
)

# Generous, for computers that have other things to do.
_TIMEOUT = 300.0

# What plain Keras gets: this many seconds, or this many times what the same
# case took with this package, if that is more.
_KERAS_SECONDS = 20.0
_KERAS_TIMES = 3.0


@dataclasses.dataclass
class Result:
    """What became of a case.

    Args:
        case: `Case`.
        runs: list of `Trained`, by process; empty if it failed.
        difference: float, the largest from one device, on any process.
        error: string, how it failed.
        keras: dictionary from `KERAS_NUMPY` or `KERAS_TF_DATA` to the
            `Outcome` of plain Keras.
    """

    case: Case
    runs: Sequence[Trained] = ()
    difference: float = 0.0
    error: str = ""
    keras: dict[str, Outcome] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The loss of the last epoch."""
        return self.runs[0].losses[-1]

    @property
    def accuracy(self) -> float:
        """The accuracy of the held-out rows, the lowest on any process."""
        return min(run.accuracy for run in self.runs)

    @property
    def fault(self) -> str:
        """What is wrong with it, in words; empty if nothing is."""
        if self.error:
            return self.error
        if not self.difference <= TOLERANCE:
            return f"differs by {self.difference:.1e} from one device"
        if not self.accuracy > ACCURACY:
            return f"has an accuracy of only {self.accuracy:.1%}"
        return ""


def run_cases(
    cases: Sequence[Case], digits: Digits, epochs: int, progress: Progress
) -> list[Result]:
    """Runs cases on one device first, then on their meshes.

    Args:
        cases: list of `Case`; those of one shape share their processes.
        digits: `Digits`.
        epochs: integer, number of epochs of each run.
        progress: `Progress`, that is told of each run.

    Returns:
        List of `Result`: those on one device, then one for each case.

    Raises:
        ClusterError: If a run on one device fails.
    """
    references = list(dict.fromkeys(case.reference for case in cases))
    progress.total = len(references) + sum(
        1 + len(_keras_ways(case)) for case in cases
    )
    results = []
    with contextlib.closing(_Runner(digits, epochs, progress)) as runner:
        on_one_device = {case: runner.reference(case) for case in references}
        for _, same_shape in itertools.groupby(cases, lambda case: case.shape):
            runner.close()
            ours = [
                runner.ours(case, on_one_device[case.reference])
                for case in same_shape
            ]
            # In the same processes, to save time: plain Keras comes last,
            # when this package's hooks can be removed for good.
            for result in ours:
                runner.keras(result, on_one_device[result.case.reference])
            results += ours
    return [
        *(Result(case, [run]) for case, run in on_one_device.items()),
        *results,
    ]


def _keras_ways(case: Case) -> list[str]:
    """How plain Keras is tried: on several processes it wants tf.data."""
    if case.processes > 1 and importlib.util.find_spec("tensorflow"):
        return [KERAS_NUMPY, KERAS_TF_DATA]
    return [KERAS_NUMPY]


class _Runner:
    """Trains on processes that it starts when they are needed."""

    def __init__(self, digits: Digits, epochs: int, progress: Progress):
        self._digits = digits
        self._epochs = epochs
        self._progress = progress
        self._cluster: Cluster | None = None
        # How long the run before took, and each case with this package.
        self._seconds = 0.0
        self._took: dict[Case, float] = {}

    def reference(self, case: Case) -> Trained:
        self._progress.step(f"{OURS} {case}")
        return self._train(case, OURS, _TIMEOUT)[0]

    def ours(self, case: Case, reference: Trained) -> Result:
        self._progress.step(f"{OURS} {case}")
        try:
            runs = self._train(case, OURS, _TIMEOUT)
        except ClusterError as error:
            return Result(case, error=str(error))
        self._took[case] = self._seconds
        return Result(
            case, runs, max(difference(run, reference) for run in runs)
        )

    def keras(self, result: Result, reference: Trained) -> None:
        case = result.case
        limit = max(_KERAS_SECONDS, _KERAS_TIMES * self._took.get(case, 0.0))
        for way in _keras_ways(case):
            self._progress.step(f"plain Keras ({way}) {case}")
            try:
                runs = self._train(case, way, limit)
            except ClusterError as error:
                outcome = failed(
                    error,
                    self._returncode(error.process_id),
                    self._seconds,
                    limit,
                )
            else:
                outcome = finished(runs, reference)
            result.keras[way] = outcome

    def close(self) -> None:
        """Ends the processes; the next run starts others."""
        if self._cluster:
            self._cluster.close()
        self._cluster = None

    def _train(self, case: Case, who: str, limit: float) -> list[Trained]:
        self._seconds = 0.0
        cluster = self._started(case)
        if who == KERAS_TF_DATA:
            self._progress.note("importing TensorFlow")
            cluster.call(import_tensorflow)
        self._progress.note("")
        cluster.timeout = limit
        started = time.monotonic()
        try:
            return cluster.call(
                train,
                case,
                who,
                self._digits,
                self._epochs,
                self._progress.path,
            )
        finally:
            self._seconds = time.monotonic() - started
            cluster.timeout = _TIMEOUT

    def _started(self, case: Case) -> Cluster:
        if not self._cluster or self._cluster.closed:
            self._progress.note("starting processes")
            self._cluster = None
            self._cluster = Cluster(
                case.processes, case.devices, _TIMEOUT, forward=False
            )
        return self._cluster

    def _returncode(self, process: int) -> int | None:
        if not self._cluster:
            return None
        return self._cluster.processes[process].poll()
