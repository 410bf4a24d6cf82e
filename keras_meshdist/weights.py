"""Puts values of variables on the mesh, and moves whole models."""

import zlib
from typing import Any

import jax
import numpy as np

from keras_meshdist import keras_hooks, predictions, verdicts
from keras_meshdist.arrays import FileArray


class Assigned:
    """What was assigned to variables, for processes to compare.

    Each process takes its own part of a value, so a value that isn't the same
    on all would become one that nobody gave.
    """

    def __init__(self):
        self._digests: dict[str, int] = {}

    def note(self, path: str, value: Any) -> None:
        """Keeps what is compared of a value; of a file, samples."""
        if isinstance(value, FileArray):
            self._digests[path] = value.digest()
            return
        value = np.ascontiguousarray(value)
        self._digests[path] = zlib.crc32(value.view(np.uint8).data)

    def take(self) -> tuple[tuple[str, int], ...]:
        """Returns paths and digests since the last time."""
        digests, self._digests = self._digests, {}
        return tuple(digests.items())


def is_local(value: Any) -> bool:
    """Whether each process has a value of its own, perhaps another one."""
    return not isinstance(value, jax.Array) or (
        value.is_fully_addressable and len(value.devices()) == 1
    )


def compare(answers: list[Any]) -> None:
    """Compares what all processes assigned.

    Args:
        answers: list of what `Assigned.take` returned, by process number.

    Raises:
        verdicts.DisagreementError: if they differ.
    """
    if len(set(answers)) <= 1:
        return
    given = [dict(answer) for answer in answers]
    paths = dict.fromkeys(path for answer in given for path in answer)
    path = next(p for p in paths if len({g.get(p) for g in given}) > 1)
    texts = [
        f"a value with the checksum {digests[path]}"
        if path in digests
        else "no value"
        for digests in given
    ]
    raise verdicts.DisagreementError(
        "All processes must give a variable the same value, since each holds "
        f"a part. Received, for variable {path!r}: {verdicts.grouped(texts)}. "
        "Draw random values from Keras' seeds, and set what depends on a "
        "process' own data alike on all."
    )


def place(value: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts the value of a variable on devices, each its own part.

    Args:
        value: NumPy or JAX array, or `FileArray`. If it doesn't lie on the
            devices of all processes, it must be the same on each.
        sharding: `jax.sharding.Sharding`.

    Returns:
        `jax.Array`.
    """
    if isinstance(value, FileArray):
        return _place_parts(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        across = not value.is_fully_addressable
        if sharding.is_fully_addressable or (
            across and value.sharding.device_set == sharding.device_set
        ):
            return jax.device_put(value, sharding)
        value = predictions.fetch(value) if across else np.asarray(value)
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def _place_parts(value, sharding):
    """Reads each part once, and no more than one at a time."""
    parts, arrays = {}, []
    for device, index in sharding.addressable_devices_indices_map(
        value.shape
    ).items():
        key = str(index)
        if key not in parts:
            parts[key] = value[index]
        parts[key] = jax.device_put(parts[key], device)
        # Until then the host holds it too.
        arrays.append(jax.block_until_ready(parts[key]))
    return jax.make_array_from_single_device_arrays(
        value.shape, sharding, arrays
    )


def distribute_model(model, distribution=None):
    """Moves a model that exists already onto a mesh, in place.

    All variables are moved, one by one: those of the layers, of the optimizer
    and of the metrics, and the states of random generators. The model may lie
    on one device or on another mesh before. Layout rules are judged when all
    have been moved.

    Example:

    ```python
    model = keras.saving.load_model("model.keras")
    keras.distribution.set_distribution(dist)
    kmd.distribute_model(model, dist)
    model.fit(x, y)
    ```

    Args:
        model: built Keras model, or layer.
        distribution: `kmd.ModelParallel` or `kmd.DataParallel`. `None` moves
            all to one device, the first of this process.

    Returns:
        The model.

    Raises:
        ValueError: if the model isn't built, the distribution isn't one of
            these, or a layout doesn't fit.
        DisagreementError: if processes have different values.
    """
    ours = isinstance(distribution, keras_hooks.HookedDistribution)
    if distribution is not None and not ours:
        raise ValueError(
            "`distribution` must be a `kmd.ModelParallel`, a "
            f"`kmd.DataParallel` or None. Received: {distribution}."
        )
    if not getattr(model, "built", False):
        raise ValueError(
            "The model must be built, for its variables to be moved. Received: "
            f"{model.name!r}, which isn't. Call it on a batch, or `build` it; "
            "or build it under the distribution, which needs no moving."
        )
    weights, slots = variables_of(model)
    for variable in weights:
        _move(variable, distribution)
    for variable, weight in slots:
        if distribution is None:
            _move(variable, None)
        else:
            with distribution.creating_slot(weight):
                _move(variable, distribution)
    keras_hooks.forget_functions(model)
    if distribution is not None:
        distribution.compare_assigned()
        distribution.model_is_whole(model)
    return model


def check_place(model, mesh):
    """Raises unless the variables of a model lie on the devices of a mesh.

    Args:
        model: `keras.Model`, whose variables may have no values yet.
        mesh: `jax.sharding.Mesh`.

    Raises:
        ValueError: if one lies elsewhere.
    """
    devices = set(mesh.devices.flat)
    for variable in model.variables:
        if not keras_hooks.has_value(variable):
            continue
        sharding = getattr(variable.value, "sharding", None)
        if sharding is not None and sharding.device_set != devices:
            found = sorted(map(str, sharding.device_set))
            raise ValueError(
                "A model must lie on the mesh of the distribution. Received: "
                f"variable {variable.path!r} on {', '.join(found[:2])}"
                f"{' and others' if found[2:] else ''}, and a mesh of "
                f"{len(devices)} devices. Build the model after "
                "`keras.distribution.set_distribution(distribution)`, or move "
                "it: `kmd.distribute_model(model, distribution)`."
            )


def variables_of(model):
    """Returns all variables of a model that training changes.

    Args:
        model: built Keras model, or layer.

    Returns:
        List of those of layers and metrics, and list of pairs of an optimizer's
        variable and the weight that it belongs to, or `None`.
    """
    metrics = getattr(model, "metrics_variables", [])
    weights = list({id(v): v for v in [*model.variables, *metrics]}.values())
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return weights, []
    # A slot is named for its weight, which Keras doesn't keep otherwise.
    by_name = {w.path.replace("/", "_"): w for w in model.trainable_variables}
    pairs = []
    for slot in optimizer.variables:
        prefixes = [
            name for name in by_name if slot.name.startswith(f"{name}_")
        ]
        longest = max(prefixes, key=len, default=None)
        pairs.append((slot, by_name.get(longest)))
    return weights, pairs


def _move(variable, distribution):
    keras_hooks.forget_layout(variable)
    value = variable.value
    if distribution is None:
        if not value.is_fully_addressable or len(value.devices()) > 1:
            value = jax.device_put(
                predictions.fetch(value), jax.local_devices()[0]
            )
        keras_hooks.set_value(variable, value, None)
        return
    layout = distribution.get_variable_layout(variable)
    placed = distribution.place_variable(variable, value, layout)
    # One after the other: older JAX confuses collectives that run at a time.
    jax.block_until_ready(placed)
    keras_hooks.set_value(variable, placed, layout)
