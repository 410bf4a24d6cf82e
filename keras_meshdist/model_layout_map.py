"""Layout rules of a model that is built more than once."""

import collections
import math
import re
import warnings

import jax

from keras_meshdist.layout import LayoutMap, TensorLayout
from keras_meshdist.pieces import (
    as_entries,
    axes_of,
    shard_further,
    what_divides,
)

_NUMBER = re.compile(r"_\d+$")
# Elements from which on a variable that stays whole is worth a warning; as
# `kmd.layouts.fsdp` has it.
_LARGE = 2**16


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
        self.notes = {}
        # Rules for what the model need not have.
        self.optional = set()
        # Rules for what layers return, whose first entry stands for the rows,
        # and their layouts with the sizes of the last dimension.
        self.activations = {}
        self.sequence_axes, self.weight_axes = (), set()
        self.optimizer_axes, self.min_size = (), 0

    def as_built(self, path, shape=None):
        """Returns the path that a variable had in the model of the rules.

        Without a shape, that of a layer whose variables are there.
        """
        names = path.split("/")
        bases = [split_number(name)[0] for name in names]
        unknown = [b for b in dict.fromkeys(bases) if self._numbers.get(b)]
        if not unknown:
            return path
        renamed = self._renamed(names, self._shifts)
        if shape is None or self._shapes.get(renamed) == tuple(shape):
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
        axes = (None,) * len(shape)
        if len(layout.axes) == len(shape):
            axes = what_divides(layout.axes, shape, mesh)
        self.notes[variable.path] = f"{layout.axes} doesn't fit {shape}"
        if not any(axes) and math.prod(shape) >= _LARGE:
            warnings.warn(
                f"A large variable stays whole on every device: "
                f"{variable.path!r} of shape {tuple(shape)}, since its rule's "
                f"axes={layout.axes} don't fit it on {mesh}. Make the rules "
                "from the model as it is now.",
                stacklevel=2,
            )
        return TensorLayout(axes, mesh)

    def of_output(self, rule, batch_axes):
        """Returns the layout of a rule in `activations`, or `None`.

        What a layer returns has the rows of its devices even where its weights
        are split over the batch axes: XLA then gathers the weights. Of itself
        it may gather the rows of all devices instead, and keep weights apart.
        If neither that nor a sequence is split, nothing needs to be said.

        Args:
            rule: str.
            batch_axes: tuple of str.
        """
        if not self.sequence_axes and not self.weight_axes & set(batch_axes):
            return None
        layouts = [
            ((batch_axes, *axes[1:]), sizes)
            for axes, sizes in self.activations[rule]
        ]
        return ActivationLayout(
            layouts, self.device_mesh, is_open=not self.sequence_axes
        )

    def of_slot(self, layout, shape):
        """Returns the layout of an optimizer's variable, by its weight's."""
        used = {axis for entry in layout.axes for axis in axes_of(entry)}
        over = [axis for axis in self.optimizer_axes if axis not in used]
        if not over:
            return layout
        axes, mesh = [axes_of(entry) for entry in layout.axes], self.device_mesh
        shard_further(axes, shape, mesh, over, self.min_size)
        return TensorLayout(as_entries(axes), mesh)

    def _renamed(self, names, shifts):
        found = []
        for name in names:
            base, number = split_number(name)
            if self._numbers.get(base):
                number -= shifts.get(base, 0)
                name = f"{base}_{number}" if number else base
            found.append(name)
        return "/".join(found)


class ActivationLayout(TensorLayout):
    """The layout of those of a layer's outputs that it fits.

    A layer may return several arrays, and others when it generates than when
    it trains; or others each time it is called, as a table of tokens does
    that also makes the logits. Rows need not divide.

    Args:
        layouts: list of pairs: a layout's entries, and if there are several
            the sizes of the last dimension that it is for.
        device_mesh: `keras.distribution.DeviceMesh`.
        is_open: bool, whether dimensions without an axis lie as XLA likes.
    """

    def __init__(self, layouts, device_mesh, is_open):
        super().__init__(layouts[0][0], device_mesh)
        self._layouts, self._is_open = layouts, is_open

    def sharding_for(self, shape):
        """Returns the `NamedSharding` for an output, or `None`."""
        fitting = [
            axes
            for axes, sizes in self._layouts
            if len(axes) == len(shape)
            and (len(self._layouts) == 1 or shape[-1] in sizes)
        ]
        if len(fitting) != 1:
            return None
        rows, *rest = fitting[0]
        rest = what_divides(rest, shape[1:], self.device_mesh)
        if self._is_open:
            free = jax.sharding.PartitionSpec.UNCONSTRAINED
            rest = [free if entry is None else entry for entry in rest]
        if isinstance(rows, tuple) and len(rows) == 1:
            rows = rows[0]  # an older JAX takes the two for different
        spec = jax.sharding.PartitionSpec(rows, *rest)
        return jax.sharding.NamedSharding(self.backend_layout.mesh, spec)


def split_number(name):
    """A name without its number, and the number, 0 if it has none."""
    match = _NUMBER.search(name)
    return (name[: match.start()], int(match[0][1:])) if match else (name, 0)
