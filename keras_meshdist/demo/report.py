"""The table at the end of the demo."""

from collections.abc import Iterator, Sequence

import jax
import keras
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_meshdist.demo.comparison import TOLERANCE, Outcome
from keras_meshdist.demo.runs import Result

_STYLES = {
    "same": "green",
    "wrong": "bold red",
    "error": "yellow",
    "crash": "yellow",
    "hang": "magenta",
}

_WIDE = 90


def table(results: Sequence[Result], width: int) -> RenderableType:
    """The table of all results, with what its columns mean below it.

    Args:
        results: list of `Result`.
        width: integer, how many columns of text there are.

    Returns:
        What `rich` can print.
    """
    columns = Table(
        box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
    )
    # Long meshes on two lines, rather than the last column on many.
    columns.add_column("\nmesh", width=None if width >= _WIDE else 15)
    for header in (
        "pro-\ncesses",
        "\nbatch",
        "final\nloss",
        "accu-\nracy",
        "\ndiff.",
    ):
        columns.add_column(header, justify="right", no_wrap=True)
    columns.add_column("\nplain Keras")
    shape = None
    for result in results:
        if result.case.shape != shape and shape is not None:
            columns.add_section()
        shape = result.case.shape
        columns.add_row(*_row(result))
    return Group("", columns, "", *_notes(results))


def _row(result: Result) -> Iterator[str | Text]:
    case = result.case
    yield case.mesh
    yield case.shape
    yield str(case.batch)
    style = "red" if result.fault else "green"
    if result.error:
        yield Text("failed", style)
        yield from ("", "")
    else:
        yield f"{result.loss:.4f}"
        yield f"{result.accuracy:.1%}"
        yield Text(f"{result.difference:.0e}", style) if case.axes else "-"
    yield _keras_cell(result.keras)


def _keras_cell(outcomes: dict[str, Outcome]) -> Text:
    if not outcomes:
        return Text("-")
    return Text("\n").join(
        Text(f"{way}: " if len(outcomes) > 1 else "").append(
            outcome.text, _STYLES[outcome.kind]
        )
        for way, outcome in outcomes.items()
    )


def _notes(results: Sequence[Result]) -> Iterator[RenderableType]:
    plain_keras = (
        "the same with `keras.distribution.ModelParallel` of Keras "
        f"{keras.__version__} on JAX {jax.__version__}; “same” is equal by "
        "the same measure."
    )
    if any(len(result.keras) > 1 for result in results):
        plain_keras += (
            " On several processes it is given NumPy arrays, then a "
            "`tf.data.Dataset`; two losses are those of different processes."
        )
    else:
        plain_keras += (
            " On several processes it wants a `tf.data.Dataset`, and would be "
            "given one if TensorFlow were installed."
        )
    if any(len(result.case.batch_axes) > 1 for result in results):
        plain_keras += (
            " It takes one batch axis only, so with fsdp it splits rows over "
            "“batch” alone."
        )
    notes = {
        "processes": "2×4: two processes with four devices.",  # noqa: RUF001
        "diff.": "the largest on any process between the loss curves, or "
        "between any of the final weights, and those of one device with the "
        "same batch size; relative to the largest magnitude in that curve or "
        f"weight on one device. Up to {TOLERANCE:.0e} counts as equal.",
        "plain Keras": plain_keras,
    }
    grid = Table.grid(padding=(0, 2, 0, 0))
    for word, note in notes.items():
        grid.add_row(Text(word, no_wrap=True), note, style="dim")
    yield grid


def faults(results: Sequence[Result]) -> list[str]:
    """What is wrong, a line or more for each case at fault."""
    return [f"{r.case}: {r.fault}" for r in results if r.fault]
