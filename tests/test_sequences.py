"""Sequences that are split over processes, against one device."""

import numpy as np
import pytest

from tests import parity, sequences
from tests.clusters import shared_cluster

CASES = (
    # Both processes need all rows, and half of each.
    ((2, 4), (("sequence", 2), ("batch", 4)), "sequence"),
    pytest.param(
        (2, 4),
        (("model", 4), ("batch", 2)),
        "model",
        marks=pytest.mark.extra,
    ),
)
MORE = (
    ((2, 4), (("batch", 2), ("sequence", 4)), "sequence"),
    ((1, 8), (("batch", 2), ("model", 2), ("sequence", 2)), "sequence"),
    ((4, 2), (("sequence", 2), ("model", 2), ("batch", 2)), "sequence"),
    ((4, 2), (("sequence", 8), ("batch", 1)), "sequence"),
    ((4, 2), (("batch", 2), ("model", 4)), "model"),
)


def check(processes, axes, sequence):
    (expected,) = shared_cluster(1, 8).call(sequences.train)
    results = shared_cluster(*processes).call(sequences.train, axes, sequence)
    # Keras' attention computes in float32 in part.
    parity.compare(expected, results, 1e-7)
    # Together the own rows are all rows.
    rows = {row.tobytes() for row in expected["own"].round(6)}
    own = np.concatenate([result["own"] for result in results])
    assert {row.tobytes() for row in own.round(6)} == rows


@pytest.mark.parametrize(("processes", "axes", "sequence"), CASES)
def test_trains_as_on_one_device(processes, axes, sequence):
    check(processes, axes, sequence)


@pytest.mark.full
@pytest.mark.parametrize(("processes", "axes", "sequence"), MORE)
def test_trains_as_on_one_device_full(processes, axes, sequence):
    check(processes, axes, sequence)
