"""Processes that don't do the same end with one error, and never hang."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from keras_meshdist import agreement, cluster, verdicts
from keras_meshdist.cluster.processes import reserve_port
from tests import datasets, processes
from tests.clusters import local_only, shared_cluster

MESH = {"m": 4, "b": 2}


def fit(dataset, **arguments):
    return shared_cluster(2, 4).call(
        processes.fit_on, MESH, dataset, **arguments
    )


@pytest.mark.parametrize("dataset", [datasets.slow])
def test_a_slow_process_is_no_error(dataset):
    first, second = fit(dataset, epochs=1, timeout=2.0)
    assert first == second
    assert np.isfinite(first).all()


@pytest.mark.parametrize(
    ("dataset", "step", "what", "seen"),
    [
        (datasets.longer, 5, "number of rows", ["has ended", "8 rows"]),
        (datasets.more_rows, 0, "number of rows", ["8 rows", "9 rows"]),
        (datasets.other_contents, 0, "contents", ["contents"]),
        (datasets.other_dtype, 0, "structure", ["float32", "float64"]),
        (datasets.other_structure, 0, "structure", ["rows, 4", "rows]"]),
        (datasets.other_order, 0, "contents", ["contents"]),
    ],
)
def test_different_data_is_one_error_on_all(dataset, step, what, seen):
    first, second = fit(dataset, epochs=1, shuffle=False)
    assert first == second
    assert first.startswith("DisagreementError: ")
    assert f"batch {step} (" in first
    assert f"different {what}" in first
    assert "process 0: " in first
    assert "process 1: " in first
    assert "auto_shard_dataset=False" in first
    for text in seen:
        assert text in first


def test_lists_of_different_length_are_an_error():
    """Keras asks for their length, and so never comes to the end."""
    first, second = fit(datasets.shorter_list, epochs=2, shuffle=False)
    assert first == second
    assert "batches in an epoch: process 0: 5 batches; process 1: 4" in first


def test_an_error_in_one_dataset_is_shown_on_all():
    first, second = fit(datasets.raises, epochs=1)
    assert second == "OSError: disk is gone"
    assert "process 1 raised at batch 3: OSError: disk is gone" in first


def test_a_read_that_takes_too_long_is_an_error_on_all():
    began = time.monotonic()
    first, second = fit(datasets.hangs, epochs=1, timeout=3.0)
    assert first == second
    assert "within 3 seconds" in first
    assert "process 1 is reading" in first
    assert time.monotonic() - began < 30


def fit_arrays(arrays):
    return shared_cluster(2, 4).call(processes.fit_arrays, MESH, arrays)


def test_arrays_need_few_agreements():
    """Their rows are known, so that a quick step needn't wait for one."""
    (losses, agreed), (others, _) = fit_arrays(datasets.many_rows)
    assert losses == others
    # Not before steps are known to be quick, and then each time twice as far.
    assert len(agreed) < 60
    assert agreed[:3] == [0, 0, 1]  # Keras builds the model with the first


def test_arrays_of_different_length():
    (first, agreed), (second, _) = fit_arrays(datasets.one_row_more)
    assert first == second
    assert "batch 298 (" in first
    assert "process 0: 6 rows; process 1: 7 rows" in first
    assert agreed == [0, *range(299)]


def test_arrays_that_differ_later_are_an_error():
    (first, _), (second, _) = fit_arrays(datasets.other_half)
    assert first == second
    assert "different contents" in first


def test_training_goes_on_after_an_error():
    fit(datasets.other_contents, epochs=1)
    first, second = fit(datasets.same, epochs=1)
    assert first == second
    assert np.isfinite(first).all()


def test_a_call_that_one_process_makes_alone_waits_for_the_other():
    """A long save or compilation elsewhere is no error."""
    waited = shared_cluster(2, 4).call(processes.fit_late, MESH, 5.0)
    assert waited[0] == waited[1]


def test_many_passes_within_a_pass():
    """A callback that predicts after each batch opens one each time."""
    first, second = shared_cluster(2, 4).call(processes.predict_often, MESH)
    assert first == second
    assert len(first) == 30


def test_equal_answers_are_named_together():
    assert (
        verdicts.grouped(["a", "b", "a"]) == "processes 0, 2: a; process 1: b"
    )


SETUP = """
import sys, time
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
import keras
process = int(sys.argv[1])
keras.distribution.initialize(sys.argv[2], 2, process)
import numpy as np
import keras_meshdist as kmd
dist = kmd.ModelParallel(
    layout_map=kmd.LayoutMap(kmd.make_mesh({"m": 2, "b": 2})),
    batch_dim_name="b",
    data_timeout=4.0,
)
keras.distribution.set_distribution(dist)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
x, y = np.ones((8, 4)), np.ones((8, 2))

def endless():
    for step in range(10**6):
        if step == 20:
            print("training", flush=True)
        time.sleep(0.01)
        yield x, y

def fit(*callbacks):
    model.fit(
        endless(), steps_per_epoch=10**6, verbose=0, callbacks=callbacks
    )
"""
TRAINS = SETUP + "fit()"
PREDICTS_ALONE = """
other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

class Predict(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 30 and process == 1:
            other.predict(x, verbose=0)

fit(Predict())
"""
# A last message that is not ours; JAX ends all when process 0 has gone.
OF_JAX = "JAX distributed service detected fatal errors"


@pytest.fixture
def start(tmp_path):
    """Starts two processes that nobody watches over."""
    running = []

    def run(script):
        file = tmp_path / "train.py"
        file.write_text(script)
        root = pathlib.Path(agreement.__file__).parent.parent
        reserved = reserve_port()
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        reserved.close()
        environment = {**os.environ, **cluster.environment(2)}
        environment["PYTHONPATH"] = str(root)
        for process in range(2):
            running.append(
                subprocess.Popen(
                    [sys.executable, str(file), str(process), address],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in running:
            assert "training\n" in iter(process.stdout.readline, "")
        return running

    yield run
    for process in running:
        process.kill()
        process.communicate()


@local_only
@pytest.mark.parametrize(
    ("killed", "message"), [(1, "process 1 has died"), (0, OF_JAX)]
)
def test_when_one_is_killed_the_other_ends_and_says_so(start, killed, message):
    running = start(TRAINS)
    running[killed].send_signal(signal.SIGKILL)
    _, errors = running[1 - killed].communicate(timeout=60)
    assert running[1 - killed].returncode != 0
    assert message in errors


@local_only
def test_different_calls_end_all(start):
    """One waits in a collective, which no exception reaches."""
    first, second = start(SETUP + PREDICTS_ALONE)
    _, errors = second.communicate(timeout=90)
    assert second.returncode != 0
    assert "All processes must make the same calls" in errors
    _, errors = first.communicate(timeout=90)
    assert first.returncode != 0
    assert "process 1" in errors
