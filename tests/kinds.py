"""The kinds of datasets that Keras takes, each of the same batches.

Each is a function of a nested structure of arrays, the number of rows in a
batch, and whether the dataset is for `fit`; it returns what `fit` and its like
take first, and further arguments.
"""

import numpy as np


def _batches(arrays, size):
    import keras

    rows = len(keras.tree.flatten(arrays)[0])
    for start in range(0, rows, size):
        yield keras.tree.map_structure(
            lambda a, start=start: a[start : start + size], arrays
        )


def _arrays(convert):
    def kind(arrays, size, fit):
        import keras

        x, y, weight = keras.tree.map_structure(convert, arrays)
        further = {"batch_size": size}
        if fit is None:  # predict
            return (x,), further
        return (x, y), {"sample_weight": weight, **further}

    return kind


def _to_jax(array):
    import jax.numpy as jnp

    return jnp.asarray(array)


def _to_pandas(array):
    import pandas

    if array.ndim > 2:
        return array
    many = array.ndim == 2 and array.shape[1] > 1
    return pandas.DataFrame(array) if many else array


def _tf(change=lambda dataset, size: dataset.batch(size)):
    def kind(arrays, size, fit):
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        return (change(dataset, size),), {}

    return kind


def _mapped(dataset, size):
    return dataset.batch(size).map(lambda *leaves: leaves)


def _filtered(dataset, size):
    """An unknown number of batches, of which one is dropped."""
    import tensorflow as tf

    wrong = (
        dataset.take(1)
        .batch(1)
        .map(lambda *leaves: tf.nest.map_structure(lambda a: a * 0 - 1, leaves))
    )
    return wrong.concatenate(dataset.batch(size)).filter(
        lambda x, y, weight: tf.reduce_all(tf.nest.flatten(weight)[0] >= 0)
    )


def _padded(dataset, size):
    return dataset.padded_batch(size)


def _numpy_function(dataset, size):
    """Whose shapes are unknown."""
    import tensorflow as tf

    def through(*leaves):
        flat = tf.nest.flatten(leaves)
        types = [leaf.dtype for leaf in flat]
        flat = tf.numpy_function(lambda *a: list(a), flat, types)
        return tf.nest.pack_sequence_as(leaves, flat)

    return dataset.batch(size).map(through)


def _endless(arrays, size, fit):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(size).repeat()
    return (dataset,), _steps(arrays, size, fit)


def _steps(arrays, size, fit):
    steps = len(list(_batches(arrays, size)))
    return {"steps_per_epoch" if fit else "steps": steps}


def _generator(arrays, size, fit):
    def batches():
        while True:
            yield from _batches(arrays, size)

    return (batches(),), _steps(arrays, size, fit)


def _py_dataset(**settings):
    def kind(arrays, size, fit):
        return (Batches(list(_batches(arrays, size)), **settings),), {}

    return kind


def Batches(batches, **settings):  # noqa: N802
    """A `PyDataset`; Keras is imported in the processes only."""
    import keras

    class OfList(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, i):
            return batches[i]

    return OfList(**settings)


def _torch(arrays, size, fit):
    import keras
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(keras.tree.flatten(arrays)[0])

        def __getitem__(self, i):
            return keras.tree.map_structure(lambda a: a[i], arrays)

    return (torch.utils.data.DataLoader(Rows(), batch_size=size),), {}


class _Source:
    """A random access source for Grain."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        import keras

        return len(keras.tree.flatten(self.arrays)[0])

    def __getitem__(self, i):
        import keras

        return keras.tree.map_structure(lambda a: a[i], self.arrays)


def _grain_map(arrays, size, fit):
    import grain

    dataset = grain.MapDataset.source(_Source(arrays))
    return (dataset.batch(size, drop_remainder=False),), {}


def _grain_iter(arrays, size, fit):
    import grain

    dataset = grain.MapDataset.source(_Source(arrays)).to_iter_dataset()
    return (dataset.batch(size, drop_remainder=False),), {}


def _grain_loader(arrays, size, fit):
    import grain

    source = _Source(arrays)
    loader = grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.SequentialSampler(
            len(source), grain.sharding.NoSharding()
        ),
        operations=[grain.transforms.Batch(size, drop_remainder=False)],
    )
    return (loader,), {}


KINDS = {
    "numpy": _arrays(np.asarray),
    "jax": _arrays(_to_jax),
    "pandas": _arrays(_to_pandas),
    "tf": _tf(),
    "tf_mapped": _tf(_mapped),
    "tf_filtered": _tf(_filtered),
    "tf_padded": _tf(_padded),
    "tf_numpy_function": _tf(_numpy_function),
    "tf_endless": _endless,
    "generator": _generator,
    "py_dataset": _py_dataset(),
    "py_dataset_workers": _py_dataset(workers=2, max_queue_size=3),
    "torch": _torch,
    "grain_map": _grain_map,
    "grain_iter": _grain_iter,
    "grain_loader": _grain_loader,
}
# What the tests' own environment need not have.
NEEDS = {
    "pandas": "pandas",
    "torch": "torch",
    "grain_map": "grain",
    "grain_iter": "grain",
    "grain_loader": "grain",
}
