"""Small models of KerasHub's language models and encoders."""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Family:
    """A class of models, and the arguments of a small one.

    Args:
        name: str, the class in `keras_hub.models`.
        config: dict; a value may be a `Family`, which is built then.
        sizes: dict from an input's name to the shape of a row, where sizes
            are unknown and aren't those of a short text.
        rows: dict from an input's name to a row of it, for one that can't be
            of random numbers.
    """

    name: str
    config: dict
    sizes: dict = dataclasses.field(default_factory=dict)
    rows: dict = dataclasses.field(default_factory=dict)

    @property
    def backbone(self):
        import keras_hub

        return getattr(keras_hub.models, self.name)

    def build(self):
        config = {
            name: value.build() if isinstance(value, Family) else value
            for name, value in self.config.items()
        }
        return self.backbone(**config)


def _family(backbone, sizes=None, rows=None, **config):
    common = {"vocabulary_size": 128, "num_layers": 2}
    return Family(backbone, {**common, **config}, sizes or {}, rows or {})


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


def _twice(backbone):
    """An encoder and a decoder that are configured each for itself."""
    config = {
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    both = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in config.items()
    }
    # With the default of 1, scores are so large that rounding is amplified.
    rest = {"query_pre_attn_scalar": 8, "cross_attention_hidden_size": 32}
    config = {"vocabulary_size": 128, "sliding_window": 4, **both, **rest}
    return Family(backbone, config)


_patches = {"image_shape": (8, 8, 3), "patch_size": 4}
_images = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32}
_encoder = {**_patches, **_images, "intermediate_dim": 64}


def _text_and_images(name, **config):
    """Two encoders, and as outputs how well each pair fits."""
    text = {"embedding_dim": 32, "max_sequence_length": 16}
    return Family(
        f"{name}Backbone",
        {
            "vision_encoder": Family(f"{name}VisionEncoder", _encoder),
            "text_encoder": _heads(f"{name}TextEncoder", **text),
            **config,
        },
    )


