"""A real KerasHub language model, trained on a mesh and on one device."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class HubCase:
    family: str
    axes: tuple[tuple[str, int], ...]
    batch: str | tuple[str, ...]
    lora: bool = False


def train(case):
    """Returns losses, and every variable whole, of two epochs."""
    import jax
    import keras

    import keras_meshdist as kmd

    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    dist = None
    if case.axes:
        mesh = kmd.make_mesh(dict(case.axes))
        layout_map = kmd.LayoutMap(mesh)
        rows = "fsdp" if "fsdp" in mesh.axis_names else None
        layout_map[".*token_embedding/embeddings"] = ("model", rows)
        layout_map[".*(ffw_gating|gate_dense|intermediate).*/kernel"] = (
            rows,
            "model",
        )
        layout_map[".*(ffw_linear|output_dense|ffn_out).*/kernel"] = (
            "model",
            rows,
        )
        layout_map[".*attention/query/kernel"] = (
            ("model", None, rows)
            if case.family == "gemma"
            else (rows, "model", None)
        )
        dist = kmd.ModelParallel(
            layout_map=layout_map, batch_dim_name=case.batch
        )
    keras.distribution.set_distribution(dist)
    try:
        return _train(case)
    finally:
        keras.distribution.set_distribution(None)


def generate(axes, prompts, sampler):
    """Returns what a small Gemma generates from so many prompts."""
    import jax
    import keras
    import keras_hub

    import keras_meshdist as kmd

    # KerasHub's samplers mix kinds of integers otherwise.
    jax.config.update("jax_enable_x64", False)
    keras.config.set_floatx("float32")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    dist = None
    if axes:
        layout_map = kmd.LayoutMap(kmd.make_mesh(axes))
        layout_map[".*token_embedding/embeddings"] = ("model", None)
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    try:
        backbone = keras_hub.models.GemmaBackbone(
            num_layers=2,
            vocabulary_size=64,
            hidden_dim=16,
            num_query_heads=4,
            num_key_value_heads=1,
            intermediate_dim=64,
            head_dim=4,
        )
        model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
        model.compile(sampler=sampler)
        tokens = np.random.default_rng(0).integers(1, 64, size=(prompts, 12))
        known = np.broadcast_to(np.arange(12) < 5, tokens.shape)
        prompt = {"token_ids": tokens.astype("int32"), "padding_mask": known}
        generated = model.generate(prompt, stop_token_ids=None)
        return np.asarray(generated["token_ids"])
    finally:
        keras.distribution.set_distribution(None)


def _train(case):
    import keras
    import keras_hub

    sizes = {"num_layers": 2, "vocabulary_size": 64, "hidden_dim": 16}
    if case.family == "gemma":
        backbone = keras_hub.models.GemmaBackbone(
            **sizes,
            num_query_heads=4,
            num_key_value_heads=1,
            intermediate_dim=64,
            head_dim=4,
            dtype="float64",
        )
        model = keras_hub.models.GemmaCausalLM(backbone, preprocessor=None)
    else:
        backbone = keras_hub.models.LlamaBackbone(
            **sizes,
            num_query_heads=4,
            num_key_value_heads=2,
            intermediate_dim=32,
            dtype="float64",
        )
        model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    if case.lora:
        backbone.enable_lora(2)
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, size=(11, 9))
    x = {"token_ids": tokens[:, :-1], "padding_mask": tokens[:, :-1] > 3}
    y, weight = tokens[:, 1:], tokens[:, 1:] > 3
    history = model.fit(
        x, y, 4, epochs=2, sample_weight=weight, shuffle=False, verbose=0
    )
    out = model.predict(x, batch_size=4, verbose=0)
    return (
        {k: np.array(v) for k, v in history.history.items()},
        out,
        {v.path: _whole(v.value) for v in model.variables},
    )


def _whole(value):
    from keras_meshdist.predictions import fetch

    return fetch(value)
