"""What all processes do together when a checkpoint is saved.

Orbax lets the others wait for one that failed.
"""

import os
import tempfile
import time

import jax

from keras_meshdist import keras_hooks
from keras_meshdist.checkpoints import votes

# Seconds between two looks at a save that isn't whole yet, and until the others
# are asked: one may have failed while this one waits for it.
_PAUSE, _PATIENCE = 0.01, 1.0


def try_to_write(distribution, directory):
    """Makes a directory and writes something to it, on the first process.

    Args:
        distribution: `HookedDistribution`.
        directory: str or path.

    Raises:
        OSError: if it can't, on all processes.
    """
    error = _try(directory) if jax.process_index() == 0 else None
    _raise_on_all(distribution, directory, error)


def settle(distribution, store):
    """Waits until what was saved is whole.

    Args:
        distribution: `HookedDistribution`.
        store: `Store`.

    Raises:
        OSError: if a process failed, on all processes.
    """
    while True:
        asks = time.monotonic() + _PATIENCE
        while (state := store.state()) is False and time.monotonic() < asks:
            time.sleep(_PAUSE)
        error = state if isinstance(state, Exception) else None
        said = _raise_on_all(
            distribution, store.directory, error, state is True
        )
        if all(said):
            return


def _try(directory):
    directory = os.fspath(directory)
    if keras_hooks.is_remote_path(directory):
        return None
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _raise_on_all(distribution, directory, error, said=None):
    """Raises if a process has an error; returns what all have to say."""
    text = None
    if isinstance(error, votes.PartError):
        text = str(error)
    elif error is not None:
        text = (
            f"process {jax.process_index()} can't write: "
            f"{type(error).__name__}: {error}"
        )[:2000]
    answers = distribution.ask((text, said), "to save a checkpoint")
    for found, _ in answers:
        if found is not None:
            raise OSError(
                "A checkpoint must be written whole, by all processes. "
                f"Received: {str(directory)!r}, where {found}. Checkpoints "
                "that were whole before are still there."
            ) from error
    return [said for _, said in answers]
