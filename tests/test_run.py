"""`meshdist run`: what a user sees of a script on several processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keras_meshdist import cli, cluster
from keras_meshdist.cluster.output import Output
from tests.clusters import local_only

pytestmark = [local_only, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[1]

# How soon all must be over, on a busy computer.
SECONDS = 50

HEAD = """
import os, signal, sys, time
import jax, keras
from jax.experimental import multihost_utils
me = jax.process_index()
def meet():
    multihost_utils.sync_global_devices("script")
"""


@pytest.fixture
def write(tmp_path):
    def write(body):
        path = tmp_path / "script.py"
        path.write_text(HEAD + body)
        return str(path)

    return write


@pytest.fixture
def run(write, capfd):
    """Runs a script; gives status, both outputs, and when it ended."""

    def run(body, *arguments, **options):
        shape = {"processes": 2, "devices": 2, **options}
        status = cluster.run_script([write(body), *arguments], **shape)
        ended = time.monotonic()
        captured = capfd.readouterr()
        return status, captured.out, captured.err, ended

    return run


def test_a_script_that_ends_well(write, tmp_path):
    """By the command line, with nothing on the way but the script's output."""
    (tmp_path / "neighbour.py").write_text("name = 'neighbour'\n")
    path = write("""
import atexit, neighbour
import keras_meshdist as kmd
from keras.distribution import initialize
print(f"hello from {me}", flush=True)
meet()
if me == 1:
    # Process 0 must wait for it, although it has nothing to do.
    time.sleep(2)
    initialize("10.0.0.1:1234", 7, me)
else:
    keras.distribution.initialize("10.0.0.1:1,10.0.0.2:2", 7, me)
    jax.distributed.initialize()
kmd.initialize("10.0.0.1:1234", 7, me)
print(__name__, sys.argv[1:], neighbour.name, jax.device_count(), flush=True)
def last():
    print(f"at exit {jax.process_count()}", flush=True)
atexit.register(last)
if me == 1: sys.exit(0)
""")
    command = [sys.executable, "-m", "keras_meshdist", "run", "-n2", "-d3"]
    done = subprocess.run(
        [*command, path, "--epochs", "2", "-n", "5"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    line = "__main__ ['--epochs', '2', '-n', '5'] neighbour 6"
    lines = done.stdout.splitlines()
    for process in "01":
        mine = [line for line in lines if line.startswith(f"[{process}] ")]
        assert mine == [
            f"[{process}] hello from {process}",
            f"[{process}] {line}",
            f"[{process}] at exit 2",
        ]
    assert len(lines) == 6
    assert done.stderr == (
        "[0] meshdist run: the distribution is initialized already; the "
        "script's own call of `initialize` does nothing.\n"
    )


def test_the_first_traceback_is_seen_last(run):
    status, out, err, ended = run("""
print("started", flush=True)
meet()
if me == 1:
    print(time.monotonic(), flush=True)

    raise LookupError("no such thing")
try:
    meet()
finally:
    print("time to tidy", flush=True)
""")
    assert status == 1
    assert "[0] started" in out
    lines = err.splitlines()
    assert lines[-1] == "[1] LookupError: no such thing"
    start = lines.index("[1] Traceback (most recent call last):")
    assert "script.py" in lines[start + 1]
    assert all(line.startswith("[1] ") for line in lines[start:])
    assert "[0] Traceback" not in err
    failed = re.search(r"^\[1\] (\d+\.\d+)$", out, re.M)
    assert ended - float(failed[1]) < SECONDS


def test_the_status_is_that_of_the_failing_process(run):
    status, out, err, _ = run("""
if me == 1: sys.exit(7)
print("waits", flush=True)
time.sleep(300)
""")
    assert status == 7
    assert err.splitlines()[-1] == (
        "meshdist run: process 1 ended with status 7."
    )
    assert "[1]" not in out


def test_a_killed_process_brings_all_down(run):
    status, _, err, _ = run("""
meet()
if me == 0: os.kill(os.getpid(), signal.SIGKILL)
meet()
""")
    assert status == 128 + signal.SIGKILL
    assert err.splitlines()[-1] == (
        "meshdist run: process 0 was killed by SIGKILL (status 137)."
    )


@pytest.mark.extra
def test_the_time_limit(run):
    # On a slow computer the other process hasn't started by then.
    start = time.monotonic()
    status, _, err, ended = run("if me == 1: time.sleep(300)", timeout=10)
    assert status == 124
    last = err.splitlines()[-1]
    assert "the time limit of 10 seconds has passed; process" in last
    assert "1 of 2 still ran" in last
    assert 10 <= ended - start < 10 + SECONDS


def test_ctrl_c_ends_all(run, tmp_path, sigint):
    ready = tmp_path / "ready"
    interrupted = []

    def interrupt():
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.1)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    status, out, err, ended = run(
        """
meet()
if me == 0:
    with open(sys.argv[1], "w") as file: file.write("ready")
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
meet()
""",
        str(ready),
    )
    assert status == 130
    assert out == "[0] interrupted\n"
    assert err == ""
    assert ended - interrupted[0] < SECONDS


def test_a_module_on_one_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "module.py").write_text(
        HEAD
        + "from package.neighbour import name\n"
        + "keras.distribution.initialize()\n"
        + "print(__name__, sys.argv[1:], name, jax.device_count())\n"
        + "sys.exit('not today')\n"
    )
    (tmp_path / "package" / "neighbour.py").write_text("name = 'neighbour'")
    monkeypatch.chdir(tmp_path)
    options = ["-n", "1", "-d", "3", "-m", "package.module", "-d", "x"]
    assert cli.main(["run", *options]) == 1
    captured = capfd.readouterr()
    assert captured.out == "[0] __main__ ['-d', 'x'] neighbour 3\n"
    assert captured.err.splitlines()[-1] == "[0] not today"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", __file__], "`processes` must be a positive integer"),
        (["-d", "-3", __file__], "Received: devices=-3"),
        (["--timeout", "0", __file__], "`timeout` must be a positive number"),
        (["nowhere.py"], "script must exist. Received: 'nowhere.py'"),
        ([], "must name a script or a module"),
        (["-m"], "must name a script or a module"),
    ],
)
def test_what_cannot_be_run(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_a_library_prints_by_itself_is_left_out(capsys):
    start, middle = "[Gloo] Rank ", " is connected to 1 peer ranks. "
    end = "Expected number of connected peer ranks is : 1"
    # Two threads have printed in pieces.
    mixed = f"{start}{start}0{middle}{end}\n1{middle}{end}\n1\n{start}is gone\n"
    mixed += f"{start}{start}0{middle}1{middle}{end}{end}\n\n2\n"
    popen = subprocess.Popen(
        [sys.executable, "-c", f"print({mixed!r}, end='')"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    printed, printing = os.pipe()
    os.write(printing, b"3 peers\n")
    os.close(printing)
    output = Output(forward=True)
    output.add(0, popen, os.fdopen(printed, "rb"))
    output.start()
    popen.wait()
    output.finish()
    lines = ["1", "2", "3 peers", "[Gloo] Rank is gone"]
    assert sorted(output.last_lines(0)) == lines
    shown = capsys.readouterr().out.splitlines()
    assert sorted(shown) == [f"[0] {line}" for line in lines]


def test_a_library_does_not_write_into_a_line_of_the_script(run):
    """As gloo does, piece by piece."""
    status, out, _, _ = run("""
if me == 0:
    os.write(1, b"[Gloo] Rank ")
    print("a", "line", 3)
    os.write(1, b"0 is connected to 1 peer ranks. Expected number of ")
    print("part", end="")
    os.write(1, b"connected peer ranks is : 1\\nother\\n")
    print(" of one")
""")
    assert status == 0
    mine = [line for line in out.splitlines() if line.startswith("[0] ")]
    assert sorted(mine) == ["[0] a line 3", "[0] other", "[0] part of one"]
