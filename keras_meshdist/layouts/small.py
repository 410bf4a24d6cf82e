"""Small models of KerasHub's classes, which have all that theirs may have."""

import inspect

# Parameters of KerasHub's backbones that have no default, with what a small
# model takes whose every dimension divides by `n`. Rules don't depend on it.
_TYPICAL = (
    (("vocabulary_size", "vocab_size", "text_vocab_size"), lambda n: 32 * n),
    (("vocab_size_per_layer_input",), lambda n: 32 * n),
    (
        (
            "num_layers",
            "num_hidden_layers",
            "vit_num_layers",
            "encoder_num_layers",
            "decoder_num_layers",
            "num_layers_enc",
            "num_layers_dec",
        ),
        lambda n: 2,
    ),
    (
        (
            "num_heads",
            "num_query_heads",
            "num_key_value_heads",
            "num_attention_heads",
            "vit_num_heads",
            "encoder_num_heads",
            "decoder_num_heads",
            "encoder_num_attention_heads",
            "encoder_num_key_value_heads",
            "decoder_num_attention_heads",
            "decoder_num_key_value_heads",
        ),
        lambda n: n,
    ),
    (
        ("head_dim", "encoder_head_dim", "decoder_head_dim", "head_size"),
        lambda n: 16,
    ),
    (
        (
            "hidden_dim",
            "hidden_size",
            "text_hidden_size",
            "embedding_dim",
            "vit_hidden_dim",
            "filter_dim",
            "projection_dim",
            "output_dim",
            "encoder_hidden_dim",
            "decoder_hidden_dim",
        ),
        lambda n: 16 * n,
    ),
    (
        (
            "intermediate_dim",
            "moe_intermediate_dim",
            "expert_intermediate_dim",
            "shared_expert_intermediate_dim",
            "shared_expert_intermediate_size",
            "encoder_intermediate_dim",
            "decoder_intermediate_dim",
            "mlp_dim",
        ),
        lambda n: 64 * n,
    ),
    (("hidden_size_per_layer_input", "laurel_rank"), lambda n: 8 * n),
    (("altup_num_inputs",), lambda n: 2),
    (("intermediate_size",), lambda n: [64 * n] * 2),
    (("num_experts",), lambda n: max(n, 2)),
    (("top_k",), lambda n: 2),
    (("image_shape",), lambda n: (32, 32, 3)),
    (("image_size",), lambda n: 32),
    (("patch_size", "vit_patch_size"), lambda n: 8),
    (
        ("layer_types", "encoder_layer_types", "decoder_layer_types"),
        lambda n: ["full_attention"] * 2,
    ),
    (("hidden_activation",), lambda n: "gelu_approximate"),
    (("sliding_window",), lambda n: 16),
    (("pad_token_id",), lambda n: 0),
    (("attention_bias", "mlp_bias"), lambda n: False),
    (("attention_dropout",), lambda n: 0.0),
    (("rope_layer_enabled_list",), lambda n: [True] * 2),
    (("layer_norm_epsilon",), lambda n: 1e-6),
    (("max_position_embeddings",), lambda n: 128),
    (("rope_theta",), lambda n: 10000.0),
    (("partial_rotary_factor",), lambda n: 1.0),
)
_VALUES = {name: value for names, value in _TYPICAL for name in names}


def _part(name, **besides):
    """A part of a model that is a model itself, by the name of its class."""

    def build(n):
        import keras_hub

        return small(getattr(keras_hub.models, name), n, besides)

    return build


def _encoders(name):
    return {
        "vision_encoder": _part(f"{name}VisionEncoder"),
        "text_encoder": _part(f"{name}TextEncoder"),
    }


_TWO_KINDS = {"layer_types": lambda n: ["linear_attention", "full_attention"]}

# What small models of a class have besides: parts that not all of its models
# have, and parts that are models.
_BESIDES = {
    "CLIPBackbone": _encoders("CLIP"),
    "MetaCLIP2Backbone": _encoders("MetaCLIP2"),
    "SigLIPBackbone": _encoders("SigLIP"),
    "Gemma3Backbone": {
        "vision_encoder": _part("Gemma3VisionEncoder", pool_size=2)
    },
    "Gemma4Backbone": {
        "vision_encoder": _part("Gemma4VisionEncoder", pool_size=2),
        "enable_moe_block": lambda n: True,
        "num_experts": _VALUES["num_experts"],
        "num_experts_per_token": _VALUES["top_k"],
        "expert_intermediate_dim": _VALUES["expert_intermediate_dim"],
        "hidden_size_per_layer_input": _VALUES["hidden_size_per_layer_input"],
        "vocab_size_per_layer_input": _VALUES["vocab_size_per_layer_input"],
    },
    "Qwen3_5Backbone": _TWO_KINDS,
    "Qwen3_5MoeBackbone": _TWO_KINDS,
}


def small(cls, n, besides=None, plain=False):
    """Returns a small model of a class.

    Args:
        cls: class of models.
        n: int, by which every dimension divides.
        besides: dict, further arguments.
        plain: bool, whether it has nothing that it can do without.

    Raises:
        ValueError: if it isn't known how one is built.
    """
    parameters = inspect.signature(cls.__init__).parameters.values()
    parameters = [p for p in parameters if p.kind is not p.VAR_KEYWORD][1:]
    needed = [p.name for p in parameters if p.default is p.empty]
    more = _BESIDES.get(cls.__name__, {})
    unknown = [name for name in needed if name not in (_VALUES | more)]
    if unknown:
        raise ValueError(
            f"Nothing is known of the arguments {unknown} of {cls.__name__}. "
            "Give a model, or a function that builds one: "
            "`for_backbone(lambda: Backbone(...), mesh)`."
        )
    names = needed if plain else [*needed, *more]
    values = {name: (_VALUES | more)[name](n) for name in names}
    tied = "tie_word_embeddings"
    if tied in [p.name for p in parameters]:
        values[tied] = plain
    return cls(**values, **(besides or {}))
