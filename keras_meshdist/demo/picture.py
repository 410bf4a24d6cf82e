"""The loss curves as a picture."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from keras_meshdist.demo.runs import Result
from keras_meshdist.demo.training import OURS, Trained

_COLORS = ("tab:blue", "tab:green", "tab:purple")
_MARKERS = ("o", "s", "^")
_WRONG = ("tab:red", "tab:orange", "tab:brown", "tab:pink")
_MOST_LABELS = 4


def save(results: Sequence[Result], path: str) -> None:
    """Draws the loss curves of all runs into a PNG file.

    Args:
        results: list of `Result`, those on one device among them.
        path: string, path of the file.
    """
    # Not pyplot, which looks for a screen.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(11, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    references = [result for result in results if not result.case.axes]
    cases = [result for result in results if result.case.axes]
    colors = {
        result.case.batch: color
        for result, color in zip(references, _COLORS, strict=False)
    }
    for axes in (left, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        for result in references:
            label = f"one device, batch {result.case.batch}"
            style = {"color": colors[result.case.batch], "label": label}
            _curve(axes, result.runs[0], linewidth=8, alpha=0.3, **style)
    left.set_ylabel("training loss, mean of an epoch")
    left.set_title(f"{OURS}: {len(cases)} meshes")
    right.set_title("plain Keras on the same meshes")
    _draw_ours(left, cases, colors)
    _draw_keras(right, cases, colors)
    for axes in (left, right):
        axes.legend(
            fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12)
        )
    figure.savefig(path, format="png", dpi=120)


def _draw_ours(
    axes: Any, cases: Sequence[Result], colors: dict[int, str]
) -> None:
    shapes = list(dict.fromkeys(result.case.shape for result in cases))
    for number, shape in enumerate(shapes):
        # Larger from shape to shape: all are seen though they coincide.
        style = {
            "marker": _MARKERS[number],
            "markersize": 5 + 3 * number,
            "fillstyle": "none",
            "linewidth": 1,
        }
        axes.plot([], [], color="black", label=f"{shape} devices", **style)
        for result in cases:
            if result.case.shape == shape and result.runs:
                color = colors[result.case.batch]
                _curve(axes, result.runs[0], color=color, **style)


def _draw_keras(
    axes: Any, cases: Sequence[Result], colors: dict[int, str]
) -> None:
    wrong, without = [], Counter()
    for result in cases:
        # The last way of handing over the data is the one that got furthest.
        outcome = list(result.keras.values())[-1]
        if outcome.kind == "same":
            color = colors[result.case.batch]
            _curve(axes, outcome.runs[0], color=color, marker=".", linewidth=1)
        elif outcome.kind == "wrong":
            wrong.append((result.case, outcome))
        else:
            without[outcome.text] += 1
    for number, (case, outcome) in enumerate(wrong):
        style = {"color": _WRONG[number % len(_WRONG)], "linewidth": 1.5}
        if number < _MOST_LABELS:
            label = f"{case.shape} {case.mesh}, batch {case.batch}"
            axes.plot([], [], label=label, marker="x", **style)
        for run in outcome.runs:
            _curve(axes, run, marker="x", **style)
    if len(wrong) > _MOST_LABELS:
        axes.plot([], [], " ", label=f"… {len(wrong)} wrong in all")
    for text, count in sorted(without.items()):
        axes.plot([], [], " ", label=f"no curve ({count}): {text}")


def _curve(axes: Any, run: Trained, **style: Any) -> None:
    axes.plot(range(1, len(run.losses) + 1), run.losses, **style)
