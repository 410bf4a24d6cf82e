"""KerasHub's backbones under the layouts that are read off them."""

import itertools
import math
import pathlib

import keras
import numpy as np
import pytest
from packaging.version import Version

pytest.importorskip("keras_hub", reason="KerasHub is in the extra `hub`")

import keras_meshdist as kmd
from keras_meshdist import reports
from tests import families
from tests.clusters import shared_cluster
from tests.families import FAMILIES

if Version(keras.__version__) < Version("3.15"):
    pytest.skip("KerasHub 0.32 needs Keras 3.15", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Layer .* was passed an input with a mask:UserWarning",
    "ignore:The 'rwkv_ops' package is not installed:UserWarning",
)
MESHES = (
    (("batch", 2), ("model", 4)),
    (("model", 4), ("batch", 2)),
    (("batch", 4), ("model", 2)),
    (("model", 2), ("batch", 4)),
)
SIX = ("gemma", "llama", "qwen3_moe", "gpt2", "bert", "t5")
WHOLE = list(itertools.product(FAMILIES, MESHES, (None, "batch")))
COVERING = [
    (name, MESHES[n % 4], (None, "batch")[n % 2]) for n, name in enumerate(SIX)
]
REST = [case for case in WHOLE if case not in COVERING]


def ids(cases):
    return [
        f"{name}-{'x'.join(f'{a}{n}' for a, n in axes)}-{further}"
        for name, axes, further in cases
    ]


def check(name, axes, further, **how):
    cluster = shared_cluster(1, 8)
    ((expected, weights, none),) = cluster.call(families.train, name, **how)
    ((numbers, others, split),) = cluster.call(
        families.train, name, axes, further, **how
    )
    assert not none
    assert split
    # KerasHub computes in float32 in part, and what is quantized falls to
    # either side of a step.
    fine = 5e-7, 5e-7, 2e-6
    coarse = 5e-7, 1e-4, 1e-2
    tolerances = coarse if "quantize" in how else fine
    for one, other, tolerance in zip(
        expected, numbers, tolerances, strict=True
    ):
        worst = np.max(np.abs(other - one)) / np.max(np.abs(one))
        assert worst < tolerance, worst
    for (path, one), other in zip(
        weights.items(), others.values(), strict=True
    ):
        scale = max(np.max(np.abs(one)), 1e-3)
        assert np.max(np.abs(other - one)) < 1e-5 * scale, path


@pytest.mark.parametrize("case", COVERING, ids=ids(COVERING))
def test_trains_as_on_one_device(case):
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_trains_as_on_one_device_full(case):
    check(*case)


@pytest.mark.parametrize("how", [{"lora": True}, {"quantize": "int8"}], ids=str)
def test_after_a_change_of_the_model(how):
    check("llama", MESHES[1], None, **how)


@pytest.mark.parametrize("name", FAMILIES)
def test_nearly_all_is_split_and_nothing_is_wrong(name):
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    layout_map = kmd.layouts.auto(FAMILIES[name].build, mesh)
    report = reports.examine(kmd.abstract(FAMILIES[name].build), layout_map)
    kinds = {finding.kind for finding in report.findings}
    assert kinds <= {"large and replicated"}
    split = 2 * (1 - report.device_bytes / report.total_bytes)
    assert split > 0.95


@pytest.mark.parametrize("name", FAMILIES)
def test_the_class_alone_gives_the_same_rules(name):
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    rules = kmd.layouts.for_backbone(FAMILIES[name].backbone, mesh)
    report = reports.examine(kmd.abstract(FAMILIES[name].build), rules)
    split = 2 * (1 - report.device_bytes / report.total_bytes)
    # The small models have an odd vocabulary, or one head of keys and values,
    # of which the rules for their class know nothing.
    assert split > (0.8 if name == "bert" else 0.9)


def llama_405b():
    import keras_hub

    return keras_hub.models.LlamaBackbone(
        vocabulary_size=128256,
        num_layers=126,
        num_query_heads=128,
        num_key_value_heads=8,
        hidden_dim=16384,
        intermediate_dim=53248,
        dtype="bfloat16",
    )


def gemma2_27b():
    import keras_hub

    return keras_hub.models.GemmaBackbone(
        vocabulary_size=256000,
        num_layers=46,
        num_query_heads=32,
        num_key_value_heads=16,
        hidden_dim=4608,
        intermediate_dim=73728,
        head_dim=128,
        dtype="bfloat16",
    )


def mixtral_8x7b():
    import keras_hub

    return keras_hub.models.MixtralBackbone(
        vocabulary_size=32000,
        num_layers=32,
        num_query_heads=32,
        num_key_value_heads=8,
        hidden_dim=4096,
        intermediate_dim=14336,
        num_experts=8,
        dtype="bfloat16",
    )


def qwen3_235b():
    import keras_hub

    return keras_hub.models.Qwen3MoeBackbone(
        vocabulary_size=151936,
        num_layers=94,
        num_query_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        hidden_dim=4096,
        intermediate_dim=12288,
        moe_intermediate_dim=1536,
        num_experts=128,
        top_k=8,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    "build", [llama_405b, gemma2_27b, mixtral_8x7b, qwen3_235b]
)
def test_large_models_are_spread_evenly(build):
    keras.utils.clear_session()
    mesh = keras.distribution.DeviceMesh(
        (16, 16), ("fsdp", "model"), [f"cpu:{n}" for n in range(256)]
    )
    layout_map = kmd.layouts.auto(build, mesh, fsdp_axis="fsdp")
    report = reports.examine(kmd.abstract(build), layout_map)
    total = sum(math.prod(r.shape) for r in report.rows)
    assert total > 2e10
    assert report.device_bytes * 256 < 1.05 * report.total_bytes


def test_layouts_are_those_of_the_golden_file():
    """`python -m tests.families > tests/golden/layouts.txt` writes it anew."""
    written = pathlib.Path(__file__).parent / "golden" / "layouts.txt"
    assert families.golden() == written.read_text()
