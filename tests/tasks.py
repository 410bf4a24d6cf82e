"""KerasHub's language models at work under the layouts read off them."""

import contextlib
import functools
import pathlib
import tempfile

import numpy as np

from tests.backbones import FAMILIES

CLASSES = {"gemma": "GemmaCausalLM", "llama": "LlamaCausalLM"}


def build(name):
    import keras_hub

    cls = getattr(keras_hub.models, CLASSES[name])
    return cls(FAMILIES[name].build(), preprocessor=None)


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


def generate(name, axes=None, further=None, prompts=3):
    """Returns the tokens that a small model takes for the likeliest."""
    tokens = np.random.default_rng(0).integers(1, 100, size=(prompts, 12))
    known = np.broadcast_to(np.arange(12) < 5, tokens.shape)
    with laid_out(name, axes, further, "float32"):
        model = build(name)
        model.compile(sampler="greedy")
        generated = model.generate(
            {"token_ids": tokens.astype("int32"), "padding_mask": known},
            stop_token_ids=None,
        )
        return np.asarray(generated["token_ids"])


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
