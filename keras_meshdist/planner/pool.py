"""Several meshes at a time, each compiled in a process of its own."""

import collections
import concurrent.futures
import json
import pickle
import queue
import struct
import subprocess
import sys
import tempfile

import jax
import keras

# Compilations at a time: each takes about a core, and gigabytes of memory.
AT_A_TIME = 2
_SAID = 20


def answers(jobs, at_a_time=AT_A_TIME):
    """Yields the figures of jobs, as they are ready.

    That a job has begun is yielded too.

    Args:
        jobs: list of `Job`, or of what has `answer()` and `environment()`.
        at_a_time: int, processes that work at once. Defaults to 2.

    Yields:
        Tuples of the job's number and its figures, or `None` at the beginning.
    """
    jobs = list(jobs)
    if not jobs:
        return
    waiting, done = queue.SimpleQueue(), queue.SimpleQueue()
    for item in enumerate(jobs):
        waiting.put(item)
    stopping, workers = [], []

    def work():
        worker = None
        try:
            while not stopping:
                try:
                    number, job = waiting.get_nowait()
                except queue.Empty:
                    return
                done.put((number, None))
                if worker is None or not worker.is_free:
                    if worker is not None:
                        worker.end()
                    worker = _Worker(job.environment())
                    workers.append(worker)
                if stopping:
                    return
                done.put((number, worker.answer(job)))
        except BaseException as error:
            done.put((None, error))
        finally:
            if worker is not None:
                worker.end()

    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
        for _ in range(min(at_a_time, len(jobs))):
            threads.submit(work)
        left = len(jobs)
        try:
            while left:
                number, found = done.get()
                if number is None:
                    raise found
                left -= found is not None
                yield number, found
        finally:
            stopping.append(True)
            if left:
                # Nobody waits for what is still being compiled.
                for worker in workers:
                    worker.kill()


class _Worker:
    """A process that answers jobs until it has compiled one."""

    def __init__(self, environment):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keras_meshdist.planner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
            # Ctrl-C is for the planner, which ends its processes itself.
            start_new_session=True,
        )
        self.is_free = True
        self._send(
            {
                "path": sys.path,
                "x64": bool(jax.config.jax_enable_x64),
                "floatx": keras.config.floatx(),
                "dtype_policy": keras.config.dtype_policy().name,
            }
        )

    def answer(self, job):
        try:
            self._send(job)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self.is_free = False
            return {"axes": job.axes, "error": self._why_it_died()}
        found = json.loads(line)
        self.is_free = not found.get("compiled", True)
        return found

    def _send(self, value):
        data = pickle.dumps(value)
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        self._process.stdin.flush()

    def _why_it_died(self):
        status = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        last = collections.deque((li for li in lines if li.strip()), _SAID)
        if status == -9:
            return (
                "the compiler was killed, most likely because this machine "
                "ran out of memory; try fewer at a time, or a machine with "
                "more memory"
            )
        return f"the compiler's process ended with status {status}: " + (
            last[-1].strip() if last else "it said nothing"
        )

    def kill(self):
        """Ends the process at once; whoever waits for its answer gets none."""
        self._process.kill()

    def end(self):
        """Ends the process, whatever it is doing."""
        self._process.stdin.close()
        if self.is_free or self._process.poll() is not None:
            self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()
