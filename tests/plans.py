"""Models to be planned, by their names, in processes of the planner's own."""

import keras

import keras_meshdist as kmd


def dense():
    """Large products and little else: flops are those of the products."""
    model = keras.Sequential(
        [
            keras.Input((1024,)),
            keras.layers.Dense(4096, activation="relu", name="up"),
            keras.layers.Dense(1024, name="down"),
            keras.layers.Dense(16, name="out"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def recurrent():
    """A loop, with what devices exchange in each of its turns."""
    model = keras.Sequential(
        [
            keras.Input((12, 64)),
            keras.layers.GRU(256, name="gru", reset_after=False),
            keras.layers.Dense(8, name="out"),
        ]
    )
    model.compile("adam", "mse")
    return model


def raising():
    raise KeyError("no such preset")


def uncompiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def huge():
    model = keras.Sequential(
        [keras.Input((2**17,)), keras.layers.Dense(2**17, name="wide")]
    )
    model.compile("sgd", "mse")
    return model


def over_columns(mesh):
    layout_map = kmd.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


class Block(keras.layers.Layer):
    """A residual block, as wide as it is told."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.up = keras.layers.Dense(width, activation="gelu", name="up")
        self.down = keras.layers.Dense(256, name="down")
        self.dropout = keras.layers.Dropout(0.1, name="dropout")

    def build(self, shape):
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.width))
        self.built = True

    def call(self, x):
        return x + self.dropout(self.down(self.up(self.norm(x))))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def deep(widths=(1024,) * 12):
    x = inputs = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(512, 256, name="embedding")(x)
    for number, width in enumerate(widths):
        x = Block(width, name=f"block_{number}")(x)
    x = keras.layers.Dense(512, name="logits")(x)
    model = keras.Model(inputs, x)
    model.compile(
        keras.optimizers.AdamW(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def few():
    """Blocks that are alike, too few to be left out."""
    return deep((1024,) * 4)


def few_again():
    return kmd.remat_blocks(few())


def over_the_model_axis(mesh):
    return kmd.layouts.auto(few, mesh, sequence_axis="model")


def alternating():
    return deep((1024, 512) * 6)


def wide():
    """Too much for one chip of v5e, unless activations are recomputed."""
    return deep((2**15,) * 6)


def named_inputs():
    x = keras.Input((4,), name="x")
    model = keras.Model({"x": x}, keras.layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    return model


def open_length():
    x = inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(32, 16, name="embedding")(x)
    model = keras.Model(inputs, keras.layers.Dense(32, name="logits")(x))
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def vision():
    """A ViT, whose attention has no mask; large enough for fused kernels."""
    import keras_hub

    backbone = keras_hub.models.ViTBackbone(
        image_shape=(240, 240, 3),
        patch_size=16,
        num_layers=2,
        num_heads=4,
        hidden_dim=512,
        mlp_dim=1024,
    )
    outputs = keras.layers.Dense(16, name="head")(backbone.output[:, 0])
    model = keras.Model(backbone.input, outputs)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model
