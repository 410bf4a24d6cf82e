"""KerasHub's backbones under the layouts that are read off them."""

import collections
import functools
import itertools
import math
import pathlib
import re

import jax
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


@functools.cache
def train_on_one_device(name, **how):
    (results,) = shared_cluster(1, 8).call(families.train, name, **how)
    return results


def check(name, axes, further, layout=None, **how):
    expected, weights, none = train_on_one_device(name, **how)
    ((numbers, others, split),) = shared_cluster(1, 8).call(
        families.train, name, axes, further, **(layout or {}), **how
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


CHANGES = ({"lora": True}, {"quantize": "int8"}, {"quantize": "int4"})
CHANGED = [
    (how, axes, further)
    for how in CHANGES
    for axes in MESHES
    for further in (None, "batch")
]
FEW = [(how, MESHES[1], None) for how in CHANGES]


@pytest.mark.parametrize(("how", "axes", "further"), FEW, ids=str)
def test_after_a_change_of_the_model(how, axes, further):
    check("llama", axes, further, **how)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma", "llama"])
@pytest.mark.parametrize(("how", "axes", "further"), CHANGED, ids=str)
def test_after_a_change_of_the_model_full(name, how, axes, further):
    check(name, axes, further, **how)


def three(*names):
    return tuple((name, 2) for name in names)


SEQUENCES = (
    (three("batch", "sequence", "model"), None, "sequence"),
    (three("model", "sequence", "batch"), "batch", "sequence"),
    (MESHES[0], None, "model"),
    (MESHES[1], "batch", "model"),
)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma", "llama", "bert"])
@pytest.mark.parametrize(("axes", "further", "sequence"), SEQUENCES, ids=str)
def test_trains_with_split_sequences_full(name, axes, further, sequence):
    check(name, axes, further, {"sequence_axis": sequence})


# Meshes by which the small models' heads divide as these maps want it.
UPSTREAM = (
    ("gemma2", MESHES[2]),
    ("gemma2", MESHES[3]),
    *itertools.product(("llama", "qwen", "qwen_moe", "qwen3_moe"), MESHES[:2]),
)


@pytest.mark.parametrize(("name", "axes"), [UPSTREAM[1], UPSTREAM[2]], ids=str)
def test_trains_under_kerashub_s_own_map(name, axes):
    check(name, axes, None, {"rules": "upstream"})


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "axes"), [UPSTREAM[0], *UPSTREAM[3:]], ids=str
)
def test_trains_under_kerashub_s_own_map_full(name, axes):
    check(name, axes, None, {"rules": "upstream"})


def test_trains_under_a_map_of_parts_of_paths():
    check("llama", MESHES[1], None, {"rules": "parts"})


@pytest.mark.parametrize(
    ("name", "kind", "about"),
    [
        ("llama", "large and replicated", "token_embedding/reverse_embeddings"),
        ("gemma", "doesn't divide", "decoder_block_1/attention/key/kernel"),
    ],
)
def test_what_is_wrong_with_kerashub_s_own_map_is_said(name, kind, about):
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    layout_map = FAMILIES[name].backbone.get_layout_map(mesh)
    report = reports.examine(kmd.abstract(FAMILIES[name].build), layout_map)
    assert (kind, about) in {(f.kind, f.about) for f in report.findings}


def test_experts_that_kerashub_s_own_map_leaves_whole_are_named():
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 2, "model": 4})
    build = FAMILIES["qwen3_moe"].build
    layout_map = FAMILIES["qwen3_moe"].backbone.get_layout_map(mesh)
    findings = reports.examine(kmd.abstract(build), layout_map).findings
    experts = [f for f in findings if "expert" in f.about]
    assert {f.kind for f in experts} == {"large and replicated"}
    assert len(experts) == 4  # two kernels in each of two layers


def test_keys_that_are_parts_of_paths_are_found():
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    layout_map = families.parts_of_paths(mesh)
    report = reports.examine(kmd.abstract(FAMILIES["llama"].build), layout_map)
    layouts = {row.path: row.axes for row in report.rows}
    found = layouts["transformer_layer_1/feedforward_output_dense/kernel"]
    assert found == ("model", "batch")
    assert "unmatched rule" not in {f.kind for f in report.findings}


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


# As published: small models would hide how little positions take.
PUBLISHED = {
    "gpt2": {
        "vocabulary_size": 50257,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "max_sequence_length": 1024,
    },
    "opt": {
        "vocabulary_size": 50272,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "max_sequence_length": 2048,
    },
    "bert": {
        "vocabulary_size": 30522,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "max_sequence_length": 512,
    },
    "whisper": {
        "vocabulary_size": 51864,
        "num_layers": 6,
        "num_heads": 8,
        "hidden_dim": 512,
        "intermediate_dim": 2048,
        "max_encoder_sequence_length": 3000,
        "max_decoder_sequence_length": 448,
    },
    "bart": {
        "vocabulary_size": 50265,
        "num_layers": 6,
        "num_heads": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "max_sequence_length": 1024,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_nearly_all_of_a_published_model_is_split(name):
    def build():
        return FAMILIES[name].backbone(**PUBLISHED[name])

    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    layout_map = kmd.layouts.auto(build, mesh)
    report = reports.examine(kmd.abstract(build), layout_map)
    split = 2 * (1 - report.device_bytes / report.total_bytes)
    assert split > 0.95


_EXCHANGE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)


def exchanges_of_a_block(name, layout_map_of):
    """What devices exchange in a block forward, counted in the program."""

    def count(layers):
        def build():
            config = {**FAMILIES[name].config, "num_layers": layers}
            return FAMILIES[name].backbone(**config)

        keras.utils.clear_session()
        dist = kmd.ModelParallel(
            layout_map=layout_map_of(build), batch_dim_name="batch"
        )
        with dist.scope():
            model = build()
            ones = np.ones((8, 16), "int32")
            data = {"token_ids": ones, "padding_mask": ones}
            program = jax.jit(lambda *a: model.stateless_call(*a)[0]).lower(
                [v.value for v in model.trainable_variables],
                [v.value for v in model.non_trainable_variables],
                dist.place_batch(data),
            )
            text = program.compile().as_text()
        return collections.Counter(_EXCHANGE.findall(text))

    two, four = count(2), count(4)
    return {kind: (four[kind] - two[kind]) / 2 for kind in four | two}


AXES = ({"batch": 4, "model": 2}, {"model": 2, "batch": 4})


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_block_exchanges_twice(name, axes):
    """After attention, and after the feed-forward part, as in Megatron-LM."""
    mesh = kmd.make_mesh(axes)
    found = exchanges_of_a_block(
        name, lambda build: kmd.layouts.auto(build, mesh)
    )
    assert found == {"all-reduce": 2}


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen"])
def test_no_more_is_exchanged_than_under_kerashub_s_own_map(name):
    # Of four devices, since their maps must divide the two heads of keys.
    mesh = kmd.make_mesh({"batch": 2, "model": 2}, jax.devices()[:4])
    found = exchanges_of_a_block(
        name, lambda build: kmd.layouts.auto(build, mesh)
    )
    theirs = exchanges_of_a_block(
        name, lambda build: FAMILIES[name].backbone.get_layout_map(mesh)
    )
    assert sum(found.values()) <= sum(theirs.values())


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
