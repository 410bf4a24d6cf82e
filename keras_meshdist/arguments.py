"""What users pass to the constructor of a distribution, checked."""

import difflib

import keras

from keras_meshdist.mesh import make_mesh
from keras_meshdist.pieces import axes_of

_OF_ALL = ["batch_dim_name", "auto_shard_dataset", "data_timeout"]


def check_arguments(args, layout_map, kwargs):
    """Raises a ValueError for arguments that `ModelParallel` doesn't take."""
    if args:
        raise ValueError(
            "`ModelParallel` takes keyword arguments only; the mesh comes "
            f"with the layout map. Received: {len(args)} positional "
            f"argument(s), the first of type {type(args[0]).__name__}. Valid: "
            "ModelParallel(layout_map=LayoutMap(mesh), batch_dim_name='batch')."
        )
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise ValueError(
            "`layout_map` must be a `LayoutMap`. "
            f"Received: layout_map={layout_map!r}."
        )
    device_mesh = kwargs.pop("device_mesh", None)  # Keras drops it in silence
    if device_mesh is not None and device_mesh is not layout_map.device_mesh:
        raise ValueError(
            "The mesh of a `ModelParallel` is its layout map's. Received: "
            f"device_mesh={device_mesh}, layout_map with "
            f"{layout_map.device_mesh}. Leave `device_mesh` out."
        )
    valid = ["layout_map", *_OF_ALL, "sequence_dim_name"]
    _check_names("ModelParallel", valid, kwargs)


def mesh_of(device_mesh, devices, kwargs):
    """Returns the mesh of a `DataParallel`, by what it was given."""
    _check_names("DataParallel", ["device_mesh", "devices", *_OF_ALL], kwargs)
    if device_mesh is not None and devices is not None:
        raise ValueError(
            "`DataParallel` takes a mesh or a list of devices. Received: "
            f"device_mesh={device_mesh} and devices={devices}. Leave one out."
        )
    if device_mesh is None:
        return make_mesh({"batch": -1}, devices)
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise ValueError(
            "`device_mesh` must be a `keras.distribution.DeviceMesh`. "
            f"Received: device_mesh={device_mesh!r}. `kmd.make_mesh` makes one."
        )
    return device_mesh


def _check_names(what, valid, kwargs):
    for name in kwargs:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"`{what}` has no argument `{name}`.{hint} Received: "
            f"{name}={kwargs[name]!r}. Valid arguments: {valid}."
        )


def default_batch_axes(layout_map):
    """Returns the batch axis of a `ModelParallel` that was given none."""
    mesh = layout_map.device_mesh
    names = tuple(mesh.axis_names)
    if "batch" not in names and not len(layout_map):
        raise ValueError(
            "With no layout rule and no axis named 'batch' in the mesh, "
            "nothing says what to split. Received: batch_dim_name=None, "
            f"an empty layout map, {mesh}. Give `batch_dim_name`, one of "
            f"{list(names)}."
        )
    return "batch" if "batch" in names else names[0]


def batch_axes(batch_dim_name, mesh):
    """Returns the tuple of the mesh axes over which rows are split."""
    names = tuple(mesh.axis_names)
    is_sequence = isinstance(batch_dim_name, str | list | tuple)
    axes = axes_of(batch_dim_name) if is_sequence else ()
    if (
        not axes
        or not all(axis in names for axis in axes)
        or len(set(axes)) != len(axes)
    ):
        raise ValueError(
            "`batch_dim_name` must be an axis of the mesh, or a sequence of "
            f"different ones. Received: batch_dim_name={batch_dim_name!r}. "
            f"Valid axes: {list(names)}."
        )
    return axes


def sequence_axes(sequence_dim_name, batch_axes, mesh):
    """Returns the tuple of the mesh axes over which sequences are split."""
    axes = axes_of(sequence_dim_name)
    free = [axis for axis in mesh.axis_names if axis not in batch_axes]
    if set(axes) - set(free) or len(set(axes)) != len(axes):
        raise ValueError(
            "`sequence_dim_name` must be an axis of the mesh over which rows "
            "aren't split, or a sequence of different ones. Received: "
            f"sequence_dim_name={sequence_dim_name!r}, batch_dim_name="
            f"{batch_axes!r}. Valid axes: {free}."
        )
    return axes
