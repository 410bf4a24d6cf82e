"""Datasets by process number, for test_agreement.py; sent to a cluster."""

import time

import numpy as np

STEPS = 5


def batches(steps=STEPS, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        x = rng.normal(size=(rows, 4)).astype("float32")
        yield x, x[:, :2]


def same(process):
    return batches()


def slow(process):
    for batch in batches():
        time.sleep(0.4 * process)
        yield batch


def longer(process):
    return batches(STEPS + process)


def more_rows(process):
    return batches(rows=8 + process)


def other_contents(process):
    return batches(seed=process)


def other_dtype(process):
    for x, y in batches():
        yield x.astype("float64" if process else "float32"), y


def other_structure(process):
    for x, y in batches():
        yield (x, y, np.ones(len(x))) if process else (x, y)


def raises(process):
    for i, batch in enumerate(batches()):
        if process and i == 3:
            raise OSError("disk is gone")
        yield batch


def hangs(process):
    for i, batch in enumerate(batches()):
        if process and i == 3:
            time.sleep(7)
        yield batch


def other_order(process):
    """A list of batches, whose length Keras knows."""
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            return list(batches())[i - process]

    return Batches()


def shorter_list(process):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS - process

        def __getitem__(self, i):
            return list(batches())[i]

    return Batches()


# By pairs of four processes, which share a feed; every second one is odd.


def odd_more_rows(process):
    return more_rows(process % 2)


def odd_longer(process):
    return longer(process % 2)


def odd_other_contents(process):
    return other_contents(process % 2)


def odd_other_dtype(process):
    return other_dtype(process % 2)


def half_other_dtype(process):
    return other_dtype(process // 2)


def uneven(process):
    for x, y in batches():
        yield x, y[1:]


def many_rows(process):
    x = np.random.default_rng(0).normal(size=(8 * 300, 4)).astype("float32")
    return x, x[:, :2]


def one_row_more(process):
    x, y = many_rows(process)
    return x[: 2390 + process], y[: 2390 + process]


def other_half(process):
    """The second half has other contents, which no first batch shows."""
    x, y = many_rows(process)
    x[1200:] += process
    return x, y
