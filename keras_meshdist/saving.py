"""Files that all processes save together, and one of them writes.

Every process holds a part of the weights, so all must take part in bringing
them together. Each variable is preceded by a word of all processes, so that one
that fails, or isn't there, is an error on all and not a hang.
"""

import contextlib
import contextvars
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from keras_meshdist import agreement, coordination, keras_hooks, verdicts

# Whether this process writes what is saved at the moment; `None` if nothing is
# saved.
_writing = contextvars.ContextVar("writing", default=None)


class _OthersFailedError(RuntimeError):
    """Another process raised while it saved."""


def is_saving() -> bool:
    """Whether all processes are saving together."""
    return _writing.get() is not None


def writes() -> bool:
    """Whether this process is to write what is saved."""
    return _writing.get() is not False


def save(
    board: agreement.Board | None,
    write: Callable[[Any], Any],
    target: Any,
    among_others: bool = False,
) -> Any:
    """Saves on all processes; one writes, and all return when it has.

    A file has another name until it is whole: one that is there already stays
    as it is if saving fails.

    Args:
        board: `agreement.Board`, or `None` on one process.
        write: function that saves to the path, or open file, that it is given.
        target: path, or a file that is open for writing. Processes with
            different paths write each, and so do all with open files.
        among_others: whether the path is a folder in which other files stay.

    Returns:
        What `write` returns.

    Raises:
        DisagreementError: if not all processes save the same.
        RuntimeError: if another process failed.
    """
    if board is None or _writing.get() is not None:
        return _write(write, target, among_others)
    is_path = isinstance(target, (str, os.PathLike))
    path = str(target) if is_path else "an open file"
    with _all_or_none(board):
        paths = [answer[1] for answer in _talk(board, "save", path)]
        first = paths.index(path)
        writer = not is_path or first == coordination.process_id()
        token = _writing.set(writer)
        try:
            if writer:
                return _write(write, target, among_others)
            return _write_elsewhere(write, target)
        finally:
            _writing.reset(token)


def save_files(
    board: agreement.Board | None,
    path: str,
    write: Callable[[], Any],
    take_part: Callable[[str], Any],
) -> Any:
    """Saves several files on one process, while the others take part.

    Args:
        board: `agreement.Board`, or `None` on one process.
        path: str, for messages.
        write: function that saves all of them, on the first process.
        take_part: function that saves the weights among them to a path that
            it is given, on the others.

    Returns:
        What `write` or `take_part` returns.

    Raises:
        DisagreementError: if not all processes save.
        RuntimeError: if another process failed.
    """
    if board is None:
        return write()
    with _all_or_none(board):
        _talk(board, "save", path)
        writer = coordination.process_id() == 0
        token = _writing.set(writer)
        try:
            return write() if writer else _write_elsewhere(take_part, path)
        finally:
            _writing.reset(token)


def announce(board: agreement.Board, value: str) -> None:
    """Waits until all processes are about to bring the same value together.

    Args:
        board: `agreement.Board`.
        value: str, its name, shape and dtype.

    Raises:
        DisagreementError: if another process does something else.
        RuntimeError: if another process failed.
    """
    answers = _talk(board, "fetch", value)
    if len(set(answers)) > 1:
        texts = [" ".join(answer) for answer in answers]
        raise verdicts.DisagreementError(
            "All processes must bring the same values together, in the same "
            f"order, since each holds a part. Received: "
            f"{verdicts.grouped(texts)}."
        )


def _talk(board, kind, text):
    """Returns what all processes say; raises if one says that it failed."""
    answers = board.ask((kind, text), f"to {kind} {text}")
    for process, (other, failure) in enumerate(answers):
        if other == "fail" and kind != "fail":
            raise _OthersFailedError(
                "No process may fail where all save together. Received: "
                f"process {process} raised {failure}"
            )
    kinds = [other for other, _ in answers]
    if kind != "fail" and len(set(kinds)) > 1:
        texts = [" ".join(answer) for answer in answers]
        raise verdicts.DisagreementError(
            "All processes must make the same calls. Received: "
            f"{verdicts.grouped(texts)}."
        )
    return answers


@contextlib.contextmanager
def _all_or_none(board: agreement.Board) -> Iterator[None]:
    """An exception on one process is an exception on all."""
    try:
        yield
    except (verdicts.DisagreementError, _OthersFailedError):
        raise  # the others come to it by themselves
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:2000]
        with contextlib.suppress(verdicts.DisagreementError):
            _talk(board, "fail", text)
        raise
    _talk(board, "end", "saving")


def _write(write: Callable[[Any], Any], target: Any, among_others=False) -> Any:
    is_path = isinstance(target, (str, os.PathLike))
    if not is_path or keras_hooks.is_remote_path(target):
        return write(target)
    path = pathlib.Path(os.path.abspath(target))
    if not among_others and not path.parent.is_dir():
        raise FileNotFoundError(
            "The folder that a file is saved in must exist. Received: "
            f"{str(path)!r}. Make {str(path.parent)!r} first."
        )
    folder = path.parent / f".{path.name}.saving"
    # One that was left by a process that was killed.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=among_others)
        result = write(str(folder / path.name))
        if among_others:
            _move_files(folder / path.name, path)
            return result
        # What a file refers to is in place before it.
        for made in sorted(folder.iterdir(), key=lambda p: p.name == path.name):
            _move(made, path.parent / made.name)
        return result
    except OSError as error:
        text = (
            "A file must be whole, or it isn't saved. Received: "
            f"{str(path)!r}, which couldn't be written ({error}). What was "
            "there before is unchanged."
        )
        number = [error.errno] if error.errno else []
        raise OSError(*number, text) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move_files(made: pathlib.Path, path: pathlib.Path) -> None:
    files = [file for file in made.rglob("*") if file.is_file()]
    # What a file refers to is in place before it.
    for file in sorted(files, key=lambda file: file.suffix == ".json"):
        target = path / file.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


def _move(made: pathlib.Path, path: pathlib.Path) -> None:
    if path.is_dir():  # can't be replaced at once
        path.rename(made.parent / f"old-{made.name}")
    made.replace(path)


def _write_elsewhere(write: Callable[[Any], Any], target: Any) -> Any:
    """Takes part in saving; what there is besides values is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        return write(os.path.join(folder, os.path.basename(str(target))))
