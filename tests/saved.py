"""Models that are saved and loaded, in the processes of a cluster."""

import contextlib
import pathlib
import tempfile

import numpy as np

MESHES = {
    "first": ({"b": 4, "m": 2}, "b"),
    "last": ({"m": 4, "b": 2}, "b"),
    "fsdp": ({"data": 2, "fsdp": 4}, ("data", "fsdp")),
    "data": None,
}
FILES = {
    "weights": "model.weights.h5",
    "model": "model.keras",
    "pieces": "model.weights.json",
}
TUNED = ("lora", "int8")


@contextlib.contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


def distribution(name):
    """One of the distributions, over all devices; `None` is one device."""
    import keras_meshdist as kmd

    if name is None:
        return None
    if MESHES[name] is None:
        return kmd.DataParallel()
    axes, rows = MESHES[name]
    layout_map = kmd.LayoutMap(kmd.make_mesh(axes))
    others = [axis for axis in axes if axis not in rows] or ["fsdp"]
    layout_map[".*up/kernel"] = (None, others[0])
    layout_map[".*up/bias"] = (others[0],)
    layout_map[".*down/kernel"] = (others[0], None)
    return kmd.ModelParallel(layout_map=layout_map, batch_dim_name=rows)


def build(seed, dtype="float32", rate=0.2):
    """`dtype` may also be "lora", or "int8", which is trained by LoRA."""
    import keras

    kind, dtype = dtype, "float32" if dtype in TUNED else dtype
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu", name="up", dtype=dtype),
            keras.layers.BatchNormalization(name="norm", dtype=dtype),
            keras.layers.Dropout(rate, name="drop", dtype=dtype),
            keras.layers.Dense(8, name="down", dtype=dtype),
        ],
        name="saved",
    )
    if kind == "int8":
        for name in ("up", "down"):
            model.get_layer(name).quantize("int8")
    if kind in TUNED:
        model.get_layer("up").enable_lora(4)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(24, 16)).astype("float32")
    return x, x[:, :8]


def values(model):
    """All that training changes, as NumPy, by position."""
    return [(v.path, np.asarray(v)) for v in variables(model)]


def variables(model):
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [*model.variables, *model.optimizer.variables, *metrics]


def save(where, file, folder, dtype="float32"):
    """Trains and saves; returns what was saved."""
    import keras

    with_scope(where)
    try:
        model = build(1, dtype)
        model.fit(*data(), batch_size=8, epochs=1, verbose=0)
        path = pathlib.Path(folder) / FILES[file]
        if file == "model":
            model.save(path)
        elif file == "pieces":
            model.save_weights(path, max_shard_size=2e-6)
        else:
            model.save_weights(path)
        found = sorted(p.name for p in path.parent.iterdir())
        return values(model), found
    finally:
        keras.distribution.set_distribution(None)


def load(where, file, folder, dtype="float32"):
    """Loads into a model with other values; returns what it has then."""
    import keras

    with_scope(where)
    try:
        path = pathlib.Path(folder) / FILES[file]
        if file == "model":
            model = keras.saving.load_model(path)
        else:
            model = build(2, dtype)
            model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
        loss = model.evaluate(*data(), batch_size=8, verbose=0)
        return values(model), loss
    finally:
        keras.distribution.set_distribution(None)


def with_scope(where):
    import jax
    import keras

    # Other tests in the same process set other ones.
    jax.config.update("jax_enable_x64", False)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
    keras.distribution.set_distribution(distribution(where))


def move(there, back):
    """Trains on one device, on a mesh, and on another; returns all numbers."""
    import keras

    import keras_meshdist as kmd

    with_scope(None)
    model, numbers = build(1), []
    try:
        for where in (None, there, back, None):
            moved = distribution(where)
            keras.distribution.set_distribution(moved)
            kmd.distribute_model(model, moved)
            history = model.fit(*data(), batch_size=8, verbose=0, shuffle=False)
            numbers.append(history.history["loss"])
        on = [len(v.value.devices()) for v in variables(model)]
        return numbers, values(model), on
    finally:
        keras.distribution.set_distribution(None)


