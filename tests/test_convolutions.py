"""Convolutions: XLA's partitioner, left alone, multiplies their gradients."""

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import keras_meshdist as kmd

layers = keras.layers
SAME = {"padding": "same"}
IMAGE, SEQUENCE, VOLUME = (8, 8, 4), (8, 4), (4, 4, 4, 4)


class Patches(layers.Layer):
    """Patches are made by a convolution, with a kernel that isn't trained."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")

    def call(self, x):
        x = keras.ops.matmul(x, self.kernel)
        return keras.ops.image.extract_patches(x, 2)


KINDS = {
    "conv1d_causal": (
        lambda: layers.Conv1D(8, 3, padding="causal", dilation_rate=2),
        SEQUENCE,
    ),
    "conv2d": (lambda: layers.Conv2D(8, 3), IMAGE),
    "conv2d_strided": (lambda: layers.Conv2D(8, 3, 2, **SAME), IMAGE),
    "conv2d_of_groups": (lambda: layers.Conv2D(8, 3, groups=2), IMAGE),
    "conv2d_channels_first": (
        lambda: layers.Conv2D(8, 3, data_format="channels_first"),
        IMAGE,
    ),
    "conv3d": (lambda: layers.Conv3D(8, 3, **SAME), VOLUME),
    "depthwise1d": (lambda: layers.DepthwiseConv1D(3, **SAME), SEQUENCE),
    "depthwise2d": (
        lambda: layers.DepthwiseConv2D(3, 2, depth_multiplier=2),
        IMAGE,
    ),
    "separable1d": (lambda: layers.SeparableConv1D(8, 3), SEQUENCE),
    "transposed1d": (lambda: layers.Conv1DTranspose(8, 3, 2), SEQUENCE),
    "transposed2d": (lambda: layers.Conv2DTranspose(8, 3, 2), IMAGE),
    "lstm1d": (
        lambda: layers.ConvLSTM1D(4, 3, **SAME, return_sequences=True),
        (4, 8, 4),
    ),
    "patches": (Patches, IMAGE),
}


LONGER = ("conv2d_strided", "lstm1d", "separable1d")


def over_three_axes(rank=4, kernel=None):
    """A distribution with windows split by a rule."""
    mesh = kmd.make_mesh({"model": 2, "batch": 2, "space": 2})
    layout_map = kmd.LayoutMap(mesh)
    layout_map["layer/output"] = ("batch", "space", *[None] * (rank - 2))
    if kernel:
        layout_map["layer/kernel"] = (*[None] * (rank - 1), "model")
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def derivatives(make, shape, rows=8):
    """Outputs and all gradients of a layer, the second ones too."""
    keras.utils.set_random_seed(0)
    layer = make()
    layer.name = "layer"
    x = np.random.default_rng(0).normal(size=(rows, *shape)).astype("float32")
    layer.build((None, *shape))
    distribution = keras.distribution.distribution()
    if distribution is not None:
        axes = ("batch", "space", *[None] * (len(shape) - 1))
        layout = kmd.TensorLayout(axes, distribution.device_mesh)
        x = distribution.place_leaf(x, layout)

    def apply(weights, x):
        return layer.stateless_call(weights, others, x)[0]

    def loss(weights, x):
        y = apply(weights, x)
        return keras.ops.sum(keras.ops.sin(y) * np.arange(y.shape[-1]))

    def penalty(weights, x):
        return keras.ops.sum(keras.ops.square(jax.grad(loss, 1)(weights, x)))

    weights = [v.value for v in layer.trainable_variables]
    others = [v.value for v in layer.non_trainable_variables]
    return jax.device_get(
        (
            jax.jit(apply)(weights, x),
            jax.jit(jax.grad(loss, (0, 1)))(weights, x),
            jax.jit(jax.grad(penalty))(weights, x),
            jax.grad(loss)(weights, x),
        )
    )


def close(got, expected):
    for one, other in zip(
        jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(
            one, other, rtol=0, atol=2e-5 * np.max(np.abs(other))
        )


@pytest.fixture
def quick_compilation():
    """How programs are partitioned is the same, and they compile faster."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.extra if kind in LONGER else ())
        for kind in KINDS
    ],
)
def test_every_kind_is_as_on_one_device(kind):
    make, shape = KINDS[kind]
    expected = derivatives(make, shape)
    kernel = kind.startswith(("conv", "transposed"))
    with over_three_axes(len(shape) + 1, kernel).scope():
        close(derivatives(make, shape), expected)


def test_what_lies_on_one_device_stays_there():
    image, kernel = np.ones((1, 8, 8, 4), "float32"), np.ones((3, 3, 4, 8))
    with over_three_axes().scope():
        blurred = keras.ops.conv(image, kernel.astype("float32"))
    assert len(blurred.sharding.device_set) == 1


@pytest.mark.skipif(
    not hasattr(jax, "shard_map"), reason="an older JAX has no jax.shard_map"
)
def test_a_shard_map_of_the_users_is_left_alone():
    image = np.random.default_rng(0).normal(size=(8, 8, 8, 4))
    kernel = np.random.default_rng(1).normal(size=(3, 3, 4, 8))
    expected = keras.ops.conv(image, kernel)
    distribution = over_three_axes()
    rows = PartitionSpec("batch")
    with distribution.scope():
        split = jax.shard_map(
            lambda x: keras.ops.conv(x, kernel),
            mesh=kmd.mesh.jax_mesh(distribution.device_mesh),
            in_specs=rows,
            out_specs=rows,
        )
        got = jax.jit(split)(image)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
