"""`meshdist demo`: real training on many meshes, next to one device."""

from keras_meshdist.demo.command import run

__all__ = ["run"]
