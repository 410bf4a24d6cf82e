"""Keras distribution over any device mesh, on any number of processes."""

from keras_meshdist import keras_hooks
from keras_meshdist.distribution import ModelParallel
from keras_meshdist.layout import LayoutMap, TensorLayout
from keras_meshdist.mesh import make_mesh

__version__ = "0.1.0"

__all__ = [
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "keras_hooks",
    "make_mesh",
]

keras_hooks.install()
