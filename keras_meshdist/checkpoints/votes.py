"""Before a checkpoint is whole, all processes say whether they wrote theirs.

Orbax lets the others wait, for minutes, for a process that failed.
"""

import functools
import itertools
import pickle

import jax

from keras_meshdist import coordination

# Votes are counted, since all processes make the same saves.
_numbers = itertools.count()


class PartError(OSError):
    """A process couldn't write its part; it is raised on all."""


class _Vote:
    """What Orbax waits for in the background: all has been written, by all."""

    def __init__(self, futures, error):
        self._futures, self._error = futures, error
        self._name = f"checkpoint_{next(_numbers)}"

    def result(self, timeout=None):
        error = self._error
        try:
            for future in self._futures:
                future.result(timeout)
        except Exception as found:
            error = found
        text = error and f"{type(error).__name__}: {error}"[:2000]
        answers = coordination.exchange(self._name, pickle.dumps(text), timeout)
        for process, answer in enumerate(answers):
            found = pickle.loads(answer)
            if found is not None:
                raise PartError(
                    f"process {process} can't write: {found}"
                ) from error


@functools.cache
def _voting(kind):
    class Voting(kind):
        async def async_save(self, *args, **kwargs):
            futures, error = (), None
            try:
                futures = await super().async_save(*args, **kwargs)
            except Exception as found:
                error = found
            return [_Vote(futures or (), error)]

    return Voting


def registry(ocp):
    """Returns what a checkpoint manager writes and reads by.

    Args:
        ocp: the module `orbax.checkpoint`.

    Returns:
        Orbax' registry for the items `arrays` and `meta`, or `None` for one
        process, which needs no other.
    """
    if jax.process_count() == 1:
        return None
    kinds = ocp.DefaultCheckpointHandlerRegistry()
    for item, kind, arguments in (
        (
            "arrays",
            ocp.PyTreeCheckpointHandler,
            (ocp.args.PyTreeSave, ocp.args.PyTreeRestore),
        ),
        (
            "meta",
            ocp.JsonCheckpointHandler,
            (ocp.args.JsonSave, ocp.args.JsonRestore),
        ),
    ):
        handler = _voting(kind)()
        for each in arguments:
            kinds.add(item, each, handler)
    return kinds
