"""Layouts read off a model: fully sharded, and tensor parallel."""

import math

import jax

from keras_meshdist import keras_hooks
from keras_meshdist.abstract import abstract, no_distribution, shapes_of
from keras_meshdist.layout import axes_of
from keras_meshdist.layouts.choice import split_dimensions, weights_of
from keras_meshdist.layouts.dimensions import Dimensions
from keras_meshdist.layouts.rules import make_map

# Smaller variables than this many elements stay whole under `fsdp`: what they
# take is little, and each would be gathered by itself before it is used.
_MIN_SIZE = 2**16


def fsdp(model_or_build_fn, mesh, axis="fsdp", min_size=_MIN_SIZE):
    """Layout rules that shard each large variable, whatever it is for.

    Each is split along its largest dimension that divides by the size of the
    axis; before it is used, XLA gathers it. With the axis also among the batch
    axes this is fully sharded data parallelism.

    Example:

    ```python
    mesh = kmd.make_mesh({"fsdp": -1})
    layout_map = kmd.layouts.fsdp(build_model, mesh)
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="fsdp")
    ```

    Args:
        model_or_build_fn: `keras.Model`, or a function that returns one, which
            is then built without memory.
        mesh: `keras.distribution.DeviceMesh`.
        axis: str, or sequence of str: the mesh axes over which to shard.
            Defaults to `"fsdp"`.
        min_size: int, number of elements below which a variable stays whole.
            Defaults to 65536.

    Returns:
        A `LayoutMap`. Its `notes` say of each variable that stays whole why.

    Raises:
        ValueError: if the axis isn't in the mesh.
    """
    names = _check_axes(mesh, axis=axis)["axis"]
    model = abstract(model_or_build_fn)
    layouts, notes = {}, {}
    for variable in model.variables:
        axes = [()] * len(variable.shape)
        notes[variable.path] = _shard_further(
            axes, variable.shape, names, _pieces(mesh, names), min_size
        )
        layouts[variable.path] = _as_layout(axes)
    return _finish(mesh, model, layouts, notes)


def auto(
    model_or_build_fn,
    mesh,
    model_axis="model",
    fsdp_axis=None,
    expert_axis=None,
    min_size=_MIN_SIZE,
):
    """Layout rules for tensor parallelism, from the structure of a model.

    The model is traced, not run, and what its operations do says which
    dimensions of its weights belong together: those are split together, so
    that devices exchange as little as can be. In a transformer these are the
    heads, the width of the feed-forward block, and the vocabulary: query, key,
    value and the first feed-forward kernels by their output, the kernels that
    follow by their input, as in Megatron-LM. The same goes for any other
    model. Heads of keys and values that don't divide over the axis stay whole.

    Example:

    ```python
    mesh = kmd.make_mesh({"batch": 2, "model": 4})
    layout_map = kmd.layouts.auto(build_model, mesh)
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    model = build_model()
    ```

    Args:
        model_or_build_fn: `keras.Model`, or a function that returns one, which
            is then built without memory.
        mesh: `keras.distribution.DeviceMesh`.
        model_axis: str, or sequence of str: the mesh axes for tensor
            parallelism; `None` for none. Defaults to `"model"`.
        fsdp_axis: str, or sequence of str: the mesh axes over which large
            variables are sharded further, along another dimension, or what
            `model_axis` couldn't divide along the same one. Usually a batch
            axis. Defaults to `None`.
        expert_axis: str, or sequence of str: the mesh axes for the experts of
            a mixture-of-experts; then `model_axis` splits each expert.
            Defaults to `None`: the experts are split over `model_axis`.
        min_size: int, number of elements below which `fsdp_axis` leaves a
            variable as it is. Defaults to 65536.

    Returns:
        A `LayoutMap`. Its `notes` say of each variable that stays whole why.

    Raises:
        ValueError: if an axis isn't in the mesh, or is given twice, or the
            model doesn't know its inputs.
    """
    names = _check_axes(
        mesh,
        model_axis=model_axis,
        fsdp_axis=fsdp_axis,
        expert_axis=expert_axis,
    )
    model = abstract(model_or_build_fn)
    dimensions, variables = trace(model)
    weights = weights_of(dimensions, variables)
    experts = _expert_dimensions(dimensions, weights)
    over_model = names["model_axis"]
    split = {}
    if names["expert_axis"]:
        split.update(dict.fromkeys(experts, names["expert_axis"]))
        rest = weights
    elif over_model:
        pieces = _pieces(mesh, over_model)
        whole = _divisible(weights, experts, pieces)
        split.update(dict.fromkeys(whole, over_model))
        rest = [w for w in weights if not (_is_expert(w, whole))]
    if over_model:
        pieces = _pieces(mesh, over_model)
        excluded = (
            dimensions.of_data()
            | dimensions.between_weights()
            | dimensions.between_activations()
            | experts
        )
        chosen = split_dimensions(rest, dimensions.uses(), pieces, excluded)
        split.update(dict.fromkeys(chosen, over_model))
    looked_up = {
        d
        for d, uses in dimensions.uses().items()
        if any(use.kind == "gathered" and use.weights for use in uses)
    }
    shared = {d for w in weights if w.work for d in w.dims}
    layouts, notes = {}, {}
    for weight, variable in zip(weights, variables, strict=True):
        axes = [()] * len(weight.shape)
        taken, reason = set(), None
        for d, (dim, size) in enumerate(
            zip(weight.dims, weight.shape, strict=True)
        ):
            over = split.get(dim, ())
            if dim in experts and not _is_expert(weight, {dim}):
                continue  # the router chooses among all
            if not over or taken & set(over):
                continue
            if size % _pieces(mesh, over):
                reason = f"{size} doesn't divide over {'/'.join(over)}"
                continue
            axes[d] = over
            taken |= set(over)
        table = looked_up & set(weight.dims)
        if over_model and not taken and len(axes) > 1:
            # A table whose rows don't divide goes by its columns. What isn't
            # multiplied, such as positions, goes by what no weight shares.
            free = [
                d
                for d, dim in enumerate(weight.dims)
                if table or not (weight.work or dim in shared)
            ]
            pieces = _pieces(mesh, over_model)
            problem = _shard_further(
                axes, weight.shape, over_model, pieces, 0, free
            )
            reason = reason if problem else None
        if names["fsdp_axis"]:
            over = names["fsdp_axis"]
            whole = over_model if not any(axes) else ()
            _shard_further(
                axes,
                weight.shape,
                (*over, *whole),
                _pieces(mesh, (*over, *whole)),
                min_size,
            ) and _shard_further(
                axes, weight.shape, over, _pieces(mesh, over), min_size
            )
        layouts[variable.path] = _as_layout(axes)
        notes[variable.path] = reason
    return _finish(mesh, model, layouts, notes)


