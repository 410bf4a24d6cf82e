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
        distribution knows. Not for outputs that are split over one of the
        sequence's axes already, along another dimension.
    """
    rows, sequence = dimensions.of_data(0), dimensions.of_data(1)
    found = {}
    for path, outputs in dimensions.outputs().items():
        layouts = {
            (None, *as_entries([sequence_axes, *over]))
            for dims in outputs
            if len(dims) > 1 and dims[0] in rows and dims[1] in sequence
            for over in [[split.get(dim, ()) for dim in dims[2:]]]
            if _are_different([*sequence_axes, *sum(over, ())])
        }
        if len(layouts) == 1:
            found[path] = layouts.pop()
    return found


def _are_different(axes):
    return len(set(axes)) == len(axes)
