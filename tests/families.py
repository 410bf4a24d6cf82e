"""KerasHub's small models, trained on meshes, and their layout rules."""

import jax
import numpy as np

from tests.backbones import FAMILIES


def train(
    name,
    axes=None,
    fsdp_axis=None,
    rules="auto",
    sequence_axis=None,
    lora=False,
    quantize=None,
):
    """Returns losses and predictions of a small model, and its weights.

    With `axes` on a mesh, under rules of a kind: those that `auto` reads off
    the model, KerasHub's own for the class ("upstream"), or some whose keys
    are parts of paths ("parts").
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
        mesh, family = kmd.make_mesh(dict(axes)), FAMILIES[name]
        if rules == "upstream":
            layout_map = family.backbone.get_layout_map(mesh)
        elif rules == "parts":
            layout_map = parts_of_paths(mesh)
        else:
            layout_map = kmd.layouts.auto(
                family.build,
                mesh,
                fsdp_axis=fsdp_axis,
                sequence_axis=sequence_axis,
                min_size=0,
            )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    try:
        return _train(name, lora, quantize)
    finally:
        keras.distribution.set_distribution(None)


def parts_of_paths(mesh):
    """Rules for a Llama as they were written for Keras before 3.14."""
    import keras

    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["token_embedding/embeddings"] = ("model", None)
    layout_map["self_attention/query/kernel"] = (None, "model", None)
    layout_map["(gate|intermediate)_dense/kernel"] = (None, "model")
    layout_map["feedforward_output_dense/kernel"] = ("model", "batch")
    return layout_map


def shorten_chunks():
    """Of linear attention: XLA compiles a loop over 64 steps for minutes."""
    from keras_hub.src.models.qwen3_5 import qwen3_5_gated_delta_net as net

    function = net._chunk_gated_delta_rule
    chunk_size, *others = function.__defaults__
    function.__defaults__ = (min(chunk_size, 8), *others)


def _train(name, lora, quantize):
    import keras

    if name.startswith("qwen3_5"):
        shorten_chunks()
    backbone = FAMILIES[name].build()
    if lora:
        backbone.enable_lora(2)
    if quantize:
        backbone.quantize(quantize)
    inputs = backbone.input
    outputs = backbone(inputs)
    if isinstance(outputs, dict):
        last = "decoder_sequence_output"  # else of the text, not of the whole
        outputs = outputs.get(last, outputs[max(outputs)])
    if outputs.shape[-1] is None:  # with each row of the batch
        outputs = keras.ops.sum(outputs, axis=-1, keepdims=True)
    if len(outputs.shape) > 2:
        outputs = keras.layers.GlobalAveragePooling1D()(outputs)
    head = keras.layers.Dense(3, name="head")
    model = keras.Model(inputs, head(outputs))
    rng, family = np.random.default_rng(0), FAMILIES[name]

    def data(tensor):
        row = [16 if n is None else n for n in tensor.shape[1:]]
        shape = (13, *family.sizes.get(tensor.name, row))
        if tensor.name in family.rows:
            return np.array([family.rows[tensor.name]] * 13, tensor.dtype)
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
    # Two encoders in a model have the same paths.
    weights = {
        f"{n}: {v.path}": np.asarray(v)
        for n, v in enumerate(model.trainable_variables)
    }
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
