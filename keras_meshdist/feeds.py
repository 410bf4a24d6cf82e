"""Which process has to read which rows: arithmetic on process ids alone.

A mesh is given here as the array of its devices' process ids, so that a pod of
any size can be reasoned about (and tested) without any device.
"""

import dataclasses
import functools

import numpy as np


def physical_rows(logical_rows, num_shards):
    """Rounds a number of rows up to a multiple of the batch shards.

    Example:

    ```python
    physical_rows(13, 4)  # 16
    ```

    Args:
        logical_rows: int >= 0, rows that the user gave.
        num_shards: int >= 1, number of batch shards.

    Returns:
        int, the smallest multiple of `num_shards` that holds the rows.
    """
    return -(-logical_rows // num_shards) * num_shards


@dataclasses.dataclass(frozen=True)
class Feeds:
    """The batch shards that each process holds, read off a mesh.

    Nothing here divides a process id by anything: devices may stand in the
    mesh in any order, and which rows a process needs follows from where its
    own devices stand.

    Example:

    ```python
    # Mesh ("model", "batch") of shape (2, 4), two processes of four devices.
    ids = np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    feeds = Feeds.from_mesh(ids, ("model", "batch"), ("batch",))
    feeds.shards_of(1)  # (0, 1, 2, 3)
    feeds.rows_of(1, 13)  # array([0, 1, ..., 12])
    ```

    Args:
        holders: tuple with, for each batch shard, the sorted tuple of the ids
            of the processes that have a device holding that shard.
    """

    holders: tuple[tuple[int, ...], ...]

    @classmethod
    def from_mesh(cls, process_ids, axis_names, batch_axes):
        """Reads the feeds off a mesh.

        Args:
            process_ids: int array with one dimension for each mesh axis: the
                id of the process that owns the device at that place.
            axis_names: sequence of str, the mesh's axis names.
            batch_axes: sequence of str, the axes over which rows are split,
                the slowest varying first.

        Returns:
            A `Feeds`.
        """
        process_ids = np.asarray(process_ids)
        places = [list(axis_names).index(axis) for axis in batch_axes]
        front = np.moveaxis(process_ids, places, range(len(places)))
        shards = int(np.prod(front.shape[: len(places)], dtype=int))
        return cls(
            tuple(
                tuple(int(p) for p in np.unique(row))
                for row in front.reshape(shards, -1)
            )
        )

    @property
    def num_shards(self):
        """Number of batch shards."""
        return len(self.holders)

    @functools.cached_property
    def _shards(self):
        shards = {}
        for shard, holders in enumerate(self.holders):
            for process in holders:
                shards.setdefault(process, []).append(shard)
        return {process: tuple(s) for process, s in sorted(shards.items())}

    @property
    def processes(self):
        """Sorted tuple of the ids of the processes with a device."""
        return tuple(self._shards)

    def shards_of(self, process_id):
        """Returns the sorted tuple of batch shards that a process holds.

        Args:
            process_id: int.

        Returns:
            Tuple of int.

        Raises:
            ValueError: if the process has no device in the mesh.
        """
        if process_id not in self._shards:
            raise ValueError(
                "`process_id` must be a process with a device in the mesh. "
                f"Received: process_id={process_id}. "
                f"Processes with a device: {list(self.processes)}."
            )
        return self._shards[process_id]

    def rows_of(self, process_id, logical_rows):
        """Returns the global row numbers that a process has to supply.

        Args:
            process_id: int.
            logical_rows: int >= 0, rows of the global batch.

        Returns:
            Sorted int array; empty when the process holds padding only.

        Raises:
            ValueError: if the process has no device in the mesh.
        """
        size = physical_rows(logical_rows, self.num_shards) // self.num_shards
        starts = np.array(self.shards_of(process_id))[:, None] * size
        rows = (starts + np.arange(size)).ravel()
        return rows[rows < logical_rows]

    def own_runs(self, rows):
        """Lays the rows of each process' own feed into its batch shards.

        A feed fills its shards one after the other, as `rows_of` deals the
        rows of a global batch; what is left of a shard is padding.

        Example:

        ```python
        # Two processes with two batch shards each.
        feeds = Feeds(holders=((0,), (0,), (1,), (1,)))
        feeds.own_runs([4, 3])  # (2, ((0, 7),)): the last row is padding
        feeds.own_runs([3, 4])  # (2, ((0, 3), (4, 8))): the fourth is
        ```

        Args:
            rows: sequence of int >= 0, the rows that each process has, by its
                id; processes that share a feed have equally many.

        Returns:
            Tuple `(size, runs)`: the physical rows of one batch shard, and
            pairs `(start, stop)` of the logical rows in the physical batch.
        """
        size = max(
            -(-rows[process] // len(shards))
            for process, shards in self._shards.items()
        )
        runs = []
        for shard, (process, *_) in enumerate(self.holders):
            before = self._shards[process].index(shard) * size
            count = min(max(rows[process] - before, 0), size)
            start, stop = shard * size, shard * size + count
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            if stop > start:
                runs.append((start, stop))
        return size, tuple(runs)

    def rows_in(self, process_id, size, runs):
        """Returns which logical rows of a batch stand in a process' shards.

        Args:
            process_id: int.
            size: int, physical rows of a batch shard.
            runs: tuple of pairs of int, where in the physical batch the
                logical rows stand; see `own_runs`.

        Returns:
            Sorted int array.
        """
        shard_of = np.concatenate(
            [np.arange(start, stop) // size for start, stop in runs]
            or [np.arange(0)]
        )
        return np.flatnonzero(np.isin(shard_of, self.shards_of(process_id)))

    @functools.cached_property
    def own(self):
        """The processes of each feed, where each yields its own.

        Returns:
            Tuple of sorted tuples of process ids: those with equal feeds.

        Raises:
            ValueError: when feeds overlap in part.
        """
        feeds = {}
        for process, shards in self._shards.items():
            feeds.setdefault(shards, []).append(process)
        if sum(map(len, feeds)) != self.num_shards:
            raise ValueError(
                "Processes can yield their own rows only where any two need "
                "the same rows or none in common. Received: "
                f"auto_shard_dataset=False, and {self._listing()}. Give every "
                "process the same global dataset, or choose another mesh."
            )
        return tuple(map(tuple, feeds.values()))

    def _listing(self):
        shards = "; ".join(
            f"process {p}: {list(s)}" for p, s in self._shards.items()
        )
        return f"a mesh with these batch shards on each process: {shards}"

    @functools.cached_property
    def data_shards(self):
        """The different feeds as shards of a dataset.

        They are numbered by position in the batch.

        Returns:
            Dict from process id to number; processes with equal feeds share
            one.

        Raises:
            ValueError: when feeds overlap in part or differ in size, because
                then no numbering of equal, disjoint shards exists.
        """
        feeds = sorted(set(self._shards.values()))
        sizes = {len(feed) for feed in feeds}
        if len(sizes) > 1 or sum(map(len, feeds)) != self.num_shards:
            raise ValueError(
                "`num_data_shards` and `data_shard_id` exist only where any "
                "two processes need the same rows or none in common, and all "
                f"need equally many. Received {self._listing()}. Read the "
                "rows that `feed_rows(global_batch_size)` names instead."
            )
        return {p: feeds.index(s) for p, s in self._shards.items()}
