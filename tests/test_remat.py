"""Rematerialization changes memory, and nothing else."""

import jax
import keras
import numpy as np
import pytest

import keras_meshdist as kmd
from tests import plans


class Noisy(keras.layers.Layer):
    """A block with all that a layer may have: state, noise, losses, a mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(
            16, activation="tanh", use_bias=False, name="dense"
        )
        self.dropout = keras.layers.Dropout(0.3, seed=7, name="dropout")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.supports_masking = True

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)
        self.built = True

    def call(self, x, training=False, mask=None):
        y = self.norm(self.dense(x), training=training)
        y = self.dropout(y, training=training)
        self.add_loss(keras.ops.mean(keras.ops.square(y)))
        return x + y


def noisy(remat):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(11, 16, mask_zero=True, name="embedding")(x)
    for number in range(4):
        x = Noisy(name=f"noisy_{number}")(x)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(x))
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return kmd.remat_blocks(model) if remat else model


@pytest.mark.extra
def test_training_is_the_same():
    rows = np.random.default_rng(0).integers(0, 11, (32, 5))
    targets = np.sin(rows.sum(1, keepdims=True))
    found = []
    for remat in (False, True):
        model = noisy(remat)
        history = model.fit(
            rows, targets, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history
        found.append(
            (history, model.get_weights(), model.predict(rows, verbose=0))
        )
    (losses, weights, outputs), (others, its_weights, its_outputs) = found
    for name, values in losses.items():
        np.testing.assert_allclose(others[name], values, rtol=1e-5)
    for mine, its in zip(weights, its_weights, strict=True):
        np.testing.assert_allclose(its, mine, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(its_outputs, outputs, rtol=1e-4, atol=1e-5)


def test_every_block_is_computed_again():
    def operations(model):
        def loss(trainable, others, rows):
            outputs, _ = model.stateless_call(
                trainable, others, rows, training=True
            )
            return outputs.sum()

        return str(
            jax.make_jaxpr(jax.grad(loss))(
                [v.value for v in model.trainable_variables],
                [v.value for v in model.non_trainable_variables],
                np.ones((2, 5), "int32"),
            )
        )

    assert operations(noisy(False)).count(" tanh ") == 4
    assert operations(noisy(True)).count(" tanh ") == 8


def test_model_without_blocks():
    with pytest.raises(ValueError, match="three or more layers"):
        kmd.remat_blocks(plans.dense())


def test_layout_rules_are_the_same():
    mesh = kmd.make_mesh({"batch": 2, "model": 4})
    plain = kmd.layouts.auto(plans.deep, mesh)
    remat = kmd.layouts.auto(lambda: kmd.remat_blocks(plans.deep()), mesh)
    assert {rule: remat[rule].axes for rule in remat} == {
        rule: plain[rule].axes for rule in plain
    }
    assert any("up/kernel" in rule for rule in plain)
