"""Gates of recurrent layers, which XLA put together wrongly on JAX 0.4."""

import itertools

import jax
import keras
import numpy as np
import pytest
from packaging.version import Version

import keras_meshdist as kmd

RULES = (
    {"kernel": (None, "batch")},
    {"kernel": ("model", "batch")},
    {"kernel": (None, "model"), "recurrent_kernel": (None, "model")},
    {"kernel": ("model", None), "recurrent_kernel": (None, ("batch", "model"))},
    {"bias": ("model",)},
)


def step(layer, rows):
    """Returns all weights after one step on so many rows."""
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    model = keras.Sequential(
        [
            keras.Input((6, 16)),
            getattr(keras.layers, layer)(16, name="recurrent"),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.train_on_batch(
        rng.normal(size=(rows, 6, 16)), rng.normal(size=(rows, 3))
    )
    return [np.asarray(weight) for weight in model.get_weights()]


# XLA of newer JAX versions is right by itself.
AFFECTED = Version(jax.__version__) < Version("0.6.2")
CASES = [*itertools.product(["LSTM", "GRU"], [8, 5], RULES)]


@pytest.mark.parametrize(
    ("layer", "rows", "rules"),
    [
        pytest.param(*case, marks=() if chosen else pytest.mark.full)
        for i, case in enumerate(CASES)
        for chosen in [AFFECTED or i % 7 == 0]
    ],
    ids=str,
)
def test_one_step_is_as_on_one_device(layer, rows, rules):
    expected = step(layer, rows)
    layout_map = kmd.LayoutMap(kmd.make_mesh({"batch": 4, "model": 2}))
    for name, axes in rules.items():
        if name == "bias" and layer == "GRU":
            axes = (None, *axes)
        layout_map[f".*cell/{name}"] = axes
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    with dist.scope():
        found = step(layer, rows)
    for one, other in zip(expected, found, strict=True):
        scale = np.max(np.abs(one))
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5 * scale)
