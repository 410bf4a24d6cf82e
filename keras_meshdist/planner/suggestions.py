"""Changes with which a model would fit, each compiled."""

import dataclasses

from keras_meshdist.planner.compiling import compile_all
from keras_meshdist.planner.figures import LORA_RANK

# Half of the rows, and no fewer.
_FEWEST_ROWS = 2


def suggested(jobs, found, verbose=True, whole=False):
    """Looks for a change with which the mesh that comes nearest fits.

    The smallest changes are tried first, two at a time, until one fits.

    Args:
        jobs: list of `Job`, none of which fits.
        found: list of their figures.
        verbose: bool, whether to show a progress bar.
        whole: bool, whether to compile deep models as a whole.

    Returns:
        List of pairs: the change in words, and figures.
    """
    known = [
        (figures["bytes"]["peak"], number)
        for number, figures in enumerate(found)
        if not figures["error"]
    ]
    if not known:
        return []
    _, nearest = min(known)
    job = jobs[nearest]
    waiting = list(_changes(job, found[nearest]))
    tried = []
    while waiting:
        some, waiting = waiting[:2], waiting[2:]
        figures = compile_all([job for _, job in some], verbose, whole)
        tried += [
            (words, f) for (words, _), f in zip(some, figures, strict=True)
        ]
        if any(_fits(f, job) for f in figures):
            break
    return tried


def _fits(figures, job):
    if figures["error"] or figures["too_large"]:
        return False
    return figures["bytes"]["peak"] <= job.topology.chip.hbm_bytes


def _changes(job, figures):
    """Yields changes in words, and the job with each; the smallest first."""
    axes = dict(job.axes)
    done = set(job.changes)

    def changed(*more, **fields):
        changes = (*job.changes, *more)
        return dataclasses.replace(job, changes=changes, **fields)

    if figures["blocks"] and "remat" not in done:
        yield "rematerialization by block", changed("remat")
    remat = {"remat"} - done if figures["blocks"] else ()
    and_remat = " and rematerialization" if remat else ""
    if job.layout == "auto" and axes.get("model", 1) > 1:
        words = f"activations split over the model axis{and_remat}"
        yield words, changed("sequence", *remat)
    if axes.get("batch", 1) > 1:
        mesh = _more_fsdp(job.axes)
        yield f"FSDP over the batch axis{and_remat}", changed(*remat, axes=mesh)
    if "float16" not in (job.dtype or figures["dtype_policy"]):
        yield (
            f"bfloat16{and_remat}",
            changed(*remat, dtype="bfloat16"),
        )
    if isinstance(job.batch, int) and job.batch >= _FEWEST_ROWS:
        rows = job.batch // 2
        yield f"a batch of {rows}{and_remat}", changed(*remat, batch=rows)
    if figures["has_backbone"] and "lora" not in done:
        words = f"LoRA of rank {LORA_RANK}{and_remat}"
        yield words, changed("lora", *remat)


def _more_fsdp(axes):
    """The same mesh with weights split over the batch axis, too."""
    sizes = dict(axes)
    over = sizes["batch"] * sizes.get("fsdp", 1)
    if "fsdp" not in sizes:
        return tuple(
            ("fsdp", over) if name == "batch" else (name, size)
            for name, size in axes
        )
    return tuple(
        (name, over if name == "fsdp" else size)
        for name, size in axes
        if name != "batch"
    )
