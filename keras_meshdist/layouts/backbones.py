"""Layout rules for KerasHub's backbones."""

import functools
import math

import keras

from keras_meshdist.abstract import abstract
from keras_meshdist.layouts.automatic import auto
from keras_meshdist.layouts.small import small
from keras_meshdist.unmatched import unmatched_rules


def for_backbone(backbone, mesh, **arguments):
    """Layout rules for a KerasHub backbone, its class, or a task.

    Given a class, the rules are those of a small model of that class whose
    every dimension divides, and which has all that a model of it may have.
    When a larger one is built, an entry that doesn't divide there, such as few
    heads of keys and values, is left out for that variable.

    Example:

    ```python
    layout_map = kmd.layouts.for_backbone(
        keras_hub.models.LlamaBackbone, mesh, fsdp_axis="fsdp"
    )
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="fsdp")
    keras.distribution.set_distribution(dist)
    model = keras_hub.models.LlamaCausalLM.from_preset("llama3_8b_en")
    ```

    Args:
        backbone: a `keras.Model`, such as a backbone or a task, a function
            that returns one, or a class of backbones.
        mesh: `keras.distribution.DeviceMesh`.
        **arguments: of `auto`, such as `model_axis` and `fsdp_axis`.

    Returns:
        A `LayoutMap`.

    Raises:
        ValueError: if it isn't known how a small model of the class is built.
    """
    if not isinstance(backbone, type):
        return auto(backbone, mesh, **arguments)
    if not issubclass(backbone, keras.Model):
        raise ValueError(
            "Layout rules are for a backbone, or a class of them. Received: "
            f"{backbone!r}."
        )
    pieces = math.prod(mesh.shape)
    # Of a small model just the scales and biases are small.
    arguments.setdefault("min_size", 32 * pieces + 1)
    build = functools.partial(small, backbone, pieces)
    layout_map = auto(build, mesh, **arguments)
    plain = abstract(functools.partial(build, plain=True))
    layout_map.optional.update(unmatched_rules(plain, layout_map))
    return layout_map
