"""Names of layers' outputs within a traced program."""

import contextlib

import jax
import keras
from jax.ad_checkpoint import checkpoint_name
from keras.src.distribution import distribution_lib

_PREFIX = "output of layer: "


class OutputName:
    """What stands in a traced program for a layer's output.

    Args:
        path: str, the layer's path with `/output` behind it.
    """

    def __init__(self, path):
        self._path = path

    def give(self, outputs):
        name = _PREFIX + self._path
        return keras.tree.map_structure(
            lambda x: checkpoint_name(x, name) if _is_traced(x) else x, outputs
        )


def _is_traced(x):
    return isinstance(x, jax.core.Tracer)


class _Names(distribution_lib.Distribution):
    """Asks for the name of each layer's output, and lays out nothing."""

    def get_tensor_layout(self, path):
        return OutputName(path)

    def get_variable_layout(self, variable):
        return keras.distribution.TensorLayout(
            [None] * len(variable.shape), self.device_mesh
        )

    def get_data_layout(self, data_shape):
        return None

    def distribute_dataset(self, dataset):
        return dataset


@contextlib.contextmanager
def naming_outputs():
    """Context in which a program that is traced names layers' outputs."""
    before = keras.distribution.distribution()
    mesh = keras.distribution.DeviceMesh((1,), ("all",), jax.devices()[:1])
    keras.distribution.set_distribution(_Names(mesh))
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


def output_of(name):
    """Returns the path in a name that was given so, or `None`."""
    return name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else None
