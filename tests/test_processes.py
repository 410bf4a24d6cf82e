"""Several processes: who feeds what, seeds, predictions, and errors."""

import numpy as np
import pytest

from keras_meshdist.cluster import ClusterError
from tests import processes
from tests.clusters import shared_cluster


def test_who_feeds_what_on_two_processes():
    call = shared_cluster(2, 4).call
    # The batch axis is last: both processes hold both shards.
    both = call(processes.properties, {"m": 4, "b": 2})
    for process, seen in enumerate(both):
        assert seen["process"] == process
        assert seen["processes"] == 2
        assert seen["shards"] == (0, 1)
        assert seen["feed"] == list(range(13))
        assert seen["data_shards"] == (1, 0)
    # The batch axis is first: each holds one.
    first, second = call(processes.properties, {"b": 2, "m": 4})
    assert (first["shards"], second["shards"]) == ((0,), (1,))
    assert first["feed"] == list(range(7))
    assert second["feed"] == list(range(7, 13))
    assert second["other"] == list(range(7))
    assert first["data_shards"] == (2, 0)
    assert second["data_shards"] == (2, 1)
    # Fewer rows than shards: the second process only pads.
    first, second = call(processes.properties, {"b": 8}, rows=3)
    assert first["feed"] == [0, 1, 2]
    assert second["feed"] == []


def test_a_middle_axis_on_four_processes():
    """Keras says data shards 0, 0, 1, 1 here."""
    seen = shared_cluster(4, 2).call(
        processes.properties, {"m": 2, "b": 2, "s": 2}
    )
    assert [s["shards"] for s in seen] == [(0,), (1,), (0,), (1,)]
    assert [s["data_shards"] for s in seen] == [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_feeds_that_overlap_in_part_are_an_error():
    with pytest.raises(Exception, match="same rows or none in common"):
        shared_cluster(3, 2).call(processes.overlapping_feeds)


@pytest.mark.parametrize(
    ("axes", "rows", "expected"),
    [
        ({"m": 4, "b": 2}, 4, [[1, 2], [3, 4]] * 4),
        ({"b": 4, "m": 2}, 4, [[i] for i in (1, 1, 2, 2, 3, 3, 4, 4)]),
        ({"m": 4, "b": 2}, 3, [[1, 2], [3, 0]] * 4),
        ({"b": 8}, 2, [[1], [2], [0], [0], [0], [0], [0], [0]]),
    ],
)
def test_every_device_holds_its_rows(axes, rows, expected):
    results = shared_cluster(2, 4).call(processes.rows_on_devices, axes, rows)
    held = {device: r for result in results for device, r in result.items()}
    assert [held[i] for i in range(8)] == expected


def test_processes_without_a_seed_agree_on_one():
    first, second = shared_cluster(2, 4).call(processes.seeds, None)
    assert first == second
    again, _ = shared_cluster(2, 4).call(processes.seeds, None)
    assert again != first


def test_one_seed_for_all_is_kept():
    first, second = shared_cluster(2, 4).call(processes.seeds, (5, 5))
    assert first == second
    again, _ = shared_cluster(2, 4).call(processes.seeds, (5, 5))
    assert again == first


def test_different_seeds_never_give_different_weights():
    import keras
    from packaging.version import Version

    if Version(keras.__version__) < Version("3.9"):
        # There is no seed to ask for; all take over process 0's state.
        first, second = shared_cluster(2, 4).call(processes.seeds, (5, 6))
        assert first == second
        return
    with pytest.raises(ClusterError, match=r"same random seed.*\[5, 6\]"):
        shared_cluster(2, 4).call(processes.seeds, (5, 6))


def test_a_distribution_that_was_not_set():
    for first, *others in shared_cluster(2, 4).call(
        processes.forget_to_set, {"m": 4, "b": 2}
    ):
        ((message, is_there),) = first
        assert message.startswith("A distribution is in effect only once it")
        assert "Received: a ModelParallel that wasn't, on 2 proc" in message
        assert is_there
        assert others == [[], [], []]


def test_a_process_without_a_device():
    cluster = shared_cluster(2, 4)
    with pytest.raises(ClusterError, match=r"Every process must.*\[0\] only"):
        cluster.call(processes.mesh_without_the_last_process)


@pytest.mark.parametrize("rows", [16, 13, 1])
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_every_process_gets_all_predictions(rows, steps_per_execution):
    for expected, got in shared_cluster(2, 4).call(
        processes.predictions, rows, steps_per_execution
    ):
        for one, other in zip(expected, got, strict=True):
            assert isinstance(other, np.ndarray)
            assert other.shape == (rows, 2)
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [32, 29, 1])
def test_local_predictions_are_those_of_the_own_rows(rows):
    for expected, got, own in shared_cluster(2, 4).call(
        processes.local_predictions, rows
    ):
        assert got.shape == (len(own), 2)
        np.testing.assert_allclose(got, expected[own], rtol=1e-5, atol=1e-6)
