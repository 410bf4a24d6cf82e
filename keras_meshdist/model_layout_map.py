"""Layout rules of a model that is built more than once."""

import collections
import re

from keras_meshdist.layout import LayoutMap, TensorLayout, misfit

_NUMBER = re.compile(r"_\d+$")


class ModelLayoutMap(LayoutMap):
    """Layout rules made from a model, which hold when it is built again.

    Keras numbers layers without a name of their own anew in every build:
    `dense_3` may be next time what `dense` was before. Where such layers have
    different layouts, a path is looked up by the place that it had in the
    model from which the rules were made.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        shapes: dict from the path of each of the model's variables to its
            shape, in the order in which they were created.
        automatic: set of names that Keras gave to layers.
    """

    def __init__(self, device_mesh, shapes, automatic):
        super().__init__(device_mesh)
        self._shapes = shapes
        self._numbers = collections.defaultdict(list)
        for path in shapes:
            for name in path.split("/"):
                base, number = split_number(name)
                known = self._numbers[base]
                if name in automatic and number not in known:
                    known.append(number)
        # How far the numbers of the build at hand are from those.
        self._shifts = {}
        self.optional = set()
        self.notes = {}

    def as_built(self, path, shape):
        """Returns the path that a variable had in the model of the rules."""
        names = path.split("/")
        bases = [split_number(name)[0] for name in names]
        unknown = [b for b in dict.fromkeys(bases) if self._numbers.get(b)]
        if not unknown:
            return path
        renamed = self._renamed(names, self._shifts)
        if self._shapes.get(renamed) == tuple(shape):
            return renamed
        # The first of another build.
        shifts = dict(self._shifts)
        for name in names:
            base, number = split_number(name)
            if self._numbers.get(base):
                shifts[base] = number - min(self._numbers[base])
        renamed = self._renamed(names, shifts)
        if self._shapes.get(renamed) == tuple(shape):
            self._shifts = shifts
            return renamed
        return path

    def adapt(self, variable, layout):
        """Returns the part of a layout that fits a variable.

        The variable isn't the model's: `quantize` has made it, perhaps of
        another shape.
        """
        shape, mesh = variable.shape, self.device_mesh
        axes = [None] * len(shape)
        if len(layout.axes) == len(shape):
            for d, entry in enumerate(layout.axes):
                one = [None] * len(shape)
                one[d] = entry
                if not misfit(TensorLayout(one, mesh), shape, mesh):
                    axes[d] = entry
        self.notes[variable.path] = f"{layout.axes} doesn't fit {shape}"
        return TensorLayout(axes, mesh)

    def _renamed(self, names, shifts):
        found = []
        for name in names:
            base, number = split_number(name)
            if self._numbers.get(base):
                number -= shifts.get(base, 0)
                name = f"{base}_{number}" if number else base
            found.append(name)
        return "/".join(found)


def split_number(name):
    """A name without its number, and the number, 0 if it has none."""
    match = _NUMBER.search(name)
    return (name[: match.start()], int(match[0][1:])) if match else (name, 0)
