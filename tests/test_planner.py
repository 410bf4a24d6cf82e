"""Plans: names, programs' text, and arithmetic; nothing is compiled here."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from parameterized import parameterized
from rich.console import Console

import keras_meshdist as kmd
from keras_meshdist.pieces import axes_of
from keras_meshdist.planner import (
    blocks,
    depth,
    network,
    padding,
    products,
    program,
    schedule,
    step,
)
from keras_meshdist.planner.candidates import as_axes, candidate_meshes
from keras_meshdist.planner.chips import CHIPS
from keras_meshdist.planner.collectives import (
    collectives_of,
    layer_path,
    summed,
)
from keras_meshdist.planner.groups import axes_of_groups, replica_groups
from keras_meshdist.planner.report import MeshPlan, ranked
from keras_meshdist.planner.topologies import topology_of
from tests import plans

# A loop that turns five times, a gather that is begun and ended apart, an
# exchange within an asynchronous operation, and a permutation.
TEXT = """\
HloModule jit_train_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0:T(8,128)}) parameter(0)
  %g = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %ar = f32[8,4]{1,0:T(8,128)} all-reduce(%g), channel_id=1, \
replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, \
metadata={op_name="jit(train_step)/jvp(model)/dense/dot_general"}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %ar)
}

%cond (p.1: (s32[], f32[8,4])) -> pred[] {
  %p.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %c = s32[] constant(5)
  %i = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i, %c), direction=LT
}

%async (q: bf16[4,128]) -> bf16[4,128] {
  %q = bf16[4,128]{1,0} parameter(0)
  ROOT %a2a = bf16[4,128]{1,0} all-to-all(%q), channel_id=4, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
}

