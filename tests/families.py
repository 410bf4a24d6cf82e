"""Small models of KerasHub's language models and encoders."""

import dataclasses
import functools

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Family:
    """A class of backbones, and the arguments of a small one."""

    backbone: str
    config: tuple

    def build(self):
        import keras_hub

        return getattr(keras_hub.models, self.backbone)(**dict(self.config))


def _family(backbone, **config):
    common = {"vocabulary_size": 128, "num_layers": 2}
    return Family(backbone, tuple({**common, **config}.items()))


_heads = functools.partial(
    _family, num_heads=4, hidden_dim=32, intermediate_dim=64
)
_grouped = functools.partial(
    _family,
    num_query_heads=4,
    num_key_value_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
)
_sizes = functools.partial(
    _grouped, num_query_heads=4, num_key_value_heads=1, head_dim=8
)

FAMILIES = {
    # One head of keys and values.
    "gemma": _sizes("GemmaBackbone"),
    "gemma2": _sizes(
        "GemmaBackbone",
        num_key_value_heads=2,
        query_head_dim_normalize=False,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        final_logit_soft_cap=30,
        attention_logit_soft_cap=50,
        sliding_window_size=16,
        use_sliding_window_attention=True,
    ),
    "llama": _grouped("LlamaBackbone"),
    "llama3": _grouped("Llama3Backbone"),
    "mistral": _grouped("MistralBackbone", sliding_window=16),
    "mixtral": _grouped("MixtralBackbone", num_experts=4),
    "phi3": _grouped("Phi3Backbone"),
    "qwen": _grouped("QwenBackbone"),
    "qwen_moe": _grouped(
        "QwenMoeBackbone",
        moe_intermediate_dim=32,
        shared_expert_intermediate_dim=32,
        num_experts=4,
        top_k=2,
    ),
    "qwen3": _grouped("Qwen3Backbone", head_dim=8),
    "qwen3_moe": _grouped(
        "Qwen3MoeBackbone",
        head_dim=8,
        moe_intermediate_dim=32,
        num_experts=4,
        top_k=2,
    ),
    "gpt_oss": _grouped("GptOssBackbone", num_experts=4, top_k=2),
    "gpt2": _heads("GPT2Backbone", max_sequence_length=64),
    "gpt_neo_x": _heads("GPTNeoXBackbone"),
    "opt": _heads("OPTBackbone", max_sequence_length=64),
    "bloom": _heads("BloomBackbone"),
    "falcon": _family(
        "FalconBackbone",
        num_attention_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
    ),
    "t5": _heads("T5Backbone"),
    # An odd vocabulary.
    "bert": _heads("BertBackbone", vocabulary_size=101, max_sequence_length=64),
    "roberta": _heads("RobertaBackbone", max_sequence_length=64),
    "distil_bert": _heads("DistilBertBackbone", max_sequence_length=64),
    "albert": _heads(
        "AlbertBackbone", embedding_dim=16, max_sequence_length=64
    ),
    "deberta": _heads(
        "DebertaV3Backbone", max_sequence_length=64, bucket_size=8
    ),
    "whisper": _heads(
        "WhisperBackbone",
        num_mels=8,
        max_encoder_sequence_length=64,
        max_decoder_sequence_length=64,
    ),
}


def train(name, axes=None, fsdp_axis=None, lora=False, quantize=None):
    """Returns losses and predictions of a small model, and its weights.

    With `axes` on a mesh, under the layouts that `auto` reads off the model.
    """
    import keras

    import keras_meshdist as kmd

    keras.config.set_floatx("float64")
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    dist = None
    if axes:
        layout_map = kmd.layouts.auto(
            FAMILIES[name].build,
            kmd.make_mesh(dict(axes)),
            fsdp_axis=fsdp_axis,
            min_size=0,
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    try:
        return _train(name, lora, quantize)
    finally:
        keras.distribution.set_distribution(None)


def _train(name, lora, quantize):
    import keras

    backbone = FAMILIES[name].build()
    if lora:
        backbone.enable_lora(2)
    if quantize:
        backbone.quantize(quantize)
    inputs = backbone.input
    outputs = keras.tree.flatten(backbone(inputs))[-1]
    if len(outputs.shape) > 2:
        outputs = keras.layers.GlobalAveragePooling1D()(outputs)
    head = keras.layers.Dense(3, name="head")
    model = keras.Model(inputs, head(outputs))
    rng = np.random.default_rng(0)

    def data(tensor):
        shape = (13, *(16 if n is None else n for n in tensor.shape[1:]))
        if "mask" in tensor.name:
            return np.ones(shape, "int32")
        if "float" in tensor.dtype:
            return rng.normal(size=shape)
        top = 2 if "segment" in tensor.name else 100
        return rng.integers(1, top, shape)

    x = keras.tree.map_structure(data, inputs)
    y = rng.integers(0, 3, 13)
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(
        x, y, batch_size=8, epochs=1, verbose=0, shuffle=False
    ).history
    numbers = [
        np.array(history["loss"]),
        np.array(model.evaluate(x, y, batch_size=8, verbose=0)),
        model.predict(x, batch_size=8, verbose=0),
    ]
    weights = {v.path: np.asarray(v) for v in model.trainable_variables}
    split = sum(
        not v.value.sharding.is_fully_replicated
        for v in model.variables
        if len(v.shape) > 1
    )
    return numbers, weights, split


def rules(name, axes, **arguments):
    """Returns the rules that `auto` reads off a family, a line each."""
    import keras

    import keras_meshdist as kmd

    keras.utils.clear_session()
    devices = [f"cpu:{n}" for n in range(8)]
    mesh = keras.distribution.DeviceMesh(
        tuple(axes.values()), tuple(axes), devices
    )
    layout_map = kmd.layouts.auto(FAMILIES[name].build, mesh, **arguments)
    lines = [
        f"  {rule}: {layout_map[rule].axes}"
        for rule in layout_map
        if rule not in layout_map.optional
    ]
    return "\n".join([f"{name}:", *sorted(lines)])


def golden():
    """Returns the rules of all families, as `golden/layouts.txt` has them."""
    axes = {"batch": 4, "model": 2}
    return "\n".join(rules(name, axes) for name in FAMILIES) + "\n"


if __name__ == "__main__":
    print(golden(), end="")
