"""KerasHub presets that are saved and loaded, in the processes of a cluster."""

import json
import pathlib

import numpy as np

from tests import saved, written


def build(seed):
    import keras
    import keras_hub

    keras.utils.set_random_seed(seed)
    return keras_hub.models.GemmaBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=128,
        intermediate_dim=512,
        head_dim=32,
    )


def distribution(axes):
    import keras_hub

    import keras_meshdist as kmd

    if axes is None:
        return None
    mesh = kmd.make_mesh(dict(axes))
    layout_map = kmd.layouts.for_backbone(
        keras_hub.models.GemmaBackbone, mesh, model_axis="model"
    )
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def values(model):
    # Keras' numbers in names change from one build to the next.
    return [np.asarray(v) for v in model.weights]


def with_scope(axes):
    import keras

    saved.with_scope(None)
    keras.distribution.set_distribution(distribution(axes))


def save(axes, folder, max_shard_size=10, seed=1):
    """Saves; returns the values, and the names of the files there are."""
    import keras

    with_scope(axes)
    try:
        backbone = build(seed)
        backbone.save_to_preset(folder, max_shard_size=max_shard_size)
        found = pathlib.Path(folder).iterdir()
        return values(backbone), sorted(p.name for p in found)
    finally:
        keras.distribution.set_distribution(None)


def load(axes, folder, skip):
    """Loads; returns the values and the pieces that the largest lies in."""
    import contextlib

    import keras
    import keras_hub

    import keras_meshdist as kmd

    with_scope(axes)
    try:
        skipping = kmd.skip_initializers() if skip else contextlib.nullcontext()
        with skipping:
            backbone = keras_hub.models.Backbone.from_preset(folder)
        table = backbone.token_embedding.embeddings.value
        shard = table.sharding.shard_shape(table.shape)
        return values(backbone), table.size // int(np.prod(shard))
    finally:
        keras.distribution.set_distribution(None)


def read(axes, folder):
    """Loads; returns the bytes of each part that is read of a large tensor."""
    with written.counted() as parts:
        load(axes, folder, True)
    return parts


def fail(axes, folder):
    """The first process can't write; returns the error of each."""
    import jax
    import keras

    with_scope(axes)
    try:
        backbone = build(3)
        if jax.process_index() == 0:
            backbone.get_config = _raise
        try:
            backbone.save_to_preset(folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"
    finally:
        keras.distribution.set_distribution(None)


def _raise():
    raise OSError("no space left")


def transformers(folder, parts):
    """Writes a preset as of Transformers, in so many files of safetensors."""
    from safetensors.numpy import load_file, save_file

    backbone = build(1)
    folder = pathlib.Path(folder)
    backbone.export_to_transformers(str(folder))
    if parts > 1:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        path.unlink()
        where = {}
        for part in range(parts):
            name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
            some = dict(sorted(tensors.items())[part::parts])
            save_file(some, folder / name, metadata={"format": "pt"})
            where.update(dict.fromkeys(some, name))
        text = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(text)
    return values(backbone)
