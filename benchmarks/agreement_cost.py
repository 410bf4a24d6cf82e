"""Steps with and without agreement; runs in the processes of a cluster."""

import statistics
import time

STEPS = 100


def measure(kind, size, turns):
    """Returns the median seconds of a step without agreement, and with it.

    Args:
        kind: str, `"arrays"`, or `"dataset"` for one that only reading tells
            the rows of.
        size: int, width of the model.
        turns: int, how many calls of `fit` of each.
    """
    import keras
    import numpy as np

    import keras_meshdist as kmd

    mesh = kmd.make_mesh({"batch": 4, "model": 2})
    layout_map = kmd.LayoutMap(mesh)
    layout_map[".*wide/kernel"] = (None, "model")
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(STEPS * 64, 32))
    x = x.astype("float32")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            rows = slice(i * 64, (i + 1) * 64)
            return x[rows], x[rows, :4]

    data, more = (Batches(),), {}
    if kind == "arrays":
        data, more = (x, x[:, :4]), {"batch_size": 64}
    board = dist._board
    seconds = {None: [], board: []}
    with dist.scope():
        model = keras.Sequential(
            [
                keras.Input((32,)),
                keras.layers.Dense(size, "relu", name="wide"),
                keras.layers.Dense(size, "relu"),
                keras.layers.Dense(4),
            ]
        )
        model.compile("sgd", "mse")
        for turn in range(turns + 1):
            for chosen in (board, None) if turn % 2 else (None, board):
                dist._board = chosen
                start = time.perf_counter()
                model.fit(*data, shuffle=False, verbose=0, **more)
                if turn:  # the first one compiles
                    took = (time.perf_counter() - start) / STEPS
                    seconds[chosen].append(took)
    dist._board = board
    return tuple(statistics.median(s) for s in seconds.values())
