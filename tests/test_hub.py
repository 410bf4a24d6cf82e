"""KerasHub models on meshes against one device."""

import keras
import numpy as np
import pytest
from packaging.version import Version
from parameterized import parameterized

pytest.importorskip("keras_hub", reason="KerasHub is in the extra `hub`")

from tests import hub
from tests.clusters import shared_cluster
from tests.hub import HubCase

if Version(keras.__version__) < Version("3.15"):
    pytest.skip("KerasHub 0.32 needs Keras 3.15", allow_module_level=True)

CASES = [
    ((1, 8), HubCase("gemma", (("model", 4), ("batch", 2)), "batch", True)),
    ((2, 4), HubCase("llama", (("model", 2), ("fsdp", 4)), "fsdp")),
    ((1, 8), HubCase("gemma", (("model", 4), ("batch", 2)), "batch")),
    (
        (2, 4),
        HubCase(
            "gemma",
            (("model", 2), ("data", 2), ("fsdp", 2)),
            ("data", "fsdp"),
        ),
    ),
    ((2, 4), HubCase("llama", (("fsdp", 4), ("model", 2)), "fsdp", True)),
]


def _name(function, index, parameters):
    return f"{function.__name__}_{index}_{parameters.args[1].family}"


class TestHub:
    @parameterized.expand(CASES[:2], name_func=_name)
    def test_trains_as_on_one_device(self, shape, case):
        self.check(shape, case)

    @parameterized.expand(CASES[2:], name_func=_name)
    @pytest.mark.full
    def test_trains_as_on_one_device_full(self, shape, case):
        self.check(shape, case)

    def check(self, shape, case):
        one = HubCase(case.family, (), "", case.lora)
        expected, predicted, weights = shared_cluster(1, 8).call(
            hub.train, one
        )[0]
        for got, out, variables in shared_cluster(*shape).call(hub.train, case):
            for name, values in expected.items():
                np.testing.assert_allclose(got[name], values, rtol=1e-8)
            # KerasHub computes partly in float32.
            scale = np.abs(predicted).max()
            np.testing.assert_allclose(out, predicted, atol=1e-5 * scale)
            assert len(variables) == len(weights)
            for path, value in weights.items():
                if np.issubdtype(value.dtype, np.floating):
                    scale = np.abs(value).max(initial=1e-30)
                    np.testing.assert_allclose(
                        variables[path], value, atol=1e-5 * scale
                    )


@pytest.mark.parametrize(
    ("prompts", "axes", "sampler"),
    [
        (1, {"model": 2, "batch": 4}, "greedy"),
        (3, {"batch": 4, "model": 2}, "top_k"),
        (4, {"batch": 4, "model": 2}, "greedy"),
    ],
)
def test_generates_as_on_one_device(prompts, axes, sampler):
    cluster = shared_cluster(2, 4)
    expected = cluster.call(hub.generate, None, prompts, sampler)[0]
    assert expected.shape == (prompts, 12)
    for got in cluster.call(hub.generate, axes, prompts, sampler):
        np.testing.assert_array_equal(got, expected)
