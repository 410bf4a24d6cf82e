"""The distributions that users construct."""

import contextlib
import contextvars

import keras

from keras_meshdist import keras_hooks, unmatched
from keras_meshdist.arguments import (
    batch_axes,
    check_arguments,
    default_batch_axes,
    mesh_of,
    sequence_axes,
)
from keras_meshdist.layout import (
    TensorLayout,
    check_layout,
    find_rule,
    layout_of,
)
from keras_meshdist.mesh import check_axis_names
from keras_meshdist.mesh_distribution import MeshDistribution
from keras_meshdist.model_layout_map import ModelLayoutMap
from keras_meshdist.pieces import misfit

# What an optimizer is creating at the moment: None, or a tuple that holds the
# model variable to which the new slot belongs (or None).
_optimizer_slot = contextvars.ContextVar("optimizer_slot", default=None)


class ModelParallel(MeshDistribution, keras.distribution.ModelParallel):
    """Splits rows over named mesh axes, and weights by layout rules.

    A `keras.distribution.ModelParallel` that is right on every mesh: the batch
    axis may stand anywhere in it, there may be several batch axes, devices
    may lie on the processes in any way, and a batch of any number of rows
    works. Training gives what one device gives.

    Example:

    ```python
    mesh = kmd.make_mesh({"model": 4, "batch": -1})
    layout_map = kmd.LayoutMap(mesh)
    layout_map[".*dense.*/kernel"] = (None, "model")
    dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    model = build_model()  # from here on, ordinary Keras
    ```

    Args:
        layout_map: `LayoutMap` (or `keras.distribution.LayoutMap`), the rules
            for weights and layer outputs. Its mesh is the distribution's.
        batch_dim_name: str, or sequence of str: the mesh axis or axes over
            which rows are split, the slowest varying first. Defaults to the
            axis `"batch"` if the mesh has one, else to its first axis.
        auto_shard_dataset: bool. `True`: every process iterates over the same
            global dataset, and each takes from every batch the rows that its
            devices need. `False`: each process yields only those rows itself,
            its own feed; a batch is the feeds of all processes together, and
            `fit` goes on until the last has ended. Defaults to `True`.
        data_timeout: float, seconds. On several processes it is an error, on
            all of them, when one takes longer to read a batch, or gives no
            sign of life for so long. Defaults to 60.
        sequence_dim_name: str, or sequence of str: the mesh axis or axes over
            which the second dimension of data is split, wherever it divides.
            Defaults to the `sequence_axis` of a layout map that
            `kmd.layouts.auto` made, else to none.

    Raises:
        ValueError: if an argument is unknown or malformed, the mesh has empty
            or repeated axis names, this process has no device in it, or with
            `auto_shard_dataset=False` processes need some rows in common, but
            not all.
    """

    def __init__(
        self,
        *args,
        layout_map=None,
        batch_dim_name=None,
        auto_shard_dataset=True,
        data_timeout=60.0,
        sequence_dim_name=None,
        **kwargs,
    ):
        check_arguments(args, layout_map, kwargs)
        mesh = layout_map.device_mesh
        check_axis_names(tuple(mesh.axis_names))
        for rule in layout_map:
            check_layout(layout_of(layout_map, rule))
        if batch_dim_name is None:
            batch_dim_name = default_batch_axes(layout_map)
        rows = batch_axes(batch_dim_name, mesh)
        if sequence_dim_name is None:
            sequence_dim_name = getattr(layout_map, "sequence_axes", ())
        self._split_data(
            mesh, rows, sequence_axes(sequence_dim_name, rows, mesh)
        )
        super().__init__(layout_map=layout_map, batch_dim_name=self._batch_name)
        self._start(auto_shard_dataset, data_timeout)

    @property
    def sequence_dim_name(self):
        """The sequence axis' name, the tuple of them, or `None`."""
        axes = self._sequence_axes
        return axes if len(axes) > 1 else next(iter(axes), None)

    def get_variable_layout(self, variable):
        """Returns the layout that the rules give a variable.

        Args:
            variable: `keras.Variable`.

        Returns:
            A `TensorLayout`; without axes if no rule matches.

        Raises:
            ValueError: if two rules match, or the layout that matches doesn't
                fit the variable's shape.
        """
        given = keras_hooks.layout_given(variable)
        if given is not None:
            return given
        slot = _optimizer_slot.get()
        if slot is None:
            return self._layout_of_weight(variable)
        return self._layout_of_slot(variable, *slot)

    def _layout_of_weight(self, variable):
        path, layout_map = variable.path, self._layout_map
        if isinstance(layout_map, ModelLayoutMap):
            path = layout_map.as_built(path, variable.shape)
        rule = find_rule(layout_map, path)
        layout = layout_of(layout_map, rule)
        if layout is None:
            return self._whole(variable)
        problem = misfit(layout.axes, variable.shape, self.device_mesh)
        if problem and isinstance(layout_map, ModelLayoutMap):
            return layout_map.adapt(variable, layout)
        if problem:
            raise ValueError(
                f"The layout of a variable must fit its shape: {problem}. "
                f"Received: variable {variable.path!r} of shape "
                f"{tuple(variable.shape)}, rule {rule!r} with "
                f"axes={layout.axes}, {self.device_mesh}."
            )
        return layout

    def _layout_of_slot(self, slot, weight):
        layout_map = self._layout_map
        made = isinstance(layout_map, ModelLayoutMap)
        layout = weight is not None and keras_hooks.layout_given(weight)
        if not layout:
            path = slot.path if weight is None else weight.path
            if made and weight is not None:
                path = layout_map.as_built(path, weight.shape)
            # An optimizer's path has the weight's path within it, so a rule
            # that may match a part would match more than it means.
            rule = find_rule(layout_map, path, search=False)
            layout = layout_of(layout_map, rule)
        if not layout or misfit(layout.axes, slot.shape, self.device_mesh):
            layout = self._whole(slot)
        if made and weight is not None:
            return layout_map.of_slot(layout, slot.shape)
        return layout

    def _whole(self, variable):
        return TensorLayout([None] * len(variable.shape), self.device_mesh)

    def get_tensor_layout(self, path):
        """Returns the layout that the rules give a layer's output.

        Args:
            path: str, the layer's path with `/output` behind it.

        Returns:
            A `TensorLayout`, or `None` if no rule matches.

        Raises:
            ValueError: if two rules match.
        """
        layout_map = self._layout_map
        if not isinstance(layout_map, ModelLayoutMap):
            return layout_of(layout_map, find_rule(layout_map, path))
        rule = find_rule(layout_map, layout_map.as_built(path))
        if rule in layout_map.activations:
            return layout_map.of_output(rule, self._batch_axes)
        return layout_of(layout_map, rule)

    @contextlib.contextmanager
    def creating_slot(self, reference):
        outer = _optimizer_slot.get()
        keep = reference is None and outer is not None
        token = _optimizer_slot.set(outer if keep else (reference,))
        try:
            yield
        finally:
            _optimizer_slot.reset(token)

    @property
    def lays_out_slot(self):
        slot = _optimizer_slot.get()
        return slot is not None and slot[0] is not None

    def model_is_whole(self, model):
        unmatched.judge(model, self._layout_map)

    def rules_of(self, layout):
        return [
            rule
            for rule in self._layout_map
            if layout_of(self._layout_map, rule) is layout
        ]


