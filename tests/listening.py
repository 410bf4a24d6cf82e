"""Keras' callbacks that decide and write, in the processes of a cluster."""

import os
import pathlib

import numpy as np

from tests import saved


def run(where, folder):
    """Fits until the loss has risen twice; returns what came of it."""
    import jax
    import keras

    saved.with_scope(where)
    try:
        model = saved.build(1, rate=0.0)
        weights = []
        stopping = keras.callbacks.EarlyStopping(
            "loss", patience=2, restore_best_weights=True
        )
        callbacks = [
            # The loss rises from the fourth epoch on.
            keras.callbacks.LearningRateScheduler(
                lambda epoch: 0.01 if epoch < 3 else -0.05
            ),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: weights.append(
                    model.get_weights()
                )
            ),
            stopping,
        ]
        if folder:
            callbacks.append(
                keras.callbacks.TensorBoard(
                    folder, histogram_freq=1, write_graph=False
                )
            )
        history = model.fit(
            *saved.data(),
            batch_size=8,
            shuffle=False,
            epochs=10,
            verbose=0,
            callbacks=callbacks,
        )
        kept = [
            isinstance(value, jax.Array) and value.sharding.spec
            for value in stopping.best_weights
        ]
        return (
            history.history,
            weights[int(np.argmin(history.history["loss"]))],
            model.get_weights(),
            [tuple(spec) for spec in kept] if where else [],
            os.getpid(),
        )
    finally:
        keras.distribution.set_distribution(None)


def plateau(where):
    """Returns the learning rates of epochs in which nothing gets better."""
    import keras

    saved.with_scope(where)
    try:
        model = saved.build(1, rate=0.0)
        rates = []
        model.fit(
            *saved.data(),
            batch_size=8,
            epochs=6,
            verbose=0,
            callbacks=[
                keras.callbacks.ReduceLROnPlateau(
                    "loss", factor=0.5, patience=1, min_delta=100.0
                ),
                keras.callbacks.LambdaCallback(
                    on_epoch_begin=lambda epoch, logs: rates.append(
                        float(model.optimizer.learning_rate.numpy())
                    )
                ),
            ],
        )
        return rates
    finally:
        keras.distribution.set_distribution(None)


def writers(folder):
    """The process numbers in the names of TensorBoard's files."""
    found = pathlib.Path(folder).rglob("events.*")
    return {int(path.name.split(".")[-3]) for path in found}
