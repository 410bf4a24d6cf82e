"""make_mesh: names, sizes, devices and their order."""

import dataclasses
import itertools

import jax
import keras
import numpy as np
import pytest

import keras_meshdist as kmd
from keras_meshdist.mesh import jax_mesh, process_ids


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU chip as JAX's mesh utilities see one."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


def chips(*shape, slices=1):
    places = itertools.product(range(slices), *map(range, shape))
    return [
        Chip(i, (place[1], place[2], 0), slice_index=place[0])
        for i, place in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"model": 4, "batch": -1}, (4, 2)),
        ({"model": -1}, (8,)),
        ({"a": 2, "b": 2, "c": 2}, (2, 2, 2)),
        ({"a": 1, "b": -1, "c": 8}, (1, 1, 8)),
        ({"a": np.int64(2), "b": 4}, (2, 4)),
    ],
)
def test_shape_and_written_order(axes, shape):
    mesh = kmd.make_mesh(axes)
    assert isinstance(mesh, keras.distribution.DeviceMesh)
    assert tuple(mesh.shape) == shape
    assert tuple(mesh.axis_names) == tuple(axes)
    assert list(jax_mesh(mesh).devices.flat) == jax.devices()


def test_devices_as_names_and_objects():
    names = keras.distribution.list_devices()[::-1][:4]
    by_name = kmd.make_mesh({"a": 2, "b": 2}, names)
    by_device = kmd.make_mesh({"a": 2, "b": 2}, jax.devices()[::-1][:4])
    plain = keras.distribution.DeviceMesh((2, 2), ["a", "b"], names)
    for mesh in (by_name, by_device, plain):
        assert list(jax_mesh(mesh).devices.flat) == jax.devices()[::-1][:4]
        assert jax_mesh(mesh).axis_names == ("a", "b")
        assert process_ids(jax_mesh(mesh)).tolist() == [[0, 0], [0, 0]]


def test_neighbours_on_a_tpu_are_neighbours_in_the_mesh():
    mesh = kmd.make_mesh({"model": 4, "batch": 4}, chips(4, 4))
    for line in (*mesh.devices, *mesh.devices.T):
        for one, other in itertools.pairwise(line):
            distance = np.abs(np.subtract(one.coords, other.coords)).sum()
            assert distance == 1


@pytest.mark.parametrize("grid", [(2, 4), (4, 2)])
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8,), (1, 8), (4, 1, 2)])
def test_neighbours_among_the_eight_chips_of_a_host(shape, kind, grid):
    # As JAX lists them, the first coordinate the fastest.
    found = [
        Chip(2 * y + x, (x, y, 0), device_kind=kind)
        for y in range(grid[1])
        for x in range(grid[0])
    ]
    axes = {f"axis{n}": size for n, size in enumerate(shape)}
    mesh = kmd.make_mesh(axes, found)
    assert set(mesh.devices.flat) == set(found)
    for axis, size in enumerate(shape):
        lines = np.moveaxis(mesh.devices, axis, -1).reshape(-1, size)
        for line in lines:
            ring = [*line, line[0]] if size == 8 else line
            for one, other in itertools.pairwise(ring):
                distance = np.abs(np.subtract(one.coords, other.coords)).sum()
                assert distance == 1


@pytest.mark.parametrize(
    ("axes", "across"),
    [
        ({"model": 4, "batch": 8}, 1),
        ({"batch": 8, "model": 4}, 0),
        ({"model": 8, "fsdp": 4}, 1),
        ({"x": 8, "y": 4}, 0),
        ({"model": 32, "batch": 1}, 0),
    ],
)
def test_only_one_axis_crosses_slices(axes, across):
    mesh = kmd.make_mesh(axes, chips(4, 4, slices=2))
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    lines = np.moveaxis(slices, across, -1).reshape(-1, slices.shape[across])
    # Along that axis first one slice, then the other; else always one.
    half = lines.shape[1] // 2
    assert (lines[:, :half] == 0).all()
    assert (lines[:, half:] == 1).all()


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({}, None, r"non-empty dict.*Received: axes=\{\}"),
        ([("a", 8)], None, "non-empty dict"),
        ({"": 8}, None, r"distinct, non-empty strings.*\[''\]"),
        ({3: 8}, None, r"distinct, non-empty strings.*\[3\]"),
        ({"a": -1, "b": -1}, None, "At most one mesh axis may have size -1"),
        ({"a": 3, "b": -1}, None, "multiply to the number.*for 8 devices"),
        ({"a": 4, "b": 4}, None, "multiply.*16 with the sizes given"),
        ({"a": 0, "b": 8}, None, "positive int.*'a' has size 0"),
        ({"a": 2.0, "b": 4}, None, "positive int.*'a' has size 2.0"),
        ({"a": True, "b": 8}, None, "positive int.*'a' has size True"),
        ({"a": 8}, ["cpu:0"] * 8, "repeated devices"),
        ({"a": 1}, ["cpu:77"], "Received: 'cpu:77'. Valid: .*'cpu:0'"),
    ],
)
def test_bad_input(axes, devices, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        kmd.make_mesh(axes, devices)


def test_more_slices_than_any_axis_can_cross():
    mesh = kmd.make_mesh({"x": 2, "batch": 2}, chips(1, 1, slices=4))
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert sorted(slices.ravel()) == [0, 1, 2, 3]
