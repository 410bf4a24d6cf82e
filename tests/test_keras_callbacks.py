"""Keras' callbacks that decide and write, on meshes and several processes."""

import numpy as np
import pytest

from tests import listening
from tests.clusters import shared_cluster


@pytest.mark.extra
@pytest.mark.parametrize("writes", [False, True])
def test_one_decision_and_one_writer(tmp_path, writes):
    if writes:
        pytest.importorskip("tensorboard")
    expected, best, restored, _, _ = listening.run(None, None)
    for one, other in zip(best, restored, strict=True):
        np.testing.assert_array_equal(one, other)
    assert 4 < len(expected["loss"]) < 10
    folder = str(tmp_path / "logs") if writes else None
    answers = shared_cluster(2, 4).call(listening.run, "last", folder)
    for history, best, restored, kept, _ in answers:
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-4)
        for one, other in zip(best, restored, strict=True):
            np.testing.assert_array_equal(one, other)
        # What is the best stays in shards.
        assert (None, "m") in kept
    for one, other in zip(*(a[2] for a in answers), strict=True):
        np.testing.assert_array_equal(one, other)
    if writes:
        assert listening.writers(folder) == {answers[0][4]}


@pytest.mark.extra
def test_a_lower_learning_rate_on_all():
    expected = listening.plateau(None)
    assert expected[0] > expected[-1]
    for rates in shared_cluster(2, 4).call(listening.plateau, "last"):
        assert rates == expected
