"""Processes meet where process 0 will be, before JAX's own service starts.

JAX ends a process, without an exception, when others of its job don't come
within the time limit, and doesn't say which. So they meet here first, at the
same address: each tells process 0 who it is, and process 0 tells all of them
how it went.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import time

from keras_meshdist.coordination import MissingProcessError, named

_GREETING = "keras_meshdist 1 "
_LONGEST_GREETING = 4096
# Seconds: for one attempt to reach process 0, for a word of process 0 after
# the limit, for the others to close, and until the user is told who is waited
# for.
_ATTEMPT, _GRACE, _GOODBYE, _TELL = 5.0, 5.0, 2.0, 20.0
# Seconds between two attempts, at first and at most.
_SHORTEST, _LONGEST = 0.1, 2.0


def meet(address: str, count: int, process: int, timeout: float) -> None:
    """Waits until all processes of a job are there.

    Args:
        address: string, `"host:port"` of process 0; the port must be free.
        count: integer, number of processes.
        process: integer, this process' number.
        timeout: float, seconds.

    Raises:
        MissingProcessError: on all processes, if some don't come in time.
        ValueError: on all processes, if they don't agree on their number, or
            two have the same.
        RuntimeError: if process 0 can't listen at its port.
    """
    limit = time.monotonic() + timeout
    if process == 0:
        with _listen(address) as listener:
            verdict = _Host(listener, address, count, timeout).judge(limit)
    else:
        verdict = _ask(address, count, process, timeout, limit)
    if not verdict["error"]:
        return
    message = f"{verdict['error']} This is process {process} of {count}."
    if verdict["missing"]:
        raise MissingProcessError(
            message, "initialize", tuple(verdict["missing"])
        )
    raise ValueError(message)


class _Host:
    """Process 0, to which all others come."""

    def __init__(self, listener, address, count, timeout):
        self._listener, self._address = listener, address
        self._count, self._timeout = count, timeout
        self._began = time.monotonic()
        self._told = False
        # What each connection has said so far, and who it is.
        self._words: dict[socket.socket, bytes] = {}
        self._present = {None: _myself(0, count, timeout)}
        self._limit = float("inf")

    def judge(self, limit):
        """Waits for all, and tells all; returns what they were told."""
        self._limit = limit
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._listener, selectors.EVENT_READ)
            error, missing = self._wait()
            verdict = {"error": error, "missing": missing}
            self._tell(json.dumps(verdict).encode() + b"\n")
        return verdict

    def _wait(self):
        while True:
            error = self._disagreement()
            if error:
                return error, []
            there = {hello["process"] for hello in self._present.values()}
            missing = sorted(set(range(self._count)) - there)
            if not missing:
                return "", []
            now = time.monotonic()
            if now >= self._limit:
                return self._too_late(missing), missing
            self._say_who_is_missing(missing)
            for key, _ in self._selector.select(min(self._limit - now, 1.0)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)

    def _accept(self):
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._words[connection] = b""

    def _hear(self, connection):
        try:
            data = connection.recv(_LONGEST_GREETING)
        except OSError:
            data = b""
        words = self._words.get(connection, b"") + data
        hello = _understood(words)
        if data and (hello or len(words) < _LONGEST_GREETING):
            self._words[connection] = words
            if hello and connection not in self._present:
                self._present[connection] = hello
                limit = time.monotonic() + hello["seconds"]
                self._limit = min(self._limit, limit)
            return
        # It has gone, or is no process of this package.
        self._selector.unregister(connection)
        self._words.pop(connection)
        self._present.pop(connection, None)
        connection.close()

    def _disagreement(self):
        hellos = list(self._present.values())
        counts = {hello["count"] for hello in hellos}
        if len(counts) > 1:
            listed = ", ".join(
                f"process {h['process']} says {h['count']}" for h in hellos
            )
            return (
                "All processes must agree on how many they are. Received: "
                f"{listed}. Give the same `num_processes` to all."
            )
        numbers = [hello["process"] for hello in hellos]
        twice = sorted({n for n in numbers if numbers.count(n) > 1})
        if not twice:
            return ""
        who = " and ".join(h["who"] for h in hellos if h["process"] == twice[0])
        return (
            "Every process must have a number of its own. Received: process "
            f"{twice[0]} is {who}. Valid: a `process_id` from 0 to "
            f"{self._count - 1} for each, once."
        )

    def _too_late(self, missing):
        there = sorted(hello["process"] for hello in self._present.values())
        return (
            "All processes of a job must call `initialize` within the time "
            f"limit ({self._timeout:g} seconds at process 0). Received: "
            f"{named(there)} came, {named(missing)} of {self._count} did not. "
            "Look at the output of the missing ones: they weren't started, "
            f"failed before, or can't reach process 0 at {self._address}."
        )

    def _say_who_is_missing(self, missing):
        waited = time.monotonic() - self._began
        if waited > _TELL and not self._told:
            self._told = True
            print(
                f"keras_meshdist: process 0 waits at {self._address} for "
                f"{named(missing)} of {self._count}.",
                file=sys.stderr,
                flush=True,
            )

    def _tell(self, verdict):
        for connection in list(self._words):
            connection.settimeout(_GOODBYE)
            try:
                if connection in self._present:
                    connection.sendall(verdict)
                    connection.shutdown(socket.SHUT_WR)
                    continue
            except OSError:
                pass
            self._words.pop(connection)
            connection.close()
        # If they close first, the port is free at once for JAX's service.
        limit = time.monotonic() + _GOODBYE
        for connection in self._words:
            connection.settimeout(max(0.01, limit - time.monotonic()))
            with contextlib.suppress(OSError), connection:
                connection.recv(_LONGEST_GREETING)


def _ask(address, count, process, timeout, limit):
    """Tells process 0 of this one, and returns what it answers."""
    problem, pause = "nothing was tried", _SHORTEST
    while (left := limit - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(
                _host_and_port(address), min(left, _ATTEMPT)
            )
        except socket.gaierror as error:
            problem = f"its name can't be resolved: {error}"
        except OSError as error:
            problem = f"no connection: {error}"
        else:
            with connection:
                hello = _myself(process, count, left)
                verdict = _verdict(connection, hello, left + _GRACE)
            if verdict is not None:
                return verdict
            problem = (
                "what answers there isn't process 0 in `initialize`: it has "
                "ended, belongs to another job, or has gone on without this"
            )
        time.sleep(max(0.0, min(pause, limit - time.monotonic())))
        pause = min(2 * pause, _LONGEST)
    return {
        "error": (
            f"Process 0 must be reached within {timeout:g} seconds. Received: "
            f"nothing from it at {address} ({problem}). Look at the output of "
            "process 0: it wasn't started, or failed before; or the address "
            "isn't its own, or its port is closed to this host."
        ),
        "missing": [0],
    }


def _verdict(connection, hello, seconds):
    try:
        greeting = f"{_GREETING}{json.dumps(hello)}\n"
        connection.sendall(greeting.encode())
        connection.settimeout(seconds)
        with connection.makefile("rb") as lines:
            verdict = json.loads(lines.readline(2**20))
        return verdict if set(verdict) == {"error", "missing"} else None
    except (OSError, ValueError):
        return None


def _myself(process, count, seconds):
    who = f"number {os.getpid()} on host {socket.gethostname()}"
    return {
        "process": process,
        "count": count,
        "seconds": seconds,
        "who": who,
    }


def _understood(words):
    """What a connection has said, once it has said all; else `None`."""
    greeting = words.decode(errors="replace")
    if not greeting.startswith(_GREETING) or "\n" not in greeting:
        return None
    try:
        hello = json.loads(greeting[len(_GREETING) :])
    except ValueError:
        return None
    return hello if set(hello) == set(_myself(0, 0, 0.0)) else None


def _listen(address):
    """Listens where JAX's service will."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host, port = _host_and_port(bind) if bind else ("", _port(address))
    host = "" if host in ("::", "0.0.0.0") else host
    try:
        socket.create_connection((host or "localhost", port), 1.0).close()
    except OSError:
        pass
    else:
        raise RuntimeError(
            "The port of process 0 must be free. Received: a program listens "
            f"already at {address}: another job, or process 0 was started "
            "twice. Give another port to all processes."
        )
    both = not host and socket.has_dualstack_ipv6()
    is_ipv6 = both or ":" in host
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            backlog=1024,
            # As JAX's service does, which so gets the port of a test that
            # has reserved it.
            reuse_port=hasattr(socket, "SO_REUSEPORT"),
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise RuntimeError(
            f"Process 0 must be able to listen at its port. Received: {error}, "
            f"for {address}. Give a free port above 1023 to all processes."
        ) from error


def _host_and_port(address):
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host, _port(address)


def _port(address):
    return int(address.rpartition(":")[2])
