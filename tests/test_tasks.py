"""Generating, saving and loading under the layouts that `auto` reads."""

import functools
import itertools

import keras
import numpy as np
import pytest
from packaging.version import Version

pytest.importorskip("keras_hub", reason="KerasHub is in the extra `hub`")

from tests import tasks
from tests.clusters import shared_cluster
from tests.test_families import MESHES, ids

if Version(keras.__version__) < Version("3.15"):
    pytest.skip("KerasHub 0.32 needs Keras 3.15", allow_module_level=True)

COVERING = [("gemma", MESHES[1], None), ("llama", MESHES[2], "batch")]


def whole(names):
    return list(itertools.product(names, MESHES, (None, "batch")))


REST = [case for case in whole(tasks.GENERATORS) if case not in COVERING]


@functools.cache
def generate_on_one_device(name):
    (tokens,) = shared_cluster(1, 8).call(tasks.generate, name)
    return tokens


def check_tokens(name, axes, further):
    expected = generate_on_one_device(name)
    (found,) = shared_cluster(1, 8).call(tasks.generate, name, axes, further)
    assert expected.shape[0] == 3
    assert len(np.unique(expected)) > 5
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("case", COVERING, ids=ids(COVERING))
def test_generates_as_on_one_device(case):
    check_tokens(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_generates_as_on_one_device_full(case):
    check_tokens(*case)


def check_round_trip(name, axes, further, lora):
    cluster = shared_cluster(1, 8)
    (seen,) = cluster.call(tasks.round_trip, name, axes, further, lora)
    before, weights, split = seen.pop("saved")
    scale = np.max(np.abs(before))
    assert split
    assert seen["weights"][2] == split
    # LoRA's part isn't saved as such: Keras puts it into the kernels.
    assert 0 < seen["whole"][2] <= split
    assert not seen["on one device"][2]
    for how, (after, others, _) in seen.items():
        # KerasHub computes in float32 in part.
        assert np.max(np.abs(after - before)) < 2e-6 * scale, how
        if not lora:
            for one, other in zip(weights, others, strict=True):
                np.testing.assert_array_equal(other, one, how)


CASES = [
    (*case, lora)
    for case in whole(["gemma", "llama"])
    for lora in (False, True)
]
FEW = [(*COVERING[0], True), (*COVERING[1], False)]
MANY = [case for case in CASES if case not in FEW]


def ids_of(cases):
    names = ids([case[:3] for case in cases])
    return [
        f"{name}-{'lora' if case[3] else 'plain'}"
        for name, case in zip(names, cases, strict=True)
    ]


@pytest.mark.parametrize("case", FEW, ids=ids_of(FEW))
def test_saves_and_loads(case):
    check_round_trip(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MANY, ids=ids_of(MANY))
def test_saves_and_loads_full(case):
    check_round_trip(*case)
