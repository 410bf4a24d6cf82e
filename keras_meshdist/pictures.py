"""Pictures of which part of an array each device of a mesh holds."""

import html
import itertools

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_meshdist.feeds import Feeds, physical_rows
from keras_meshdist.pieces import axes_of, pieces_of

_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# Light, so that dark letters can be read on them on a light and a dark page.
_FILLS = (
    "#8fb8de",
    "#f2c48d",
    "#a8d5a2",
    "#e3a8c0",
    "#c5b3e6",
    "#e6dd8f",
    "#9fd8d3",
    "#d0b49f",
)
_GRAY, _DARK = "#808080", "#1b1b1b"
_HEIGHT, _GAP, _MARGIN = 42, 6, 10


class Picture:
    """A mesh with what each device holds; equal parts have one color.

    Notebooks show it, `rich.print` prints it, and `save` writes it to a file.

    Args:
        axis_names: sequence of str, the mesh's axes.
        texts: array of str with a dimension for each axis: what the device at
            that place holds.
        title: str.
        process_ids: int array of the same shape, whose devices these are.
            Defaults to `None`: that isn't shown.

    Raises:
        ValueError: if the mesh has more than three axes.
    """

    def __init__(self, axis_names, texts, title, process_ids=None):
        texts = np.asarray(texts)
        if texts.ndim > 3:
            raise ValueError(
                "A picture shows a mesh of at most three axes. Received: "
                f"axes {tuple(axis_names)} of sizes {texts.shape}."
            )
        self.title = title
        self._names = ("",) * (3 - texts.ndim) + tuple(axis_names)
        self._texts = texts.reshape((1,) * (3 - texts.ndim) + texts.shape)
        self._processes = None
        if process_ids is not None and len(np.unique(process_ids)) > 1:
            self._processes = np.reshape(process_ids, self._texts.shape)
        distinct = dict.fromkeys(self._texts.flat)
        self._number = {text: n for n, text in enumerate(distinct)}

    def __rich__(self):
        tables = []
        for i, block in enumerate(self._texts):
            title = self.title
            if self._names[0]:
                title = f"{self.title}, {self._names[0]}={i}"
            table = Table(title=title, show_header=False, show_lines=True)
            for j, row in enumerate(block):
                cells = [self._label((i, j, k)) for k in range(len(row))]
                table.add_row(*cells)
            tables.append(table)
        return Group(*tables)

    def _label(self, place):
        text = self._texts[place]
        color = _COLORS[self._number[text] % len(_COLORS)]
        if self._processes is None:
            return Text(text, color)
        return Text(f"{text}\nprocess {self._processes[place]}", color)

    def save(self, path):
        """Writes the picture as an SVG file.

        Args:
            path: str or path of the file.
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._repr_svg_())

    def _repr_svg_(self):
        blocks, rows, columns = self._texts.shape
        lines = 2 if self._processes is None else 3
        height = _HEIGHT + 16 * (lines - 2)
        width = max(76, *(7 * len(t) + 18 for t in self._number))
        left = _MARGIN + 8 * (len(self._names[1]) + 3) * bool(self._names[1])
        # What stands above the devices: title, block and column names.
        block_top, column_top, top = 44, 44 + 20 * (blocks > 1), 0
        top = column_top + 22
        block_width = left + columns * (width + _GAP) + _MARGIN
        whole = (
            max(blocks * block_width, 9 * len(self.title) + 2 * _MARGIN),
            top - 10 + rows * (height + _GAP) + _MARGIN,
        )
        parts = [
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" '
            f'height="{whole[1]}" font-family="sans-serif" role="img">',
            f"<title>{html.escape(self.title)}</title>",
            _text(whole[0] / 2, 24, self.title, 15, _GRAY, "bold"),
        ]
        for i, j, k in itertools.product(*map(range, self._texts.shape)):
            x = i * block_width + left + k * (width + _GAP)
            y = top - 10 + j * (height + _GAP)
            if blocks > 1 and j == k == 0:
                middle = x + (columns * (width + _GAP) - _GAP) / 2
                parts.append(
                    _text(middle, block_top, f"{self._names[0]} {i}", 13)
                )
            if j == 0:
                name = f"{self._names[2]} {k}"
                parts.append(_text(x + width / 2, column_top + 4, name, 13))
            if k == 0 and self._names[1]:
                name, middle = f"{self._names[1]} {j}", y + height / 2 + 4
                parts.append(
                    _text(x - 10, middle, name, 13, _GRAY, "normal", "end")
                )
            parts += self._device((i, j, k), x, y, width, height)
        return "\n".join([*parts, "</svg>", ""])

    def _device(self, place, x, y, width, height):
        text = self._texts[place]
        fill = _FILLS[self._number[text] % len(_FILLS)]
        yield (
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" '
            f'fill="{fill}" stroke="{_GRAY}"/>'
        )
        number = np.ravel_multi_index(place, self._texts.shape)
        middle = x + width / 2
        yield _text(middle, y + 18, f"device {number}", 13, _DARK, "bold")
        yield _text(middle, y + 34, text, 12, _DARK)
        if self._processes is not None:
            process = f"process {self._processes[place]}"
            yield _text(middle, y + 50, process, 11, "#5a5a5a")


def _text(x, y, text, size, color=_GRAY, weight="normal", anchor="middle"):
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" '
        f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}">'
        f"{html.escape(text)}</text>"
    )


def picture_of_part(mesh, path, shape, axes):
    """Returns the `Picture` of which part of a variable each device holds.

    Args:
        mesh: `keras.distribution.DeviceMesh`.
        path: str, the variable's.
        shape: tuple of int, the variable's.
        axes: tuple, its layout's entries, which divide it.
    """
    names = tuple(mesh.axis_names)
    sizes = dict(zip(names, mesh.shape, strict=True))
    texts = np.empty(mesh.shape, object)
    for place in np.ndindex(*mesh.shape):
        where = dict(zip(names, place, strict=True))
        bounds = []
        for size, entry in zip(shape, axes, strict=True):
            block = 0
            for axis in axes_of(entry):
                block = block * sizes[axis] + where[axis]
            step = size // pieces_of(mesh, entry)
            bounds.append(f"{block * step}:{(block + 1) * step}")
        texts[place] = f"[{', '.join(bounds)}]"
    return Picture(names, texts, path)


def picture_of_rows(process_ids, axis_names, batch_axes, rows):
    """Returns the `Picture` of which rows of a batch each device holds.

    Example:

    ```python
    ids = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])
    picture_of_rows(ids, ("model", "batch"), ("batch",), 13).save("rows.svg")
    ```

    Args:
        process_ids: int array with one dimension for each mesh axis: the id
            of the process that owns the device at that place.
        axis_names: sequence of str, the mesh's axis names.
        batch_axes: sequence of str, the axes over which rows are split, the
            slowest varying first.
        rows: int >= 0, rows of the global batch.
    """
    ids = np.asarray(process_ids)
    # As many processes as devices: so a feed is what one device needs.
    own = np.arange(ids.size).reshape(ids.shape)
    devices = Feeds.from_mesh(own, axis_names, batch_axes)
    size = physical_rows(rows, devices.num_shards) // devices.num_shards
    texts = np.empty(ids.shape, object)
    for place in np.ndindex(*ids.shape):
        held = devices.rows_of(int(own[place]), rows)
        texts[place] = _rows_in_words(held, size)
    title = f"{rows} row{'' if rows == 1 else 's'} over {', '.join(batch_axes)}"
    return Picture(axis_names, texts, title, ids)


def _rows_in_words(held, size):
    padding = size - len(held)
    if not len(held):
        return "padding only"
    words = f"row {held[0]}"
    if len(held) > 1:
        words = f"rows {held[0]}–{held[-1]}"  # noqa: RUF001
    return f"{words}, {padding} padding" if padding else words
