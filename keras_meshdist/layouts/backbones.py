"""Layout rules for KerasHub's backbones."""

import functools
import inspect
import math

import keras

from keras_meshdist.layouts.automatic import auto

# Parameters of KerasHub's backbones that have no default, with what a small
# model takes whose every dimension divides by `n`. Rules don't depend on it.
_TYPICAL = (
    (("vocabulary_size", "vocab_size", "text_vocab_size"), lambda n: 32 * n),
    (("vocab_size_per_layer_input",), lambda n: 32 * n),
    (("num_layers", "num_hidden_layers", "vit_num_layers"), lambda n: 2),
    (("encoder_num_layers", "decoder_num_layers"), lambda n: 2),
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
            "encoder_hidden_dim",
            "decoder_hidden_dim",
        ),
        lambda n: 16 * n,
    ),
    (
        (
            "intermediate_dim",
            "moe_intermediate_dim",
            "shared_expert_intermediate_dim",
            "shared_expert_intermediate_size",
            "encoder_intermediate_dim",
            "decoder_intermediate_dim",
            "mlp_dim",
            "filter_dim",
        ),
        lambda n: 64 * n,
    ),
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
    (("attention_bias", "mlp_bias"), lambda n: False),
    (("attention_dropout",), lambda n: 0.0),
    (("rope_layer_enabled_list",), lambda n: [True] * 2),
    (("layer_norm_epsilon",), lambda n: 1e-6),
    (("max_position_embeddings",), lambda n: 128),
    (("rope_theta",), lambda n: 10000.0),
    (("partial_rotary_factor",), lambda n: 1.0),
)
_VALUES = {name: value for names, value in _TYPICAL for name in names}


def for_backbone(backbone, mesh, **arguments):
    """Layout rules for a KerasHub backbone, its class, or a task.

    Given a class, the rules are those of a small model of that class whose
    every dimension divides. When a larger one is built, an entry that doesn't
    divide there, such as few heads of keys and values, is left out for that
    variable.

    Example:

    ```python
    layout_map = kmd.layouts.for_backbone(
        keras_hub.models.LlamaBackbone, mesh, fsdp_axis="fsdp"
    )
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="fsdp")
    keras.distribution.set_distribution(dist)
    model = keras_hub.models.LlamaCausalLM.from_preset("llama3_8b_en")
    ```

    Args:
        backbone: a `keras.Model`, such as a backbone or a task, a function
            that returns one, or a class of backbones.
        mesh: `keras.distribution.DeviceMesh`.
        **arguments: of `auto`, such as `model_axis` and `fsdp_axis`.

    Returns:
        A `LayoutMap`.

    Raises:
        ValueError: if it isn't known how a small model of the class is built.
    """
    if not isinstance(backbone, type):
        return auto(backbone, mesh, **arguments)
    if not issubclass(backbone, keras.Model):
        raise ValueError(
            "Layout rules are for a backbone, or a class of them. Received: "
            f"{backbone!r}."
        )
    pieces = math.prod(mesh.shape)
    parameters = inspect.signature(backbone.__init__).parameters.values()
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        and parameter.name != "self"
    ]
    unknown = [name for name in needed if name not in _VALUES]
    if unknown:
        raise ValueError(
            f"Nothing is known of the arguments {unknown} of "
            f"{backbone.__name__}. Give a model, or a function that builds "
            "one: `for_backbone(lambda: Backbone(...), mesh)`."
        )
    config = {name: _VALUES[name](pieces) for name in needed}
    # Of a small model just the scales and biases are small.
    arguments.setdefault("min_size", 32 * pieces + 1)
    return auto(functools.partial(backbone, **config), mesh, **arguments)
