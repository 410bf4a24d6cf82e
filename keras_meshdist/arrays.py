"""Rows of an array that are read when they are put on a device."""

import numpy as np


class ArrayRows:
    """Rows of an array, each read from it only when it is asked for.

    So a process reads of a large array, for instance a memory-mapped file,
    what its own devices need.

    Args:
        read: function from a slice, or an array of row numbers, to the rows.
        rows: slice with start and stop, or int array: the rows' numbers.
    """

    def __init__(self, read, rows):
        if isinstance(rows, slice):
            rows = range(rows.start, rows.stop)
        self._read = read
        self.numbers = rows
        none = self[:0]
        self.shape = (len(rows), *none.shape[1:])
        self.dtype = none.dtype

    @property
    def ndim(self):
        return len(self.shape)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, key):
        first, *rest = key if isinstance(key, tuple) else (key,)
        numbers = self.numbers[first]
        if isinstance(numbers, range):
            numbers = slice(numbers.start, numbers.stop)
        return np.asarray(self._read(numbers))[(slice(None), *rest)]

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self[:], dtype=dtype)

    def sample(self):
        """Returns the first and the last row, of which all processes know.

        Together with the numbers they tell whether processes have the same
        array.
        """
        return np.concatenate([self[:1], self[-1:]])
