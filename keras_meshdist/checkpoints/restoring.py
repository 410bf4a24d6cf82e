"""Brings checkpoints back into models, onto whatever mesh they lie on."""

import math
import weakref

import jax
import keras

from keras_meshdist import keras_hooks
from keras_meshdist.checkpoints import digests
from keras_meshdist.checkpoints.keys import METRICS, OPTIMIZER, variables_of
from keras_meshdist.checkpoints.store import Store, locate
from keras_meshdist.layout import sharding_of

# So many bytes of a device are restored at a time, before the values that were
# there are given up; a larger variable goes by itself.
_AT_A_TIME = 2**28

# What models were restored from, by model.
_sources = weakref.WeakKeyDictionary()


def restore(model, path, step=None, best=False, strict=True):
    """Restores a checkpoint of `kmd.callbacks.Checkpoint` into a model.

    Weights, optimizer, metrics and the states of random generators come back,
    bit for bit, onto the mesh that the model lies on: the number of processes,
    the mesh and the layouts may be others than those it was saved with. Each
    process reads its part. A `fit` with
    `kmd.callbacks.Checkpoint(other, resume=True)` then goes on at the epoch,
    the step and the rows at which it was saved.

    Example:

    ```python
    keras.distribution.set_distribution(dist)
    model = build_model()
    step = kmd.restore(model, "checkpoints", best=True)
    ```

    Args:
        model: built Keras model. Its optimizer is built if it isn't yet; if it
            isn't compiled, the optimizer's variables are left out. Metrics are
            left out if the model hasn't got them yet, as before its first
            batch.
        path: str or path, the directory of checkpoints, or the folder of one
            step in it. All processes must see it.
        step: int, which step. Defaults to the newest.
        best: bool, whether to take the one with the best monitored value.
        strict: bool. If `False`, variables that are missing in the checkpoint
            or have another shape or dtype there are left as they are, and
            those that the model doesn't have are left out. Defaults to `True`.

    Returns:
        int, the step: how many batches the model was trained on.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if the model isn't built, or the variables differ, or it is
            no checkpoint of this package.
        OSError: if it can't be read, or isn't what was saved.
    """
    if not getattr(model, "built", False):
        raise ValueError(
            "A model must be built for a checkpoint to be restored into it. "
            f"Received: {model.name!r}, which isn't. Call it on a batch, or "
            "`build` it."
        )
    directory, named = locate(path)
    if named is not None and (step is not None or best):
        raise ValueError(
            "`step` and `best` choose from a directory of checkpoints. "
            f"Received: path={path!r}, which is one step's folder, with "
            f"step={step}, best={best}."
        )
    with Store(directory) as store:
        step = _choose(store, named if step is None else step, best)
        restore_from(store, model, step, strict)
    return step


def restore_from(store, model, step, strict, metrics=False):
    """Restores a step of a `Store`; returns what is written beside it.

    Metrics are built by the first batch, and reset by each epoch. So they may
    be missing in a model, unless `metrics` is true: in the middle of an epoch.
    """
    meta = store.meta(step)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = variables_of(model)
    there = meta["variables"]
    kinds = [OPTIMIZER] if optimizer is None else []
    measured = [
        [key for key in keys if key.startswith(f"{METRICS}/")]
        for keys in (variables, there)
    ]
    if not metrics and measured[0] != measured[1]:
        kinds.append(METRICS)
    variables, there = _without(kinds, variables), _without(kinds, there)
    same = {
        key: variable
        for key, variable in variables.items()
        if there.get(key) == describe(variable)
    }
    if strict and len(same) < max(len(variables), len(there)):
        raise ValueError(_differences(store, step, variables, there))
    saved = store.digests(step)
    for some in _portions(same):
        _restore_some(store, step, some, saved)
    _sources[model] = (store.directory, step)
    return meta


def source_of(model):
    """Returns directory and step that a model was restored from, or `None`."""
    return _sources.get(model)


def describe(variable):
    """Returns what is written of a variable: shape and dtype."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return [list(variable.shape), dtype]


def _without(kinds, variables):
    kinds = tuple(f"{kind}/" for kind in kinds)
    return {k: v for k, v in variables.items() if not k.startswith(kinds)}


def _choose(store, step, best):
    steps = store.steps()
    if step is not None and best:
        raise ValueError(
            "`step` and `best` exclude each other. Received: "
            f"step={step}, best=True."
        )
    if not steps or step not in (None, *steps):
        raise FileNotFoundError(
            f"There must be a whole checkpoint to restore. Received: step "
            f"{'newest' if step is None else step} of {store.directory!r}, "
            f"which has the steps {steps}."
        )
    if not best:
        return steps[-1] if step is None else step
    metas = {step: store.meta(step) for step in steps}
    found = best_step(metas)
    if found is None:
        raise ValueError(
            "`best` needs checkpoints that were saved with a `monitor` of "
            f"`kmd.callbacks.Checkpoint`. Received: {store.directory!r}, "
            "where no checkpoint has a monitored value."
        )
    return found


def best_step(metas):
    """Returns the step with the best value; the newest says what is better.

    Args:
        metas: dict from steps to what is written beside them.

    Returns:
        int, or `None` if none has a value.
    """
    values = {
        step: meta["value"]
        for step, meta in metas.items()
        if meta["value"] is not None
    }
    if not values:
        return None
    sign = 1 if metas[max(values)]["mode"] == "max" else -1
    return max(values, key=lambda step: (sign * values[step], -step))


def _differences(store, step, variables, there):
    missing = [key for key in variables if key not in there]
    surplus = [key for key in there if key not in variables]
    other = [
        f"{key} {there[key]} instead of {describe(variables[key])}"
        for key in variables
        if key in there and there[key] != describe(variables[key])
    ]
    named = (
        ("not in the checkpoint", missing),
        ("not in the model", surplus),
        ("of another shape or dtype", other),
    )
    texts = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}"
        f"{', ...' if len(keys) > 5 else ''}"
        for what, keys in named
        if keys
    ]
    return (
        "The model must have the variables that were saved. Received: step "
        f"{step} of {store.directory!r}; {'; '.join(texts)}. Build the model "
        "as it was built then, or leave out what differs with strict=False."
    )


def _portions(variables):
    portion, size = {}, 0
    for key, variable in variables.items():
        value = _abstract(variable)
        shard = value.sharding.shard_shape(value.shape)
        more = math.prod(shard) * value.dtype.itemsize
        if portion and size + more > _AT_A_TIME:
            yield portion
            portion, size = {}, 0
        portion[key] = variable
        size += more
    if portion:
        yield portion


def _abstract(variable):
    """Returns how a value lies, without asking for one that isn't there."""
    if keras_hooks.has_value(variable):
        value = variable.value
        dtype, sharding = value.dtype, value.sharding
    else:
        dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
        sharding = sharding_of(keras_hooks.layout_given(variable))
    return jax.ShapeDtypeStruct(variable.shape, dtype, sharding=sharding)


def _restore_some(store, step, variables, saved):
    found = store.arrays(
        step, {key: _abstract(v) for key, v in variables.items()}
    )
    wrong = digests.different(saved, digests.of_arrays(found))
    if wrong:
        raise OSError(
            "What is restored must be what was saved. Received: step "
            f"{step} of {store.directory!r}, where the values of "
            f"{', '.join(wrong[:5])} have other digests. Take another step."
        )
    for key, variable in variables.items():
        keras_hooks.set_value(
            variable, found[key], keras_hooks.layout_given(variable)
        )
