"""Training of a small language model whose sequences are split.

It runs in the processes of a cluster.
"""

import numpy as np

LENGTH, VOCABULARY, ROWS = 8, 40, 13


def build():
    """The gradient of a bias of keys is zero, so there are no biases."""
    import keras

    layers = keras.layers
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 16)(ids)
    y = layers.MultiHeadAttention(2, 8, use_bias=False)(
        x, x, use_causal_mask=True
    )
    x = layers.Add()([x, y])
    y = layers.Dense(32, "relu", name="up")(x)
    x = layers.Add()([x, layers.Dense(16, name="down")(y)])
    x = layers.Dropout(0.2)(x)
    return keras.Model(ids, layers.Dense(VOCABULARY, name="head")(x))


def train(axes=(), sequence=None):
    """Returns what a user sees of it; on one device without axes."""
    import jax
    import keras

    import keras_meshdist as kmd

    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    dist = None
    if axes:
        names = [name for name, _ in axes]
        layout_map = kmd.layouts.auto(
            build,
            kmd.make_mesh(dict(axes)),
            model_axis="model" if "model" in names else None,
            sequence_axis=sequence,
        )
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    try:
        return _train()
    finally:
        keras.distribution.set_distribution(None)


def _train():
    import keras

    import keras_meshdist as kmd
    from tests import parity

    model = build()
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, VOCABULARY, (2, ROWS, LENGTH))
    history = model.fit(
        x, y, batch_size=8, epochs=2, verbose=0, shuffle=False
    ).history
    numbers = {name: np.array(values) for name, values in history.items()}
    numbers["predict"] = model.predict(x, batch_size=8, verbose=0)
    with kmd.local_predictions():
        own = model.predict(x, batch_size=8, verbose=0)
    numbers["train_on_batch"] = np.array(model.train_on_batch(x[:5], y[:5]))
    variables = [*model.variables, *model.optimizer.variables]
    return {"numbers": numbers, "own": own, **parity.on_devices(variables)}
