"""Into how many pieces the axes of a mesh split a dimension."""

import math


def axes_of(entry):
    """Returns a layout entry's axis names as a tuple."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def pieces_of(mesh, *entries):
    """Returns the number of pieces that entries of a layout make together.

    Args:
        mesh: `keras.distribution.DeviceMesh`.
        *entries: axis name, sequence of axis names, or `None`.
    """
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return math.prod(sizes[a] for entry in entries for a in axes_of(entry))


def misfit(axes, shape, mesh):
    """Says in words why a layout doesn't fit a shape; None if it does.

    Args:
        axes: tuple, the layout's entries.
        shape: tuple of int.
        mesh: `keras.distribution.DeviceMesh`.
    """
    if len(axes) != len(shape):
        return (
            f"the layout has {len(axes)} entries, the shape has "
            f"{len(shape)} dimensions"
        )
    for dimension, entry in enumerate(axes):
        pieces = pieces_of(mesh, entry)
        if shape[dimension] % pieces:
            return (
                f"dimension {dimension} of size {shape[dimension]} doesn't "
                f"divide by the {pieces} pieces of axis {entry!r}"
            )
    return None


def what_divides(axes, shape, mesh):
    """Returns a layout's entries, with `None` where they don't divide."""
    return tuple(
        None if size % pieces_of(mesh, entry) else entry
        for size, entry in zip(shape, axes, strict=True)
    )


def shard_further(axes, shape, mesh, over, min_size, among=None, cut=()):
    """Splits a variable further, along its largest dimension that divides.

    Args:
        axes: list of the tuple of axis names of each dimension; changed.
        shape: tuple of int.
        mesh: `keras.distribution.DeviceMesh`.
        over: tuple of str, the axes to split over.
        min_size: int, number of elements below which nothing is done.
        among: sequence of int, the dimensions that may be split. Defaults to
            all that aren't.
        cut: collection of int, dimensions of which a layer takes parts, such
            as the gates of an LSTM. They come last: their parts would have to
            change places.

    Returns:
        Why it couldn't, or `None`.
    """
    if math.prod(shape) < min_size:
        return f"fewer than {min_size} elements"
    pieces = pieces_of(mesh, over)
    among = range(len(shape)) if among is None else among
    free = [d for d in among if not axes[d] and shape[d] > 1]
    for d in sorted(free, key=lambda d: (d in cut, -shape[d])):
        if shape[d] % pieces == 0:
            axes[d] = tuple(over)
            return None
    return f"no dimension divides by the {pieces} of {'/'.join(over)}"


def as_entries(axes):
    """Returns a layout's entries for tuples of axis names."""
    return tuple(
        (names[0] if len(names) == 1 else tuple(names)) if names else None
        for names in axes
    )
