"""Layout rules for a model, made from the model."""

from keras_meshdist.layouts.automatic import auto, fsdp

__all__ = ["auto", "fsdp"]