# One image, of which the text has four tokens, from its third on.
_vision = {
    **_images,
    "image_size": 16,
    "patch_size": 4,
    "intermediate_dim": 64,
    "output_dim": 32,
    "pool_size": 2,
}
_places = {
    "vision_indices": np.arange(2, 6),
    "vision_mask": np.isin(np.arange(16), np.arange(2, 6)),
}
_linear_attention = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
}
_gemma4 = functools.partial(
    _sizes,
    "Gemma4Backbone",
    num_key_value_heads=2,
    image_size=16,
    sliding_window_size=4,
)
_positions = {"position_ids": np.arange(16)}

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
    "gpt2": _heads("GPT2Backbone", max_sequence_length=16),
    "gpt_neo_x": _heads("GPTNeoXBackbone"),
    "opt": _heads("OPTBackbone", max_sequence_length=16),
    "bloom": _heads("BloomBackbone"),
    "falcon": _family(
        "FalconBackbone",
        num_attention_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
    ),
    "t5": _heads("T5Backbone"),
    # An odd vocabulary.
    "bert": _heads("BertBackbone", vocabulary_size=101, max_sequence_length=16),
    "roberta": _heads("RobertaBackbone", max_sequence_length=16),
    "distil_bert": _heads("DistilBertBackbone", max_sequence_length=16),
    "albert": _heads(
        "AlbertBackbone", embedding_dim=16, max_sequence_length=16
    ),
    "deberta": _heads(
        "DebertaV3Backbone", max_sequence_length=16, bucket_size=8
    ),
    "whisper": _heads(
        "WhisperBackbone",
        num_mels=8,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=16,
    ),
    "xlm_roberta": _heads("XLMRobertaBackbone", max_sequence_length=16),
    "electra": Family(
        "ElectraBackbone",
        {
            "vocab_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_dim": 32,
            "intermediate_dim": 64,
            "embedding_dim": 16,
            "max_sequence_length": 16,
        },
    ),
    "xlnet": _heads("XLNetBackbone"),
    "esm": _heads("ESMBackbone"),
    "roformer_v2": _heads("RoformerV2Backbone", head_size=8),
    "bart": _heads("BartBackbone", max_sequence_length=16),
    "gemma3": _sizes(
        "Gemma3Backbone",
        num_key_value_heads=2,
        image_size=16,
        use_sliding_window_attention=True,
        sliding_window_size=4,
    ),
    "gemma3_vision": _sizes(
        "Gemma3Backbone",
        num_key_value_heads=2,
        image_size=16,
        vision_encoder=Family("Gemma3VisionEncoder", _vision),
        sizes={"images": (1, 16, 16, 3)},
        rows=_places,
    ),
    "gemma3n": Family(
        "Gemma3nBackbone",
        {
            "text_vocab_size": 128,
            "text_hidden_size": 32,
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": [64, 64],
            "hidden_activation": "gelu_approximate",
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 4,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
        },
    ),
    "gemma4": _gemma4(
        num_layers=3,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", *["full_attention"] * 2],
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        rows=_positions,
    ),
    "gemma4_moe": _gemma4(
        enable_moe_block=True,
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_dim=32,
        rows=_positions,
    ),
    "gemma4_vision": _gemma4(
        vision_encoder=Family(
            "Gemma4VisionEncoder", {**_vision, "head_dim": 8}
        ),
        sizes={"pixel_values": (1, 16, 48)},
        rows={
            **_positions,
            **_places,
            "pixel_position_ids": [[divmod(n, 4) for n in range(16)]],
        },
    ),
    "pali_gemma": _sizes(
        "PaliGemmaBackbone",
        image_size=16,
        vit_patch_size=4,
        vit_num_heads=4,
        vit_hidden_dim=32,
        vit_num_layers=2,
        vit_intermediate_dim=64,
    ),
    "t5gemma": _twice("T5GemmaBackbone"),
    "t5gemma2": _twice("T5Gemma2Backbone"),
    "qwen3_5": _grouped("Qwen3_5Backbone", head_dim=8, **_linear_attention),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeBackbone",
        {
            "vocabulary_size": 128,
            "num_layers": 2,
            "num_query_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_dim": 32,
            "moe_intermediate_dim": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "top_k": 2,
            **_linear_attention,
        },
    ),
    "smollm3": _family(
        "SmolLM3Backbone",
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention"] * 2,
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        max_position_embeddings=64,
        rope_theta=10000.0,
        partial_rotary_factor=1.0,
    ),
    # So wide that the low ranks of its gates, which aren't split, are few.
    "rwkv7": _family(
        "RWKV7Backbone",
        hidden_size=64,
        head_size=16,
        intermediate_dim=128,
        gate_lora=4,
        mv_lora=4,
        aaa_lora=4,
        decay_lora=4,
    ),
    "edrec": Family(
        "EdRecBackbone",
        {
            "vocab_size": 128,
            "num_layers_enc": 2,
            "num_layers_dec": 2,
            "hidden_dim": 32,
            "intermediate_dim": 64,
            "num_heads": 4,
        },
    ),
    "moonshine": Family(
        "MoonshineBackbone",
        {
            "vocabulary_size": 128,
            "filter_dim": 32,
            "encoder_num_layers": 2,
            "decoder_num_layers": 2,
            "hidden_dim": 32,
            "intermediate_dim": 64,
            "encoder_num_heads": 4,
            "decoder_num_heads": 4,
        },
        sizes={
            "encoder_input_values": (1024, 1),
            "encoder_padding_mask": (1024,),
        },
    ),
    "vit": Family("ViTBackbone", {**_patches, **_images, "mlp_dim": 64}),
    "deit": Family("DeiTBackbone", _encoder),
    "dinov2": Family(
        "DINOV2Backbone", {**_encoder, "position_embedding_shape": (8, 8, 3)}
    ),
    "clip": _text_and_images("CLIP", projection_dim=8),
    "metaclip2": _text_and_images("MetaCLIP2", projection_dim=8),
    "siglip": _text_and_images("SigLIP"),
}
