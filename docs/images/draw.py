"""Draws the pictures of meshes that stand on the pages.

Run it where a picture or what draws it changes; a test compares them:

    python docs/images/draw.py
"""

import pathlib

import keras
import numpy as np

import keras_meshdist  # noqa: F401  Keras then runs on JAX
from keras_meshdist.pictures import picture_of_part, picture_of_rows

FOLDER = pathlib.Path(__file__).parent


def rows(axes, processes, batch_axes, count):
    """Rows on a mesh whose devices belong to the processes in turn."""
    shape = tuple(axes.values())
    ids = np.arange(np.prod(shape)) // (np.prod(shape) // processes)
    return picture_of_rows(ids.reshape(shape), tuple(axes), batch_axes, count)


def part(axes, path, shape, layout):
    """The parts of a variable on a mesh."""
    names = [f"cpu:{number}" for number in range(np.prod(list(axes.values())))]
    mesh = keras.distribution.DeviceMesh(
        tuple(axes.values()), tuple(axes), names
    )
    return picture_of_part(mesh, path, shape, layout)


def pictures():
    """Returns a dict from file names to pictures."""
    cube = {"data": 2, "model": 2, "fsdp": 2}
    square = {"batch": 4, "model": 2}
    return {
        "model-first.svg": rows({"model": 4, "batch": 2}, 2, ("batch",), 64),
        "batch-first.svg": rows({"batch": 2, "model": 4}, 2, ("batch",), 64),
        "two-batch-axes.svg": rows(cube, 2, ("data", "fsdp"), 64),
        "thirteen-rows.svg": rows({"model": 2, "batch": 4}, 1, ("batch",), 13),
        "four-processes.svg": rows(
            {"model": 2, "batch": 2, "sequence": 2}, 4, ("batch",), 64
        ),
        "predictions.svg": rows({"batch": 4, "model": 2}, 2, ("batch",), 9),
        "columns.svg": part(
            square, "up/kernel, (None, 'model')", (64, 256), (None, "model")
        ),
        "rows.svg": part(
            square, "down/kernel, ('model', None)", (256, 64), ("model", None)
        ),
        "both.svg": part(
            {"fsdp": 4, "model": 2},
            "up/kernel, ('fsdp', 'model')",
            (64, 256),
            ("fsdp", "model"),
        ),
        "moved.svg": part(
            {"model": 2, "batch": 4},
            "up/kernel, ('batch', 'model')",
            (64, 256),
            ("batch", "model"),
        ),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        picture.save(FOLDER / name)
