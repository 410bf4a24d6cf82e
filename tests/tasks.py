"""KerasHub's language models at work under the layouts read off them."""

import contextlib
import functools
import pathlib
import tempfile

import numpy as np

from tests.backbones import FAMILIES

# The families that generate, and the task's class where it isn't called as
# the backbone.
GENERATORS = (
    *("gemma", "gemma2", "llama", "llama3", "mistral", "mixtral", "phi3"),
    *("qwen", "qwen_moe", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"),
    *("gpt_oss", "gpt2", "gpt_neo_x", "opt", "bloom", "falcon", "smollm3"),
    # Gemma 3 without images needs a preprocessor.
    *("rwkv7", "gemma3_vision", "gemma3n", "gemma4", "gemma4_moe"),
    *("gemma4_vision", "pali_gemma"),
    *("t5", "bart", "t5gemma", "t5gemma2", "edrec"),
)
SEQ2SEQ = ("t5", "bart", "t5gemma", "t5gemma2", "edrec")


def build(name):
    import keras_hub

    family = FAMILIES[name]
    kind = "Seq2SeqLM" if name in SEQ2SEQ else "CausalLM"
    cls = getattr(keras_hub.models, family.name.replace("Backbone", kind))
    return cls(backbone=family.build(), preprocessor=None)


@contextlib.contextmanager
def laid_out(name, axes, further, floatx="float64"):
    """Context with a small model's layouts, or of one device, without axes."""
    import jax
    import keras

    import keras_meshdist as kmd

    # KerasHub's samplers mix kinds of integers with 64 bits.
    jax.config.update("jax_enable_x64", floatx == "float64")
    keras.config.set_floatx(floatx)
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    if axes:
        layout_map = kmd.layouts.auto(
            functools.partial(build, name),
            kmd.make_mesh(dict(axes)),
            fsdp_axis=further,
            min_size=0,
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        keras.distribution.set_distribution(dist)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


def prompts_of(name, rows):
    """Returns what a family generates from: texts, some with an image."""
    rng, family = np.random.default_rng(0), FAMILIES[name]

    def text(prefix, known, mask="padding_mask", length=16):
        tokens = rng.integers(1, 100, size=(rows, length))
        given = np.broadcast_to(np.arange(length) < known, tokens.shape)
        return {
            f"{prefix}token_ids": tokens.astype("int32"),
            f"{prefix}{mask}": given,
        }

    if name in SEQ2SEQ:
        return {**text("encoder_", 16), **text("decoder_", 3)}
    if name == "rwkv7":
        generated = text("predict_", 1, "mask")
        mask = generated.pop("predict_mask")
        prompt = text("", 16, "input_padding_mask")
        return {**prompt, **generated, "padding_mask": mask}
    inputs = text("", 8)
    for key, value in family.rows.items():
        inputs[key] = np.array([value] * rows)
    for key, shape in family.sizes.items():
        inputs[key] = rng.normal(size=(rows, *shape)).astype("float32")
    if name == "pali_gemma":
        images = rng.normal(size=(rows, 16, 16, 3))
        inputs["images"] = images.astype("float32")
    return inputs


def generate(name, axes=None, further=None, rows=3):
    """Returns the tokens that a small model takes for the likeliest."""
    with laid_out(name, axes, further, "float32"):
        model = build(name)
        model.compile(sampler="greedy")
        generated = model.generate(prompts_of(name, rows), stop_token_ids=None)
        if isinstance(generated, dict):
            key = "decoder_token_ids" if name in SEQ2SEQ else "token_ids"
            generated = generated[key]
        return np.asarray(generated)


def round_trip(name, axes=None, further=None, lora=False):
    """Saves a model and loads it, as weights and whole, and on one device.

    Returns:
        Dict from a name of each of these models, and of the one that was
        saved, to what it predicts, its weights, and how many are split.
    """
    import keras

    x = {
        "token_ids": np.random.default_rng(0).integers(1, 100, size=(13, 9)),
        "padding_mask": np.ones((13, 9), "int32"),
    }

    def look(model):
        split = [
            tuple(v.value.sharding.spec)
            for v in model.variables
            if not v.value.sharding.is_fully_replicated
        ]
        weights = model.get_weights()
        return model.predict(x, batch_size=8, verbose=0), weights, len(split)

    def new(seed):
        keras.utils.set_random_seed(seed)
        model = build(name)
        if lora:
            model.backbone.enable_lora(2)
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "model.weights.h5"
        whole = pathlib.Path(folder) / "model.keras"
        with laid_out(name, axes, further):
            model = new(1)
            model.fit(x, x["token_ids"], 8, epochs=2, verbose=0)
            seen["saved"] = look(model)
            model.save_weights(weights)
            model.save(whole)
            model = new(2)
            model.load_weights(weights)
            seen["weights"] = look(model)
            seen["whole"] = look(keras.saving.load_model(whole))
        seen["on one device"] = look(keras.saving.load_model(whole))
    return seen
