"""A run that is killed again and again, in the processes of a cluster."""

import pathlib
import time

from tests import checkpointed, saved


def run(where, folder, epochs, pause):
    """Trains, or goes on, with a pause after each batch; returns all values.

    The first process says how far it is.
    """
    import jax
    import keras

    import keras_meshdist as kmd

    saved.with_scope(where)
    try:
        model = saved.build(1)

        def after(batch, logs):
            if pause and jax.process_index() == 0:
                (pathlib.Path(folder) / "began").touch()
            time.sleep(pause)

        callbacks = [
            keras.callbacks.LambdaCallback(on_train_batch_end=after),
            kmd.callbacks.Checkpoint(
                pathlib.Path(folder) / "c", save_freq=2, resume=True
            ),
        ]
        model.fit(
            *checkpointed.data(),
            batch_size=8,
            epochs=epochs,
            verbose=0,
            callbacks=callbacks,
        )
        return saved.values(model)
    finally:
        keras.distribution.set_distribution(None)
