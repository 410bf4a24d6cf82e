"""Blocks of a deep model that are alike, so that a few stand for all."""

import dataclasses
import json
import math
import re

from keras_meshdist.keras_hooks import steps

# Kinds of blocks that alternate, at most.
_LONGEST_PERIOD = 6
_FEWEST_UNITS = 3
# A model with more units than this needn't be compiled as a whole.
DEEP = 4
_NUMBER = re.compile(r"_?\d+")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Layers that follow each other, of one kind, or of several in turn.

    Args:
        layers: list of `keras.Layer`, in order.
        period: int, how many make a unit; that many kinds alternate.
    """

    layers: list
    period: int

    @property
    def units(self):
        """How often the unit is repeated."""
        return len(self.layers) // self.period


def find_blocks(model):
    """Finds the repeated blocks of a model that have most of its weights.

    Two layers are alike if they are of one class, have variables of the same
    names, shapes and dtypes, and were made with the same arguments. Blocks of
    several kinds may alternate.

    Args:
        model: `keras.Model`, built; it may be without memory.

    Returns:
        `Blocks`, or `None` if there are none.
    """
    best, most = None, 0
    holders = [model]
    while holders:
        holder = holders.pop(0)
        inside = steps.sublayers(holder)
        holders += inside
        layers = [layer for layer in inside if layer.variables]
        found = _longest_run([kind_of(layer) for layer in layers])
        if found is None:
            continue
        start, units, period = found
        layers = layers[start : start + units * period]
        size = sum(_elements(layer) for layer in layers)
        if size > most:
            best, most = Blocks(layers, period), size
    return best


def kind_of(layer):
    """Returns what makes two layers alike, as text."""
    variables = [
        (_plain(v.path, layer), tuple(v.shape), str(v.dtype), v.trainable)
        for v in layer.variables
    ]
    return f"{type(layer).__qualname__} {_config(layer)} {variables}"


def keep_units(blocks, units):
    """Leaves out all blocks but those of the first units.

    Args:
        blocks: `Blocks` of a model that has no optimizer variables yet.
        units: int.
    """
    for layer in blocks.layers[units * blocks.period :]:
        steps.leave_out(layer)


class Cut:
    """Finds the blocks of a model, and keeps some units of them.

    Args:
        keep: int, units to keep, or `None` for all.

    Attributes:
        units: int, units that the model had, or `None` if it is whole.
        blocks: dict from the name of a block to one for all of its kind.
    """

    def __init__(self, keep):
        self._keep = keep
        self.units, self.blocks = None, {}

    def __call__(self, model):
        found = find_blocks(model)
        if found is None:
            return
        self.blocks = {
            layer.name: re.sub(r"\d+", "*", layer.name)
            for layer in found.layers
        }
        if self._keep is not None and found.units > DEEP:
            self.units = found.units
            keep_units(found, self._keep)


def _longest_run(kinds):
    """Where a pattern is repeated most: start, repetitions and length."""
    best, covered = None, 0
    for period in range(1, _LONGEST_PERIOD + 1):
        start = 0
        while start + period < len(kinds):
            stop = start + period
            while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
                stop += 1
            units = (stop - start) // period
            if units >= _FEWEST_UNITS and units * period > covered:
                best, covered = (start, units, period), units * period
            start = max(start + 1, stop - period + 1)
    return best


def _plain(path, layer):
    """A variable's path below its layer, without numbers."""
    below = path.rpartition(f"{layer.name}/")[2]
    return _NUMBER.sub("", below)


def _config(layer):
    try:
        config = layer.get_config()
    except Exception:
        return ""
    text = json.dumps(_nameless(config), default=str, sort_keys=True)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _nameless(config):
    if isinstance(config, dict):
        return {k: _nameless(v) for k, v in config.items() if k != "name"}
    if isinstance(config, list | tuple):
        return [_nameless(v) for v in config]
    return config


def _elements(layer):
    return sum(math.prod(v.shape) for v in layer.variables)
