"""Small models of every structure that layouts are read from."""

import functools

import jax
import keras
import numpy as np

layers = keras.layers


def mlp():
    return keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(64, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(3),
        ]
    )


def convolutions():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.DepthwiseConv2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )


def recurrent():
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(40, 16),
            layers.LSTM(16, return_sequences=True),
            layers.GRU(8),
            layers.Dense(3),
        ]
    )


def _block(x, attend):
    x = layers.Add()([x, attend(layers.LayerNormalization()(x))])
    y = layers.LayerNormalization()(x)
    up = layers.Dense(128, name="up")(y)
    gate = layers.Dense(128, activation="silu", name="gate")(y)
    y = layers.Dense(64, name="down")(layers.Multiply()([up, gate]))
    return layers.Add()([x, y])


def _language_model(vocabulary, attend):
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(vocabulary, 64)(ids)
    x = _block(x, attend)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, layers.Dense(3, name="head")(x))


def transformer():
    attention = layers.MultiHeadAttention(8, 8)
    return _language_model(96, lambda x: attention(x, x, use_causal_mask=True))


def grouped():
    attention = layers.GroupQueryAttention(8, 8, 2)
    return _language_model(96, lambda x: attention(x, x))


def odd_vocabulary():
    attention = layers.MultiHeadAttention(8, 8)
    return _language_model(101, lambda x: attention(x, x))


class Experts(layers.Layer):
    """A mixture of four experts, all of them used, by their weights."""

    def build(self, shape):
        hidden = shape[-1]
        self.router = self.add_weight(name="router", shape=(hidden, 4))
        self.up = self.add_weight(name="up", shape=(4, hidden, 32))
        self.down = self.add_weight(name="down", shape=(4, 32, hidden))

    def call(self, x):
        gates = keras.ops.softmax(keras.ops.matmul(x, self.router))
        y = keras.ops.relu(keras.ops.einsum("bh,ehf->ebf", x, self.up))
        y = keras.ops.einsum("ebf,efh->ebh", y, self.down)
        return x + keras.ops.einsum("ebh,be->bh", y, gates)


def experts():
    return keras.Sequential(
        [
            keras.Input((20,)),
            layers.Dense(16),
            Experts(),
            Experts(),
            layers.Dense(3),
        ]
    )


ALL = {
    "mlp": mlp,
    "convolutions": convolutions,
    "recurrent": recurrent,
    "transformer": transformer,
    "grouped": grouped,
    "odd_vocabulary": odd_vocabulary,
    "experts": experts,
}


def train(name, optimizer="sgd", dist=None):
    """Returns the losses of three epochs, and all weights after them."""
    if dist is None:
        return _alone(name, optimizer)
    with dist.scope():
        return _train(name, optimizer)


@functools.cache
def _alone(name, optimizer):
    keras.utils.clear_session()
    return _train(name, optimizer)


def _train(name, optimizer):
    # How programs are partitioned is the same, and they compile faster.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return _train_fast(name, optimizer)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def _train_fast(name, optimizer):
    keras.utils.set_random_seed(5)
    model = ALL[name]()
    rng = np.random.default_rng(0)
    shape = (13, *model.input_shape[1:])
    ids = name not in ("mlp", "convolutions", "experts")
    x = rng.integers(0, 40, shape) if ids else rng.normal(size=shape)
    y = rng.integers(0, 3, 13)
    # Adam makes noise of gradients that are zero, unless `epsilon` is large.
    optimizers = {
        "sgd": keras.optimizers.SGD(0.1),
        "adam": keras.optimizers.Adam(0.1, epsilon=1e-2),
    }
    model.compile(
        optimizers[optimizer],
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(
        x, y, batch_size=8, epochs=3, verbose=0, shuffle=False
    ).history
    return [
        np.array(history["loss"]),
        model.predict(x, batch_size=8, verbose=0),
        *[np.asarray(w) for w in model.get_weights()],
    ]
