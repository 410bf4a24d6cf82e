"""Models that a process builds and compiles once, for many cases.

Most of a case's time would go into building and compiling the same model anew.
"""

_SEED = 7
_MOST = 4  # which with their programs fit into memory
_kept = {}


def kept(key, build):
    """Returns what `build` gives, a model first, as new; sets random seeds.

    Args:
        key: hashable, what the model, its programs and its mesh depend on.
        build: function that returns a tuple of a model with its optimizer, and
            whatever else belongs to it.
    """
    import jax
    import jax.numpy as jnp
    import keras

    if key not in _kept:
        if len(_kept) >= _MOST:
            _kept.clear()
            jax.clear_caches()
        keras.utils.set_random_seed(_SEED)
        model, *others = build()
        model.optimizer.build(model.trainable_variables)
        # Steps take the memory of what they are given.
        values = [jnp.copy(v.value) for v in _variables(model)]
        _kept[key] = model, others, values
    model, others, values = _kept[key]
    for variable, value in zip(_variables(model), values, strict=True):
        variable.assign(jnp.copy(value))
    model.reset_metrics()
    keras.utils.set_random_seed(_SEED)
    return (model, *others)


def _variables(model):
    # Weights, seeds and slots; metrics come and are reset otherwise.
    return [*model.variables, *model.optimizer.variables]
