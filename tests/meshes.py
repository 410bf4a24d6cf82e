"""The meshes that the parity tests go through."""

import dataclasses
import itertools
import math


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to lay training out; everything else is the same.

    `layout` is how weights lie: "tensor" (over all axes but the batch axes),
    "fsdp" (over the batch axes too) or "none".
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    batch: tuple[str, ...]
    layout: str = "tensor"
    rows: int = 29
    batch_size: int = 16
    optimizer: str = "adam"
    permutation: int | None = None  # seed of an order of the devices
    dataset: str = "arrays"
    model: str = "dense"

    def __str__(self):
        name = "x".join(
            f"{a}{n}" for a, n in zip(self.axes, self.shape, strict=True)
        )
        name += "_by_" + "_".join(self.batch)
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                name += f"_{field.name}_{value}"
        return name

    @property
    def data(self):
        """What the single device has to know of it."""
        return dataclasses.replace(
            self,
            shape=(),
            axes=(),
            batch=(),
            layout="none",
            permutation=None,
            dataset="arrays",
        )


def all_meshes(devices=8):
    """Every 2-D and 3-D mesh, with each axis as the batch axis."""
    for rank, names in ((2, "ab"), (3, "abc")):
        for shape in itertools.product(range(1, devices + 1), repeat=rank):
            if math.prod(shape) == devices:
                for batch in names:
                    yield Case(shape, tuple(names), (batch,))


def _windows(*cases):
    return tuple(dataclasses.replace(c, model="windows") for c in cases)


# What the plain meshes don't have. "m" is the axis of the weights.
SPECIAL = (
    # Several batch axes, also in another order than the mesh's.
    Case((2, 2, 2), ("a", "b", "c"), ("c", "a")),
    Case((2, 2, 2), ("a", "b", "c"), ("a", "c")),
    Case((2, 4), ("a", "b"), ("b", "a")),
    Case((2, 2, 2), ("a", "b", "c"), ("c", "b", "a"), layout="none"),
    # Weights over the batch axes too.
    Case((4, 2), ("m", "fsdp"), ("fsdp",), layout="fsdp"),
    Case((2, 2, 2), ("m", "fsdp", "data"), ("data", "fsdp"), layout="fsdp"),
    Case((8,), ("fsdp",), ("fsdp",), layout="fsdp"),
    # Devices in any order.
    Case((4, 2), ("m", "b"), ("b",), permutation=1),
    Case((2, 2, 2), ("a", "b", "c"), ("b",), permutation=2),
    # Batches smaller than the batch shards, and of one row.
    Case((2, 4), ("m", "b"), ("b",), rows=3, batch_size=3),
    Case((1, 8), ("m", "b"), ("b",), rows=11, batch_size=5),
    Case((8,), ("b",), ("b",), layout="none", rows=3, batch_size=1),
    # Other inputs and optimizers.
    Case((4, 2), ("m", "b"), ("b",), dataset="tf"),
    Case((2, 4), ("m", "b"), ("b",), dataset="tf", rows=61),
    Case((4, 2), ("m", "b"), ("b",), optimizer="sgd"),
    # Everything that sees rows: BatchNormalization, masks, add_loss, weights.
    Case((4, 2), ("m", "b"), ("b",), model="rows"),
    Case((2, 4), ("m", "b"), ("b",), model="rows", rows=61),
    # Convolutions, which XLA splits wrongly where windows are split.
    *_windows(
        Case((4, 2), ("m", "b"), ("b",)),
        Case((2, 2, 2), ("m", "fsdp", "data"), ("data", "fsdp"), "fsdp"),
        Case((2, 4), ("m", "b"), ("b",), rows=3, batch_size=3),
    ),
)

# Ten that cover: each rank, each place of the batch axis, sizes 1, 2, 4, 8,
# several batch axes, FSDP, permuted devices, padding, tf.data, convolutions.
COVERING = (
    Case((4, 2), ("a", "b"), ("b",)),
    Case((2, 4), ("a", "b"), ("b",)),
    Case((4, 2), ("a", "b"), ("a",)),
    *_windows(Case((2, 2, 2), ("a", "b", "c"), ("b",))),
    Case((2, 1, 4), ("a", "b", "c"), ("c",)),
    Case((8, 1), ("a", "b"), ("b",)),
    Case((2, 2, 2), ("a", "b", "c"), ("c", "a")),
    Case((2, 2, 2), ("m", "fsdp", "data"), ("data", "fsdp"), layout="fsdp"),
    Case((4, 2), ("m", "b"), ("b",), permutation=1, dataset="tf"),
    Case((2, 4), ("m", "b"), ("b",), rows=3, batch_size=3),
)

# Convolutions on every mesh.
WINDOWS = _windows(*all_meshes())

# Six devices on three processes: the feeds overlap in part.
OVERLAPPING = (
    Case((2, 3), ("m", "b"), ("b",)),
    Case((2, 3), ("m", "b"), ("b",), rows=2, batch_size=2),
    Case((3, 2), ("b", "m"), ("b",), dataset="tf"),
)

# More devices, and more processes, than rows.
SMALL_BATCHES = (
    Case((16, 2), ("b", "m"), ("b",), rows=4, batch_size=4),
    Case((2, 16), ("m", "b"), ("b",), rows=5, batch_size=4, dataset="tf"),
)

# A pod's mesh: 256 devices, a batch of one row for each batch shard.
POD = (
    Case((16, 16), ("fsdp", "model"), ("fsdp",), layout="fsdp", rows=16),
    Case((16, 16), ("model", "fsdp"), ("fsdp",), layout="fsdp", rows=21),
)
