"""What `fit` takes besides a dataset, on two processes, against one device."""

import keras
import numpy as np
import pytest
from packaging.version import Version

from keras_meshdist import cluster
from tests import fits
from tests.clusters import local_only, shared_cluster

# What Keras 3.7 does on one device.
NOT_ON_3_7 = {
    fits.no_weights: "it fails on a leaf that is None",
    fits.py_dataset_in_processes: "its look-ahead takes batches of the first "
    "epoch away when a model is built, and so changes their order",
}


@pytest.mark.parametrize("variant", fits.VARIANTS, ids=lambda f: f.__name__)
def test_it_equals_one_device(variant):
    if variant in NOT_ON_3_7 and Version(keras.__version__) < Version("3.8"):
        pytest.skip(f"Keras 3.7 on one device: {NOT_ON_3_7[variant]}")
    processes = shared_cluster(2, 4)
    expected = processes.call(fits.run, variant, {})[0]
    for got in processes.call(fits.run, variant, {"m": 2, "b": 4}):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(got[name], value, atol=1e-11 * scale)


def test_a_process_reads_its_own_rows_of_an_array():
    """And of batches that are compared the first and the last row."""
    own = (
        [*range(8), *range(16, 23)],
        [*range(8, 16), *range(23, 29)],
    )
    ends = {0, 15, 16, 28}
    for mine, read in zip(
        own, shared_cluster(2, 4).call(fits.rows_read), strict=True
    ):
        assert set(mine) <= set(read) <= {*mine, *ends}
        # Once for each of three epochs, but for those that build or compare.
        within = set(mine) - {7, 8} - ends
        times = [read.count(row) for row in within]
        assert max(times) <= 4


def test_an_array_that_is_sharded_already_is_an_error():
    first, second = shared_cluster(2, 4).call(fits.sharded_array)
    assert first == second
    assert "different contents" in first
    assert "auto_shard_dataset=False" in first


@local_only
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_fifty_epochs_keep_memory_and_threads():
    # Processes that have compiled nothing else.
    with cluster.Cluster(4, 2, timeout=1100) as several:
        results = several.call(fits.resident_sizes, 50)
    for sizes, threads in results:
        assert not threads
        late = np.array(sizes[15:])
        assert late.max() <= 1.02 * late[0], late / late[0]
