"""Variables sharded by their size, and what `auto` shares with that."""

import math

import jax

from keras_meshdist import keras_hooks
from keras_meshdist.abstract import abstract, no_distribution, shapes_of
from keras_meshdist.layout import axes_of
from keras_meshdist.layouts.choice import weights_of
from keras_meshdist.layouts.dimensions import Dimensions
from keras_meshdist.layouts.rules import make_map

# Smaller variables than this many elements stay whole under `fsdp`: what they
# take is little, and each would be gathered by itself before it is used.
MIN_SIZE = 2**16


def fsdp(model_or_build_fn, mesh, axis="fsdp", min_size=MIN_SIZE):
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
    names = check_axes(mesh, axis=axis)["axis"]
    model = abstract(model_or_build_fn)
    cut = {}
    if keras_hooks.input_structure(model) is not None:
        dimensions, variables = trace(model)
        weights, uses = weights_of(dimensions, variables), dimensions.uses()
        cut = {
            variable.path: cut_places(weight, uses)
            for weight, variable in zip(weights, variables, strict=True)
        }
    layouts, notes = {}, {}
    for variable in model.variables:
        axes = [()] * len(variable.shape)
        notes[variable.path] = shard_further(
            axes,
            variable.shape,
            names,
            pieces_of(mesh, names),
            min_size,
            cut=cut.get(variable.path, ()),
        )
        layouts[variable.path] = as_layout(axes)
    return finish(mesh, model, layouts, notes)


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


def cut_places(weight, uses):
    """The places of a weight's dimensions of which its layer takes parts."""
    return [
        d
        for d, dim in enumerate(weight.dims)
        if any(use.kind == "cut" for use in uses.get(dim, ()))
    ]


def shard_further(axes, shape, over, pieces, min_size, among=None, cut=()):
    """Splits a variable further, along its largest dimension that divides.

    Changes `axes`, the tuple of axis names of each dimension. Returns why it
    couldn't, or `None`. Dimensions that are cut, such as the gates of an LSTM,
    come last: their parts would have to change places.
    """
    if math.prod(shape) < min_size:
        return f"fewer than {min_size} elements"
    among = range(len(shape)) if among is None else among
    free = [d for d in among if not axes[d] and shape[d] > 1]
    for d in sorted(free, key=lambda d: (d in cut, -shape[d])):
        if shape[d] % pieces == 0:
            axes[d] = tuple(over)
            return None
    return f"no dimension divides by the {pieces} of {'/'.join(over)}"


def as_layout(axes):
    return tuple(
        (names[0] if len(names) == 1 else names) if names else None
        for names in axes
    )


def pieces_of(mesh, names):
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return math.prod(sizes[name] for name in names)


def check_axes(mesh, **arguments):
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


def finish(mesh, model, layouts, notes):
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
