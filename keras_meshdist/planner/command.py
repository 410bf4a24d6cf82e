"""The command `meshdist plan`."""

import argparse
import os
import pathlib
import sys

from rich.console import Console

from keras_meshdist.options import parse_axes
from keras_meshdist.planner import words
from keras_meshdist.planner.plan import plan
from keras_meshdist.planner.sources import HubModel, Named

_FAILED = 2


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds `plan` to the commands of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="compile the training step for chips that aren't there, and rank "
        "meshes",
        description="Compiles a model's own training step for a named TPU "
        "topology on a machine without one, for every mesh, and prints what "
        "each takes of a chip's memory, what chips exchange, how long a step "
        "is estimated to take, and which host feeds which rows. Nothing runs, "
        "and the model takes no memory.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="module:function",
        help="function without arguments that returns the compiled model",
    )
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="v5e-8, v6e-256, v5p-128, v4-32, ..., as libtpu says it "
        "(v5e:2x4), or cpu:8",
    )
    parser.add_argument(
        "--batch", required=True, type=int, metavar="ROWS", help="global rows"
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help="length of sequences, where the model leaves it open",
    )
    parser.add_argument(
        "--mesh",
        action="append",
        metavar="AXIS=SIZE,...",
        help="a mesh, for instance model=4,batch=2; may be repeated (default: "
        "all sensible ones)",
    )
    parser.add_argument(
        "--layout",
        default="auto",
        metavar="LAYOUT",
        help="auto, fsdp, or module:function that takes the mesh and returns "
        "the layout map (default: auto)",
    )
    parser.add_argument(
        "--dtype", metavar="POLICY", help="dtype policy, for instance bfloat16"
    )
    parser.add_argument(
        "--slices", type=int, metavar="N", help="slices of this topology"
    )
    parser.add_argument(
        "--chips-per-host",
        type=int,
        metavar="N",
        help="1, 4 or 8 (default: what the topology has)",
    )
    parser.add_argument(
        "--hub",
        metavar="TASK",
        help="a model of KerasHub instead, for instance Llama3CausalLM",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="with --hub: JSON with the arguments of its backbone",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute the model's blocks again for gradients, as "
        "kmd.remat_blocks does",
    )
    parser.add_argument(
        "--no-suggestions",
        action="store_true",
        help="don't look for a change if no mesh fits",
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="compile deep models as a whole, which takes long",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - prints it"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="write the report as one page with pictures",
    )
    parser.add_argument(
        "--pictures", metavar="FOLDER", help="save the pictures as PNG"
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    sys.path.insert(0, os.getcwd())
    try:
        report = plan(
            _model(options),
            options.topology,
            options.batch,
            meshes=[parse_axes(text) for text in options.mesh or ()] or None,
            seq=options.seq,
            layout=options.layout,
            dtype=options.dtype,
            slices=options.slices,
            chips_per_host=options.chips_per_host,
            remat=options.remat,
            whole=options.whole,
            suggest=not options.no_suggestions,
            verbose=options.json != "-",
        )
    except (ValueError, RuntimeError) as error:
        return failed("plan", str(error))
    if options.json == "-":
        print(report.to_json())
    elif options.json:
        pathlib.Path(options.json).write_text(report.to_json())
    if options.html:
        pathlib.Path(options.html).write_text(report.to_html())
    if options.pictures:
        report.save_pictures(options.pictures)
    if all(mesh.error or mesh.too_large for mesh in report.meshes):
        return failed(
            "plan",
            "; ".join(
                dict.fromkeys(
                    mesh.error or words.too_large(mesh, report.hbm_bytes)
                    for mesh in report.meshes
                )
            ),
        )
    return 0


def failed(command: str, message: str) -> int:
    """Says on standard error what is wrong, and returns the exit status."""
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
        f"meshdist {command}: {message}"
    )
    return _FAILED


def _model(options: argparse.Namespace):
    if (options.model is None) == (options.hub is None):
        raise ValueError(
            "One model is planned: a function that builds it, or --hub. "
            f"Received: {options.model!r} and --hub {options.hub}."
        )
    if options.hub is None:
        if options.config:
            raise ValueError(
                "`--config` goes with `--hub`. Received: --config "
                f"{options.config} without it."
            )
        Named(options.model).load()
        return Named(options.model)
    if options.config is None:
        raise ValueError(
            "`--hub` needs `--config FILE`, the arguments of the model's "
            f"backbone. Received: --hub {options.hub} alone."
        )
    model = HubModel.from_file(options.hub, options.config)
    model.load()
    return model
