"""Llama 3.1 405B, to be planned.

    PYTHONPATH=. meshdist plan benchmarks.llama405b:build --topology v6e-256 \\
        --batch 16 --seq 8192 --mesh fsdp=16,model=16 --dtype bfloat16
"""

from benchmarks.published import compiled


def build():
    import keras_hub

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=128256,
        num_layers=126,
        num_query_heads=128,
        num_key_value_heads=8,
        hidden_dim=16384,
        intermediate_dim=53248,
    )
    return compiled(
        keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    )
