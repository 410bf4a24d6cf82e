"""Reading ahead: order, errors, ends, and nothing taken that isn't used."""

import threading
import time

import keras
import numpy as np
import pytest

import keras_meshdist as kmd
from keras_meshdist.datasets import GlobalDataset
from keras_meshdist.inputs import Reader


def slowly(items, taken=None):
    for item in items:
        time.sleep(0.002)
        if taken is not None:
            taken.append(item)
        if isinstance(item, Exception):
            raise item
        yield item


def threads():
    return [t for t in threading.enumerate() if "meshdist" in t.name]


def until(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_batches_come_in_order_and_end():
    reader = Reader(slowly(range(1, 30)), GlobalDataset(lambda n: n * 10))
    assert list(reader) == [n * 10 for n in range(1, 30)]
    assert list(reader) == []
    assert not threads()


def test_the_next_batch_is_read_while_this_one_is_used():
    taken = []
    reader = Reader(slowly(range(9), taken), GlobalDataset(lambda n: n))
    assert next(reader) == 0
    assert next(reader) == 1
    assert until(lambda: len(taken) == 3)
    time.sleep(0.05)
    assert len(taken) == 3  # one ahead, and no more


def test_one_batch_is_read_to_build_a_model():
    taken = []
    reader = Reader(slowly(range(9), taken), GlobalDataset(lambda n: n))
    next(reader)
    time.sleep(0.05)
    assert taken == [0]


def test_nothing_is_read_behind_an_epoch():
    taken = []
    reader = Reader(
        slowly(range(9), taken), GlobalDataset(lambda n: n), epoch_steps=3
    )
    assert [next(reader) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.05)
    assert taken == [0, 1, 2]
    assert [next(reader) for _ in range(3)] == [3, 4, 5]
    time.sleep(0.05)
    assert taken == [0, 1, 2, 3, 4, 5]


def test_an_error_comes_in_its_turn():
    reader = Reader(
        slowly([1, 2, OSError("disk"), 4]), GlobalDataset(lambda n: n)
    )
    assert [next(reader), next(reader)] == [1, 2]
    with pytest.raises(OSError, match="disk"):
        next(reader)
    with pytest.raises(StopIteration):
        next(reader)
    assert until(lambda: not threads())


class Rows(keras.utils.PyDataset):
    """Batches of rows that take time; the calls are counted."""

    def __init__(self, rows=40, breaks_at=None):
        super().__init__()
        self.x = np.linspace(0, 1, rows * 4).reshape(rows, 4)
        self.breaks_at = breaks_at

    def __len__(self):
        return -(-len(self.x) // 8)

    def __getitem__(self, i):
        time.sleep(0.002)
        if i == self.breaks_at:
            raise OSError("disk is gone")
        x = self.x[i * 8 : i * 8 + 8]
        return x, x[:, :2]


@pytest.fixture
def model():
    mesh = kmd.make_mesh({"model": 2, "batch": 4})
    dist = kmd.ModelParallel(
        layout_map=kmd.LayoutMap(mesh), batch_dim_name="batch"
    )
    with dist.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        yield model


def test_a_broken_fit_leaves_no_thread(model):
    with pytest.raises(OSError, match="disk is gone"):
        model.fit(Rows(breaks_at=3), verbose=0, shuffle=False)
    assert until(lambda: not threads())


def test_a_broken_callback_leaves_no_thread(model):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("callback")

    with pytest.raises(KeyError, match="callback"):
        model.fit(Rows(), verbose=0, callbacks=[Stop()])
    assert until(lambda: not threads())


def test_a_generator_gives_what_steps_ask_for_and_no_more(model):
    taken = []

    def endless():
        while True:
            time.sleep(0.002)
            taken.append(1)
            yield np.ones((8, 4)), np.ones((8, 2))

    batches = endless()
    model.build((None, 4))
    model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0, shuffle=False)
    first = len(taken)
    time.sleep(0.05)
    assert len(taken) == first
    # Keras itself takes some to see what they are, and one to build a model.
    keras.distribution.set_distribution(None)
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    other.compile("sgd", "mse")
    taken.clear()
    other.fit(endless(), steps_per_epoch=4, epochs=2, verbose=0, shuffle=False)
    assert 8 <= first <= len(taken)


def test_shuffled_order_is_that_of_one_device(model):
    def order(fit_model):
        keras.utils.set_random_seed(5)
        fit_model.set_weights([np.ones((4, 2)), np.zeros(2)])
        return fit_model.fit(Rows(), epochs=3, verbose=0).history["loss"]

    got = order(model)
    dist = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    plain.compile("sgd", "mse")
    np.testing.assert_allclose(got, order(plain), rtol=1e-5)
    keras.distribution.set_distribution(dist)


def test_what_is_no_dataset_is_one_error(recwarn):
    with pytest.raises(TypeError, match="not iterable"):
        Reader(3, GlobalDataset(lambda n: n))
    assert not recwarn.list
