"""All meshes compiled, deep models in a few depths, with a progress bar."""

import dataclasses

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from keras_meshdist.planner import depth, pool


def compile_all(jobs, verbose=True, whole=False):
    """Returns the figures of jobs, in their order.

    Args:
        jobs: list of `Job` of whole models.
        verbose: bool, whether to show a progress bar on standard error.
        whole: bool, whether to compile deep models as a whole.

    Returns:
        List of dicts, as `figures` has them.
    """
    found = [None] * len(jobs)
    shallow = [{} for _ in jobs]
    waiting = [(number, None if whole else 1) for number in range(len(jobs))]
    with _Bar(verbose) as bar:
        while waiting:
            again = set()
            for number, kept, figures in _answers(jobs, waiting, bar):
                is_cut = figures.get("units") is not None
                if is_cut and figures["error"]:
                    # A block may be more than something for one array.
                    again.add(number)
                elif is_cut:
                    shallow[number][kept] = figures
                else:
                    found[number] = figures
            waiting = [(number, None) for number in sorted(again)]
            for number, known in enumerate(shallow):
                if found[number] is None and number not in again:
                    wanted = depth.depths_to_compile(known)
                    waiting += [(number, kept) for kept in wanted]
                    if not wanted:
                        found[number] = depth.extrapolated(known)
    return found


def _answers(jobs, waiting, bar):
    """Yields the numbers of jobs, how many units were kept, and figures."""
    bar.expect(len(waiting))
    some = [
        dataclasses.replace(jobs[number], units=kept)
        for number, kept in waiting
    ]
    for place, figures in pool.answers(some):
        number, kept = waiting[place]
        if figures is None:
            bar.begin(_name(jobs[number], kept))
            continue
        bar.end(_name(jobs[number], kept))
        yield number, kept, figures


def _name(job, kept):
    mesh = ", ".join(f"{axis}={size}" for axis, size in job.axes)
    return mesh if kept is None else f"{mesh} (depth {kept})"


class _Bar:
    """What is being compiled, and how much is done."""

    def __init__(self, verbose):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("compiling {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            # A notebook has no place for it, and would show a warning.
            disable=not verbose or console.is_jupyter,
            transient=True,
        )
        self._task = self._progress.add_task("", total=0)
        self._expected, self._under_way = 0, []

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()

    def expect(self, count):
        self._expected += count
        self._progress.update(self._task, total=self._expected)

    def begin(self, name):
        self._under_way.append(name)
        self._show()

    def end(self, name):
        self._under_way.remove(name)
        self._progress.advance(self._task)
        self._show()

    def _show(self):
        text = " | ".join(self._under_way)
        self._progress.update(self._task, description=text)
