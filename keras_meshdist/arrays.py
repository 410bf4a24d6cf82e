"""Parts of arrays that are read when they are put on a device."""

import mmap
import zlib

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


class FileArray:
    """An array in a file, of which each device's part is read for it.

    Args:
        mapped: `np.memmap` of a whole array.
        dtype: dtype that it is to have.
    """

    # How many places of an array, and elements of each, tell it from others.
    _PLACES, _ELEMENTS = 32, 1024
    # Bytes of the file that are in memory at a time.
    _AT_A_TIME = 2**24

    def __init__(self, mapped, dtype):
        self._mapped = mapped
        self.shape, self.ndim = mapped.shape, mapped.ndim
        self.dtype = np.dtype(dtype)

    @staticmethod
    def takes(value):
        """Whether a value is an array in a file, and not a part of one."""
        return isinstance(value, np.memmap) and isinstance(
            value.base, mmap.mmap
        )

    def __getitem__(self, index):
        part = self._mapped[index]
        read = np.empty(part.shape, self.dtype)
        if not part.ndim:
            read[...] = part
            return read
        # A part of each row, but memory is mapped for whole rows and more.
        row = max(1, self._mapped.nbytes // max(1, self.shape[0]))
        rows = max(1, self._AT_A_TIME // row)
        for start in range(0, len(part), rows):
            some = slice(start, start + rows)
            read[some] = part[some]
            self._leave()
        return read

    def __array__(self, dtype=None, copy=None):
        return self[...].astype(dtype or self.dtype, copy=False)

    def digest(self):
        """Returns a checksum of some of the elements, all over the array."""
        flat = self._mapped.reshape(-1)
        last = max(0, flat.size - self._ELEMENTS)
        digest = zlib.crc32(f"{self.shape}{self._mapped.dtype}".encode())
        for start in np.linspace(0, last, self._PLACES).astype(int):
            some = np.array(flat[start : start + self._ELEMENTS])
            digest = zlib.crc32(some.view(np.uint8).data, digest)
        self._leave()
        return digest

    def _leave(self):
        """Gives the memory back that was read into."""
        self._mapped.base.madvise(mmap.MADV_DONTNEED)
