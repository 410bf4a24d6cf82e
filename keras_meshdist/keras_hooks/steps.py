"""Keras' own steps, taken out to be compiled, and a platform that isn't there.

Nothing of Keras or JAX stays replaced after a call or a context.
"""

import contextlib
import contextvars

import jax
from keras.src.backend.common import masking
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)

_slots = contextvars.ContextVar("slots_of_optimizers", default=None)

# What each step takes and gives, in the order of Keras' own functions.
_STATE = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}


@contextlib.contextmanager
def recording_slots():
    """Context that records which variables optimizers create, and for what.

    Yields:
        Dict from the `id` of an optimizer's variable to the weight that it
        belongs to, or to `None`.
    """
    found = {}
    token = _slots.set(found)
    try:
        yield found
    finally:
        _slots.reset(token)


def record_slot(slot, weight):
    """Notes what an optimizer has created, in `recording_slots`."""
    found = _slots.get()
    if found is not None:
        found[id(slot)] = weight
    return slot


def set_shape(variable, sharding):
    """Gives a variable a value that has but a shape, and lies somewhere."""
    variable._value = jax.ShapeDtypeStruct(
        tuple(variable.shape), variable._value.dtype, sharding=sharding
    )


def symbolic_build(model, data):
    """Lets a model create all that `fit` would, from the shapes of a batch.

    Args:
        model: compiled `keras.Model`.
        data: tuple `(x, y)` or `(x, y, sample_weight)` of what has shapes.
    """
    model._symbolic_build(data_batch=data)


def step_of(model, kind):
    """Returns the step that Keras would run, and the state that it takes.

    Keras (3.7 to 3.16) compiles it in `make_train_function` and its like, and
    hands it to `_make_function`, which calls it with one batch after another;
    there it is taken.

    Args:
        model: compiled `keras.Model` whose variables have values, or shapes.
        kind: str, `"train"`, `"test"` or `"predict"`.

    Returns:
        Tuple of the jitted step and its state, a tuple of lists.

    Raises:
        ValueError: if the model isn't compiled by JAX.
    """
    if hasattr(model, "_record_training_state_sharding_spec"):
        # Before 3.9, where the step itself lays its results out.
        model._record_training_state_sharding_spec()
    taken = []

    def take(step_function, concatenate_outputs=False):
        taken.append(step_function)
        return step_function

    vars(model)["_make_function"] = take
    try:
        getattr(model, f"make_{kind}_function")(force=True)
    finally:
        del vars(model)["_make_function"]
        setattr(model, f"{kind}_function", None)
    (step,) = taken
    if not hasattr(step, "trace"):
        raise ValueError(
            "Only a step that JAX compiles can be planned. Received: a model "
            f"with run_eagerly={model.run_eagerly}, jit_compile="
            f"{model.jit_compile}. Valid: model.compile(..., "
            "jit_compile=True)."
        )
    asked = {f"{part}_variables": True for part in _STATE[kind]}
    return step, model._get_jax_state(**asked)


@contextlib.contextmanager
def looking_like(devices):
    """Context in which code that asks for the platform sees other devices.

    Keras asks `jax.devices()` and `jax.default_backend()` (3.7 to 3.16), and
    so does KerasHub. JAX itself doesn't go through these names.

    Args:
        devices: sequence of `jax.Device`, such as those of a topology.
    """
    platform = devices[0].platform
    real = {
        name: getattr(jax, name)
        for name in ("devices", "local_devices", "default_backend")
    }

    def listed(name):
        def list_devices(*args, **kwargs):
            backend = kwargs.get("backend", args[0] if args else None)
            if backend in (None, platform):
                return list(devices)
            return real[name](*args, **kwargs)

        return list_devices

    jax.devices, jax.local_devices = listed("devices"), listed("local_devices")
    jax.default_backend = lambda: platform
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(jax, name, function)


def sublayers(layer):
    """Returns the layers that a layer holds itself, in their order."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def leave_out(layer):
    """Makes a layer of a model that isn't compiled yet one that does nothing.

    It has no variables any more, and returns its first argument. Keras (3.7 to
    3.16) collects a model's variables from these lists of its layers.
    """
    for name in (
        "_trainable_variables",
        "_non_trainable_variables",
        "_seed_generators",
        "_metrics",
        "_layers",
    ):
        vars(layer)[name] = []
    set_call(layer, lambda first, *args, **kwargs: first)


def set_call(layer, call):
    """Lets a layer call a function, with the arguments that it has."""
    vars(layer)["call"] = call


def traced_values(variables):
    """Returns the values of variables in a traced step, or `None`.

    As they are, and not in the dtype of the computation.
    """
    if not in_stateless_scope():
        return None
    scope = get_stateless_scope()
    values = [scope.get_current_value(v) for v in variables]
    return None if any(value is None for value in values) else values


def collects_losses():
    """Whether what layers add to the loss is collected."""
    return get_stateless_scope().collect_losses


def mask_of(array):
    """Returns the mask that Keras has attached to an array, or `None`."""
    return masking.get_keras_mask(array)


def with_mask(array, mask):
    """Attaches a mask to an array, as Keras does (3.7 to 3.16)."""
    if mask is not None:
        masking.set_keras_mask(array, mask)
    return array
