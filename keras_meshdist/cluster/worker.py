"""What runs in each of the processes that `processes.py` starts."""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import importlib
import io
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from multiprocessing import connection
from typing import Any

from keras_meshdist import joining
from keras_meshdist.cluster import devices
from keras_meshdist.cluster.failures import user_traceback

_PR_SET_PDEATHSIG = 1


def main(fd: int, printing: int) -> None:
    """Sets the process up, then runs calls or a script for the parent.

    Args:
        fd: integer, file descriptor of the connection to the parent.
        printing: integer, that of the pipe for what Python prints.
    """
    os.set_inheritable(fd, False)
    os.set_inheritable(printing, False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(
        os.fdopen(printing, "wb", buffering=0),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        write_through=True,
    )
    conn = connection.Connection(fd)
    setup = conn.recv()
    _end_with_parent(setup["parent"], setup["end_with_thread"])
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    argv = setup.get("script")
    try:
        _initialize(setup)
    except Exception:
        traceback.print_exc()
        # Not by way of JAX's own end, which waits for the other processes.
        os._exit(1)
    if argv is None:
        conn.send(("result", b""))
        _serve_calls(conn)
    else:
        _run_script(conn, argv, setup["process"])


def _end_with_parent(parent: int, end_with_thread: bool) -> None:
    """Ends this process when its parent ends, however that ended."""
    if sys.platform == "linux" and end_with_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _initialize(setup: dict[str, Any]) -> None:
    import jax
    import keras

    # Later versions of Keras agree on a seed in `initialize`, unless there is
    # one already: so every version behaves alike.
    keras.utils.set_random_seed(setup["seed"])
    if setup["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        keras.distribution.initialize(
            setup["address"], setup["processes"], setup["process"]
        )


def _leave() -> None:
    """Leaves the job, together with all others.

    If process 0 just ended, the others would be aborted.
    """
    import jax

    jax.distributed.shutdown()


def _wait_to_be_ended() -> None:
    while True:
        time.sleep(3600)


def _serve_calls(conn: connection.Connection) -> None:
    while True:
        kind, *message = conn.recv()
        if kind == "close":
            _leave()
            return
        try:
            if kind == "call":
                sys.path[:], payload = message
                function, args, kwargs = pickle.loads(payload)
                result = function(*args, **kwargs)
            else:
                result = _meet()
            reply: tuple = ("result", pickle.dumps(result))
        except BaseException as error:
            reply = ("failed", 1, user_traceback(error), time.monotonic())
        conn.send(reply)


def _meet() -> str:
    """A collective of all processes: fails or hangs if one is elsewhere."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("meshdist")
    return "met"


def _run_script(
    conn: connection.Connection, argv: list[str], process: int
) -> None:
    _ignore_initialize(tell=process == 0)
    devices.started_by_run = True

    def meet_at_end() -> None:
        conn.send(("finished",))
        conn.recv()
        _leave()

    # Registered before the script runs, it comes after all that the script
    # registers for its end, and before JAX's own.
    atexit.register(meet_at_end)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            folder = os.path.dirname(os.path.abspath(argv[0]))
            sys.path.insert(0, folder)
            runpy.run_path(argv[0], run_name="__main__")
        return
    except SystemExit as error:
        status, text = _exit_status(error)
        if status == 0:
            return
    except KeyboardInterrupt as error:
        status, text = 128 + signal.SIGINT, user_traceback(error)
    except BaseException as error:
        status, text = 1, user_traceback(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # The parent shows the text when the others have ended.
    conn.send(("failed", status, text, time.monotonic()))
    _wait_to_be_ended()


def _ignore_initialize(tell: bool) -> None:
    """Makes the script's own call of `initialize` do nothing."""
    import jax

    told = not tell

    def initialize(*args: Any, **kwargs: Any) -> None:
        nonlocal told
        if not told:
            told = True
            print(
                "meshdist run: the distribution is initialized already; the "
                "script's own call of `initialize` does nothing.",
                file=sys.stderr,
            )

    joining.joined_by(initialize)
    # On Keras 3.7 `import keras` leaves another module under this name.
    module = importlib.import_module("keras.distribution")
    owner: Any
    for owner in (module, jax.distributed):
        owner.initialize = functools.wraps(owner.initialize)(initialize)


def _exit_status(error: SystemExit) -> tuple[int, str]:
    """Status and text of `sys.exit(...)`, as Python's interpreter sees it."""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return 1, str(error.code)
