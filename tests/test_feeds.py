"""Which process reads which rows, for meshes of any kind."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_meshdist.feeds import Feeds, physical_rows


@st.composite
def meshes(draw):
    """(process id of each device, axis names, batch axes, rows)."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = math.prod(shape)
    ids = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    names = draw(st.permutations("abcd"))[: len(shape)]
    batch = draw(st.permutations(names))
    batch = batch[: draw(st.integers(1, len(names)))]
    rows = draw(st.integers(0, 100))
    return np.reshape(ids, shape), tuple(names), tuple(batch), rows


def shard_of_device(place, shape, names, batch):
    """Counted as one counts digits: the last batch axis is the fastest."""
    shard = 0
    for axis in batch:
        shard = shard * shape[names.index(axis)] + place[names.index(axis)]
    return shard


def rows_by_device(ids, names, batch, rows):
    shards = math.prod(ids.shape[names.index(axis)] for axis in batch)
    size = math.ceil(rows / shards)
    for place in itertools.product(*map(range, ids.shape)):
        shard = shard_of_device(place, ids.shape, names, batch)
        wanted = range(shard * size, min((shard + 1) * size, rows))
        yield int(ids[place]), shard, set(wanted)


@given(meshes())
def test_every_device_is_supplied_and_nothing_else_is_read(mesh):
    ids, names, batch, rows = mesh
    feeds = Feeds.from_mesh(ids, names, batch)
    needed, shards = {}, {}
    for process, shard, wanted in rows_by_device(ids, names, batch, rows):
        needed.setdefault(process, set()).update(wanted)
        shards.setdefault(process, set()).add(shard)
    assert set(feeds.processes) == set(needed)
    for process, wanted in needed.items():
        read = feeds.rows_of(process, rows)
        assert list(read) == sorted(wanted)
        assert feeds.shards_of(process) == tuple(sorted(shards[process]))


@given(meshes())
def test_all_rows_are_read_by_somebody(mesh):
    ids, names, batch, rows = mesh
    feeds = Feeds.from_mesh(ids, names, batch)
    read = [feeds.rows_of(process, rows) for process in feeds.processes]
    assert set(np.concatenate(read)) == set(range(rows))


@given(meshes())
def test_data_shards_are_disjoint_equal_and_in_order(mesh):
    ids, names, batch, _ = mesh
    feeds = Feeds.from_mesh(ids, names, batch)
    by_process = {p: set(feeds.shards_of(p)) for p in feeds.processes}
    distinct = [set(s) for s in {frozenset(s) for s in by_process.values()}]
    regular = len({len(s) for s in distinct}) == 1 and all(
        a == b or not a & b for a in distinct for b in distinct
    )
    if not regular:
        with pytest.raises(ValueError, match="Read the rows that `feed_rows"):
            _ = feeds.data_shards
        return
    numbers = feeds.data_shards
    assert set(numbers.values()) == set(range(len(distinct)))
    for p, q in itertools.product(by_process, repeat=2):
        assert (numbers[p] == numbers[q]) == (by_process[p] == by_process[q])
        if numbers[p] < numbers[q]:
            assert min(by_process[p]) < min(by_process[q])


@given(st.integers(0, 10_000), st.integers(1, 512))
def test_physical_rows(rows, shards):
    physical = physical_rows(rows, shards)
    assert physical % shards == 0
    assert rows <= physical < rows + shards


@settings(max_examples=50)
@given(st.data())
def test_agrees_with_where_jax_puts_rows(data):
    shape = data.draw(
        st.sampled_from([(8,), (4, 2), (2, 4), (2, 2, 2), (1, 8), (2, 1, 4)])
    )
    names = tuple("abc"[: len(shape)])
    batch = tuple(data.draw(st.permutations(names)))
    batch = batch[: data.draw(st.integers(1, len(names)))]
    devices = data.draw(st.permutations(jax.devices()))
    process_of = {
        d: data.draw(st.integers(0, 3), label=f"process of {d}")
        for d in devices
    }
    mesh = jax.sharding.Mesh(np.reshape(devices, shape), names)
    feeds = Feeds.from_mesh(
        np.vectorize(process_of.get)(mesh.devices), names, batch
    )
    rows = 24
    spec = jax.sharding.PartitionSpec(batch)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    expected = {}
    for device, index in sharding.devices_indices_map((rows,)).items():
        part = range(*index[0].indices(rows))
        expected.setdefault(process_of[device], set()).update(part)
    for process, part in expected.items():
        assert list(feeds.rows_of(process, rows)) == sorted(part)


@pytest.mark.parametrize(
    ("ids", "names", "rows", "expected"),
    [
        # Two processes of four devices, batch axis last: each needs all.
        ([[0, 0], [0, 0], [1, 1], [1, 1]], "mb", 16, {0: 16, 1: 16}),
        # Batch axis first: half each.
        ([[0, 0], [0, 0], [1, 1], [1, 1]], "bm", 16, {0: 8, 1: 8}),
        # Three processes of two devices on a mesh (2, 3): feeds overlap.
        ([[0, 0, 1], [1, 2, 2]], "mb", 6, {0: 4, 1: 4, 2: 4}),
        # A batch of 4 rows over 16 shards on 64 hosts: most only pad.
        (
            np.repeat(np.arange(64), 4).reshape(16, 16),
            "bm",
            4,
            {p: int(p < 16) for p in range(64)},
        ),
    ],
)
def test_counts_by_hand(ids, names, rows, expected):
    feeds = Feeds.from_mesh(ids, tuple(names), ("b",))
    got = {p: len(feeds.rows_of(p, rows)) for p in feeds.processes}
    assert got == expected


def test_unknown_process():
    feeds = Feeds.from_mesh([[0, 1]], ("m", "b"), ("b",))
    with pytest.raises(ValueError, match=r"process_id=2.*\[0, 1\]"):
        feeds.rows_of(2, 8)
