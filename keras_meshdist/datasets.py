"""What a dataset is: the same on every process, or each its own feed.

Both kinds say what each process tells the others of a batch, what must be
equal, and how the batch is then put on the devices.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_meshdist import verdicts
from keras_meshdist.arrays import ArrayRows
from keras_meshdist.feeds import Feeds


@dataclasses.dataclass(frozen=True)
class Said:
    """What a process says of a batch; `rows` is `None` at a dataset's end.

    `assigned` is what variables were given since the pass before; `leaving`,
    whether the process was asked to end. `known` gives the rows of all batches
    of the pass, if that is known; `pace`, the seconds that a batch took.
    """

    rows: int | None
    structure: str = ""
    digest: str | None = None
    epoch_steps: int | None = None
    empty: Any = None
    assigned: tuple[tuple[str, int], ...] = ()
    leaving: bool = False
    known: Any = None
    pace: float = 0.0


class GlobalDataset:
    """Every process reads the same batches, and places its part of each.

    Args:
        place: function that puts a global array on the devices.
    """

    def __init__(self, place: Callable[[Any], Any]):
        self._place = place

    def describe(
        self, batch: Any, step: int, epoch_steps: int | None, contents: bool
    ) -> Said:
        """Returns what there is to say of a batch.

        Args:
            batch: nested structure of arrays.
            step: int, which batch it is, counted from 0.
            epoch_steps: int, how many batches an epoch takes, if it is known.
            contents: bool, whether to say a digest of the contents too.

        Returns:
            A `Said`.
        """
        leaves = _leaves(batch)
        digest = _digest(leaves) if contents else None
        return Said(
            _rows(leaves), _structure(batch, leaves), digest, epoch_steps
        )

    def check(self, step: int, answers: list[Said]) -> None:
        """Compares what all processes say of a batch.

        Args:
            step: int, which batch it is, counted from 0.
            answers: list of `Said`, by process number.

        Raises:
            verdicts.DisagreementError: if they differ.
        """
        lengths = [f"{said.epoch_steps} batches" for said in answers]
        _compare(
            step,
            "All processes must iterate over the same global dataset, in the "
            "same order.",
            (
                ("number of batches in an epoch", lengths),
                ("number of rows", [_counted(said) for said in answers]),
                *_kinds(answers),
            ),
            "Give every process the same whole dataset and the same seeds; or, "
            "if each yields only its own rows, set auto_shard_dataset=False on "
            "the distribution.",
        )

    def place(self, batch: Any, answers: list[Said] | None) -> Any:
        """Puts a batch on the devices."""
        return keras.tree.map_structure(self._place, batch)


class OwnFeeds:
    """Each process reads its own rows, which are its part of each batch.

    Args:
        feeds: `Feeds` of the mesh.
        process: int, this process' number.
        place: function of an array, the batch shards of this process, and what
            `Feeds.own_runs` returns; it puts a feed on the devices.
    """

    def __init__(self, feeds: Feeds, process: int, place: Callable[..., Any]):
        self._feeds = feeds
        self._shards = feeds.shards_of(process)
        self._alone = (process,) in feeds.own
        self._place = place

    def describe(
        self, batch: Any, step: int, epoch_steps: int | None, contents: bool
    ) -> Said:
        """Returns what there is to say of a batch; see `GlobalDataset`.

        Raises:
            ValueError: if the feed's arrays differ in their rows, or lie on
                other processes' devices.
        """
        leaves = _leaves(batch)
        rows = _rows(leaves)
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                raise ValueError(
                    "A process' own feed must be an array of its own. "
                    f"Received: an array of shape {leaf.shape} on several "
                    "processes. Use auto_shard_dataset=True for global arrays."
                )
            if np.ndim(leaf) and len(leaf) != rows:
                raise ValueError(
                    "All arrays of a process' own feed must have equally many "
                    f"rows. Received: batch {step} (counted from 0) with "
                    f"shapes {[np.shape(leaf) for leaf in leaves]}."
                )
        return Said(
            rows,
            _structure(batch, leaves),
            _digest(leaves) if contents and not self._alone else None,
            epoch_steps,
            keras.tree.map_structure(_empty, batch),
        )

    def check(self, step: int, answers: list[Said]) -> None:
        """Compares what all processes say of a batch; see `GlobalDataset`."""
        _compare(
            step,
            "The feeds of all processes must have the same structure.",
            _kinds([said for said in answers if said.rows is not None])[:1],
            "Let all yield the same dtypes and shapes but for the rows.",
            [p for p, said in enumerate(answers) if said.rows is not None],
        )
        for group in self._feeds.own:
            those = [answers[process] for process in group]
            _compare(
                step,
                "Processes that hold the same batch shards must yield the same "
                f"rows, here {_named(group)}.",
                (
                    ("number of rows", [_counted(said) for said in those]),
                    *_kinds(those),
                ),
                "Give processes with the same `data_shard_id` the same feed "
                "and the same seeds.",
                group,
            )

    def place(self, batch: Any, answers: list[Said]) -> Any:
        """Puts the feed on the devices, beside those of the others."""
        runs = self._feeds.own_runs([said.rows or 0 for said in answers])
        if batch is None:
            others = (said for said in answers if said.rows is not None)
            batch = next(others).empty
        return keras.tree.map_structure(
            lambda leaf: self._place(leaf, self._shards, *runs), batch
        )


def _compare(step, rule, aspects, remedy, processes=None):
    for what, seen in aspects:
        if len(set(seen)) > 1:
            raise verdicts.DisagreementError(
                f"{rule} Received: batch {step} (counted from 0) with "
                f"different {what}: {verdicts.grouped(seen, processes)}. "
                f"{remedy}"
            )


def _counted(said):
    if said.rows is None:
        return "no batch, its dataset has ended"
    return f"{said.rows} rows"


def _kinds(answers):
    return (
        ("structure, dtypes or shapes", [said.structure for said in answers]),
        ("contents", [f"contents {said.digest}" for said in answers]),
    )


def _leaves(batch):
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def _rows(leaves):
    return next((len(leaf) for leaf in leaves if np.ndim(leaf)), 1)


def _structure(batch, leaves):
    rows = _rows(leaves)

    def described(leaf):
        if leaf is None:
            return None
        shape = np.shape(leaf)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if not shape:
            # All processes hold it, whichever kind of dataset it is.
            return f"{dtype}: {np.asarray(leaf)}"
        first = "rows" if shape[0] == rows else shape[0]
        return f"{dtype}[{', '.join(map(str, (first, *shape[1:])))}]"

    return str(keras.tree.map_structure(described, batch))


def _digest(leaves):
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, ArrayRows):
            hashed.update(np.asarray(leaf.numbers).tobytes())
            leaf = leaf.sample()
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            hashed.update(np.ascontiguousarray(leaf).tobytes())
    return hashed.hexdigest()


def _empty(leaf):
    """No rows of what a leaf has, for a process whose feed has ended."""
    if leaf is None or not np.ndim(leaf):
        return leaf
    return np.empty((0, *np.shape(leaf)[1:]), leaf.dtype)


def _named(processes):
    return f"processes {', '.join(map(str, processes))}"
