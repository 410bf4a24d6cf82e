"""A directory of checkpoints, written and read with Orbax."""

import inspect
import os
import pathlib
from typing import Any

import jax

from keras_meshdist import keras_hooks
from keras_meshdist.checkpoints import digests, votes

# Of what is saved; what an older version can't read gets a higher number.
FORMAT = 2
# Seconds that one process waits for the others at the end of a save.
_PATIENCE = 600


class Store:
    """Checkpoints by step, in one directory that all processes see.

    All processes must make the same calls. A step is whole or isn't there:
    Orbax writes it under another name, or marks it at the end.

    Args:
        directory: str or path.
        asynchronous: bool, whether `save` returns when values were copied.
            Then a failure shows in a later call. Defaults to `False`.
        create: bool, whether to make the directory. Defaults to `False`.
    """

    def __init__(self, directory, asynchronous=False, create=False):
        self._ocp, epath = _orbax()
        directory = os.fspath(directory)
        if not keras_hooks.is_remote_path(directory):
            directory = os.path.abspath(directory)
        self.directory = directory
        self._failure: Exception | None = None
        if not create and not epath.Path(directory).is_dir():
            raise FileNotFoundError(
                "Checkpoints must be in a directory that all processes see. "
                f"Received: {directory!r}, which isn't one."
            )
        self._manager = self._ocp.CheckpointManager(
            directory,
            handler_registry=votes.registry(self._ocp),
            options=self._ocp.CheckpointManagerOptions(
                create=create,
                cleanup_tmp_directories=create,
                # Votes are taken in the background.
                enable_async_checkpointing=(
                    asynchronous or jax.process_count() > 1
                ),
                # Otherwise, if a directory can't be made, what is to write in
                # it waits for minutes, also when the process ends.
                async_options=self._ocp.AsyncOptions(
                    timeout_secs=_PATIENCE,
                    create_directories_asynchronously=False,
                ),
            ),
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._manager.close()

    def steps(self) -> list[int]:
        """Returns the steps of all whole checkpoints, in order."""
        self._manager.reload()
        return sorted(self._manager.all_steps())

    def save(self, step: int, arrays: dict[str, Any], meta: dict[str, Any]):
        """Saves arrays, their digests, and what is written beside them.

        Args:
            step: int, higher than all there are.
            arrays: dict of `jax.Array`s.
            meta: dict, which is written as JSON.
        """
        ocp = self._ocp
        self._manager.save(
            step,
            args=ocp.args.Composite(
                digests=ocp.args.JsonSave([[*arrays], digests.begin(arrays)]),
                arrays=ocp.args.PyTreeSave(arrays),
                meta=ocp.args.JsonSave({"keras_meshdist": FORMAT, **meta}),
            ),
            force=True,
        )

    def state(self) -> Exception | bool:
        """Returns whether what was saved is whole, or what went wrong."""
        if self._failure is None:
            try:
                if self._manager.is_saving_in_progress():
                    self._manager.check_for_errors()
                    return False
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
            except Exception as error:
                self._failure = error
        return True if self._failure is None else self._failure

    def delete(self, step: int) -> None:
        """Deletes a step."""
        self._manager.delete(step)

    def meta(self, step: int) -> dict[str, Any]:
        """Returns what is written beside the arrays of a step.

        Raises:
            ValueError: if it wasn't written by this package.
        """
        ocp = self._ocp
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )
            meta = restored.meta
        except Exception as error:
            raise ValueError(
                "A checkpoint must be one that `kmd.callbacks.Checkpoint` "
                f"saved. Received: step {step} of {self.directory!r}, whose "
                f"description can't be read ({type(error).__name__}: {error}). "
                f"{self._others(step)}"
            ) from error
        if not isinstance(meta, dict) or meta.get("keras_meshdist") != FORMAT:
            raise ValueError(
                "A checkpoint must have a format that this version of "
                f"keras_meshdist reads, which is {FORMAT}. Received: step "
                f"{step} of {self.directory!r} with "
                f"{meta.get('keras_meshdist') if meta else meta}."
            )
        return meta

    def digests(self, step: int) -> dict[str, list[int]]:
        """Returns the digests that were saved with the arrays of a step.

        Raises:
            OSError: if they can't be read.
        """
        ocp = self._ocp
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(digests=ocp.args.JsonRestore())
            )
        except Exception as error:
            raise OSError(
                "A checkpoint must be whole. Received: step "
                f"{step} of {self.directory!r}, whose digests can't be read "
                f"({type(error).__name__}: {error}). {self._others(step)}"
            ) from error
        return restored.digests

    def arrays(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Returns some of the arrays of a step, each where it has to lie.

        Args:
            step: int.
            abstract: dict of `jax.ShapeDtypeStruct` with shardings.

        Raises:
            OSError: if they can't be read.
        """
        ocp = self._ocp
        wanted = ocp.checkpoint_utils.construct_restore_args(abstract)
        # How Orbax before 0.11.9 is told that the others aren't wanted.
        some = {"transforms": {}}
        if (
            "partial_restore"
            in inspect.signature(ocp.args.PyTreeRestore).parameters
        ):
            some = {"partial_restore": True}
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeRestore(
                        abstract, restore_args=wanted, **some
                    )
                ),
            )
        except Exception as error:
            names = list(abstract)
            raise OSError(
                "A checkpoint must be whole. Received: step "
                f"{step} of {self.directory!r}, where one of {names[:8]} "
                f"{'and more ' if len(names) > 8 else ''}can't be read "
                f"({type(error).__name__}: {error}). {self._others(step)}"
            ) from error
        return jax.block_until_ready(restored.arrays)

    def _others(self, step):
        others = [other for other in self.steps() if other != step]
        return f"Other steps that are there: {others}."


def locate(path: Any) -> tuple[pathlib.PurePath | str, int | None]:
    """Returns the directory of checkpoints, and the step if it is one's."""
    text = os.fspath(path).rstrip("/")
    folder, _, name = text.rpartition("/")
    inside = _orbax()[1].Path(text) / "arrays"
    if name.isdigit() and inside.exists():
        return folder or ".", int(name)
    return text, None


def _orbax():
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise ImportError(
            "Checkpoints need Orbax. Received: no package "
            "`orbax.checkpoint`. Run: pip install 'keras-meshdist[orbax]'."
        ) from error
    return ocp, epath
