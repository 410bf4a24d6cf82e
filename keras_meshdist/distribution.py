"""The distribution that users construct."""

import contextlib
import contextvars

import jax
import keras
import numpy as np

from keras_meshdist import (
    batches,
    convolutions,
    feeds,
    heartbeat,
    inputs,
    keras_hooks,
)
from keras_meshdist.arguments import batch_axes, check_arguments
from keras_meshdist.layout import (
    TensorLayout,
    check_layout,
    constrain,
    find_rule,
    layout_of,
    misfit,
    sharding_of,
)
from keras_meshdist.mesh import check_axis_names, jax_mesh, process_ids

# What an optimizer is creating at the moment: None, or a tuple that holds the
# model variable to which the new slot belongs (or None).
_optimizer_slot = contextvars.ContextVar("optimizer_slot", default=None)


class ModelParallel(
    keras_hooks.HookedDistribution, keras.distribution.ModelParallel
):
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
            devices need. Defaults to `True`.
        data_timeout: float, seconds. On several processes it is an error, on
            all of them, when one takes longer to read a batch, or gives no
            sign of life for so long. Defaults to 60.

    Raises:
        ValueError: if an argument is unknown or malformed, the mesh has empty
            or repeated axis names, or this process has no device in it.
    """

    def __init__(
        self,
        *args,
        layout_map=None,
        batch_dim_name=None,
        auto_shard_dataset=True,
        data_timeout=60.0,
        **kwargs,
    ):
        check_arguments(args, layout_map, kwargs)
        mesh = layout_map.device_mesh
        check_axis_names(tuple(mesh.axis_names))
        for rule in layout_map:
            check_layout(layout_of(layout_map, rule))
        self._batch_axes = batch_axes(batch_dim_name, layout_map)
        self._feeds = feeds.Feeds.from_mesh(
            process_ids(jax_mesh(mesh)), mesh.axis_names, self._batch_axes
        )
        if jax.process_index() not in self._feeds.processes:
            raise ValueError(
                "Every process must have a device in the mesh. Received: "
                f"{mesh}, with devices of the processes "
                f"{list(self._feeds.processes)} only, in process "
                f"{jax.process_index()} of {jax.process_count()}. Give the "
                "mesh devices of all processes, or start fewer processes."
            )
        super().__init__(layout_map=layout_map, batch_dim_name=self._batch_name)
        self.auto_shard_dataset = auto_shard_dataset
        self._data_layouts = {}
        keras_hooks.agree_on_seed()
        self._board = heartbeat.start(data_timeout)

    @property
    def _batch_name(self):
        one = len(self._batch_axes) == 1
        return self._batch_axes[0] if one else self._batch_axes

    @property
    def batch_dim_name(self):
        """The batch axis' name, or the tuple of the batch axes' names."""
        return self._batch_name

    @property
    def num_model_replicas(self):
        """Number of batch shards: the product of the batch axes' sizes."""
        return self._feeds.num_shards

    @property
    def num_processes(self):
        """Number of processes."""
        return keras_hooks.num_processes()

    # Keras shards a dataset by this flag, and by arithmetic on process ids
    # that is wrong on most meshes; so for Keras there is one process. The
    # constructors of some versions set it, and Keras' tests delete it.
    _is_multi_process = property(
        lambda self: False, lambda self, value: None, lambda self: None
    )

    @property
    def auto_shard_dataset(self):
        """Whether every process iterates over the same global dataset."""
        return self._shards_datasets

    @auto_shard_dataset.setter
    def auto_shard_dataset(self, value):
        if jax.process_count() > 1 and not value:
            raise ValueError(
                "On several processes every process must iterate over the "
                "same global dataset. Received: "
                f"auto_shard_dataset={value!r}. Valid: True."
            )
        self._shards_datasets = bool(value)

    @property
    def batch_shard_ids(self):
        """Sorted tuple of the batch shards that this process' devices hold."""
        return self._feeds.shards_of(jax.process_index())

    def feed_rows(self, global_batch_size, process_id=None):
        """Returns the rows of a global batch that a process has to supply.

        Example:

        ```python
        rows = dist.feed_rows(64)  # e.g. array([0, 1, ..., 31])
        ```

        Args:
            global_batch_size: int >= 0, number of rows.
            process_id: int. Defaults to this process.

        Returns:
            Sorted int array of global row numbers; empty if the process'
            devices hold padding only.

        Raises:
            ValueError: if the process has no device in the mesh.
        """
        if process_id is None:
            process_id = jax.process_index()
        return self._feeds.rows_of(process_id, global_batch_size)

    @property
    def num_data_shards(self):
        """Number of different feeds, as for `shard()` of a dataset."""
        return len(set(self._feeds.data_shards.values()))

    @property
    def data_shard_id(self):
        """Which of the feeds is this process', by position in the batch."""
        return self._feeds.data_shards[jax.process_index()]

    def distribute_dataset(self, dataset):
        """Returns the dataset as it is; batches are split one by one."""
        return dataset

    def get_data_layout(self, data_shape):
        """Returns the layout of a batch: rows over the batch axes.

        Args:
            data_shape: sequence of int, shape of the global batch; `()` for a
                scalar, which is replicated.

        Returns:
            A `TensorLayout`.
        """
        rank = len(data_shape)
        if rank not in self._data_layouts:
            axes = (self._batch_name, *[None] * (rank - 1))[:rank]
            self._data_layouts[rank] = TensorLayout(axes, self.device_mesh)
        return self._data_layouts[rank]

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
        if slot is not None and slot[0] is not None:
            variable = slot[0]
        # An optimizer's path has the weight's path within it, so a rule that
        # may match a part would match more than it means.
        rule = find_rule(self._layout_map, variable.path, search=slot is None)
        layout = layout_of(self._layout_map, rule)
        problem = layout and misfit(layout, variable.shape, self.device_mesh)
        if problem and slot is None:
            raise ValueError(
                f"The layout of a variable must fit its shape: {problem}. "
                f"Received: variable {variable.path!r} of shape "
                f"{tuple(variable.shape)}, rule {rule!r} with "
                f"axes={layout.axes}, {self.device_mesh}."
            )
        if layout is None or problem:
            axes = [None] * len(variable.shape)
            return TensorLayout(axes, self.device_mesh)
        return layout

    def get_tensor_layout(self, path):
        """Returns the layout that the rules give a layer's output.

        Args:
            path: str, the layer's path with `/output` behind it.

        Returns:
            A `TensorLayout`, or `None` if no rule matches.

        Raises:
            ValueError: if two rules match.
        """
        return layout_of(self._layout_map, find_rule(self._layout_map, path))

    # What the hooks call.

    def read(self, source, epoch_steps):
        return inputs.Reader(
            source,
            lambda batch: keras.tree.map_structure(self.place_leaf, batch),
            self._board,
            epoch_steps,
            self.scope,
        )

    def place_batch(self, batch):
        return next(self.read(iter([batch]), 1))

    def place_leaf(self, leaf, layout=None):
        if leaf is None:
            return None
        if layout is None:
            layout = self.get_data_layout(np.shape(leaf))
        return batches.place(leaf, sharding_of(layout))

    def place_output(self, tensor, layout):
        if not hasattr(tensor, "shape"):
            return tensor
        if len(layout.axes) != len(tensor.shape):
            rules = [
                rule
                for rule in self._layout_map
                if layout_of(self._layout_map, rule) is layout
            ]
            raise ValueError(
                "The layout of a layer's output must have an entry for each "
                "dimension. Received: an output of shape "
                f"{tuple(tensor.shape)}, rule {rules} with "
                f"axes={layout.axes}."
            )
        return constrain(tensor, sharding_of(layout))

    def convolve(self, function, inputs, kernel, settings):
        return convolutions.convolve(
            function,
            inputs,
            kernel,
            settings,
            jax_mesh(self.device_mesh),
            self._batch_axes,
        )

    def fetch(self, outputs, wait):
        if self.num_processes > 1:
            return keras.tree.map_structure(batches.fetch, outputs)
        if wait:
            return keras.tree.map_structure(np.asarray, outputs)
        return outputs

    @contextlib.contextmanager
    def creating_slot(self, reference):
        outer = _optimizer_slot.get()
        keep = reference is None and outer is not None
        token = _optimizer_slot.set(outer if keep else (reference,))
        try:
            yield
        finally:
            _optimizer_slot.reset(token)
