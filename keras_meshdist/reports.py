"""What layout rules do to a model: a table, findings, and pictures."""

import collections
import dataclasses
import difflib
import math

import jax
import keras
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_meshdist.abstract import abstract
from keras_meshdist.layout import TensorLayout, layout_of, matching_rules
from keras_meshdist.pictures import picture_of_part
from keras_meshdist.pieces import axes_of, misfit, pieces_of, what_divides
from keras_meshdist.unmatched import unmatched_rules

# A replicated variable is worth a word from this part of all bytes on.
_LARGE = 0.01


@dataclasses.dataclass(frozen=True)
class Row:
    """How one variable lies: its layout's axes, and bytes on each device."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple
    device_bytes: int
    rule: str | None
    slots_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something to look at: what kind it is, what it is about, and why."""

    kind: str
    about: str
    message: str


class Report:
    """What `kmd.inspect` found; see there.

    Args:
        mesh: `keras.distribution.DeviceMesh`.
        rows: list of `Row`.
        findings: list of `Finding`.
    """

    def __init__(self, mesh, rows, findings):
        self.mesh = mesh
        self.rows = rows
        self.findings = findings

    @property
    def total_bytes(self):
        """Bytes of all variables, once."""
        return sum(math.prod(r.shape) * _itemsize(r.dtype) for r in self.rows)

    @property
    def device_bytes(self):
        """Bytes of all variables on each device."""
        return sum(row.device_bytes for row in self.rows)

    @property
    def slots_bytes(self):
        """Bytes of the optimizer's variables on each device."""
        return sum(row.slots_bytes for row in self.rows)

    def __repr__(self):
        return (
            f"<Report: {len(self.rows)} variables, "
            f"{_amount(self.device_bytes)} on each device, "
            f"{len(self.findings)} findings>"
        )

    def __rich__(self):
        sizes = zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        table = Table(title=f"Mesh {', '.join(f'{n}={s}' for n, s in sizes)}")
        for name in ("variable", "shape", "dtype", "layout"):
            table.add_column(name, overflow="fold")
        table.add_column("on a device", justify="right")
        table.add_column("rule", overflow="fold")
        for row in self.rows:
            table.add_row(
                Text(row.path),
                Text(str(row.shape)),
                row.dtype,
                Text(_named(row.axes)),
                _amount(row.device_bytes),
                Text(row.rule or "-"),
            )
        total = (
            f"All: {_amount(self.total_bytes)}, on each device "
            f"{_amount(self.device_bytes)}"
        )
        if self.slots_bytes:
            total += f", the optimizer's {_amount(self.slots_bytes)}"
        lines = [Text(f"{f.kind}: {f.message}", "red") for f in self.findings]
        return Group(table, Text(total), *lines)

    def picture(self, path):
        """Draws which part of a variable each device of the mesh holds.

        Args:
            path: str, the variable's path.

        Returns:
            A picture: notebooks show it, `rich.print` prints it, and its
            method `save` writes it to an SVG file.

        Raises:
            ValueError: if there is no such variable, or the mesh has more
                than three axes.
        """
        rows = {row.path: row for row in self.rows}
        if path not in rows:
            near = difflib.get_close_matches(path, rows, 1, 0)
            raise ValueError(
                "A picture needs the path of a variable. "
                f"Received: path={path!r}. Nearest: {near}."
            )
        row = rows[path]
        return picture_of_part(self.mesh, path, row.shape, row.axes)


def inspect(model, layout_map=None):
    """Prints how layout rules split a model, and what is wrong with them.

    Works before the model takes memory: give the function that builds it.

    Example:

    ```python
    report = kmd.inspect(build_model, layout_map)
    assert not report.findings
    ```

    Args:
        model: `keras.Model`, or a function that returns one.
        layout_map: `LayoutMap`, or `keras.distribution.LayoutMap`. Defaults to
            the rules of the current distribution.

    Returns:
        A `Report`, with `rows`, `findings`, `total_bytes` and `device_bytes`.

    Raises:
        ValueError: if there are no rules.
    """
    if layout_map is None:
        current = keras.distribution.distribution()
        layout_map = getattr(current, "_layout_map", None)
    if not isinstance(layout_map, keras.distribution.LayoutMap):
        raise ValueError(
            "To inspect a model takes a `LayoutMap`, or a current distribution "
            f"that has one. Received: layout_map={layout_map!r}."
        )
    report = examine(abstract(model), layout_map)
    Console().print(report)
    return report


