"""`plan`: every mesh compiled and ranked, for chips that aren't there."""

from rich.console import Console

from keras_meshdist.planner import libtpu
from keras_meshdist.planner.candidates import as_axes, candidate_meshes
from keras_meshdist.planner.compiling import compile_all
from keras_meshdist.planner.figures import Job
from keras_meshdist.planner.report import MeshPlan, ranked
from keras_meshdist.planner.sources import travelling
from keras_meshdist.planner.suggestions import suggested
from keras_meshdist.planner.topologies import topology_of


def plan(
    build_fn,
    topology,
    batch,
    meshes=None,
    seq=None,
    layout="auto",
    dtype=None,
    step="train",
    slices=None,
    chips_per_host=None,
    remat=False,
    whole=False,
    suggest=True,
    verbose=True,
):
    """Compiles a model's training step for chips that need not be there.

    Each mesh is compiled by the compiler of the chips themselves, in a process
    of its own, and what the program takes and exchanges is read off it. The
    model takes no memory, nothing runs, and the JAX of this process isn't
    touched. What was compiled once is kept on disk.

    Example:

    ```python
    report = kmd.plan(build_model, topology="v5e-8", batch=16, seq=1024)
    report.best.axes  # (("model", 4), ("batch", 2))
    ```

    Args:
        build_fn: function without arguments that returns a compiled
            `keras.Model`, or its name, `"my_module:build_model"`.
        topology: str, as people say it (`"v5e-8"`, `"v6e-256"`, `"v5p-128"`,
            where the number counts TensorCores, `"v4-32"`), as libtpu says it
            (`"v5e:2x4"`), or `"cpu:8"`.
        batch: int, rows of a batch of the model's inputs; or the batch itself,
            a tuple `(x, y)` or `(x, y, sample_weight)` of structures of arrays
            or shapes.
        meshes: sequence of dicts from axis name to size, in the order of the
            mesh; one size may be -1. Defaults to all sensible ones.
        seq: int, the size of the second dimension of inputs where the model
            leaves it open. Defaults to `None`.
        layout: `"auto"` or `"fsdp"`, as `kmd.layouts` has them; or a function,
            or its name, that takes the mesh and returns a layout map, or a
            distribution. Defaults to `"auto"`.
        dtype: str, a dtype policy such as `"bfloat16"`. Defaults to that of
            this process.
        step: str, `"train"`, `"test"` or `"predict"`. Defaults to `"train"`.
        slices: int, number of slices. Defaults to 1.
        chips_per_host: int, 1, 4 or 8. Defaults to what the topology has.
        remat: bool, whether to rematerialize the model's blocks, as
            `kmd.remat_blocks` does. Defaults to `False`.
        whole: bool, whether to compile deep models as a whole. Of a model with
            many blocks that are alike only a few are compiled else, and its
            figures are extrapolated. Defaults to `False`.
        suggest: bool, whether to look for a change with which the model fits,
            if no mesh does. Each is compiled. Defaults to `True`.
        verbose: bool, whether to print the report, and a progress bar on
            standard error. Defaults to `True`.

    Returns:
        A `PlanReport`, with `meshes`, the best first, `best`, and `to_json()`.

    Raises:
        ValueError: if the topology is unknown, or a mesh doesn't multiply to
            its chips.
        RuntimeError: if libtpu isn't there, or isn't the one that belongs to
            this JAX.
    """
    chips = topology_of(topology, slices, chips_per_host)
    if not chips.is_virtual:
        libtpu.check_version()
    if meshes is None:
        rows = batch if isinstance(batch, int) else chips.num_devices
        meshes = candidate_meshes(chips.num_devices, rows, layout)
    axes = [as_axes(mesh, chips.num_devices) for mesh in meshes]
    build = travelling(build_fn)
    if layout not in ("auto", "fsdp"):
        layout = travelling(layout)
    jobs = [
        Job(
            *(build, chips, mesh, batch, seq, layout, dtype, step),
            changes=("remat",) if remat else (),
        )
        for mesh in axes
    ]
    found = compile_all(jobs, verbose, whole)
    plans = [mesh_plan(figures, chips.chip.hbm_bytes) for figures in found]
    suggestions = ()
    if suggest and not any(mesh.fits for mesh in plans):
        suggestions = suggested(jobs, found, verbose, whole)
    report = ranked(
        chips.name,
        chips.chip.hbm_bytes,
        plans,
        not chips.is_virtual,
        [
            (words, mesh_plan(figures, chips.chip.hbm_bytes))
            for words, figures in suggestions
        ],
    )
    if verbose:
        Console().print(report)
    return report


def mesh_plan(found, hbm_bytes):
    """Returns the `MeshPlan` of a job's figures."""
    axes = tuple((name, size) for name, size in found["axes"])
    if found["error"]:
        return MeshPlan(axes, error=found["error"])
    known = {
        name: found[name]
        for name in MeshPlan.__dataclass_fields__
        if name in found and name not in ("axes", "notes")
    }
    return MeshPlan(
        axes,
        fits=not found["too_large"] and found["bytes"]["peak"] <= hbm_bytes,
        **known,
        notes=tuple(found["notes"]),
    )
