"""Hooks on presets of Transformers: a tensor stays in its file until placed."""

import functools
import json
import math
import struct
import sys

import ml_dtypes
import numpy as np

from keras_meshdist.keras_hooks.base import ours

# Bytes below which a tensor is read at once.
_SMALL = 2**16
# Names of dtypes in files of safetensors.
_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "U8": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}


class _Tensors:
    """A file of safetensors, of which tensors are mapped into memory."""

    def __init__(self, path):
        self._path = path
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            self._header = json.loads(file.read(size))
        self._header.pop("__metadata__", None)
        self._start = 8 + size

    def keys(self):
        return self._header.keys()

    def get_tensor(self, name):
        known = self._header.get(name, {})
        dtype = _DTYPES.get(known.get("dtype"))
        first, last = known.get("data_offsets", (0, 0))
        if dtype is None or last - first < _SMALL:
            return self._read(name)
        shape = tuple(known["shape"])
        if math.prod(shape) * np.dtype(dtype).itemsize != last - first:
            return self._read(name)
        return np.memmap(self._path, dtype, "r", self._start + first, shape)

    def _read(self, name):
        import safetensors

        with safetensors.safe_open(self._path, framework="np") as file:
            return file.get_tensor(name)


class _Files(dict):
    """By name, files that are opened when they are asked for."""

    def __init__(self, find):
        self._find = find

    def __contains__(self, name):
        return True

    def __missing__(self, name):
        self[name] = _Tensors(self._find(name))
        return self[name]


def open_tensors(hub_method):
    """KerasHub reads whole tensors, on every process.

    Wraps `SafetensorLoader.__init__` of KerasHub (0.32 and newer), as soon as
    KerasHub is there. What it does to a tensor, such as to transpose it, makes
    another view of the file; where it has to make a copy, as of several
    tensors put together, the tensor is read whole.
    """
    hub = sys.modules[hub_method.__module__]

    @functools.wraps(hub_method)
    def hook(self, preset, *args, **kwargs):
        hub_method(self, preset, *args, **kwargs)
        if ours() is not None:
            self.safetensor_files = _Files(
                lambda name: hub.get_file(preset, name)
            )

    return hook
