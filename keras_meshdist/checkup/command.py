"""The command `meshdist doctor`."""

import argparse
import contextlib
import os
import pathlib
import sys

from rich.console import Console

from keras_meshdist import coordination
from keras_meshdist.checkup.examination import doctor

# Seconds for process 0 to print before the others leave.
_PRINTING = 30.0


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `doctor` to the commands of `meshdist`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="say what is wrong with an installation or a cluster",
        description="Looks at versions, hooks, devices and what started the "
        "processes; on several, which all must run it, also whether they see "
        "the same and can work together. The exit status is 0 if all is "
        "well, and 1 if something was found.",
        epilog="On one computer: meshdist run -n 2 -d 4 -m keras_meshdist "
        "doctor. On a cluster: srun meshdist doctor, or whatever starts your "
        "processes.",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print the report as JSON, or write it into a file",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for other processes (default: %(default)g)",
    )

    def run(options: argparse.Namespace) -> int:
        if not 0 < options.timeout < float("inf"):
            parser.error(
                "--timeout must be a positive number of seconds. Received: "
                f"{options.timeout}."
            )
        return _run(options)

    parser.set_defaults(command=run)


def _run(options):
    report = doctor(options.timeout, verbose=False)
    if report.process == 0:
        if options.json != "-":
            Console(soft_wrap=True).print(report)
        if options.json == "-":
            print(report.to_json())
        elif options.json:
            pathlib.Path(options.json).write_text(report.to_json() + "\n")
    sys.stdout.flush()
    with contextlib.suppress(TimeoutError, RuntimeError):
        coordination.barrier("doctor/end", _PRINTING)
    status = 0 if report.ok else 1
    if report.check("collective").findings:
        # A thread may wait for other devices for ever.
        sys.stderr.flush()
        os._exit(status)
    return status
