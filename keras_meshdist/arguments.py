"""What users pass to the constructor of a distribution, checked."""

import difflib

import keras

from keras_meshdist.layout import axes_of


def check_arguments(args, layout_map, kwargs):
    """Raises a ValueError for arguments that no distribution takes."""
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
    valid = [
        "layout_map",
        "batch_dim_name",
        "auto_shard_dataset",
        "data_timeout",
    ]
    for name in kwargs:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise ValueError(
            f"`ModelParallel` has no argument `{name}`.{hint} "
            f"Received: {name}={kwargs[name]!r}. Valid arguments: {valid}."
        )


def batch_axes(batch_dim_name, layout_map):
    """Returns the tuple of the mesh axes over which rows are split."""
    mesh = layout_map.device_mesh
    names = tuple(mesh.axis_names)
    if batch_dim_name is None:
        if "batch" not in names and not len(layout_map):
            raise ValueError(
                "With no layout rule and no axis named 'batch' in the mesh, "
                "nothing says what to split. Received: batch_dim_name=None, "
                f"an empty layout map, {mesh}. Give `batch_dim_name`, one of "
                f"{list(names)}."
            )
        batch_dim_name = "batch" if "batch" in names else names[0]
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
