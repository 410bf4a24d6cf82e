"""What is read of files of weights, and how they are written."""

import zipfile

import h5py
import keras
import numpy as np
import pytest

from keras_meshdist.arrays import FileArray
from tests import saved, written
from tests.clusters import shared_cluster

KERNEL = written.ROWS * written.COLUMNS * 4


@pytest.fixture
def files(tmp_path):
    saved.with_scope(None)
    model = written.build(1)
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.keras")
    return tmp_path, model.get_weights()


def equal(expected, got):
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_array_equal(one, other)


VIEWS = (
    lambda whole: whole,
    lambda whole: whole.T,
    lambda whole: np.reshape(np.transpose(whole), (40, 5, 12)),
    lambda whole: np.reshape(whole, (6, 10, 40)).transpose(2, 0, 1),
    lambda whole: whole[7:, 5:21],
    lambda whole: whole[::-1, ::3],
    lambda whole: whole[:1].T,
    lambda whole: whole[3, 4],
)


class TestViews:
    """Of an array in a file, as those who load transpose and cut it."""

    @pytest.fixture
    def mapped(self, tmp_path, monkeypatch):
        monkeypatch.setattr(FileArray, "_AT_A_TIME", 1000)
        path = tmp_path / "array"
        np.arange(2400, dtype="float32").tofile(path)
        return lambda: np.memmap(path, "float32", "r", shape=(60, 40))

    @pytest.mark.parametrize("view", VIEWS)
    def test_parts(self, mapped, view):
        expected = view(np.arange(2400, dtype="float32").reshape(60, 40))
        if not expected.ndim:  # NumPy reads it
            assert not FileArray.takes(view(mapped()))
            return
        assert FileArray.takes(view(mapped()))
        array = FileArray(view(mapped()), "float64")
        assert array.shape == expected.shape
        np.testing.assert_array_equal(np.asarray(array), expected)
        for index in ((slice(1, 9),), (..., slice(0, 4)), (slice(0, 0),)):
            part = array[index]
            assert part.dtype == "float64"
            np.testing.assert_array_equal(part, expected[index])

    def test_each_has_a_checksum(self, mapped):
        checksums = [
            FileArray(view(mapped()), "float32").digest() for view in VIEWS[:-1]
        ]
        assert len(set(checksums)) == len(checksums)
        again = FileArray(VIEWS[2](mapped()), "float32").digest()
        assert again == checksums[2]

    def test_what_is_computed_is_in_memory(self, mapped):
        whole = mapped()
        for value in (whole + 1, whole.T.reshape(-1), np.array(whole)):
            assert not FileArray.takes(value)
        changed = np.memmap(whole.filename, "float32", "c", shape=(60, 40))
        changed[0] = 0
        assert not FileArray.takes(changed)


class TestReading:
    @pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
    def test_part_by_part(self, files, name, monkeypatch):
        folder, expected = files

        def extract(*arguments):
            raise AssertionError("copied out of the archive")

        monkeypatch.setattr(zipfile.ZipFile, "extract", extract)
        got, read = written.load("first", str(folder / name))
        equal(expected, got)
        # Over the axis of two, each part once.
        assert read == [KERNEL // 2] * 2

    @pytest.mark.extra
    @pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
    def test_a_process_reads_its_own_part(self, files, name):
        folder, expected = files
        for got, read in shared_cluster(2, 4).call(
            written.load, "last", str(folder / name)
        ):
            equal(expected, got)
            assert read == [KERNEL // 4] * 2

    @pytest.mark.extra
    def test_as_another_dtype(self, files):
        folder, expected = files
        path = str(folder / "model.weights.h5")
        got, _ = written.load("first", path, "bfloat16")
        for one, other in zip(expected, got, strict=True):
            assert other.dtype == "bfloat16"
            np.testing.assert_array_equal(one.astype("bfloat16"), other)

    @pytest.mark.extra
    def test_bfloat16(self, files):
        folder, _ = files
        model = written.build(3, "bfloat16")
        path = folder / "b.weights.h5"
        model.save_weights(path)
        got, read = written.load("first", str(path), "bfloat16")
        equal(model.get_weights(), got)
        assert read == [KERNEL // 4] * 2

    @pytest.mark.extra
    def test_what_is_compressed(self, files):
        """Somebody else wrote it so."""
        folder, expected = files
        packed = folder / "packed.weights.h5"
        with (
            h5py.File(folder / "model.weights.h5") as source,
            h5py.File(packed, "w") as target,
        ):

            def copy(name, found):
                if isinstance(found, h5py.Dataset):
                    how = {"compression": "gzip"} if found.shape else {}
                    target.create_dataset(name, data=found[()], **how)

            source.visititems(copy)
        got, read = written.load("first", str(packed))
        equal(expected, got)
        assert not read
        archive = folder / "packed.keras"
        with (
            zipfile.ZipFile(folder / "model.keras") as source,
            zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        got, _ = written.load("first", str(archive))
        equal(expected, got)

    @pytest.mark.extra
    def test_another_file_on_another_process(self, files):
        folder, _ = files
        model = written.build(1)
        model.save_weights(folder / "0.weights.h5")
        kernel = model.layers[0].kernel
        kernel.assign(kernel * 1.001)
        model.save_weights(folder / "1.weights.h5")
        for error in shared_cluster(2, 4).call(
            written.load_different, "last", str(folder)
        ):
            assert "DisagreementError" in error
            assert "for variable 'written/up/kernel'" in error

    def test_what_was_read_stays_when_the_file_changes(self, files):
        folder, expected = files
        path = folder / "model.weights.h5"
        with saved.distribution("first").scope():
            model = written.build(2)
            model.load_weights(path)
            with open(path, "r+b") as file:
                file.write(bytes(path.stat().st_size))
            equal(expected, model.get_weights())

    def test_truncated(self, files):
        folder, _ = files
        path = folder / "model.weights.h5"
        path.write_bytes(path.read_bytes()[:-5000])
        with saved.distribution("first").scope():
            model = written.build(2)
            with pytest.raises(OSError, match="truncated"):
                model.load_weights(path)


@pytest.mark.extra
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_export(tmp_path, shape):
    """What is exported runs on one device, without this package."""
    tf = pytest.importorskip("tensorflow")

    answers = shared_cluster(*shape).call(written.export, "last", str(tmp_path))
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    given = exported.serve(tf.constant(saved.data()[0]))
    for kernel, names, predicted in answers:
        assert names == ["exported"]
        np.testing.assert_allclose(given, predicted, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(kernel, answers[0][0])
        assert kernel.shape == (16, 32)


def test_models_are_as_before_on_keras(files):
    """Without a distribution nothing is read otherwise."""
    folder, expected = files
    with written.counted() as read:
        model = keras.saving.load_model(folder / "model.keras")
    equal(expected, model.get_weights())
    assert not read
