"""Layout rules for a model, made from the model."""

from keras_meshdist.layouts.automatic import auto, fsdp
from keras_meshdist.layouts.backbones import for_backbone

__all__ = ["auto", "for_backbone", "fsdp"]
