"""Meshes: from named axes to devices, and from Keras' mesh to JAX's."""

import collections
import math

import jax
import keras
import numpy as np
from jax.experimental import mesh_utils

# Axes that usually split rows, and so send the least between devices: the slow
# network between the slices of a pod goes to the first of these.
_ROW_AXES = ("batch", "data", "replica", "fsdp")


def make_mesh(axes, devices=None):
    """Makes a device mesh from named axes.

    On TPU the devices are ordered so that neighbours in the mesh are
    neighbours in the chips' network (`jax.experimental.mesh_utils`). Of
    several TPU slices, the slow network between them is crossed only along
    the axis named `"batch"`, `"data"`, `"replica"` or `"fsdp"` (else along the
    first axis) if the number of slices divides it. Elsewhere devices stand in
    the order in which they were given.

    Example:

    ```python
    mesh = make_mesh({"model": 4, "batch": -1})  # 8 devices: shape (4, 2)
    ```

    Args:
        axes: dict from axis name to size, in the order of the mesh. One size
            may be -1: it is inferred from the number of devices.
        devices: sequence of `jax.Device` or of strings such as `"cpu:0"`.
            Defaults to all devices of all processes.

    Returns:
        A `keras.distribution.DeviceMesh`.

    Raises:
        ValueError: if the axes are malformed or don't fit the devices.
    """
    devices = [
        _as_jax_device(device)
        for device in (jax.devices() if devices is None else np.ravel(devices))
    ]
    names, shape = _names_and_shape(axes, len(devices))
    if len(set(devices)) != len(devices):
        repeated = [
            str(d) for d, n in collections.Counter(devices).items() if n > 1
        ]
        raise ValueError(
            "A device stands in a mesh once. "
            f"Received repeated devices: {repeated}."
        )
    return keras.distribution.DeviceMesh(
        shape, names, _arrange(devices, names, shape)
    )


def _names_and_shape(axes, count):
    if not isinstance(axes, collections.abc.Mapping) or not axes:
        raise ValueError(
            "`axes` must be a non-empty dict from axis name to size. "
            f"Received: axes={axes!r}. Valid: {{'model': 4, 'batch': -1}}."
        )
    check_axis_names(tuple(axes))
    for name, size in axes.items():
        is_int = isinstance(size, int | np.integer) and size is not True
        if not is_int or not (size >= 1 or size == -1):
            raise ValueError(
                "The size of a mesh axis must be a positive int, or -1 once "
                f"to infer it. Received: axes={dict(axes)!r}, where "
                f"{name!r} has size {size!r}."
            )
    sizes = [int(size) for size in axes.values()]
    if sizes.count(-1) > 1:
        raise ValueError(
            "At most one mesh axis may have size -1, because only one can be "
            f"inferred. Received: axes={dict(axes)!r}."
        )
    known = math.prod(size for size in sizes if size != -1)
    if (-1 in sizes and count % known) or (-1 not in sizes and known != count):
        raise ValueError(
            "The sizes of the mesh axes must multiply to the number of "
            f"devices. Received: axes={dict(axes)!r} ({known} with the sizes "
            f"given) for {count} devices. Valid: sizes whose product is "
            f"{count}, or `devices=` with a part of the devices."
        )
    return tuple(axes), tuple(
        count // known if size == -1 else size for size in sizes
    )


def _arrange(devices, names, shape):
    if devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    slices = {getattr(d, "slice_index", 0) for d in devices}
    if len(slices) == 1:
        on_tray = _arrange_tray(devices, shape)
        if on_tray is not None:
            return on_tray
        return mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
    across = _across_slices(names, shape, len(slices))
    within = [n // a for n, a in zip(shape, across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def _arrange_tray(devices, shape):
    """Arranges the 2 x 4 chips of one host; `None` for all other grids.

    JAX's own order for eight chips of v5e and v6e, whatever the mesh, is a
    ring along the longer side if that is the first, as it isn't on these; an
    axis of four chips then has two in each of two opposite corners.
    """
    coords = np.array([device.coords for device in devices])
    spread = np.ptp(coords, axis=0) + 1
    if sorted(spread) != [1, 2, 4] or len(devices) != 8:
        return None
    by_length = np.argsort(spread, kind="stable")
    order = np.lexsort([coords[:, d] for d in by_length[::-1]])
    grid = np.array(devices, dtype=object)[order].reshape(2, 4)
    if max(shape) == 8:
        # Along one side and back along the other: all are neighbours.
        grid = np.concatenate([grid[0], grid[1][::-1]])
    elif [size for size in shape if size > 1] == [4, 2]:
        grid = grid.T
    return grid.reshape(shape)


def _across_slices(names, shape, slices):
    """How many slices each axis crosses: one axis all, or several a part."""
    order = sorted(
        range(len(names)),
        key=lambda i: (*_ROW_AXES, names[i]).index(names[i]),
    )
    across = [1] * len(shape)
    whole = [axis for axis in order if shape[axis] % slices == 0]
    for axis in whole[:1] or order:
        across[axis] = math.gcd(shape[axis], slices)
        slices //= across[axis]
    return across


def check_axis_names(names):
    """Raises a ValueError unless axis names are distinct non-empty strings."""
    if (
        not names
        or not all(isinstance(name, str) and name for name in names)
        or len(set(names)) != len(names)
    ):
        raise ValueError(
            "The axis names of a mesh must be distinct, non-empty strings. "
            f"Received: axis_names={list(names)!r}."
        )


def _as_jax_device(device):
    if isinstance(device, str | np.str_):
        return _devices_by_name([device])[str(device)]
    return device


def _devices_by_name(names):
    platforms = {str(name).partition(":")[0] for name in names}
    found = {
        f"{device.platform}:{device.id}": device
        for platform in sorted(platforms)
        for device in jax.devices(platform)
    }
    for name in names:
        if str(name) not in found:
            raise ValueError(
                "A device must be a `jax.Device` or a name that "
                "`keras.distribution.list_devices()` gives. "
                f"Received: {str(name)!r}. Valid: {sorted(found)}."
            )
    return found


def jax_mesh(device_mesh):
    """Returns Keras' mesh as a `jax.sharding.Mesh`.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`, whose devices may be
            names or `jax.Device` objects.

    Returns:
        A `jax.sharding.Mesh` with the same axes.
    """
    devices = np.asarray(device_mesh.devices)
    names = [d for d in devices.flat if isinstance(d, str | np.str_)]
    if names:
        by_name = _devices_by_name(names)
        flat = [
            by_name[str(d)] if isinstance(d, str | np.str_) else d
            for d in devices.flat
        ]
        devices = np.array(flat, dtype=object).reshape(devices.shape)
    return jax.sharding.Mesh(devices, tuple(device_mesh.axis_names))


def process_ids(mesh):
    """Returns the ids of the processes that own the devices of a mesh.

    Args:
        mesh: `jax.sharding.Mesh`.

    Returns:
        Int array with one dimension for each mesh axis.
    """
    return np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
