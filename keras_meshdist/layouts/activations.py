"""Where rows and a sequence are split: layouts for what layers return."""

import collections

from keras_meshdist.pieces import as_entries


def output_axes(dimensions, split, sequence_axes=()):
    """Returns layouts for the outputs of layers that have rows.

    Args:
        dimensions: `Dimensions` of a model.
        split: dict from dimension to the tuple of axes that split it.
        sequence_axes: tuple of str. If there are any, only outputs that have
            the sequence get a layout. Defaults to none.

    Returns:
        Dict from path, a layer's with `/output` behind it, to a tuple of
        pairs: a layout's entries, and if there are several the sizes of the
        last dimension that it is for. The first entry stands for the batch
        axes, which only the distribution knows. Where an axis splits another
        dimension, such as the heads, it doesn't split the sequence: that is
        said too, or XLA might gather weights instead.
    """
    rows, sequence = dimensions.of_data(0), dimensions.of_data(1)
    found = {}
    for path, outputs in dimensions.outputs().items():
        layouts = collections.defaultdict(set)
        for dims, size in outputs:
            if len(dims) < 2 or dims[0] not in rows:
                continue
            if dims[1] in sequence or not sequence_axes:
                layouts[_layout(dims, split, sequence_axes)].add(size)
        if len(layouts) == 1:
            found[path] = ((*layouts, ()),)
        elif layouts:
            found[path] = tuple(
                (axes, tuple(sorted(sizes))) for axes, sizes in layouts.items()
            )
    return found


def _layout(dims, split, sequence_axes):
    over, used = [], set()
    for dim in dims[1:]:
        axes = split.get(dim, ())
        over.append(() if used & set(axes) else axes)
        used |= set(axes)
    if sequence_axes:
        over[0] = tuple(axis for axis in sequence_axes if axis not in used)
    return (None, *as_entries(over))
