"""Which meshes, processes and batch sizes the demo tries."""

import dataclasses
import itertools
import math

# Rows for training, and held-out rows.
TRAIN_ROWS = 1408
TEST_ROWS = 384

# Batch sizes: with the first, all batches divide over every mesh, the last one
# of an epoch too; with the second, all do but the last one is smaller; with
# the third, none divides.
EVEN_BATCH = 64
SHORT_LAST_BATCH = 48
ODD_BATCH = 61


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run: a mesh, the processes that hold it, a batch size.

    ```python
    Case(2, (("model", 4), ("batch", 2)), 64)
    ```

    Args:
        processes: integer, number of processes.
        axes: tuple of `(name, size)`, the mesh axes in their order. Empty for
            one device without a distribution.
        batch: integer, rows of a global batch.
    """

    processes: int
    axes: tuple[tuple[str, int], ...]
    batch: int

    @property
    def devices(self) -> int:
        """Number of devices of each process."""
        return math.prod(size for _, size in self.axes) // self.processes

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which rows are split."""
        names = [name for name, _ in self.axes]
        return tuple(name for name in ("batch", "fsdp") if name in names)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        if not self.axes:
            return "one device"
        return " ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def shape(self) -> str:
        """Processes × devices of each."""
        return f"{self.processes}×{self.devices}"  # noqa: RUF001

    @property
    def reference(self) -> "Case":
        """The case on one device that this one must equal."""
        return Case(1, (), self.batch)

    def __str__(self) -> str:
        return f"{self.shape} {self.mesh}, batch {self.batch}"


def default_cases() -> list[Case]:
    """The cases of `meshdist demo`, those of one shape next to each other."""
    return [
        _case(1, "batch=4 model=2"),
        _case(1, "model=2 batch=4", ODD_BATCH),
        _case(1, "model=2 batch=2 fsdp=2"),
        _case(2, "model=4 batch=2"),
        _case(2, "batch=4 model=2", SHORT_LAST_BATCH),
        _case(4, "model=2 batch=4", ODD_BATCH),
        _case(4, "model=2 batch=2 fsdp=2"),
    ]


def all_cases() -> list[Case]:
    """Every order of the axes of every mesh of 8 devices, on every shape."""
    meshes = [
        "batch=2 model=4",
        "batch=4 model=2",
        "batch=2 model=2 fsdp=2",
    ]
    return [
        _case(processes, " ".join(axes), batch)
        for processes in (1, 2, 4)
        for mesh in meshes
        for axes in itertools.permutations(mesh.split())
        for batch in (EVEN_BATCH, ODD_BATCH)
    ]


def _case(processes: int, mesh: str, batch: int = EVEN_BATCH) -> Case:
    axes = (axis.split("=") for axis in mesh.split())
    return Case(processes, tuple((n, int(size)) for n, size in axes), batch)
