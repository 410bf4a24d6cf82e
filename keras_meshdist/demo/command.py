"""What `meshdist demo` does, from the missing extra to the exit status."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from keras_meshdist.cluster import ClusterError
from keras_meshdist.demo import cases, picture, report
from keras_meshdist.demo.comparison import ACCURACY
from keras_meshdist.demo.progress import Progress
from keras_meshdist.demo.runs import run_cases
from keras_meshdist.demo.training import Digits

_EPOCHS = 5


def run(
    output: str = "meshdist-demo.png",
    every_order: bool = False,
    console: Console | None = None,
) -> int:
    """Trains on many meshes and shows how close to one device they come.

    ```python
    sys.exit(demo.run(output="curves.png"))
    ```

    Args:
        output: string, path of the PNG file for the loss curves.
        every_order: boolean, whether to try every order of the mesh axes,
            which takes long. Defaults to `False`.
        console: `rich.console.Console` for the output. Defaults to one on
            the standard output.

    Returns:
        Integer: `0` if every case equals one device and learns, `1` if one
        doesn't, `2` if something that the demo needs is missing, `130` after
        Ctrl-C.
    """
    problem = _problem(output)
    if problem:
        print(f"meshdist demo: {problem}", file=sys.stderr)
        return 2
    console = console or _console()
    tried = cases.all_cases() if every_order else cases.default_cases()
    digits = load_digits()
    try:
        with Progress(console, _EPOCHS) as progress:
            results = run_cases(tried, digits, _EPOCHS, progress)
    except ClusterError as error:
        print(f"meshdist demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    picture.save(results, output)
    console.print(report.table(results, console.width))
    console.print(f"\nLoss curves: {output}", highlight=False, soft_wrap=True)
    faults = report.faults(results)
    if faults:
        for fault in faults:
            print(f"meshdist demo: {fault}", file=sys.stderr)
        return 1
    console.print(
        f"All {len(tried)} cases equal one device and read over "
        f"{ACCURACY:.0%} of the held-out digits ({progress.seconds:.0f} s).",
        highlight=False,
    )
    return 0


def load_digits() -> Digits:
    """The digits of scikit-learn, in an order that is always the same."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = (x[order] / 16).astype("float32")
    y = y[order].astype("int32")
    end = cases.TRAIN_ROWS + cases.TEST_ROWS
    train, test = slice(cases.TRAIN_ROWS), slice(cases.TRAIN_ROWS, end)
    return Digits(x[train], y[train], x[test], y[test])


def _problem(output: str) -> str:
    """What stands in the way, in words; empty if nothing does."""
    missing = [
        name
        for name, module in (
            ("scikit-learn", "sklearn"),
            ("matplotlib", "matplotlib"),
        )
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        return (
            f"it needs {' and '.join(missing)}. Run: "
            'pip install "keras-meshdist[demo]"'
        )
    # Better now than at the end.
    folder = Path(output).absolute().parent
    if not folder.is_dir():
        return (
            f"the folder of --output must exist. Received: {output!r}, and "
            f"there is no folder {str(folder)!r}."
        )
    return ""


def _console() -> Console:
    # A file has no width; rich would take 80.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100
    return Console(width=width)
