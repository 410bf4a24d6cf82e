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
        mapped: `np.memmap` of an array, or a view of one, such as its
            transpose.
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
        """Whether a value is still in a file, and as it is there."""
        return (
            isinstance(value, np.memmap)
            and isinstance(_file_of(value).base, mmap.mmap)
            and value.mode != "c"  # changed in memory
        )

    def __getitem__(self, index):
        part = self._mapped[index]
        read = np.empty(part.shape, self.dtype)
        if not part.ndim:
            read[...] = part
            return read
        # Along the dimension that varies slowest in the file. Of each row a
        # part is read, but memory is mapped for whole rows and more.
        strides = np.abs(part.strides) * np.greater(part.shape, 1)
        slowest = int(np.argmax(strides))
        rows = max(1, self._AT_A_TIME // max(1, int(strides[slowest])))
        for start in range(0, part.shape[slowest], rows):
            some = (slice(None),) * slowest + (slice(start, start + rows),)
            read[some] = part[some]
            self._leave()
        return read

    def __array__(self, dtype=None, copy=None):
        return self[...].astype(dtype or self.dtype, copy=False)

    def digest(self):
        """Returns a checksum of some of the elements, all over the array."""
        flat = _file_of(self._mapped).reshape(-1)
        last = max(0, flat.size - self._ELEMENTS)
        known = self.shape, self._mapped.strides, self._mapped.dtype
        first = self._mapped.ctypes.data - flat.ctypes.data
        digest = zlib.crc32(f"{known}{first}".encode())
        for start in np.linspace(0, last, self._PLACES).astype(int):
            some = np.array(flat[start : start + self._ELEMENTS])
            digest = zlib.crc32(some.view(np.uint8).data, digest)
        self._leave()
        return digest

    def _leave(self):
        """Gives the memory back that was read into."""
        _file_of(self._mapped).base.madvise(mmap.MADV_DONTNEED)


def _file_of(value):
    """Returns the array of which another one is a view."""
    while isinstance(value.base, np.ndarray):
        value = value.base
    return value
