"""Callbacks for `fit` where those of Keras can't be made right."""

from keras_meshdist.checkpoints.callback import Checkpoint

__all__ = ["Checkpoint"]
