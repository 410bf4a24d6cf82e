"""Which meshes are worth a look when none is given."""

import itertools
import math

# More chips than this share no layer's work: then each has so little of it
# that the exchange takes longer.
_MOST_FOR_A_LAYER = 32


def candidate_meshes(devices, rows, layout="auto"):
    """Returns all sensible factorisations and axis orders.

    Rows are split over `"batch"`, or over `"fsdp"`, which also splits the
    weights; and layers over `"model"`. Meshes with more batch shards than
    there are rows are left out.

    Example:

    ```python
    candidate_meshes(4, 8)[1]  # {"batch": 2, "model": 2}
    ```

    Args:
        devices: int, number of devices.
        rows: int, rows of a batch.
        layout: `"fsdp"` for meshes without a model axis, or else anything.

    Returns:
        List of dicts from axis name to size.
    """
    found = []
    for rows_axis in ("fsdp",) if layout == "fsdp" else ("batch", "fsdp"):
        other = "batch" if layout == "fsdp" else "model"
        for size in _divisors(devices):
            axes = {rows_axis: devices // size, other: size}
            over = math.prod(s for name, s in axes.items() if name != "model")
            wide = axes.get("model", 1) > _MOST_FOR_A_LAYER
            # Then no weight is split over it.
            bare = axes.get("fsdp") == 1
            if over > max(rows, 1) or wide or bare:
                continue
            orders = itertools.permutations(axes.items())
            if 1 in axes.values():
                orders = [sorted(axes.items(), key=lambda axis: -axis[1])]
            found += [dict(order) for order in orders]
    return found


def _divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def as_axes(mesh, devices):
    """Returns the axes of a mesh as pairs, with -1 filled in.

    Args:
        mesh: dict from axis name to size, one of which may be -1.
        devices: int, number of devices.

    Returns:
        Tuple of pairs of str and int.

    Raises:
        ValueError: if the sizes don't multiply to the number of devices.
    """
    sizes = dict(mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    good = all(
        isinstance(size, int) and (size > 0 or size == -1)
        for size in sizes.values()
    )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if good and len(open_axes) == 1 and devices % known == 0:
        sizes[open_axes[0]] = known = devices // known
        known = math.prod(sizes.values())
    if not good or not sizes or len(open_axes) > 1 or known != devices:
        raise ValueError(
            "The sizes of the mesh axes must multiply to the number of chips. "
            f"Received: {_written(mesh)} for {devices} chips. Valid: for "
            f"instance batch={devices}, or a size of -1 once."
        )
    return tuple(sizes.items())


def _written(mesh):
    return ",".join(f"{name}={size}" for name, size in dict(mesh).items())
