"""Models whose initial values are looked at, in the processes of a cluster."""

import numpy as np

from tests import saved


def build(dtype="float32", seed=1):
    """Draws from integers, and from generators that others draw from too."""
    import keras

    keras.utils.set_random_seed(seed)
    shared = keras.random.SeedGenerator(5 + seed)
    initializers = keras.initializers
    rows = keras.Input((16,))
    x = keras.layers.Dense(
        32,
        name="up",
        dtype=dtype,
        kernel_initializer=initializers.RandomNormal(0.1, 0.2, seed=shared),
        bias_initializer=initializers.Constant(0.3),
    )(rows)
    x = keras.layers.Dense(
        32,
        name="plain",
        dtype=dtype,
        kernel_initializer=initializers.HeNormal(seed=seed),
    )(x)
    x = keras.layers.BatchNormalization(name="norm", dtype=dtype)(x)
    x = keras.layers.Dropout(0.1, name="drop", dtype=dtype)(x)
    x = keras.layers.Dense(
        8,
        name="down",
        dtype=dtype,
        kernel_initializer=initializers.RandomUniform(seed=shared),
    )(x)
    return keras.Model(rows, x, name="initialized")


def values(model):
    return {
        v.path: np.asarray(v)
        for v in model.variables
        if "seed_generator" not in v.path  # which Keras numbers anew
    }


def largest_on_a_device(shape, initializer):
    """Bytes of the largest piece on a device while a variable is created."""
    import jax
    import keras

    from keras_meshdist import weights

    seen, place = [], weights.place

    def look(event=None, duration=None, **_):
        seen.extend(
            shard.data.nbytes
            for array in jax.live_arrays()
            for shard in array.addressable_shards
        )

    layer = keras.layers.Dense(
        shape[1], kernel_initializer=initializer, use_bias=False, name="up"
    )

    def placed(*arguments):
        look()
        return place(*arguments)

    # The first at each operation, since each is compiled.
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(look)
    weights.place = placed
    try:
        layer.build((None, shape[0]))
        look()
    finally:
        weights.place = place
        jax.monitoring.clear_event_listeners()
    return max(seen)


def skip(where, path):
    """Values that are loaded, and that are drawn: at the end, and in shards."""
    import keras

    import keras_meshdist as kmd
    from keras_meshdist import initial_values

    small = initial_values._SMALL
    saved.with_scope(where)
    try:
        with kmd.skip_initializers():
            loaded = build()
            loaded.load_weights(path)
        with kmd.skip_initializers():
            drawn = build()
        initial_values._SMALL = 0
        in_shards = build()
        return [values(model) for model in (loaded, drawn, in_shards)]
    finally:
        initial_values._SMALL = small
        keras.distribution.set_distribution(None)
