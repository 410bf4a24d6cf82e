"""The command `meshdist tune`: estimates beside measurements."""

import argparse
import os
import sys

from rich.console import Console
from rich.table import Table

from keras_meshdist.options import parse_axes
from keras_meshdist.planner import pool
from keras_meshdist.planner.command import failed
from keras_meshdist.planner.figures import Job
from keras_meshdist.planner.measuring import Machine, Measurement
from keras_meshdist.planner.plan import plan
from keras_meshdist.planner.sources import Named
from keras_meshdist.planner.topologies import topology_of


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds `tune` to the commands of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="time real steps on the best meshes, beside their estimates",
        description="Plans a model for the devices of this machine, runs some "
        "steps on the meshes that come first, and prints what was measured "
        "beside what was estimated. Each mesh runs in a process of its own.",
    )
    parser.add_argument(
        "model",
        metavar="module:function",
        help="function without arguments that returns the compiled model",
    )
    parser.add_argument("--batch", required=True, type=int, metavar="ROWS")
    parser.add_argument("--seq", type=int, metavar="N")
    parser.add_argument("--mesh", action="append", metavar="AXIS=SIZE,...")
    parser.add_argument("--layout", default="auto", metavar="LAYOUT")
    parser.add_argument("--dtype", metavar="POLICY")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="virtual CPU devices (default: the devices that there are)",
    )
    parser.add_argument(
        "--best",
        type=int,
        default=3,
        metavar="N",
        help="how many meshes to run (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=5,
        metavar="N",
        help="steps to time of each (default: %(default)s)",
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())
    try:
        rows = tune(
            Named(options.model),
            options.batch,
            seq=options.seq,
            meshes=[parse_axes(text) for text in options.mesh or ()] or None,
            layout=options.layout,
            dtype=options.dtype,
            devices=options.devices,
            best=options.best,
            steps=options.steps,
        )
    except (ValueError, RuntimeError) as error:
        return failed("tune", str(error))
    table = Table(title="A step, in milliseconds")
    for column in ("mesh", "estimated", "measured"):
        table.add_column(column)
    for mesh, seconds, error in rows:
        measured = error or f"{seconds * 1e3:.4g}"
        table.add_row(mesh.name, f"~{mesh.step_seconds * 1e3:.4g}", measured)
    Console().print(table)
    if all(error for _, _, error in rows):
        return failed("tune", "; ".join({error for _, _, error in rows}))
    return 0


def tune(
    build,
    batch,
    seq=None,
    meshes=None,
    layout="auto",
    dtype=None,
    devices=None,
    best=3,
    steps=5,
):
    """Times real steps on the meshes that a plan puts first.

    Args:
        build: what has `load()` and gives the function that builds the model.
        batch: int, rows.
        seq: as in `plan`.
        meshes: as in `plan`.
        layout: as in `plan`; a function is given by its name.
        dtype: as in `plan`.
        devices: int, virtual CPU devices. Defaults to what there is.
        best: int, how many meshes are run.
        steps: int, how many steps are timed of each.

    Returns:
        List of tuples of `MeshPlan`, the median of the measured seconds or
        `None`, and an error or `None`.

    Raises:
        ValueError: if the devices aren't TPUs or CPU devices, or no mesh fits.
    """
    machine = Machine(devices)
    found = _only(machine)
    if found["error"]:
        raise ValueError(found["error"])
    name = found["topology"]
    report = plan(
        build,
        name,
        batch,
        meshes=meshes,
        seq=seq,
        layout=layout,
        dtype=dtype,
        suggest=False,
    )
    fitting = [mesh for mesh in report.meshes if mesh.fits][:best]
    if not fitting:
        errors = {mesh.error for mesh in report.meshes if mesh.error}
        raise ValueError(
            f"No mesh can be run on {name}: {'; '.join(errors) or 'none fits'}."
        )
    if layout not in ("auto", "fsdp"):
        layout = Named(layout)
    rows = []
    for mesh in fitting:
        job = Job(
            build, topology_of(name), mesh.axes, batch, seq, layout, dtype
        )
        measured = _only(Measurement(job, machine, steps))
        rows.append((mesh, measured.get("seconds"), measured["error"]))
    return rows


def _only(job):
    """The answer to a job by itself."""
    answers = [found for _, found in pool.answers([job], 1)]
    return answers[-1]
