"""The training run of one case: what runs in each process."""

import dataclasses
import types
from typing import Any

import jax
import keras
import numpy as np

import keras_meshdist
from keras_meshdist import keras_hooks
from keras_meshdist.demo.cases import Case
from keras_meshdist.predictions import fetch

# Who trains: this package with NumPy arrays, or Keras alone with NumPy arrays
# or a `tf.data.Dataset` of them.
OURS = "keras_meshdist"
KERAS_NUMPY = "NumPy"
KERAS_TF_DATA = "tf.data"

_SEED = 1


@dataclasses.dataclass(frozen=True)
class Digits:
    """The images, as rows of pixels in [0, 1], and their labels."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Trained:
    """What one process reports of a training run.

    Args:
        losses: list of floats, the mean loss of each epoch.
        accuracy: float, of the held-out rows.
        weights: list of arrays, the final weights.
    """

    losses: list[float]
    accuracy: float
    weights: list[np.ndarray]


def train(
    case: Case, who: str, digits: Digits, epochs: int, progress: str
) -> Trained:
    """Trains on the mesh of a case.

    Args:
        case: `Case`.
        who: `OURS`, `KERAS_NUMPY` or `KERAS_TF_DATA`.
        digits: `Digits`, the same on every process.
        epochs: integer, number of epochs.
        progress: string, path of a file that grows by a byte an epoch.

    Returns:
        A `Trained`.
    """
    library, batch_axes = keras_meshdist, case.batch_axes
    if who != OURS:
        _remove_hooks()
        # Keras takes one batch axis only. Rows over fewer axes give the same
        # numbers.
        library, batch_axes = keras.distribution, case.batch_axes[:1]
    keras.utils.set_random_seed(_SEED)
    if case.axes:
        keras.distribution.set_distribution(
            _distribution(library, case, batch_axes)
        )
    try:
        model = _model()
        history = model.fit(
            **_dataset(who, digits.x, digits.y, case.batch),
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[_Progress(progress)],
        )
        scores = model.evaluate(
            **_dataset(who, digits.test_x, digits.test_y, case.batch),
            verbose=0,
            return_dict=True,
        )
        weights = [fetch(variable.value) for variable in model.weights]
    finally:
        keras.distribution.set_distribution(None)
    return Trained(history.history["loss"], scores["accuracy"], weights)


def import_tensorflow() -> None:
    """Imports TensorFlow, which takes long, before a run is timed."""
    import tensorflow  # noqa: F401


def _remove_hooks() -> None:
    keras_hooks.remove()
    # Removed with the hooks on old versions of JAX, where without it initial
    # weights depend on the mesh. That is no fault of Keras.
    if not getattr(jax.config, "jax_threefry_partitionable", True):
        jax.config.update("jax_threefry_partitionable", True)


def _distribution(
    library: types.ModuleType, case: Case, batch_axes: tuple[str, ...]
) -> keras.distribution.ModelParallel:
    names, sizes = zip(*case.axes, strict=True)
    fsdp = "fsdp" if "fsdp" in names else None
    layout_map = library.LayoutMap(keras.distribution.DeviceMesh(sizes, names))
    layout_map[".*hidden/kernel"] = (fsdp, "model")
    layout_map[".*hidden/bias"] = ("model",)
    layout_map[".*logits/kernel"] = ("model", fsdp)
    return library.ModelParallel(
        layout_map=layout_map,
        batch_dim_name=batch_axes if len(batch_axes) > 1 else batch_axes[0],
    )


def _model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu", name="hidden"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, name="logits"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _dataset(
    who: str, x: np.ndarray, y: np.ndarray, batch: int
) -> dict[str, Any]:
    """The arguments of `fit` and `evaluate` that hold the data."""
    if who != KERAS_TF_DATA:
        return {"x": x, "y": y, "batch_size": batch}
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)}


class _Progress(keras.callbacks.Callback):
    """Makes a file grow by a byte an epoch."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if jax.process_index() == 0:
            with open(self._path, "ab") as file:
                file.write(b".")
