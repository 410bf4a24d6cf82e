"""Hooks on reading files of weights: a value stays there until it is placed."""

import contextvars
import functools
import io
import struct
import weakref
import zipfile

import ml_dtypes
import numpy as np

from keras_meshdist.keras_hooks.base import ours

# Bytes below which a value is read at once.
_SMALL = 2**16
_WEIGHTS = "model.weights.h5"
# A local file header of a ZIP archive: its length, and where the lengths of
# the name and of the extra field stand that come before the content (APPNOTE
# 6.3.10 of PKWARE, section 4.3.7).
_HEADER, _LENGTHS = 30, 26

_in_place = contextvars.ContextVar("in_place", default=False)
# By the name under which h5py knows them.
_windows = weakref.WeakValueDictionary()


class ReadInPlaceError(Exception):
    """Tells Keras to read the weights of an archive from the archive."""


class _Window(io.RawIOBase):
    """What lies in a file, as if it were a file of its own."""

    def __init__(self, path, start, size):
        self.path, self.start, self._size = path, start, size
        self._file = open(path, "rb")  # noqa: SIM115
        self._place = 0
        _windows[repr(self)] = self

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}
        self._place = origins.get(whence, self._size) + offset
        return self._place

    def tell(self):
        return self._place

    def readinto(self, buffer):
        size = max(0, min(len(buffer), self._size - self._place))
        self._file.seek(self.start + self._place)
        count = self._file.readinto(memoryview(buffer)[:size])
        self._place += count
        return count

    def close(self):
        self._file.close()
        super().close()


class _Stored:
    """What a store takes for an archive."""

    def __init__(self, window):
        self._window = window

    def open(self, name, mode="r"):
        return self._window


def open_store(keras_method):
    """Keras reads from an archive as if it were a tape, and from its start.

    Wraps `H5IOStore.__init__` (Keras 3.7 to 3.16).
    """

    @functools.wraps(keras_method)
    def hook(self, path, archive=None, mode="r", **kwargs):
        if ours() is not None and archive is not None and mode == "r":
            place = _place_in(archive, str(path))
            if place is not None:
                archive = _Stored(_Window(*place))
        return keras_method(self, path, archive=archive, mode=mode, **kwargs)

    return hook


def load_archive(keras_function):
    """Keras copies all weights out of an archive, on every process.

    Wraps `_load_model_from_fileobj` (Keras 3.7 to 3.16). What Keras does if
    that fails is to read them from the archive.
    """

    @functools.wraps(keras_function)
    def hook(fileobj, *args, **kwargs):
        if ours() is None:
            return keras_function(fileobj, *args, **kwargs)
        with zipfile.ZipFile(fileobj) as archive:
            place = _place_in(archive, _WEIGHTS)
        fileobj.seek(0)
        token = _in_place.set(place is not None)
        try:
            return keras_function(fileobj, *args, **kwargs)
        finally:
            _in_place.reset(token)

    return hook


def is_memory_sufficient(keras_function):
    """Keras holds a whole file in memory if there is room.

    Wraps `is_memory_sufficient` (Keras 3.7 to 3.16): variables go one by one.
    """

    @functools.wraps(keras_function)
    def hook(model):
        if _in_place.get():
            raise ReadInPlaceError
        return ours() is None and keras_function(model)

    return hook


def read_value(keras_method):
    """Keras reads a whole value, and a process may need but a part of it.

    Wraps `__getitem__` of what weights are read from: `H5Entry` of Keras 3.7,
    `H5IOStore` of newer versions up to 3.16. A large value comes as an array
    of NumPy whose content is still in the file.
    """

    @functools.wraps(keras_method)
    def hook(self, key):
        mapped = None if ours() is None else _mapped(self, key)
        return keras_method(self, key) if mapped is None else mapped

    return hook


def _mapped(store, key):
    """Returns a value that is read later, or `None` if it can't be."""
    import h5py

    group = getattr(store, "_h5_entry_group", getattr(store, "group", {}))
    if key not in group or not isinstance(
        group.get(key, getlink=True), h5py.HardLink
    ):
        return None  # Keras says what is wrong
    found = group[key]
    if not isinstance(found, h5py.Dataset) or found.nbytes < _SMALL:
        return None
    offset, dtype = found.id.get_offset(), found.dtype
    if offset is None or dtype.hasobject:  # compressed, or in other files
        return None
    if found.attrs.get("dtype") == "bfloat16":
        dtype = np.dtype(ml_dtypes.bfloat16)
    path, start = group.file.filename, 0
    if path in _windows:
        path, start = _windows[path].path, _windows[path].start
    elif group.file.driver == "fileobj":
        return None
    return np.memmap(path, dtype, "r", start + offset, found.shape)


def _place_in(archive, name):
    """Where in which file a member's content lies; `None` if it can't be."""
    if not isinstance(archive, zipfile.ZipFile):
        return None
    if not isinstance(archive.filename, str) or name not in archive.namelist():
        return None
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        return None
    with open(archive.filename, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(_HEADER)
    lengths = struct.unpack_from("<HH", header, _LENGTHS)
    start = info.header_offset + _HEADER + sum(lengths)
    return archive.filename, start, info.file_size
