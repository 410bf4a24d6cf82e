"""A model's own step, compiled for devices that need not be there."""

import contextlib

import keras

from keras_meshdist import keras_hooks, layouts
from keras_meshdist.abstract import build_abstractly, variables_of
from keras_meshdist.batches import shape_of_placed
from keras_meshdist.distribution import ModelParallel
from keras_meshdist.keras_hooks import steps
from keras_meshdist.layout import sharding_of
from keras_meshdist.planner.example import example_batch

# Axes that split rows, by the names that are used for them.
ROW_AXES = ("batch", "data", "replica", "fsdp")
_OTHER_AXES = ("model", "sequence", "expert")


class AbstractStep:
    """A model without memory, and the batch that it is trained on.

    Args:
        build_fn: function without arguments that returns a compiled
            `keras.Model`.
        batch: int, or shapes, as `example_batch` takes them.
        seq: int, as `example_batch` takes it. Defaults to `None`.
        kind: str, `"train"`, `"test"` or `"predict"`. Defaults to `"train"`.
        change: function that is called with the model before the optimizer
            has its variables. Defaults to `None`.

    Raises:
        ValueError: if the function returns no compiled model, or the shapes of
            a batch can't be known.
    """

    def __init__(self, build_fn, batch, seq=None, kind="train", change=None):
        self.kind = kind

        def finish(model, _):
            if change is not None:
                change(model)
            if getattr(model, "optimizer", None) is None and kind == "train":
                raise ValueError(
                    "The function must return a model that is compiled, as "
                    f"`fit` needs it. Received: {model.name!r} of class "
                    f"{type(model).__name__}, without an optimizer."
                )
            self.data = example_batch(model, batch, seq)
            steps.symbolic_build(model, self.data)

        with steps.recording_slots() as self._slots:
            self.model = build_abstractly(build_fn, finish)

    def place(self, distribution):
        """Lets variables lie as a distribution says."""
        for variable in variables_of(self.model):
            slot = id(variable) in self._slots
            context = (
                distribution.creating_slot(self._slots[id(variable)])
                if slot
                else contextlib.nullcontext()
            )
            with context:
                layout = distribution.get_variable_layout(variable)
            steps.set_shape(variable, sharding_of(layout))

    def lower(self, distribution):
        """Returns JAX's lowered step, ready to be compiled.

        Args:
            distribution: `ModelParallel` of the package.
        """
        devices = list(distribution.device_mesh.devices.flat)
        platform = devices[0].platform
        with distribution.scope(), steps.looking_like(devices):
            self.place(distribution)
            step, state = steps.step_of(self.model, self.kind)
            batch = keras.tree.map_structure(
                lambda leaf: shape_of_placed(
                    tuple(leaf.shape),
                    leaf.dtype,
                    sharding_of(distribution.get_data_layout(leaf.shape)),
                ),
                self.data,
            )
            return step.trace(state, batch).lower(
                lowering_platforms=(platform,)
            )


def distribute(model, mesh, layout="auto", sequence=None):
    """Returns the distribution of a model over a mesh.

    Args:
        model: `keras.Model`, without memory.
        mesh: `keras.distribution.DeviceMesh`.
        layout: `"auto"`: `kmd.layouts.auto` with the axes `"model"` and
            `"fsdp"`, and `"sequence"` and `"expert"`, where the mesh has them;
            `"fsdp"`: `kmd.layouts.fsdp` over the axis of that name, else over
            all that split rows; or a function that takes the mesh and returns
            a layout map or a distribution.
        sequence: str, the axis over which `"auto"` splits the sequence.
            Defaults to `"sequence"`, if the mesh has it.

    Returns:
        `ModelParallel` of the package.

    Raises:
        ValueError: if the layout is none of these, or rows have no axis.
    """
    names = tuple(mesh.axis_names)
    if layout == "auto":
        axes = {
            f"{axis}_axis": axis if axis in names else None
            for axis in (*_OTHER_AXES, "fsdp")
        }
        if sequence is not None:
            axes["sequence_axis"] = sequence
        found = layouts.auto(model, mesh, **axes)
    elif layout == "fsdp":
        axis = "fsdp" if "fsdp" in names else _axes_of_rows(mesh)
        found = layouts.fsdp(model, mesh, axis=axis)
    elif callable(layout):
        found = layout(mesh)
    else:
        raise ValueError(
            "The layout is 'auto', 'fsdp' or a function that takes the mesh. "
            f"Received: layout={layout!r}."
        )
    if isinstance(found, keras_hooks.HookedDistribution):
        return found
    return ModelParallel(layout_map=found, batch_dim_name=_axes_of_rows(mesh))


def _axes_of_rows(mesh):
    """Those with the names that they have; else the first of a name unknown."""
    names = mesh.axis_names
    rows = tuple(name for name in names if name in ROW_AXES)
    rows = rows or tuple(n for n in names if n not in _OTHER_AXES)[:1]
    if not rows:
        sizes = dict(zip(names, mesh.shape, strict=True))
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"A mesh names the axis of a batch's rows, one of {ROW_AXES}. "
            f"Received: {axes}. Valid: for instance batch=1,{axes}."
        )
    return rows
