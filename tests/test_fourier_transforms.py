"""Fourier transforms of what is split, at which XLA may end the process."""

import keras
import numpy as np
import pytest

import keras_meshdist as kmd

LAYOUTS = ((None, "batch"), (None, "model"), (None, ("batch", "model")))


class Mix(keras.layers.Layer):
    """What an F-Net has for attention."""

    def call(self, x):
        return keras.ops.fft2((x, keras.ops.zeros_like(x)))[0]


def step(rows):
    """Returns all weights after one step on so many rows."""
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    model = keras.Sequential(
        [
            keras.Input((6, 16)),
            keras.layers.Dense(32, name="before"),
            Mix(),
            keras.layers.Dense(3, name="after"),
        ]
    )
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    model.train_on_batch(
        rng.normal(size=(rows, 6, 16)), rng.normal(size=(rows, 6, 3))
    )
    return [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [8, 5])
def test_one_step_is_as_on_one_device(rows, axes):
    expected = step(rows)
    layout_map = kmd.LayoutMap(kmd.make_mesh({"batch": 4, "model": 2}))
    layout_map[".*before/kernel"] = axes
    layout_map[".*before/bias"] = axes[1:]
    layout_map[".*after/kernel"] = axes[::-1]
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with dist.scope():
        found = step(rows)
    for one, other in zip(expected, found, strict=True):
        scale = np.max(np.abs(one))
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * scale)
