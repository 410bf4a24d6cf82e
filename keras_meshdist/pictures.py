"""Pictures of which part of an array each device of a mesh holds."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_meshdist.pieces import axes_of, pieces_of

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def picture(mesh, row):
    if len(mesh.shape) > 3:
        raise ValueError(
            f"A picture shows a mesh of at most three axes. Received: {mesh}."
        )
    names, shape = tuple(mesh.axis_names), tuple(mesh.shape)
    sizes = dict(zip(names, shape, strict=True))
    colors = {}

    def cell(place):
        where = dict(zip(names, place, strict=True))
        bounds = []
        for size, entry in zip(row.shape, row.axes, strict=True):
            block = 0
            for axis in axes_of(entry):
                block = block * sizes[axis] + where[axis]
            step = size // pieces_of(mesh, entry)
            bounds.append(f"{block * step}:{(block + 1) * step}")
        text = f"[{', '.join(bounds)}]"
        color = colors.setdefault(text, _COLORS[len(colors) % len(_COLORS)])
        return Text(text, color)

    flat = (1,) * (3 - len(shape)) + shape
    tables = []
    for i in range(flat[0]):
        title = f"{names[0]}={i}" if len(shape) == 3 else row.path
        table = Table(title=title, show_header=False, show_lines=True)
        for j in range(flat[1]):
            table.add_row(
                *(cell((i, j, k)[3 - len(shape) :]) for k in range(flat[2]))
            )
        tables.append(table)
    return Group(*tables)
