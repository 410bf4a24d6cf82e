"""Processes that are killed at random moments of training and of saving."""

import pathlib
import random
import threading
import time

import numpy as np
import pytest

from keras_meshdist import cluster
from tests import checkpointed, killed, saved
from tests.clusters import close_all, local_only
from tests.test_checkpoints import needs_try_get

PAUSE = 0.03


def whole_ones(folder):
    path = folder / "c"
    return checkpointed.steps_in(path) if path.is_dir() else []


def kill_once(folder, epochs, rng, early):
    """Runs until all or one are killed; returns the last whole checkpoint.

    It is the last that was seen before the first was killed. That is early, if
    asked for, or after the run has saved at least once.
    """
    seen = []
    start = max(whole_ones(folder), default=0)
    (folder / "began").unlink(missing_ok=True)
    running = cluster.Cluster(2, 4, forward=False)

    def kill():
        until = time.monotonic() + 200
        while not (folder / "began").exists() or (
            not early and max(whole_ones(folder), default=0) == start
        ):
            if time.monotonic() > until:
                return
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1.5))
        seen.append(max(whole_ones(folder), default=0))
        for process in rng.choice([(0,), (1,), (0, 1)]):
            running.kill(process)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(cluster.ClusterError):
            running.call(killed.run, "last", str(folder), epochs, PAUSE)
    finally:
        killer.join()
        running.close()
    return seen[0]


def check(moments, epochs, seed):
    rng = random.Random(seed)
    # Each has its own cluster, and memory for two is needed.
    close_all()
    with saved.folder() as folder, saved.folder() as other:
        for moment in range(moments):
            early = moment > 0 and rng.random() < 0.25
            before = kill_once(folder, epochs, rng, early)
            whole = whole_ones(folder)
            assert max(whole, default=0) >= before, (moment, whole, before)
        assert whole_ones(folder)  # or nothing was resumed
        results = []
        with cluster.Cluster(2, 4, forward=False) as running:
            for path in folder, pathlib.Path(other):
                results.append(
                    running.call(killed.run, "last", str(path), epochs, 0.0)
                )
        steps = epochs * 8
        assert whole_ones(folder)[-1] == whole_ones(other)[-1] == steps
        for resumed, undisturbed in zip(*results, strict=True):
            for (path, one), (_, expected) in zip(
                resumed, undisturbed, strict=True
            ):
                np.testing.assert_array_equal(one, expected, err_msg=path)


@local_only
@needs_try_get
@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_moments():
    check(2, 20, seed=1)


@local_only
@needs_try_get
@pytest.mark.full
@pytest.mark.timeout(3000)
def test_twenty_moments():
    check(20, 150, seed=2)
