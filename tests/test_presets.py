"""KerasHub's presets on meshes, and on several processes."""

import keras
import numpy as np
import pytest
from packaging.version import Version
from parameterized import parameterized

pytest.importorskip("keras_hub", reason="KerasHub is in the extra `hub`")

from tests import presets, saved
from tests.clusters import shared_cluster

if Version(keras.__version__) < Version("3.15"):
    pytest.skip("KerasHub 0.32 needs Keras 3.15", allow_module_level=True)

ONE, TWO = (1, 8), (2, 4)
FIRST = (("batch", 4), ("model", 2))
LAST = (("model", 4), ("batch", 2))


def equal(expected, got):
    assert len(expected) == len(got)
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)


class TestPresets:
    @parameterized.expand([(TWO, LAST, 10), (TWO, FIRST, 4e-4)])
    @pytest.mark.extra
    def test_round_trip(self, processes, axes, shard_size):
        with saved.folder() as folder:
            path = str(folder / "deep" / "preset")
            answers = shared_cluster(*processes).call(
                presets.save, axes, path, shard_size
            )
            expected, names = answers[0]
            for values, found in answers[1:]:
                equal(expected, values)
                assert found == names
            whole = {"config.json", "metadata.json", "model.weights.h5"}
            if shard_size == 10:
                assert set(names) == whole
            else:
                assert "model.weights.json" in names
                assert len(names) > 4
            assert sorted(p.name for p in folder.rglob(".*")) == []
            equal(expected, presets.load(None, path, False)[0])
            for skip in (True, False):
                got, pieces = presets.load(FIRST, path, skip)
                equal(expected, got)
                assert pieces == 2
            for got, pieces in shared_cluster(*TWO).call(
                presets.load, LAST, path, True
            ):
                equal(expected, got)
                assert pieces == 4

    @pytest.mark.extra
    def test_other_files_of_a_preset_stay(self):
        with saved.folder() as folder:
            preset = folder / "preset"
            preset.mkdir()
            (preset / "tokenizer.json").write_text("{}")
            (preset / "config.json").write_text("old")
            presets.save(FIRST, str(preset))
            assert (preset / "tokenizer.json").read_text() == "{}"
            assert "GemmaBackbone" in (preset / "config.json").read_text()

    @pytest.mark.extra
    def test_an_error_on_one_is_one_on_all(self):
        with saved.folder() as folder:
            path = folder / "preset"
            presets.save(FIRST, str(path))
            before = {p.name: p.read_bytes() for p in path.iterdir()}
            errors = shared_cluster(*TWO).call(presets.fail, LAST, str(path))
            assert "no space left" in errors[0]
            assert "process 0 raised" in errors[1]
            after = {p.name: p.read_bytes() for p in path.iterdir()}
            assert before == after

    @parameterized.expand([(1,), (3,)])
    @pytest.mark.extra
    def test_safetensors(self, parts):
        pytest.importorskip("safetensors")
        saved.with_scope(None)
        with saved.folder() as folder:
            expected = presets.transformers(folder, parts)
            got, pieces = presets.load(FIRST, str(folder), True)
            equal(expected, got)
            assert pieces == 2
            for values, pieces in shared_cluster(*TWO).call(
                presets.load, LAST, str(folder), True
            ):
                equal(expected, values)
                assert pieces == 4
            kernel = 128 * 256 * 4
            for parts_read in shared_cluster(*TWO).call(
                presets.read, LAST, str(folder)
            ):
                # Its half of the devices has two of four pieces of each: of
                # the table, and of three kernels of two layers. Those of
                # queries and outputs are half as large.
                assert parts_read.count(kernel // 4) == 2 * (1 + 3 * 2)
                assert parts_read.count(kernel // 8) == 2 * (2 * 2)
                assert len(parts_read) == 14 + 8