def examine(model, layout_map):
    """Returns the `Report` of a model, without printing it."""
    mesh = layout_map.device_mesh
    slots = _slots(model)
    rows, findings = [], []
    for variable in model.variables:
        rule, axes, found = _layout(layout_map, variable)
        findings += found
        pieces = pieces_of(mesh, *axes)
        size = _itemsize(variable.dtype)
        rows.append(
            Row(
                variable.path,
                tuple(variable.shape),
                keras.backend.standardize_dtype(variable.dtype),
                axes,
                math.prod(variable.shape) * size // pieces,
                rule,
                sum(
                    _slot_bytes(layout_map, axes, slot)
                    for slot in slots[variable.path]
                ),
            )
        )
    findings += [
        Finding("unmatched rule", rule, message)
        for rule, message in unmatched_rules(model, layout_map).items()
    ]
    findings += _replicated(rows)
    used = {a for row in rows for entry in row.axes for a in axes_of(entry)}
    outputs = [layout_of(layout_map, rule).axes for rule in layout_map]
    used |= {a for axes in outputs for entry in axes for a in axes_of(entry)}
    used |= set(getattr(layout_map, "sequence_axes", ()))
    used |= set(getattr(layout_map, "optimizer_axes", ()))
    current = keras.distribution.distribution()
    if getattr(current, "_layout_map", None) is layout_map:
        used |= set(axes_of(current.batch_dim_name))
        used |= set(axes_of(getattr(current, "sequence_dim_name", None)))
    else:
        # What a distribution takes that is given none.
        names = tuple(mesh.axis_names)
        used.add("batch" if "batch" in names else names[0])
    for name, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if name not in used and size > 1:
            message = (
                f"neither rows nor a rule use the axis {name!r} of the mesh: "
                f"its {size} devices do the same"
            )
            findings.append(Finding("unused axis", name, message))
    return Report(mesh, rows, findings)


def _layout(layout_map, variable):
    """Returns a variable's rule, its axes, and what is wrong with them."""
    path, shape = variable.path, tuple(variable.shape)
    whole = (None,) * len(shape)
    as_built = getattr(layout_map, "as_built", None)
    path = as_built(path, shape) if as_built else path
    rules = matching_rules(layout_map, path)
    if len(rules) > 1:
        message = f"{path!r} is matched by {rules}; write narrower rules"
        return None, whole, [Finding("two rules", path, message)]
    if not rules:
        return None, whole, []
    layout = layout_of(layout_map, rules[0])
    used = [axis for entry in layout.axes for axis in axes_of(entry)]
    about = f"{path!r} of shape {shape}, rule {rules[0]!r}"
    twice = [a for a, n in collections.Counter(used).items() if n > 1]
    if twice:
        message = f"{about}: the layout {layout.axes} uses {twice} twice"
        return rules[0], whole, [Finding("axis used twice", path, message)]
    problem = misfit(layout.axes, shape, layout_map.device_mesh)
    if not problem:
        return rules[0], tuple(layout.axes), []
    rank = len(layout.axes) != len(shape)
    kind = "wrong rank" if rank else "doesn't divide"
    if as_built and not rank:
        # A map that was made from a model leaves out what doesn't fit.
        whole = what_divides(layout.axes, shape, layout_map.device_mesh)
    return rules[0], whole, [Finding(kind, path, f"{about}: {problem}")]


def _replicated(rows):
    total = sum(row.device_bytes * 1 for row in rows) or 1
    every = sum(math.prod(r.shape) * _itemsize(r.dtype) for r in rows) or 1
    split = any(any(row.axes) for row in rows)
    return [
        Finding(
            "large and replicated",
            row.path,
            f"{row.path!r} of shape {row.shape} lies whole on each device: "
            f"{_amount(row.device_bytes)}, {row.device_bytes / total:.0%} of "
            "what a device holds",
        )
        for row in rows
        if split and not any(row.axes) and row.device_bytes > _LARGE * every
    ]


def _slots(model):
    """The optimizer's variables, by the path of their weight."""
    found = collections.defaultdict(list)
    optimizer = getattr(model, "optimizer", None)
    weights = {v.path.replace("/", "_"): v.path for v in model.variables}
    for slot in optimizer.variables if optimizer is not None else ():
        name = slot.path.rpartition("/")[2]
        fitting = [key for key in weights if name.startswith(key + "_")]
        if fitting:
            found[weights[max(fitting, key=len)]].append(slot)
    return found


def _slot_bytes(layout_map, axes, slot):
    """Bytes on each device of a slot of a weight with these axes."""
    mesh, shape = layout_map.device_mesh, tuple(slot.shape)
    if misfit(axes, shape, mesh):
        axes = (None,) * len(shape)
    if hasattr(layout_map, "of_slot"):
        layout = TensorLayout(axes, mesh)
        axes = layout_map.of_slot(layout, shape).axes
    size = math.prod(shape) * _itemsize(slot.dtype)
    return size // pieces_of(mesh, *axes)


def _itemsize(dtype):
    dtype = keras.backend.standardize_dtype(dtype)
    return jax.numpy.dtype(dtype).itemsize


def _named(axes):
    names = ["/".join(axes_of(entry)) or "-" for entry in axes]
    return f"({', '.join(names)})" if any(axes) else "replicated"


def _amount(size):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024
