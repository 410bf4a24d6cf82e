"""What a plan has found: meshes, the best first."""

import dataclasses
import json
import pathlib

from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_meshdist.planner import words

_NULL = (
    "fits",
    "bytes",
    "flops",
    "collectives",
    "step_seconds",
    "parts",
    "feeds",
)
_BYTES = (
    "arguments",
    "arguments_unpadded",
    "outputs",
    "alias",
    "temporaries",
    "peak",
)


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """What was found of one mesh; all figures are of one chip and one step.

    Args:
        axes: tuple of pairs of str and int, in the order of the mesh.
        error: str, why nothing is known, or `None`.
        fits: bool, whether the program fits into the chip's memory.
        bytes: dict: `arguments`, `outputs`, `alias`, `temporaries` and `peak`,
            the compiler's; `arguments_unpadded`, those of the program's
            arguments without what fills tiles up, which is
            `arguments_padding`; `weights`, `optimizer` and `gradients`,
            counted from shapes.
        flops: int, by the compiler.
        collectives: list of dicts with `kind`, `bytes` of one, `axes`, `count`
            in a step and `source`, the layer's path.
        step_seconds: float, the estimate.
        parts: dict of the seconds of which it consists, and others to compare
            it with.
        feeds: dict from host to the global rows that it feeds.
        rows: int, of a batch.
        tokens: int, of a batch.
        rings: dict from axis to whether its devices are `neighbours` in the
            grid of chips and close to `rings`, or cross slices.
        coords: list, where each device of the mesh stands in the grid.
        hosts: list of int, the host of each device of the mesh.
        temporaries_range: list of two int, if they were extrapolated: the
            least and the most that temporaries may be; `bytes` has the most.
        largest: list of pairs, the variables that take the most, and bytes.
        too_large: str, what the compiler says if a chip has no memory for the
            program, or `None`.
        notes: tuple of str, what else is to be known.
    """

    axes: tuple
    error: str | None = None
    fits: bool | None = None
    bytes: dict | None = None
    flops: int | None = None
    collectives: list | None = None
    step_seconds: float | None = None
    parts: dict | None = None
    feeds: dict | None = None
    rows: int | None = None
    tokens: int | None = None
    rings: dict | None = None
    coords: list | None = None
    hosts: list | None = None
    temporaries_range: list | None = None
    largest: list | None = None
    too_large: str | None = None
    notes: tuple = ()

    @property
    def name(self):
        """The mesh in short, for instance `"model=4, batch=2"`."""
        return ", ".join(f"{axis}={size}" for axis, size in self.axes)

    @property
    def tokens_per_second(self):
        """Tokens a second by the estimate; rows where there are none."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def utilisation(self):
        """The part of the chip's peak that the estimate uses."""
        if not self.step_seconds:
            return None
        return self.parts["at_peak_flops"] / self.step_seconds


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """What `kmd.plan` found; see there.

    Args:
        topology: str, its name.
        hbm_bytes: int, the memory of a chip that a program may use.
        meshes: tuple of `MeshPlan`: those that fit, the fastest first, those
            that don't, the smallest first, and those with an error.
        claimed: bool, whether times are estimates of a real chip.
        suggestions: tuple of pairs of str and `MeshPlan`, if no mesh fits:
            changes that were compiled, in words, and what came of them.
    """

    topology: str
    hbm_bytes: int
    meshes: tuple[MeshPlan, ...]
    claimed: bool = True
    suggestions: tuple = ()

    @property
    def best(self):
        """The first `MeshPlan` that fits, or `None`."""
        first = self.meshes[0] if self.meshes else None
        return first if first is not None and first.fits else None

    def to_json(self):
        """Returns the report as text of JSON.

        Returns:
            Str: an object with `topology`, `hbm_bytes` and `meshes`, the best
            first. Every mesh has all keys: `axes`, a list of pairs in order,
            `fits`, `bytes`, `flops`, `collectives`, `step_seconds`, `parts`,
            `feeds` and `error`; with an error the others are null.
        """
        return json.dumps(
            {
                "topology": self.topology,
                "hbm_bytes": self.hbm_bytes,
                "meshes": [_json(mesh) for mesh in self.meshes],
            },
            indent=1,
        )

    def to_html(self):
        """Returns the report as a page with pictures that needs no network.

        Returns:
            Str: memory by part against the chip's, the estimate by part, and
            the best meshes on the grid of chips.
        """
        from keras_meshdist.planner import html

        return html.page(self)

    def save_pictures(self, folder):
        """Saves the pictures of the page as PNG files.

        Args:
            folder: str or `pathlib.Path`; it is made if it isn't there.

        Returns:
            List of `pathlib.Path`: `memory.png`, `time.png`, and `grid.png` of
            the first mesh.
        """
        from keras_meshdist.planner import charts

        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        figures = {
            "memory": charts.memory_chart(self),
            "time": charts.time_chart(self),
        }
        known = [mesh for mesh in self.meshes if not mesh.error]
        if known:
            figures["grid"] = charts.grid_chart(known[0])
        paths = []
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            paths[-1].write_bytes(charts.as_png(figure))
        return paths

    def __rich__(self):
        gib = 2**30
        table = Table(
            title=f"{self.topology}: {self.hbm_bytes / gib:.2f} GiB a chip",
            caption="GiB of a chip in all, of which arguments and temporaries; "
            "estimated ms of a step, of which waiting for other chips; part of "
            "the chips' peak",
        )
        table.add_column("mesh", no_wrap=True)
        for column in (
            "fits",
            "GiB",
            "args",
            "temp",
            "ms",
            "wait",
            "tok/s",
            "peak",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for mesh in self.meshes:
            if mesh.error:
                table.add_row(Text(mesh.name), Text("error", "red"))
                continue
            table.add_row(
                Text(mesh.name),
                Text("yes", "green") if mesh.fits else Text("no", "red"),
                *(
                    f"{mesh.bytes[part] / gib:.2f}"
                    for part in ("peak", "arguments", "temporaries")
                ),
                f"~{mesh.step_seconds * 1e3:.3g}",
                f"{mesh.parts['exposed_collectives'] * 1e3:.3g}",
                f"{mesh.tokens_per_second:.0f}",
                f"{mesh.utilisation:.0%}",
            )
        return Group(table, *(Text(line) for line in words.of_report(self)))


def _json(mesh):
    found = {"axes": [list(axis) for axis in mesh.axes]}
    for key in _NULL:
        found[key] = None if mesh.error else getattr(mesh, key)
    if found["bytes"] is not None:
        found["bytes"] = {key: mesh.bytes[key] for key in _BYTES}
    return {**found, "error": mesh.error}


def ranked(topology, hbm_bytes, meshes, claimed=True, suggestions=()):
    """Returns the `PlanReport` of meshes in any order."""

    def place(mesh):
        if mesh.error:
            return (2, 0)
        if not mesh.fits:
            return (1, mesh.bytes["peak"])
        return (0, mesh.step_seconds)

    order = tuple(sorted(meshes, key=place))
    return PlanReport(topology, hbm_bytes, order, claimed, tuple(suggestions))
