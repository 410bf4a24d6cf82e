"""The examples in docstrings run."""

import ast
import importlib
import math
import os
import subprocess
import sys
import types

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rich.console import Console

import keras_meshdist as kmd
from keras_meshdist import batches, cli, coordination, environments
from tests import blocks
from tests.clusters import local_only

pytestmark = [pytest.mark.extra, pytest.mark.timeout(240)]

BLOCKS = list(blocks.in_docstrings(blocks.ROOT / "keras_meshdist"))
# What the demo does has tests of its own, and so have these on several hosts.
LEFT_OUT = {
    ("keras_meshdist.demo.command", "run"),
    ("keras_meshdist.coordination", "posts"),
    ("keras_meshdist.joining", "initialize"),
    # And this on a machine that has some.
    ("keras_meshdist.hardware", "gpus"),
    # And these on models that are planned.
    ("keras_meshdist.planner.plan", "plan"),
    ("keras_meshdist.planner.remat", "remat_blocks"),
}
# These start processes.
SEVERAL = {"main", "Cluster", "environment", "run_script"}
NEEDS_HUB = {"abstract", "for_backbone"}

IDS = [f"{module.partition('.')[2]}.{name}" for module, name, _ in BLOCKS]


def train(mesh_shape):
    """Runs in the processes of a cluster."""
    return math.prod(mesh_shape)


def build_model():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="dense"),
            keras.layers.Dense(1, name="classifier"),
        ]
    )
    model.compile("adam", "mse")
    return model


def given():
    """What the examples take for granted."""
    keras.utils.clear_session()
    mesh = kmd.make_mesh({"batch": 2, "fsdp": 2, "model": 2})
    dist = kmd.ModelParallel(
        layout_map=kmd.LayoutMap(mesh), batch_dim_name="batch"
    )
    x, y = np.ones((13, 8), "float32"), np.ones((13, 1), "float32")
    pair = kmd.make_mesh({"batch": 4, "model": 2})
    four = jax.sharding.Mesh(jax.devices()[:4], "b")
    return {
        "PartitionSpec": PartitionSpec,
        "batch": x,
        "batches": [x, x[:5]],
        "build_model": build_model,
        "cli": cli,
        "console": Console(),
        "coordination": coordination,
        "environments": environments,
        "f": lambda x: x + 1,
        "dataset": x,
        "device_mesh": mesh,
        "dist": dist,
        "jax": jax,
        "jitted_step": jax.jit(lambda state, rows: (rows.mean(), state)),
        "keras": keras,
        "kmd": kmd,
        "layout_map": kmd.layouts.auto(build_model, pair),
        "math": math,
        "mesh": mesh,
        "np": np,
        "os": os,
        "place": batches.place,
        "process": 0,
        "sharding_over_four_devices": jax.sharding.NamedSharding(
            four, PartitionSpec("b")
        ),
        "state": {},
        "subprocess": subprocess,
        "sys": sys,
        "train": train,
        "x": x,
        "y": y,
    }


def hub():
    """KerasHub with one preset that needs no download."""
    keras_hub = pytest.importorskip("keras_hub")
    sizes = {
        "vocabulary_size": 32,
        "num_layers": 1,
        "num_query_heads": 2,
        "num_key_value_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
    }

    def from_preset(name):
        backbone = keras_hub.models.LlamaBackbone(**sizes)
        return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)

    task = types.SimpleNamespace(from_preset=from_preset)
    names = {
        "LlamaBackbone": keras_hub.models.LlamaBackbone,
        "LlamaCausalLM": task,
    }
    return {
        "keras_hub": types.SimpleNamespace(
            models=types.SimpleNamespace(**names)
        ),
        "config": sizes,
    }


@pytest.fixture
def namespace(request, tmp_path, monkeypatch):
    module, name = request.param
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(blocks.ROOT))
    found = {**vars(importlib.import_module(module)), **given()}
    if name in NEEDS_HUB:
        found |= hub()
    with found["dist"].scope():
        found["model"] = model = build_model()
        if name == "distribute_model":
            model.fit(found["x"], found["y"], verbose=0)
        model.save("model.keras")
        model.save_weights("model.weights.h5")
        if name == "restore":
            checkpoint = kmd.callbacks.Checkpoint("checkpoints", "loss")
            model.fit(found["x"], found["y"], verbose=0, callbacks=[checkpoint])
        (tmp_path / "train.py").write_text("import sys; print(sys.argv)")
        yield found
    keras.distribution.set_distribution(None)


CASES = [
    pytest.param(
        (module, name),
        code,
        id=example,
        marks=[local_only] if name in SEVERAL else [],
    )
    for (module, name, code), example in zip(BLOCKS, IDS, strict=True)
    if (module, name) not in LEFT_OUT
]


@pytest.mark.parametrize(("namespace", "code"), CASES, indirect=["namespace"])
def test_example(namespace, code):
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        source = ast.unparse(statement)
        if not isinstance(statement, ast.Expr):
            exec(source, namespace)
            continue
        if source.startswith("sys.exit"):
            with pytest.raises(SystemExit, match="0"):
                eval(source, namespace)
            continue
        got = eval(source, namespace)
        _, _, comment = lines[statement.end_lineno - 1].partition("  # ")
        try:
            wanted = ast.literal_eval(comment)
        except (SyntaxError, ValueError):
            continue  # words, if anything
        assert got == wanted
