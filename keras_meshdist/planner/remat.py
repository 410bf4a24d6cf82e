"""Rematerialization, block by block: less memory for more computation."""

import functools
import itertools

import jax
import keras

from keras_meshdist import keras_hooks
from keras_meshdist.keras_hooks import steps
from keras_meshdist.planner.blocks import find_blocks


def remat_blocks(model):
    """Lets a model compute its blocks again on the way back.

    Of each of the repeated blocks of a deep model only what goes into it is
    kept until gradients are computed; all within is computed a second time
    then. Losses, updates and random numbers stay as they are. Call it before
    the model is trained; what is saved of the model doesn't have it, so call
    it again on one that was loaded.

    Example:

    ```python
    model = keras_hub.models.Llama3CausalLM(backbone=backbone)
    model.compile(...)
    kmd.remat_blocks(model)
    ```

    Args:
        model: `keras.Model`, built; the layers that follow each other in it
            are alike, or of several kinds in turn.

    Returns:
        The model.

    Raises:
        ValueError: if it has no such blocks.
    """
    found = find_blocks(model)
    if found is None:
        raise ValueError(
            "To rematerialize a model block by block takes three or more "
            "layers with weights that follow each other and are alike. "
            f"Received: {model.name!r} of class {type(model).__name__}."
        )
    for layer in found.layers:
        if not hasattr(layer.call, "rematerialized"):
            steps.set_call(layer, _computed_again(layer, layer.call))
    keras_hooks.forget_functions(model)
    return model


def _computed_again(layer, call):
    """A layer's `call` whose inside is computed again for gradients."""

    @functools.wraps(call)
    def rematerialized(*args, **kwargs):
        values = steps.traced_values(layer.variables)
        if values is None:
            # Nothing is differentiated, or only shapes are asked for.
            return call(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        masks = [steps.mask_of(leaves[i]) for i in places]
        changed = []

        def compute(values, arrays, masks):
            given = list(leaves)
            for i, array, mask in zip(places, arrays, masks, strict=True):
                given[i] = steps.with_mask(array, mask)
            args, kwargs = jax.tree.unflatten(structure, given)
            pairs = zip(layer.variables, values, strict=True)
            with keras.StatelessScope(
                list(pairs), collect_losses=steps.collects_losses()
            ) as scope:
                before = [scope.get_current_value(v) for v in layer.variables]
                outputs = call(*args, **kwargs)
            after = [scope.get_current_value(v) for v in layer.variables]
            changed[:] = [
                new is not old for new, old in zip(after, before, strict=True)
            ]
            news = list(itertools.compress(after, changed))
            return outputs, news, scope.losses

        arrays = [leaves[i] for i in places]
        outputs, news, losses = jax.checkpoint(compute)(values, arrays, masks)
        variables = itertools.compress(layer.variables, changed)
        for variable, new in zip(variables, news, strict=True):
            variable.assign(new)
        for loss in losses:
            layer.add_loss(loss)
        return outputs

    rematerialized.rematerialized = True
    return rematerialized
