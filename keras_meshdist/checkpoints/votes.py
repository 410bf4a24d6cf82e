"""Before a checkpoint is whole, all processes say whether they wrote theirs.

Orbax lets the others wait, for minutes, for a process that failed.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import pickle

import jax
import numpy as np

from keras_meshdist import coordination

# The file's name.
_DIGESTS = "digests"
# Votes about each thing are counted, since all processes make the same saves.
# In what order the things of one save come may differ between processes.
_numbers = collections.defaultdict(itertools.count)


class PartError(OSError):
    """A process couldn't write its part; it is raised on all."""


class _Vote:
    """What Orbax waits for in the background: all have done something.

    Args:
        what: str, what it is about.
        do: function from the seconds that it may wait to what to tell others.
    """

    def __init__(self, what, do):
        self._do = do
        self._name = f"checkpoint_{what}_{next(_numbers[what])}"

    def result(self, timeout=None):
        """Returns what each process tells, by process number."""
        error = text = told = None
        try:
            told = self._do(timeout)
        except Exception as found:
            error = found
            text = f"{type(error).__name__}: {error}"[:2000]
        answers = [
            pickle.loads(answer)
            for answer in coordination.exchange(
                self._name, pickle.dumps((text, told)), timeout
            )
        ]
        for process, (found, _) in enumerate(answers):
            if found is not None:
                raise PartError(
                    f"process {process} can't write: {found}"
                ) from error
        return [told for _, told in answers]


class _Digests:
    """And that they added up the digests, which one process writes."""

    def __init__(self, path, names, shares):
        self._path, self._names = path, names
        threads = concurrent.futures.ThreadPoolExecutor(1)
        share = threads.submit(shares)
        threads.shutdown(wait=False)  # it goes on, beside what is written
        self._added = _Vote("shares", share.result)
        self._written = _Vote("digests", self._write)

    def result(self, timeout=None):
        self._digests = np.sum(self._added.result(timeout), 0, dtype=np.uint32)
        self._written.result(timeout)

    def _write(self, timeout):
        if jax.process_index() == 0:
            rows = self._digests.tolist()
            digests = dict(zip(self._names, rows, strict=True))
            self._path.write_text(json.dumps(digests))


@functools.cache
def _voting(kind, item):
    class Voting(kind):
        async def async_save(self, *args, **kwargs):
            futures, error = (), None
            try:
                futures = await super().async_save(*args, **kwargs)
            except Exception as found:
                error = found

            def wait(timeout):
                if error is not None:
                    raise error
                for future in futures or ():
                    future.result(timeout)

            return [_Vote(item, wait)]

    return Voting


@functools.cache
def _digesting(kind):
    class Digesting(kind):
        async def async_save(self, directory, args):
            return [_Digests(directory / _DIGESTS, *args.item)]

    return Digesting


def registry(ocp):
    """Returns what a checkpoint manager writes and reads by.

    Args:
        ocp: the module `orbax.checkpoint`.

    Returns:
        Orbax' registry for the items `digests`, `arrays` and `meta`. What is
        saved as `digests` is a list of names, and what `digests.begin` returns.
    """
    json_args = ocp.args.JsonSave, ocp.args.JsonRestore
    kinds = ocp.DefaultCheckpointHandlerRegistry()
    for item, handler, arguments in (
        (
            "digests",
            _digesting(ocp.JsonCheckpointHandler)(_DIGESTS),
            json_args,
        ),
        (
            "arrays",
            _voting(ocp.PyTreeCheckpointHandler, "arrays")(),
            (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
        ),
        ("meta", _voting(ocp.JsonCheckpointHandler, "meta")(), json_args),
    ):
        for each in arguments:
            kinds.add(item, each, handler)
    return kinds
