"""Where a sequence is split: layouts for what layers return."""

from keras_meshdist.pieces import as_entries


def output_axes(dimensions, split, sequence_axes):
    """Returns layouts for the outputs of layers that have the sequence.

    Args:
        dimensions: `Dimensions` of a model.
        split: dict from dimension to the tuple of axes that split it.
        sequence_axes: tuple of str.

    Returns:
        Dict from path, a layer's with `/output` behind it, to the layout's
        entries. The first stands for the batch axes, which only the
        distribution knows. Where an axis splits another dimension, such as the
        heads, it doesn't split the sequence: that is said too, or XLA might
        gather weights instead.
    """
    rows, sequence = dimensions.of_data(0), dimensions.of_data(1)
    found = {}
    for path, outputs in dimensions.outputs().items():
        layouts = {
            _layout([split.get(dim, ()) for dim in dims[2:]], sequence_axes)
            for dims in outputs
            if len(dims) > 1 and dims[0] in rows and dims[1] in sequence
        }
        if len(layouts) == 1:
            found[path] = layouts.pop()
    return found


def _layout(over, sequence_axes):
    used = {axis for axes in over for axis in axes}
    free = tuple(axis for axis in sequence_axes if axis not in used)
    return (None, *as_entries([free, *over]))