def forgotten(where, trained):
    """Uses a model that was built before, in every way.

    Returns what each call says, and the loss once the model has been moved,
    beside that before.
    """
    import keras

    import keras_meshdist as kmd

    with_scope(None)
    x, y = data()
    model = build(1)
    calls = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(x, y),
        "predict_on_batch": lambda: model.predict_on_batch(x),
    }
    if trained:
        # What Keras compiled then would take rows of a mesh, too.
        calls = {name: calls[name] for name in ("fit", "evaluate", "predict")}
        for call in calls.values():
            call()
    before, said = model.evaluate(x, y, verbose=0), {}
    moved = distribution(where)
    keras.distribution.set_distribution(moved)
    try:
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                said[name] = str(error)
        kmd.distribute_model(model, moved)
        return said, set(calls), before, model.evaluate(x, y, verbose=0)
    finally:
        keras.distribution.set_distribution(None)


def spread(where):
    """Into how many different parts each variable lies, by its path."""
    import keras

    import keras_meshdist as kmd

    with_scope(None)
    model = build(1)
    model.fit(*data(), verbose=0)
    moved = distribution(where)
    keras.distribution.set_distribution(moved)
    try:
        kmd.distribute_model(model, moved)
        return {
            v.path: len(
                {
                    str(index)
                    for index in v.value.sharding.devices_indices_map(
                        tuple(v.shape)
                    ).values()
                }
            )
            for v in variables(model)
        }
    finally:
        keras.distribution.set_distribution(None)


def fail(kind, folder):
    """Saves so that it fails; returns the error, and what there is then."""
    import jax
    import keras

    import keras_meshdist as kmd

    with_scope("last")
    dist = keras.distribution.distribution()
    folder = pathlib.Path(folder)
    path = folder / "model.weights.h5"
    try:
        model = build(1)
        model.fit(*data(), batch_size=8, verbose=0)
        model.save_weights(path)
        before = path.read_bytes()
        process = jax.process_index()
        limit, dist._board.limit = dist._board.limit, 3.0
        try:
            if kind == "alone" and process == 0:
                model.save_weights(path)
            elif kind == "alone":
                model.evaluate(*data(), batch_size=8, verbose=0)
            elif kind == "nowhere":
                model.save_weights(folder / "no" / "model.weights.h5")
            elif kind == "other":
                variable = model.layers[0].kernel
                np.array(variable if process else model.layers[-1].kernel)
            elif kind == "in the middle":
                layer = model.layers[-1]
                if process == 0:
                    layer.save_own_variables = _raise
                model.save_weights(path)
            elif kind == "value":
                layer = model.layers[0]
                layer.bias.assign(np.full(32, float(process)))
                model.fit(*data(), batch_size=8, verbose=0)
            elif kind == "model":
                keras.distribution.set_distribution(None)
                other = build(1)
                other.layers[0].bias.assign(np.full(32, float(process)))
                keras.distribution.set_distribution(dist)
                kmd.distribute_model(other, dist)
            error = "none"
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        finally:
            dist._board.limit = limit
        names = sorted(p.name for p in folder.iterdir())
        return error, names, path.read_bytes() == before
    finally:
        keras.distribution.set_distribution(None)


def _raise(store):
    raise OSError("no space left")


def callbacks(folder, epochs):
    """Fits with Keras' callbacks; returns the numbers of this run."""
    import keras

    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    with_scope("last")
    try:
        # Keras doesn't save the states of random generators.
        model = build(1, rate=0.0)
        kept = [
            keras.callbacks.ModelCheckpoint(
                folder / "new" / "best.keras", save_best_only=True
            ),
            keras.callbacks.BackupAndRestore(
                folder / "backup", delete_checkpoint=False
            ),
            keras.callbacks.CSVLogger(folder / "log.csv", append=True),
            keras.callbacks.LearningRateScheduler(
                lambda epoch: 0.1 / (epoch + 1)
            ),
        ]
        history = model.fit(
            *data(),
            batch_size=8,
            validation_data=data(),
            shuffle=False,
            epochs=epochs,
            callbacks=kept,
        )
        shown = keras.callbacks.CallbackList(kept, add_progbar=True)
        names = {type(callback).__name__ for callback in shown.callbacks}
        return history.history["loss"], names
    finally:
        keras.distribution.set_distribution(None)