class DataParallel(MeshDistribution, keras.distribution.DataParallel):
    """Splits rows over the devices; every device holds all weights.

    A `keras.distribution.DataParallel` with all that `ModelParallel` promises
    for data: a mesh of any number of axes, devices that lie on the processes
    in any way, and batches of any number of rows.

    Example:

    ```python
    keras.distribution.set_distribution(kmd.DataParallel())
    model = build_model()  # from here on, ordinary Keras
    ```

    Args:
        device_mesh: `keras.distribution.DeviceMesh`. Defaults to a mesh with
            the one axis `"batch"` over all devices.
        devices: sequence of str or `jax.Device`, for such a mesh over some of
            the devices.
        batch_dim_name: str, or sequence of str: the mesh axis or axes over
            which rows are split, the slowest varying first. Defaults to all.
        auto_shard_dataset: bool, as in `ModelParallel`. Defaults to `True`.
        data_timeout: float, seconds, as in `ModelParallel`. Defaults to 60.

    Raises:
        ValueError: as `ModelParallel` does.
    """

    def __init__(
        self,
        device_mesh=None,
        devices=None,
        batch_dim_name=None,
        auto_shard_dataset=True,
        data_timeout=60.0,
        **kwargs,
    ):
        mesh = mesh_of(device_mesh, devices, kwargs)
        names = tuple(mesh.axis_names)
        check_axis_names(names)
        if batch_dim_name is None:
            batch_dim_name = names
        self._split_data(mesh, batch_axes(batch_dim_name, mesh))
        # Keras' DataParallel warns of every mesh with several axes.
        super(keras.distribution.DataParallel, self).__init__(mesh)
        self._start(auto_shard_dataset, data_timeout)

    def get_variable_layout(self, variable):
        """Returns the layout of a variable: all of it on every device.

        Args:
            variable: `keras.Variable`.

        Returns:
            A `TensorLayout`.
        """
        given = keras_hooks.layout_given(variable)
        axes = [None] * len(variable.shape)
        return given or TensorLayout(axes, self.device_mesh)

    def get_tensor_layout(self, path):
        """Returns `None`: outputs of layers lie as XLA has them.

        Args:
            path: str, the layer's path with `/output` behind it.

        Returns:
            `None`.
        """
        return None

    def creating_slot(self, reference):
        return contextlib.nullcontext()

    @property
    def lays_out_slot(self):
        return False

    def model_is_whole(self, model):
        pass

    def rules_of(self, layout):
        return []
