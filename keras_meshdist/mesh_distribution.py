"""What all distributions of the package do with rows of data."""

import abc

import jax
import keras
import numpy as np

from keras_meshdist import (
    batches,
    convolutions,
    datasets,
    feeds,
    heartbeat,
    inputs,
    keras_hooks,
    pictures,
    predictions,
    weights,
)
from keras_meshdist.layout import (
    TensorLayout,
    constrain,
    sharding_of,
)
from keras_meshdist.mesh import jax_mesh, process_ids
from keras_meshdist.mesh_weights import MeshWeights
from keras_meshdist.pieces import pieces_of


class MeshDistribution(MeshWeights):
    """Splits rows over named mesh axes, on any number of processes.

    The half of a distribution that reads data; a subclass says how variables
    lie. It comes before a class of Keras among the bases.
    """

    def _split_data(self, mesh, batch_axes, sequence_axes=()):
        """Reads off the mesh which process needs which rows."""
        self._batch_axes, self._sequence_axes = batch_axes, sequence_axes
        self._feeds = feeds.Feeds.from_mesh(
            process_ids(jax_mesh(mesh)), mesh.axis_names, batch_axes
        )
        if jax.process_index() not in self._feeds.processes:
            raise ValueError(
                "Every process must have a device in the mesh. Received: "
                f"{mesh}, with devices of the processes "
                f"{list(self._feeds.processes)} only, in process "
                f"{jax.process_index()} of {jax.process_count()}. Give the "
                "mesh devices of all processes, or start fewer processes."
            )

    def _start(self, auto_shard_dataset, data_timeout):
        """Comes to terms with the other processes."""
        self._data_layouts = {}
        self._assigned = weights.Assigned()
        self.auto_shard_dataset = auto_shard_dataset
        keras_hooks.install_for_hub()
        keras_hooks.constructed(self)
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
        # Keras shards datasets itself if this is true, by other arithmetic.
        return self._shards_datasets and not keras_hooks.making_adapter()

    @auto_shard_dataset.setter
    def auto_shard_dataset(self, value):
        own_feeds = jax.process_count() > 1 and not value
        if own_feeds:
            self._dataset = datasets.OwnFeeds(
                self._feeds, jax.process_index(), self._place_feed
            )
        else:
            self._dataset = datasets.GlobalDataset(self.place_leaf)
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

    def picture(self, global_batch_size):
        """Draws which rows of a global batch each device of the mesh holds.

        Example:

        ```python
        dist.picture(13).save("rows.svg")
        ```

        Args:
            global_batch_size: int >= 0, number of rows.

        Returns:
            A picture: notebooks show it, `rich.print` prints it, and its
            method `save` writes it to an SVG file.
        """
        return pictures.picture_of_rows(
            process_ids(jax_mesh(self.device_mesh)),
            self.device_mesh.axis_names,
            self._batch_axes,
            global_batch_size,
        )

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
            A `TensorLayout`. With a sequence axis the second dimension is
            split over it, if it divides.
        """
        rank, mesh = len(data_shape), self.device_mesh
        pieces = pieces_of(mesh, self._sequence_axes)
        splits = rank > 1 and pieces > 1 and data_shape[1] % pieces == 0
        if (rank, splits) not in self._data_layouts:
            second = self._sequence_axes if splits else None
            axes = (self._batch_name, second, *[None] * (rank - 2))[:rank]
            self._data_layouts[rank, splits] = TensorLayout(axes, mesh)
        return self._data_layouts[rank, splits]

    # What the hooks call.

    def read(self, source, epoch_steps, followed=None, known=None):
        return inputs.Reader(
            source,
            self._dataset,
            self._board,
            epoch_steps,
            self.scope,
            self._assigned,
            followed,
            known,
        )

    def epoch_length(self, batches):
        if self._board is None or self.auto_shard_dataset:
            return batches
        lengths = self._board.ask(batches, "to say how long an epoch is")
        return None if None in lengths else max(lengths)

    @property
    def reads_rows(self):
        return self._board is not None and self.auto_shard_dataset

    def place_batch(self, batch):
        """Puts a batch on the devices, for a loop of your own.

        `fit` and its like do so themselves. All processes must call this.

        Example:

        ```python
        for batch in batches:  # each the same, or its own feed, on each
            loss, state = jitted_step(state, dist.place_batch(batch))
        ```

        Args:
            batch: nested structure of arrays of shape `(rows, ...)`.

        Returns:
            The same structure of `jax.Array`, or of padded batches, which the
            jitted function sees as their logical rows.

        Raises:
            DisagreementError: if processes have different batches.
        """
        return next(self.read(iter([batch]), 1))

    def place_leaf(self, leaf, layout=None):
        if leaf is None:
            return None
        if layout is None:
            layout = self.get_data_layout(np.shape(leaf))
        return batches.place(leaf, sharding_of(layout))

    def _place_feed(self, leaf, *place):
        if leaf is None:
            return None
        sharding = sharding_of(self.get_data_layout(np.shape(leaf)))
        return batches.place_feed(leaf, sharding, *place)

    def place_output(self, tensor, layout):
        if not hasattr(tensor, "shape"):
            return tensor
        if any(layout is other for other in self._data_layouts.values()) and (
            not isinstance(tensor, jax.core.Tracer)
        ):
            return self.place_batch(tensor)  # as KerasHub's `generate` does
        if hasattr(layout, "sharding_for"):
            sharding = layout.sharding_for(tensor.shape)
            return tensor if sharding is None else constrain(tensor, sharding)
        if len(layout.axes) != len(tensor.shape):
            raise ValueError(
                "The layout of a layer's output must have an entry for each "
                "dimension. Received: an output of shape "
                f"{tuple(tensor.shape)}, rule {self.rules_of(layout)} with "
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

    def keep_whole(self, array, dimension):
        spec = [jax.sharding.PartitionSpec.UNCONSTRAINED] * array.ndim
        spec[dimension] = None
        return jax.lax.with_sharding_constraint(
            array,
            jax.sharding.NamedSharding(
                jax_mesh(self.device_mesh), jax.sharding.PartitionSpec(*spec)
            ),
        )

    @property
    def num_devices(self):
        return self.device_mesh.devices.size

    def fetch(self, outputs, batch, wait):
        if self.num_processes > 1:
            return predictions.fetch_outputs(outputs, self._rows_of(batch))
        if wait:
            return keras.tree.map_structure(np.asarray, outputs)
        return outputs

    def _rows_of(self, batch):
        """The rows of a batch that are each process' own."""
        leaves = keras.tree.flatten(batch)
        array = next(leaf for leaf in leaves if np.ndim(leaf))
        physical = getattr(array, "physical", array)
        runs = getattr(array, "runs", ((0, len(array)),))
        size = len(physical) // self._feeds.num_shards
        return {
            process: self._feeds.rows_in(process, size, runs)
            for process in self._feeds.processes
        }

    @abc.abstractmethod
    def rules_of(self, layout):
        """The layout rules that gave a layout, for messages."""
