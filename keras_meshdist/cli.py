"""The command `meshdist`."""

import argparse
import math
import os
import sys
from collections.abc import Sequence

from keras_meshdist import cluster, demo, layouts, reports
from keras_meshdist.checkup.command import add_command as _add_doctor
from keras_meshdist.mesh import make_mesh
from keras_meshdist.options import named_function, parse_axes
from keras_meshdist.planner import command as plan_command
from keras_meshdist.planner import tune as tune_command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    ```python
    sys.exit(cli.main(["run", "-n", "4", "-d", "2", "train.py"]))
    ```

    Args:
        argv: list of strings, the arguments. Defaults to those of the
            process.

    Returns:
        Integer, the exit status.
    """
    parser = argparse.ArgumentParser(
        prog="meshdist",
        description="Keras on any device mesh and any number of processes.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for add in (_add_demo, _add_run, _add_inspect, _add_doctor):
        add(commands)
    plan_command.add_to(commands)
    tune_command.add_to(commands)
    options = parser.parse_args(argv)
    return options.command(options)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="train on many meshes, compare with one device and plain Keras",
        description="Trains a small network on handwritten digits: on one "
        "device, on meshes of 8 virtual devices in 1, 2 and 4 processes, and "
        "with plain Keras on the same meshes. Prints a table and draws the "
        "loss curves. Takes two to four minutes on two cores. The exit status "
        "is 0 if every mesh gives what one device gives.",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="try every order of the mesh axes, which takes long",
    )
    parser.add_argument(
        "--output",
        default="meshdist-demo.png",
        metavar="FILE",
        help="picture of the loss curves (default: %(default)s)",
    )
    parser.set_defaults(
        command=lambda options: demo.run(options.output, options.all)
    )


def _add_run(commands: argparse._SubParsersAction) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a script on several local processes",
        description="Runs a script on several local processes with virtual "
        "CPU devices each, with the Keras distribution initialized. Lines "
        "that they print get '[process] ' in front. The exit status is that "
        "of the process that failed first, 124 at the time limit, 130 after "
        "Ctrl-C.",
        usage="meshdist run [-n N] [-d D] [--timeout S] "
        "(script.py | -m module) [arguments ...]",
    )
    parser.add_argument(
        "-n",
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="number of processes (default: 2)",
    )
    parser.add_argument(
        "-d",
        "--devices",
        type=int,
        default=4,
        metavar="D",
        help="virtual CPU devices of each process (default: 4)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="time limit in seconds (default: none)",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="run a module instead of a script, with these arguments",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="the script and its arguments",
    )

    def run(options: argparse.Namespace) -> int:
        argv = ["-m", *options.module] if options.module else options.script
        try:
            return cluster.run_script(
                argv, options.processes, options.devices, options.timeout
            )
        except (ValueError, FileNotFoundError) as error:
            parser.error(str(error))

    parser.set_defaults(command=run)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show how layout rules split a model, without building it",
        description="Prints how each variable of a model lies on a mesh, the "
        "bytes on each device, and what is wrong with the layout rules. The "
        "model takes no memory, and the devices needn't exist. Without "
        "--layout the rules are those of `kmd.layouts.auto`: tensor "
        "parallelism over the axis 'model', and large variables further over "
        "the axis 'fsdp', where the mesh has them.",
    )
    parser.add_argument(
        "model",
        metavar="module:function",
        help="function without arguments that returns the model",
    )
    parser.add_argument(
        "--mesh",
        required=True,
        metavar="AXIS=SIZE,...",
        help="the mesh, for instance model=4,batch=2",
    )
    parser.add_argument(
        "--layout",
        metavar="module:function",
        help="function that takes the mesh and returns the layout map",
    )

    def run(options: argparse.Namespace) -> int:
        sys.path.insert(0, os.getcwd())
        try:
            axes = parse_axes(options.mesh)
            cluster.use_virtual_devices(math.prod(axes.values()))
            mesh = make_mesh(axes)
            build = named_function(options.model)
            if options.layout:
                layout_map = named_function(options.layout)(mesh)
            else:
                layout_map = layouts.auto(
                    build,
                    mesh,
                    model_axis="model" if "model" in axes else None,
                    fsdp_axis="fsdp" if "fsdp" in axes else None,
                )
            reports.inspect(build, layout_map)
        except ValueError as error:
            parser.error(str(error))
        return 0

    parser.set_defaults(command=run)