def trace(model):
    """Returns the `Dimensions` of a model, and its variables in their order."""
    inputs = keras_hooks.input_structure(model)
    if inputs is None:
        raise ValueError(
            "The model must know its inputs, as a functional or sequential "
            f"model does. Received: {model.name!r} of class "
            f"{type(model).__name__}."
        )
    trainable = model.trainable_variables
    others = model.non_trainable_variables

    def call(trainable, others, inputs):
        return model.stateless_call(trainable, others, inputs)[0]

    with no_distribution(), keras_hooks.untouched_names():
        jaxpr = jax.make_jaxpr(call)(
            shapes_of(trainable), shapes_of(others), shapes_of(inputs)
        )
    variables = [*trainable, *others]
    return Dimensions(jaxpr, len(variables)), variables


def _expert_dimensions(dimensions, weights):
    """Dimensions along which a weight is many, one for each expert."""
    return {
        d
        for d, uses in dimensions.uses().items()
        for use in uses
        if use.kind == "batched"
        and use.weights
        and all(d in weights[number].dims for number in use.weights)
        and any(len(weights[number].dims) > 2 for number in use.weights)
    }


def _is_expert(weight, dims):
    """Not the router, which has the experts as its outputs."""
    many = len(weight.dims) > (2 if weight.work else 1)
    return many and bool(dims & set(weight.dims))


def _divisible(weights, dims, pieces):
    """Those of some dimensions that divide wherever they are a weight's."""
    return {
        dim
        for dim in dims
        if all(
            size % pieces == 0
            for w in weights
            if len(w.dims) > 2
            for d, size in zip(w.dims, w.shape, strict=True)
            if d == dim
        )
    }


def _shard_further(axes, shape, over, pieces, min_size, among=None):
    """Splits a variable further, along its largest dimension that divides.

    Changes `axes`, the tuple of axis names of each dimension. Returns why it
    couldn't, or `None`.
    """
    if math.prod(shape) < min_size:
        return f"fewer than {min_size} elements"
    among = range(len(shape)) if among is None else among
    free = [d for d in among if not axes[d] and shape[d] > 1]
    for d in sorted(free, key=lambda d: -shape[d]):
        if shape[d] % pieces == 0:
            axes[d] = tuple(over)
            return None
    return f"no dimension divides by the {pieces} of {'/'.join(over)}"


def _as_layout(axes):
    return tuple(
        (names[0] if len(names) == 1 else names) if names else None
        for names in axes
    )


def _pieces(mesh, names):
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return math.prod(sizes[name] for name in names)


def _check_axes(mesh, **arguments):
    """Returns each argument's axes as a tuple; none is used twice."""
    found = {name: axes_of(value) for name, value in arguments.items()}
    for name, axes in found.items():
        unknown = set(axes) - set(mesh.axis_names)
        if unknown:
            raise ValueError(
                f"`{name}` must be an axis of the mesh, or several. Received: "
                f"{name}={arguments[name]!r}. Valid axes: "
                f"{list(mesh.axis_names)}."
            )
    used = [axis for axes in found.values() for axis in axes]
    if len(set(used)) != len(used):
        raise ValueError(
            f"A mesh axis can serve one purpose only. Received: {arguments}."
        )
    return found


def _finish(mesh, model, layouts, notes):
    layouts = {v.path: layouts[v.path] for v in model.variables}
    layout_map = make_map(mesh, model, layouts)
    layout_map.notes.update(
        {
            path: why
            for path, why in notes.items()
            if why and not any(layouts[path])
        }
    )
    return layout_map
