"""Sizes for inputs that have none, with which a model can be traced."""

import jax
import keras

from keras_meshdist import keras_hooks
from keras_meshdist.abstract import shapes_of

# For dimensions of unknown size, such as the length of a sequence. A model may
# have fewer positions than the first, or want more for a waveform.
_LENGTHS = (64, 16, 1024)


def shapes_to_try(model, inputs):
    """Yields shapes for a model's inputs.

    Args:
        model: `keras.Model`.
        inputs: its symbolic inputs, a nested structure.
    """
    known = _of_images(model)

    def shape(tensor, found):
        if tensor is None:
            return None
        sizes = known.get(getattr(tensor, "name", None), {})
        new = [
            sizes.get(d, found.shape[d]) if size is None else size
            for d, size in enumerate(tensor.shape)
        ]
        return jax.ShapeDtypeStruct(tuple(new), found.dtype)

    for length in _LENGTHS:
        found = shapes_of(inputs, length=length)
        yield keras.tree.map_structure(shape, inputs, found)


def first_that_works(function, arguments):
    """Returns what a function gives for the first argument it doesn't refuse.

    Raises:
        Exception: of the first argument, if it refuses all.
    """
    refused = None
    for argument in arguments:
        try:
            return function(argument)
        except Exception as error:
            refused = refused or error
    raise refused


def _of_images(model):
    """Sizes that belong together in KerasHub's models of text and images.

    Returns:
        Dict from an input's name to a dict from dimension to size, for one
        image that takes its part of the text.
    """
    for layer in keras_hooks.layers_of(model):
        tokens = getattr(layer, "num_vision_tokens_per_image", None)
        image, patch = (
            getattr(layer, name, None) for name in ("image_size", "patch_size")
        )
        if tokens and image and patch:
            patches = (image // patch) ** 2
            return {
                "images": {1: 1},
                "pixel_values": {1: 1, 2: patches, 3: 3 * patch**2},
                "pixel_position_ids": {1: 1, 2: patches},
                "vision_indices": {1: tokens},
            }
    return {}
