"""Layout rules for a model, made from the model."""

from keras_meshdist.layouts.automatic import auto
from keras_meshdist.layouts.backbones import for_backbone
from keras_meshdist.layouts.sharded import fsdp

__all__ = ["auto", "for_backbone", "fsdp"]