ENTRY %main (a: bf16[4,128]) -> bf16[16,128] {
  %a = bf16[4,128]{1,0} parameter(0)
  %ags = (bf16[4,128]{1,0:T(8,128)(2,1)}, bf16[16,128]{1,0}) \
all-gather-start(%a), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %f = bf16[2]{0} fusion(%a), kind=kLoop, calls=%add, \
backend_config={"estimated_cycles":"1500000"}
  %w = (s32[], f32[8,4]{1,0}) while(%t0), condition=%cond, body=%body%TRIPS
  %as = ((bf16[4,128]{1,0}), bf16[4,128]{1,0}) async-start(%a), calls=%async
  %ad = bf16[4,128]{1,0} async-done(%as), calls=%async
  %cp = bf16[4,128]{1,0} collective-permute(%a), channel_id=3, \
source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}
  ROOT %agd = bf16[16,128]{1,0} all-gather-done(%ags)
}
"""
KNOWN = TEXT.replace(
    "%TRIPS", ', backend_config={"known_trip_count":{"n":"5"}}'
)


class TestProgram:
    @parameterized.expand([(KNOWN,), (TEXT.replace("%TRIPS", ""),)])
    def test_collectives(self, text):
        found = program.parse(text)
        assert found.partitions == 8
        assert found.loops_of_unknown_length == []
        listed = {
            c.kind: (c.bytes, c.axes, c.count, c.source)
            for c in collectives_of(found, ("batch", "model"), (2, 4))
        }
        assert listed == {
            "all-gather": (16 * 128 * 2, ("model",), 1, ""),
            "all-reduce": (8 * 4 * 4, ("model",), 5, "model/dense"),
            "all-to-all": (4 * 128 * 2, ("batch",), 1, ""),
            "collective-permute": (4 * 128 * 2, ("model",), 1, ""),
        }

    def test_loop_of_unknown_length_is_said(self):
        text = TEXT.replace("%TRIPS", "").replace("direction=LT", "")
        found = program.parse(text)
        assert found.loops_of_unknown_length == ["w"]
        assert found.runs["body"] == 1

    def test_equal_collectives_are_listed_together(self):
        text = KNOWN.replace("all-to-all(%q)", "all-reduce(%q)")
        text = text.replace("collective-permute(%a)", "all-reduce(%a)")
        text = text.replace("source_target_pairs", "replica_groups")
        text = text.replace("{{0,4},{1,5},{2,6},{3,7}}", "[4,2]<=[8]")
        found = summed(
            collectives_of(program.parse(text), ("batch", "model"), (4, 2))
        )
        reduced = [c for c in found if c["bytes"] == 1024]
        assert [c["count"] for c in reduced] == [2]
        assert reduced[0]["axes"] == ["model"]
        assert json.loads(json.dumps(found)) == found

    def test_blocks_that_are_alike_have_one_name(self):
        text = KNOWN.replace(
            "jvp(model)/dense/dot", "jvp(model)/block_7/norm_7/dot"
        )
        found = summed(
            collectives_of(program.parse(text), ("batch", "model"), (2, 4)),
            {"block_7": "block_*"},
        )
        assert "model/block_*/norm" in {c["source"] for c in found}

    @parameterized.expand(
        [
            ("f32[]", 4),
            ("(bf16[4,128]{1,0:T(8,128)(2,1)S(1)}, f32[], s4[3])", 1030),
            ("pred[7]{0}", 7),
            ("f8e4m3fn[2,2]", 4),
            ("u32[]{:S(2)}", 4),
            ("token[]", 0),
        ]
    )
    def test_bytes(self, shape, size):
        assert program.bytes_of(shape) == size

    def test_unknown_dtype_is_an_error(self):
        with pytest.raises(ValueError, match="Received: 'q3'"):
            program.bytes_of("q3[4]")

    def test_no_program(self):
        with pytest.raises(ValueError, match="ENTRY"):
            program.parse("HloModule nothing")

    @parameterized.expand(
        [
            ("jit(train_step)/jvp(gemma)/block_0/attention/dot", "gemma/block"),
            ("jit(train_step)/transpose(jvp(seq))/dense_1/dot", "seq/dense_1"),
            (
                "jit(train_step)/jvp(gru)/while/body/closed_call/cell/d",
                "gru/cell",
            ),
            ("jit(train_step)/add", ""),
            ("", ""),
        ]
    )
    def test_layer_path(self, op_name, path):
        assert layer_path(op_name).startswith(path)
        assert bool(layer_path(op_name)) == bool(path)


class TestPadding:
    @parameterized.expand(
        [
            ("f32[250,64]{0,1:T(8,128)}", 64 * 256 * 4),
            ("f32[250,64]{1,0:T(8,128)S(1)}", 256 * 128 * 4),
            ("bf16[3,4,130]{2,1,0:T(8,128)(2,1)}", 3 * 8 * 256 * 2),
            ("f32[]{:T(128)}", 128 * 4),
            ("s32[5]{0:T(256)}", 256 * 4),
            ("f32[3,5]{1,0}", 60),
            ("f32[0,5]{1,0:T(8,128)}", 0),
        ]
    )
    def test_whole_tiles(self, shape, size):
        assert padding.padded_bytes(shape) == size

    def test_parameters_of_the_program_alone(self):
        found = program.parse(KNOWN)
        # Not those of what it calls.
        assert found.computations["add"][0].opcode == "parameter"
        own = 4 * 128 * 2
        assert padding.argument_bytes(found) == (own, own)
        text = KNOWN.replace(
            "  %f = bf16[2]",
            "  %h = f32[250,64]{0,1:T(8,128)} parameter(0)\n  %f = bf16[2]",
        )
        found = padding.argument_bytes(program.parse(text))
        assert found == (own + 64000, own + 65536)


class TestProducts:
    @parameterized.expand(
        [
            (
                "matrices",
                "f32[4,6]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
                "rhs_contracting_dims={0}",
                ("f32[4,8]", "f32[8,6]"),
                4 * 6 * 8,
            ),
            (
                "matrices_as_a_convolution",
                "bf16[4,6]{1,0} convolution(%a, %b), dim_labels=bf_io->bf",
                ("bf16[4,8]", "bf16[8,6]"),
                4 * 6 * 8,
            ),
            (
                "window_with_padding",
                "f32[1,5,6]{2,1,0} convolution(%a, %b), "
                "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
                ("f32[1,5,8]", "f32[3,8,6]"),
                # At both ends one of three places is padding.
                (3 * 5 - 2) * 8 * 6,
            ),
            (
                "strides",
                "f32[1,2,6]{2,1,0} convolution(%a, %b), "
                "window={size=3 stride=2}, dim_labels=b0f_0io->b0f",
                ("f32[1,5,8]", "f32[3,8,6]"),
                3 * 2 * 8 * 6,
            ),
            (
                "many_matrices_as_windows",
                "f32[8,4,6]{2,1,0} convolution(%a, %b), "
                "window={size=8 stride=7 lhs_dilate=8}, "
                "dim_labels=0bf_0io->0bf",
                ("f32[8,4,5]", "f32[8,5,6]"),
                8 * 4 * 5 * 6,
            ),
        ]
    )
    def test_multiplications(self, name, text, operands, count):
        lines = program.parse(
            "ENTRY %main (a: f32[]) -> f32[] {\n"
            f"  %a = {operands[0]}{{0}} parameter(0)\n"
            f"  %b = {operands[1]}{{0}} parameter(1)\n"
            f"  ROOT %c = {text}\n"
            "}\n"
        ).computations["main"]
        assert products.flops_of_products(lines) == 2 * count, name

    def test_loops_count_as_often_as_they_turn(self):
        text = KNOWN.replace(
            "  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %ar)",
            "  %d = f32[8,8]{1,0} dot(%ar, %ar), lhs_contracting_dims={1}, "
            "rhs_contracting_dims={1}\n"
            "  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %ar)",
        )
        found = products.flops_of_loops(program.parse(text))
        assert found == 4 * 2 * 8 * 8 * 4
        assert products.flops_of_loops(program.parse(KNOWN)) == 0


class TestGroups:
    @parameterized.expand(
        [
            ("replica_groups={{0,1},{2,3}}, dims", ((0, 1), (2, 3))),
            ("replica_groups={}", ((0, 1, 2, 3),)),
            ("channel_id=3", ((0, 1, 2, 3),)),
            ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
            ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
            ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
            ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
            ("replica_groups=mesh[a=4] {a:(1)2}", ((0, 2), (1, 3))),
            ("replica_groups=mesh[a=4] {a:(2)2}", ((0, 1), (2, 3))),
            (
                "replica_groups=mesh[a=2,b=2], device_ids=([2,2]T(1,0)) {b}",
                ((0, 2), (1, 3)),
            ),
            (
                "replica_groups=mesh[a=2,b=2], device_ids=(3,1,2,0) {b}",
                ((3, 1), (2, 0)),
            ),
        ]
    )
    def test_forms(self, text, groups):
        assert replica_groups(text, 4) == groups

    def test_unknown_form(self):
        with pytest.raises(ValueError, match="Received: 'replica_groups=@x'"):
            replica_groups("replica_groups=@x", 4)

    def test_every_set_of_axes_is_found(self):
        names, shape = ("a", "b", "c"), (2, 3, 4)
        places = np.arange(24).reshape(shape)
        for count in range(4):
            for axes in itertools.combinations(range(3), count):
                rest = [d for d in range(3) if d not in axes]
                groups = places.transpose([*rest, *axes]).reshape(
                    -1, int(np.prod([shape[d] for d in axes], dtype=int))
                )
                found = axes_of_groups(groups, names, shape)
                assert found == tuple(names[d] for d in axes)


class TestTopologies:
    @parameterized.expand(
        [
            ("v5e-8", (2, 4), (2, 4, 1), 8),
            ("v5litepod-16", (4, 4), None, 16),
            ("v6e-256", (16, 16), None, 256),
            ("v5p-128", (4, 4, 4), None, 64),
            ("v4-32", (2, 2, 4), None, 16),
            ("v4-8", (2, 2, 1), None, 4),
            ("v5e:2x4", (2, 4), None, 8),
            ("2xv6e-256", (16, 16), None, 512),
            ("cpu:8", (8,), None, 8),
        ]
    )
    def test_names(self, name, grid, host, devices):
        found = topology_of(name)
        assert (found.grid, found.host) == (grid, host)
        assert found.num_devices == devices

    @parameterized.expand(
        [
            ("v5e-9", "v5e-8"),
            ("v5p-100", "v5p-128"),
            ("v7-8", "v4-8"),
            ("v5e:2x4x4", "v5e-"),
            ("h100", "v"),
            ("cpu:0", "v"),
        ]
    )
    def test_unknown_names(self, name, near):
        with pytest.raises(ValueError, match=f"Nearest: .*{near}"):
            topology_of(name)

    def test_hosts(self):
        assert topology_of("v5e-16", chips_per_host=8).host == (2, 4, 1)
        assert topology_of("v5e-8", chips_per_host=4).host == (2, 2, 1)
        with pytest.raises(ValueError, match="chips_per_host=8"):
            topology_of("v5p-8", chips_per_host=8)

    def test_peaks_are_those_of_the_matrix_units(self):
        # Operations a cycle, from the programs that libtpu makes of a large
        # product of matrices: 4 units of 128 x 128 a TensorCore, on v6e as
        # many as if they were 4 of 256 x 256.
        a_cycle = {"v4": 2**18, "v5e": 2**17, "v5p": 2**18, "v6e": 2**19}
        for name, chip in CHIPS.items():
            peak = a_cycle[name] * chip.clock
            assert peak == pytest.approx(chip.peak_flops, rel=0.01)


class TestMeshes:
    def test_candidates_of_eight_chips(self):
        found = candidate_meshes(8, 8)
        assert {"batch": 2, "model": 4} in found
        assert {"model": 4, "batch": 2} in found
        orders = [tuple(mesh.items()) for mesh in found]
        assert len(set(orders)) == len(orders)
        # Both orders only where they differ.
        assert sum("batch" in mesh for mesh in found) == 6
        assert all(np.prod(list(mesh.values())) == 8 for mesh in found)

    def test_no_more_batch_shards_than_rows(self):
        for mesh in candidate_meshes(64, 4):
            assert mesh.get("batch", 1) * mesh.get("fsdp", 1) <= 4

    def test_axes(self):
        assert as_axes({"model": 4, "batch": -1}, 8) == (
            ("model", 4),
            ("batch", 2),
        )
        for mesh in ({"model": 3}, {"a": -1, "b": -1}, {"a": 0, "b": 8}, {}):
            with pytest.raises(ValueError, match="multiply .* for 8 chips"):
                as_axes(mesh, 8)

    @parameterized.expand(
        [
            ({"model": 4, "data": 2}, ("data",)),
            ({"model": 2, "fsdp": 2, "batch": 2}, ("fsdp", "batch")),
            ({"model": 4, "x": 2}, ("x",)),
            ({"y": 4, "x": 2}, ("y",)),
        ]
    )
    def test_axes_of_rows(self, axes, rows):
        model = kmd.abstract(plans.dense)
        found = step.distribute(model, kmd.make_mesh(axes))
        assert axes_of(found.batch_dim_name) == rows

    @parameterized.expand(["auto", "fsdp"])
    def test_no_axis_of_rows(self, layout):
        model = kmd.abstract(plans.dense)
        mesh = kmd.make_mesh({"model": 8})
        with pytest.raises(ValueError, match="instance batch=1,model=8"):
            step.distribute(model, mesh, layout)


def reduce_over(groups, size, grid=(2, 4), chip="v5e", kind="all-reduce"):
    coords = list(np.ndindex(*grid))
    net = network.Network(CHIPS[chip], grid, coords)
    return net.exchange_of(kind, size, groups)


class TestNetwork:
    # By the formulas of "How to Scale Your Model": what a device gets over
    # one link, or over both where the ring closes, plus a microsecond a hop.

    def test_gather_along_a_line(self):
        found = reduce_over(
            ((0, 1, 2, 3), (4, 5, 6, 7)), 4.5e9, kind="all-gather"
        )
        assert found.seconds == pytest.approx(0.1 * 3 / 4 + 3e-6)
        assert found.neighbours
        assert not found.rings

    def test_reduce_is_scatter_and_gather(self):
        groups = ((0, 4), (1, 5), (2, 6), (3, 7))
        gather = reduce_over(groups, 4.5e9, kind="all-gather")
        assert reduce_over(groups, 4.5e9).seconds == pytest.approx(
            2 * gather.seconds
        )

    def test_closed_ring_uses_both_directions(self):
        line = tuple(tuple(16 * x + y for y in range(16)) for x in range(16))
        found = reduce_over(line, 4.5e9, (16, 16), kind="all-gather")
        assert found.rings
        assert found.seconds == pytest.approx(0.05 * 15 / 16 + 8e-6)

    def test_dimensions_work_together(self):
        everyone = (tuple(range(256)),)
        found = reduce_over(everyone, 4.5e9, (16, 16), kind="all-gather")
        assert found.seconds == pytest.approx(0.025 * 255 / 256 + 16e-6)

    def test_groups_that_share_links_share_their_bandwidth(self):
        apart = reduce_over(
            ((0, 2), (1, 3), (4, 6), (5, 7)), 4.5e9, kind="all-gather"
        )
        beside = reduce_over(
            ((0, 1), (2, 3), (4, 5), (6, 7)), 4.5e9, kind="all-gather"
        )
        assert not apart.neighbours
        assert beside.neighbours
        assert apart.seconds > 1.9 * beside.seconds

    def test_between_slices(self):
        coords = [(0, 0), (0, 1)] * 2
        net = network.Network(CHIPS["v5e"], (1, 2), coords, [0, 0, 1, 1])
        found = net.exchange_of("all-reduce", 3.125e9, ((0, 2), (1, 3)))
        assert found.between_slices
        assert not found.neighbours
        assert found.seconds == pytest.approx(1.0)

    def test_permutation_to_a_neighbour(self):
        pairs = ((0, 1), (1, 0))
        found = reduce_over(pairs, 4.5e9, kind="collective-permute")
        assert found.seconds == pytest.approx(0.1 + 1e-6)


class TestSchedule:
    def test_what_stands_between_hides_a_gather(self):
        walk = schedule.Walk(
            program.parse(KNOWN),
            1.5e9,
            {"ags": 1e-3, "ar": 1e-4, "a2a": 2e-4, "cp": 3e-4},
        )
        found = walk.step()
        assert found.compute == pytest.approx(1e-3)
        # The gather runs beside the fusion; the loop and the permutation are
        # waited for, and the exchange too, since nothing stands between.
        assert found.exposed == pytest.approx(5e-4 + 2e-4 + 3e-4)
        assert found.exchange == pytest.approx(1e-3 + 5e-4 + 2e-4 + 3e-4)
        assert found.total == pytest.approx(2e-3)

    def test_what_is_unknown_is_said(self):
        assert schedule.what_is_unknown(program.parse(KNOWN)) == []
        text = KNOWN.replace(
            "fusion(%a), kind=kLoop, calls=%add, "
            'backend_config={"estimated_cycles":"1500000"}',
            'custom-call(%a), custom_call_target="tpu_custom_call"',
        )
        text = text.replace(', backend_config={"known_trip_count"', ", x={")
        text = text.replace("direction=LT", "")
        loop, kernel = schedule.what_is_unknown(program.parse(text))
        assert "'w' runs an unknown number of times" in loop
        assert "1 calls of hand-written kernels" in kernel


def mesh_plan(axes, peak, seconds, compute=0.0):
    return MeshPlan(
        axes,
        fits=peak <= 100,
        bytes=dict.fromkeys(
            (
                "arguments",
                "arguments_unpadded",
                "outputs",
                "alias",
                "temporaries",
            ),
            1,
        )
        | {"peak": peak, "weights": 1, "optimizer": 1, "gradients": 1}
        | {"arguments_padding": 0},
        flops=10,
        collectives=[],
        step_seconds=seconds,
        parts={
            "compute": compute,
            "exposed_collectives": seconds - compute,
            "at_peak_flops": seconds / 2,
        },
        feeds={"0": [0]},
        rows=1,
        tokens=1,
        rings={
            name: {
                "neighbours": True,
                "rings": False,
                "between_slices": False,
            }
            for name, _ in axes
        },
    )


class TestReport:
    def test_order_and_shape(self):
        axes = (("batch", 2), ("model", 4))
        report = ranked(
            "v5e-8",
            100,
            [
                MeshPlan(axes, error="no"),
                mesh_plan(axes, 200, 0.1),
                mesh_plan(axes, 90, 0.3),
                mesh_plan(axes, 150, 0.2),
                mesh_plan(axes, 80, 0.2),
            ],
        )
        found = json.loads(report.to_json())
        assert set(found) == {"topology", "hbm_bytes", "meshes"}
        assert [m["fits"] for m in found["meshes"]] == [
            *(True, True, False, False, None)
        ]
        assert [m["step_seconds"] for m in found["meshes"]] == [
            *(0.2, 0.3, 0.2, 0.1, None)
        ]
        for mesh in found["meshes"]:
            assert set(mesh) == {
                *("axes", "fits", "bytes", "flops", "collectives"),
                *("step_seconds", "parts", "feeds", "error"),
            }
            assert mesh["axes"] == [["batch", 2], ["model", 4]]
        last = found["meshes"][-1]
        assert {k for k, v in last.items() if v is not None} == {
            "axes",
            "error",
        }
        assert report.best.step_seconds == 0.2

    def test_equal_orders_are_said_to_be_equal(self):
        one = mesh_plan((("batch", 2), ("model", 4)), 90, 0.2)
        other = mesh_plan((("model", 4), ("batch", 2)), 90, 0.2)
        other.rings["model"]["neighbours"] = False
        text = _printed(ranked("v5e-8", 100, [one, other]))
        assert "the compiler sees no difference" in text
        assert "What differs is physical" in text
        assert "along 'model' the chips are neighbours in the first" in text

    def test_why_the_first_is_faster(self):
        one = mesh_plan((("batch", 2), ("model", 4)), 90, 0.2, 0.1)
        other = mesh_plan((("batch", 4), ("model", 2)), 90, 0.3, 0.1)
        text = _printed(ranked("v5e-8", 100, [one, other]))
        assert "50% faster" in text
        assert "waits 100 ms less for other chips" in text
        assert "estimates" in text

    def test_what_is_computed_several_times(self):
        one = mesh_plan((("batch", 8),), 90, 0.2)
        other = mesh_plan((("model", 8),), 90, 0.2)
        other = dataclasses.replace(other, flops=40)
        text = _printed(ranked("v5e-8", 100, [one, other]))
        assert "model=8: a chip makes 4.0 times the operations" in text
        assert "batch=8: a chip makes" not in text

    def test_who_feeds_what(self):
        feeds = {str(host): [2 * host, 2 * host + 1] for host in range(6)}
        feeds |= {"6": [12], "7": []}
        mesh = dataclasses.replace(
            mesh_plan((("batch", 8),), 90, 0.2), feeds=feeds, rows=13
        )
        text = _printed(ranked("v5e-8", 100, [mesh]))
        assert "of 13 rows host 0 feeds 0 to 1" in text
        assert "and 3 more hosts theirs; hosts 7 hold padding only" in text

    def test_nothing_fits(self):
        one = mesh_plan((("batch", 2), ("model", 4)), 100 + 2**30, 0.2)
        report = ranked("v5e-8", 100, [one])
        assert report.best is None
        assert "No mesh fits" in _printed(report)
        assert "1.00 GiB more" in _printed(report)


def _printed(report):
    console = Console(width=2000, file=io.StringIO())
    console.print(report)
    return console.file.getvalue()


class TestBlocks:
    @parameterized.expand(
        [
            ("one_kind", plans.deep, 12, 1),
            ("two_kinds", plans.alternating, 6, 2),
            ("another_first", lambda: plans.deep((512, *[1024] * 5)), 5, 1),
            (
                "three_kinds",
                lambda: plans.deep((512, 1024, 2048) * 3),
                3,
                3,
            ),
        ]
    )
    def test_are_found(self, name, build, units, period):
        found = blocks.find_blocks(kmd.abstract(build))
        assert (found.units, found.period) == (units, period)
        assert all(isinstance(b, plans.Block) for b in found.layers), name

    def test_none(self):
        assert blocks.find_blocks(kmd.abstract(plans.dense)) is None

    def test_what_is_left_out_has_no_variables(self):
        model = plans.deep((32,) * 6)
        found = blocks.find_blocks(model)
        kept = sum(len(block.variables) for block in found.layers[:2])
        others = len(model.variables) - 3 * kept
        blocks.keep_units(found, 2)
        assert len(model.variables) == others + kept
        alone = plans.deep((32,) * 2)
        for mine, its in zip(model.variables, alone.variables, strict=True):
            if "seed" not in mine.path:
                mine.assign(its)
        rows = np.arange(128).reshape(2, 64)
        assert np.array_equal(model(rows), alone(rows))


def shallow(depth, temporaries, collectives=(), units=10):
    sizes = {
        "arguments": 100 + 10 * depth,
        "outputs": 50 + 5 * depth,
        "alias": 40 + 4 * depth,
        "temporaries": temporaries,
        "code": 1 + depth,
        "peak": 0,
    }
    return {
        "bytes": sizes,
        "flops": 1000 + 100 * depth,
        "parts": {"compute": 1.0 + 0.5 * depth},
        "step_seconds": 2.0 + 0.5 * depth,
        "collectives": list(collectives),
        "notes": [],
        "units": units,
        "too_large": "though the shallow one isn't",
    }


def gather(size, count, source="block_*"):
    return {
        "kind": "all-gather",
        "bytes": size,
        "axes": ["fsdp"],
        "count": count,
        "source": source,
    }


class TestDepth:
    def test_which(self):
        known = {1: shallow(1, 70)}
        assert depth.depths_to_compile(known) == [2, 3]
        known |= {2: shallow(2, 90), 3: shallow(3, 110)}
        assert depth.depths_to_compile(known) == []
        known[3] = shallow(3, 95)
        assert depth.depths_to_compile(known) == [4]
        known[4] = shallow(4, 96)
        assert depth.depths_to_compile(known) == []

    def test_even_growth(self):
        known = {d: shallow(d, 50 + 20 * d) for d in (1, 2, 3)}
        found = depth.extrapolated(known)
        assert found["bytes"] == {
            **{"arguments": 200, "outputs": 100, "alias": 80, "code": 11},
            **{"temporaries": 250, "peak": 481},
        }
        assert found["flops"] == 2000
        assert found["step_seconds"] == 7.0
        assert found["parts"] == {"compute": 6.0}
        assert found["temporaries_range"] == [250, 250]
        assert found["too_large"] is None

    def test_uneven_growth_is_a_range(self):
        grown = {1: 70, 2: 90, 3: 95, 4: 96}
        known = {d: shallow(d, t) for d, t in grown.items()}
        found = depth.extrapolated(known)
        # By the last block, and by that before it.
        assert found["temporaries_range"] == [96 + 6, 96 + 6 * 5]
        assert found["bytes"]["temporaries"] == 126
        assert any("don't grow evenly" in note for note in found["notes"])

    def test_collectives_grow_in_number(self):
        known = {
            d: shallow(d, 50, [gather(64, 3 * d), gather(7, 2, "head")])
            for d in (1, 2, 3)
        }
        found = depth.extrapolated(known)["collectives"]
        assert found == [gather(64, 30), gather(7, 2, "head")]

    def test_collectives_that_are_put_together_grow_in_size(self):
        known = {
            d: shallow(d, 50, [gather(100 + 8 * d, 1, "")]) for d in (1, 2, 3)
        }
        found = depth.extrapolated(known)["collectives"]
        assert found == [gather(180, 1, "")]


def full_mesh_plan():
    plan = mesh_plan((("batch", 2), ("model", 4)), 90, 0.2, 0.1)
    return dataclasses.replace(
        plan,
        bytes=plan.bytes | {"code": 1},
        parts=plan.parts | {"hidden_collectives": 0.05},
        coords=[[x, y, 0] for x in range(2) for y in range(4)],
        hosts=[0, 0, 0, 0, 1, 1, 1, 1],
        collectives=[gather(2**20, 3, "a<b")],
        feeds={"0": [0, 1], "1": []},
    )


class TestPictures:
    def test_page_needs_nothing_else(self):
        text = ranked("v5e-8", 100, [full_mesh_plan()]).to_html()
        assert text.count('src="data:image/png;base64,') == 3
        assert "http" not in text
        assert "a&lt;b" in text
        assert "none: padding only" in text

    def test_page_with_errors_only(self):
        failed = MeshPlan((("batch", 8),), error="it's <wrong>")
        text = ranked("v5e-8", 100, [failed]).to_html()
        assert "it&#x27;s &lt;wrong&gt;" in text
        assert "<img" not in text

    def test_files(self, tmp_path):
        report = ranked("v5e-8", 100, [full_mesh_plan()])
        paths = report.save_pictures(tmp_path / "new")
        assert [path.name for path in paths] == [
            *("memory.png", "time.png", "grid.png")
        ]
        for path in paths:
            assert path.read_bytes().startswith(b"\x89PNG")
