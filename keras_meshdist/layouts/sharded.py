"""Variables sharded by their size, and what `auto` shares with that."""

import collections

import jax

from keras_meshdist import keras_hooks
from keras_meshdist.abstract import abstract, shapes_of
from keras_meshdist.layouts.activations import output_axes
from keras_meshdist.layouts.choice import weights_of
from keras_meshdist.layouts.dimensions import Dimensions
from keras_meshdist.layouts.rules import make_map
from keras_meshdist.layouts.sizes import first_that_works, shapes_to_try
from keras_meshdist.pieces import (
    as_entries,
    axes_of,
    misfit,
    pieces_of,
    shard_further,
)

# Smaller variables than this many elements stay whole under `fsdp`: what they
# take is little, and each would be gathered by itself before it is used.
MIN_SIZE = 2**16


def fsdp(
    model_or_build_fn,
    mesh,
    axis="fsdp",
    optimizer_axis=None,
    min_size=MIN_SIZE,
):
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
        optimizer_axis: str, or sequence of str: the mesh axes over which
            the optimizer's variables are sharded further, as in `auto`.
            Defaults to `None`.
        min_size: int, number of elements below which a variable stays whole.
            Defaults to 65536.

    Returns:
        A `LayoutMap`. Its `notes` say of each variable that stays whole why.

    Raises:
        ValueError: if the axis isn't in the mesh.
    """
    found = check_axes(mesh, axis=axis, optimizer_axis=optimizer_axis)
    names = found["axis"]
    model = abstract(model_or_build_fn)
    cut, outputs = {}, {}
    if keras_hooks.input_structure(model) is not None:
        dimensions, variables = trace(model)
        weights, uses = weights_of(dimensions, variables), dimensions.uses()
        cut = {
            variable.path: cut_places(weight, uses)
            for weight, variable in zip(weights, variables, strict=True)
        }
        if pieces_of(mesh, names) > 1:
            outputs = output_axes(dimensions, {})
    layouts, notes = [], {}
    for variable in model.variables:
        axes = [()] * len(variable.shape)
        notes[variable.path] = shard_further(
            axes,
            variable.shape,
            mesh,
            names,
            min_size,
            cut=cut.get(variable.path, ()),
        )
        layouts.append((variable, as_entries(axes)))
    layout_map = finish(mesh, model, layouts, notes, outputs)
    layout_map.optimizer_axes = found["optimizer_axis"]
    layout_map.min_size = min_size
    return layout_map


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

    weights = shapes_of(trainable), shapes_of(others)
    with keras_hooks.naming_outputs(), keras_hooks.untouched_names():
        jaxpr = first_that_works(
            lambda data: jax.make_jaxpr(call)(*weights, data),
            shapes_to_try(model, inputs),
        )
    variables = [*trainable, *others]
    return Dimensions(jaxpr, len(variables)), variables


def cut_places(weight, uses):
    """The places of a weight's dimensions of which its layer takes parts."""
    return [
        d
        for d, dim in enumerate(weight.dims)
        if any(use.kind == "cut" for use in uses.get(dim, ()))
    ]


def check_axes(mesh, **arguments):
    """Returns each argument's axes as a tuple.

    A weight is split over an axis once, but data, and the variables of an
    optimizer, may be split over it as well.
    """
    found = {name: axes_of(value) for name, value in arguments.items()}
    for name, axes in found.items():
        unknown = set(axes) - set(mesh.axis_names)
        if unknown:
            raise ValueError(
                f"`{name}` must be an axis of the mesh, or several. Received: "
                f"{name}={arguments[name]!r}. Valid axes: "
                f"{list(mesh.axis_names)}."
            )
    apart = ("sequence_axis", "optimizer_axis")
    of_weights = tuple(name for name in found if name not in apart)
    for names in (of_weights, *((name,) for name in apart)):
        used = [axis for name in names for axis in found.get(name, ())]
        if len(set(used)) != len(used):
            received = {name: arguments[name] for name in names}
            raise ValueError(
                f"A mesh axis can serve one purpose only. Received: {received}."
            )
    return found


def finish(mesh, model, layouts, notes, outputs=None):
    """Returns the layout map.

    Args:
        mesh: `keras.distribution.DeviceMesh`.
        model: `keras.Model`.
        layouts: list of pairs, a variable and its layout's entries.
        notes: dict from path to why a variable stays whole, or `None`.
        outputs: dict from path to what `output_axes` says of a layer.
    """
    found = collections.defaultdict(list)
    for variable, axes in layouts:
        found[variable.path].append((tuple(variable.shape), axes))
    layouts = {
        v.path: _one_layout(mesh, found[v.path]) for v in model.variables
    }
    layout_map = make_map(mesh, model, layouts, outputs or {})
    layout_map.weight_axes = {
        axis
        for axes in layouts.values()
        for entry in axes
        for axis in axes_of(entry)
    }
    layout_map.notes.update(
        {
            path: why
            for path, why in notes.items()
            if why and not any(layouts[path])
        }
    )
    return layout_map


def _one_layout(mesh, found):
    """The layout for all variables of a path, such as those of two encoders.

    Where they have different ones, that which fits most shapes, and splits
    them the most; of the others the map takes the entries that fit.
    """

    def use(axes):
        fitting = [not misfit(axes, shape, mesh) for shape, _ in found]
        return sum(fitting), pieces_of(mesh, *axes)

    return max((axes for _, axes in found), key=use)
