"""What a step of `fit` takes: this package against plain Keras.

Whole calls of `fit` of a small model, on one process with eight virtual
devices and a mesh whose batch axis comes first, so that plain Keras is right.
The two take turns. Then the same with a dataset that sleeps as long as a step
takes, for this model and for one whose steps take longer. At last what
agreement costs on four processes: steps with it, and with the processes left to
themselves.

    python benchmarks/fit.py

prints ratios of medians, and ends with status 1 if one is above its target.
"""

import argparse
import platform
import statistics
import sys
import time

from keras_meshdist.cluster import Cluster, use_virtual_devices

use_virtual_devices(8)

import jax  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import keras_meshdist as kmd  # noqa: E402
from benchmarks import agreement_cost  # noqa: E402

ROWS, FEATURES, BATCH = 6400, 32, 64


class Sleeping(keras.utils.PyDataset):
    """Batches that take some seconds each."""

    def __init__(self, x, y, seconds):
        super().__init__()
        self.x, self.y, self.seconds = x, y, seconds

    def __len__(self):
        return 60

    def __getitem__(self, i):
        time.sleep(self.seconds)
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return self.x[rows], self.y[rows]


class Contender:
    """A model of some width under one distribution."""

    def __init__(self, ours, width):
        self.hooks = ours
        self.distribution = None
        self.enter()
        mesh = kmd.make_mesh({"batch": 4, "model": 2})
        kinds = kmd if ours else keras.distribution
        layout_map = kinds.LayoutMap(mesh)
        layout_map[".*wide/kernel"] = (None, "model")
        self.distribution = kinds.ModelParallel(
            layout_map=layout_map, batch_dim_name="batch"
        )
        self.enter()
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(width, "relu", name="wide"),
                keras.layers.Dense(width, "relu"),
                keras.layers.Dense(4),
            ]
        )
        self.model.compile("sgd", "mse")

    def enter(self):
        if self.hooks:
            kmd.keras_hooks.install()
        else:
            kmd.keras_hooks.remove()
        keras.distribution.set_distribution(self.distribution)

    def fit(self, steps, *data, **arguments):
        self.enter()
        start = time.perf_counter()
        history = self.model.fit(*data, verbose=0, **arguments)
        return (time.perf_counter() - start) / steps, history.history["loss"]


def compare(pair, turns, steps, *data, **arguments):
    """Returns the median seconds of a step of plain Keras, and of ours."""
    seconds = ([], [])
    for turn in range(turns + 1):
        losses = []
        for which in (0, 1) if turn % 2 else (1, 0):
            took, loss = pair[which].fit(steps, *data, **arguments)
            losses.append(loss)
            if turn:  # the first one compiles
                seconds[which].append(took)
        np.testing.assert_allclose(*losses, rtol=1e-4)
    return tuple(map(statistics.median, seconds))


def report(what, plain, ours, target):
    ratio = ours / plain
    met = "met" if ratio <= target else "MISSED"
    print(
        f"{what:34}{1e3 * plain:9.3f}{1e3 * ours:9.3f}{ratio:8.3f}"
        f"   target {target:.2f}: {met}",
        flush=True,
    )
    return ratio <= target


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--turns", type=int, default=30, help="calls of `fit` of each contender"
    )
    options = parser.parse_args()
    print(
        f"keras_meshdist {kmd.__version__}, Keras {keras.__version__}, JAX "
        f"{jax.__version__}, NumPy {np.__version__}, Python "
        f"{platform.python_version()}"
    )
    print(f"{'milliseconds a step':34}{'Keras':>9}{'ours':>9}{'ratio':>8}")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    y = rng.normal(size=(ROWS, 4)).astype("float32")
    met = []
    for what, width in ("small", 64), ("larger", 1024):
        turns = options.turns if width == 64 else max(7, options.turns // 3)
        pair = Contender(False, width), Contender(True, width)
        arrays = {"batch_size": BATCH, "shuffle": False}
        step, ours = compare(pair, turns, ROWS // BATCH, x, y, **arrays)
        met.append(report(f"arrays, {what} model", step, ours, 1.0))
        slow = Sleeping(x, y, step)
        turns = max(7, options.turns // 3)
        plain, ours = compare(pair, turns, len(slow), slow, shuffle=False)
        met.append(report("a dataset that sleeps for a step", plain, ours, 1.0))
        met.append(report("the same, against a step alone", step, ours, 1.1))
    keras.distribution.set_distribution(None)
    with Cluster(4, 2, timeout=1200) as cluster:
        for what, size in (("small", 64), ("larger", 1024)):
            turns = max(7, options.turns // (2 if size == 64 else 4))
            for kind in "arrays", "dataset":
                measured = cluster.call(
                    agreement_cost.measure, kind, size, turns
                )
                name = f"agreement on {kind}, {what} model"
                met.append(report(name, *measured[0], 1.03))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
