"""Each row of the README's table: what plain Keras does, and what this does.

Where a newer Keras has mended something, its test fails, and the row goes.
"""

import keras
import numpy as np
import pytest
from packaging.version import Version

import keras_meshdist as kmd
from tests import plain
from tests.clusters import local_only, shared_cluster

MODEL_FIRST = {"model": 4, "batch": 2}

pytestmark = [
    pytest.mark.extra,
    local_only,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        Version(keras.__version__) < Version("3.15"),
        reason="the table is of Keras 3.15",
    ),
]


def both(task, axes=MODEL_FIRST, **arguments):
    """What plain Keras gives on two processes, ours, and one device."""
    pair = shared_cluster(2, 4)
    of_keras = pair.call(plain.attempt, False, task, axes, **arguments)
    ours = pair.call(plain.attempt, True, task, axes, **arguments)
    return of_keras, ours, plain.attempt(True, task)


def equal(ours, one):
    """Within float32, relative to the largest number."""
    for process in ours:
        atol = 1e-5 * np.abs(one).max()
        np.testing.assert_allclose(process, one, rtol=0, atol=atol)


def test_model_axis_first_on_two_processes():
    of_keras, ours, one = both("fit_dataset")
    assert abs(of_keras[0][-1] - of_keras[1][-1]) > 0.01 * one[-1]
    equal(ours, one)


def test_thirteen_rows_on_four_shards():
    axes = {"batch": 4, "model": 2}
    assert plain.attempt(False, "fit_thirteen", axes) == "IndivisibleError"
    one = plain.attempt(True, "fit_thirteen")
    equal([plain.attempt(True, "fit_thirteen", axes)], one)


def test_predict_on_two_processes():
    of_keras, ours, one = both("predict")
    assert all(len(found) == 32 for found in of_keras)  # half of the rows
    equal(ours, one)
    batch_first = both("predict", {"batch": 2, "model": 4})[0]
    assert batch_first == ["RuntimeError"] * 2


def test_the_same_arrays_on_two_processes():
    of_keras, ours, one = both("fit_arrays")
    assert of_keras == ["ValueError"] * 2
    equal(ours, one)


def test_map_after_batch_on_two_processes():
    of_keras, ours, one = both("fit_mapped_dataset")
    assert of_keras == ["ValueError"] * 2
    equal(ours, one)


def test_a_short_last_batch_on_two_processes():
    axes = {"batch": 2, "model": 4}
    with kmd.cluster.Cluster(2, 4, timeout=40, forward=False) as cluster:
        with pytest.raises(kmd.cluster.ClusterError, match="end within 40 s"):
            cluster.call(plain.attempt, False, "fit_short_dataset", axes)
        hung = cluster.closed
    assert hung
    ours = shared_cluster(2, 4).call(
        plain.attempt, True, "fit_short_dataset", axes
    )
    equal(ours, plain.attempt(True, "fit_short_dataset"))


def test_processes_that_differ():
    pair = shared_cluster(2, 4)
    ours = pair.call(plain.attempt, True, "fit_different", MODEL_FIRST)
    assert ours == ["DisagreementError"] * 2


def test_rows_over_two_axes():
    axes = {"data": 2, "model": 2, "fsdp": 2}
    arguments = ("fit_arrays", axes, ("data", "fsdp"))
    assert plain.attempt(False, *arguments) == "ValueError"
    one = plain.attempt(True, "fit_arrays")
    equal([plain.attempt(True, *arguments)], one)


def test_a_dimension_over_two_axes():
    assert plain.nested_layout(False) == "ValueError"
    assert plain.nested_layout(True) == (None, ("fsdp", "model"))


def test_a_rule_that_matches_a_part():
    assert plain.split_by(False, "idden/kernel") == (1, [])
    pieces, warned = plain.split_by(True, "idden/kernel")
    assert pieces == 4
    assert len(warned) == 1


def test_a_rule_that_matches_nothing():
    assert plain.split_by(False, "hiden/kernel") == (1, [])
    pieces, (warned,) = plain.split_by(True, "hiden/kernel")
    assert pieces == 1
    assert "did you mean" in warned


def test_rules_read_off_a_model():
    mesh = kmd.make_mesh({"batch": 2, "model": 4})
    layout_map = kmd.layouts.auto(plain.model, mesh)
    report = kmd.inspect(plain.model, layout_map)
    axes = {row.path.partition("/")[2]: row.axes for row in report.rows}
    assert axes["hidden/kernel"] == (None, "model")
    assert axes["last/kernel"] == ("model", None)


def test_save_weights_on_two_processes():
    of_keras, ours, _ = both("save_weights")
    # One fails at its weights, while the other finds the file locked.
    assert set(of_keras) <= {"RuntimeError", "BlockingIOError"}
    assert ours == [True, True]
