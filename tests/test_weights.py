"""Weights onto the mesh, into files, and back."""

import inspect
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from parameterized import parameterized

import keras_meshdist as kmd
from tests import saved
from tests.clusters import shared_cluster

ONE, TWO, FOUR = (1, 8), (2, 4), (4, 2)
COVERING = (("model", "float32", TWO, "fsdp", (FOUR, "first")),)
MORE = (
    ("weights", "float32", FOUR, "last", (TWO, "fsdp")),
    ("pieces", "bfloat16", TWO, "data", (ONE, "last")),
    ("model", "bfloat16", ONE, "first", (TWO, "last")),
)
REST = tuple(
    (file, dtype, processes, where, (others, other))
    for file in saved.FILES
    for dtype in ("float32", "bfloat16")
    for processes in (ONE, TWO, FOUR)
    for where, other in (("first", "fsdp"), ("last", "data"), ("data", "last"))
    for others in (ONE, TWO, FOUR)
)
TUNED = tuple(
    (file, kind, processes, where, (others, other))
    for kind in saved.TUNED
    for file in ("weights", "model")
    for processes, where, others, other in (
        (TWO, "last", FOUR, "fsdp"),
        (ONE, "data", TWO, "first"),
        (FOUR, "fsdp", ONE, "data"),
    )
)


def name(function, number, parameters):
    file, dtype, processes, where, (others, other) = parameters.args
    shapes = [f"{n}x{d}" for n, d in (processes, others)]
    return (
        f"{function.__name__}_{file}_{dtype}_{shapes[0]}_{where}_"
        f"{shapes[1]}_{other}"
    )


def same(expected, got):
    for (path, one), (_, other) in zip(expected, got, strict=True):
        if "seed_generator" in path:
            continue  # Keras doesn't save it
        assert one.dtype == other.dtype, path
        assert one.tobytes() == other.tobytes(), path


def round_trip(folder, file, dtype, processes, where, then):
    save_weights = inspect.signature(keras.Model.save_weights)
    if file == "pieces" and "max_shard_size" not in save_weights.parameters:
        pytest.skip("this version of Keras saves to one file only")
    answers = shared_cluster(*processes).call(
        saved.save, where, file, str(folder), dtype
    )
    expected, names = answers[0]
    assert not [n for n in names if n.startswith(".")]
    for values, _ in answers[1:]:
        same(expected, values)
    others, other = then
    results = shared_cluster(*others).call(
        saved.load, other, file, str(folder), dtype
    )
    results.append(saved.load(None, file, str(folder), dtype))
    count = len(expected)
    for values, _ in results:
        # Metrics aren't saved.
        same(expected[: count - 4], values[: count - 4])
    losses = [loss for _, loss in results]
    np.testing.assert_allclose(losses, losses[-1:] * len(losses), rtol=1e-2)


class TestFiles:
    @parameterized.expand(COVERING, name_func=name)
    def test_round_trip(self, *case):
        with saved.folder() as folder:
            round_trip(folder, *case)

    @parameterized.expand(MORE, name_func=name)
    @pytest.mark.extra
    def test_round_trip_more(self, *case):
        with saved.folder() as folder:
            round_trip(folder, *case)

    @parameterized.expand(REST, name_func=name)
    @pytest.mark.full
    def test_round_trip_full(self, *case):
        with saved.folder() as folder:
            round_trip(folder, *case)

    @parameterized.expand(TUNED[::5], name_func=name)
    @pytest.mark.extra
    def test_tuned(self, *case):
        self.check_tuned(*case)

    @parameterized.expand(TUNED, name_func=name)
    @pytest.mark.full
    def test_tuned_full(self, *case):
        self.check_tuned(*case)

    def check_tuned(self, file, kind, processes, where, then):
        """Keras saves kernels with LoRA in them."""
        with saved.folder() as folder:
            answers = shared_cluster(*processes).call(
                saved.save, where, file, str(folder), kind
            )
            others, other = then
            results = shared_cluster(*others).call(
                saved.load, other, file, str(folder), kind
            )
            expected, loss = saved.load(None, file, str(folder), kind)
        kinds = {str(value.dtype) for _, value in expected}
        assert ("int8" in kinds) == (kind == "int8")
        before = answers[0][0]
        others = [
            i
            for i, (path, _) in enumerate(before[:-4])  # without metrics
            if "/up/" not in path and "seed_generator" not in path
        ]
        assert len(others) > 6
        same([before[i] for i in others], [expected[i] for i in others])
        for values, other_loss in results:
            same(expected[:-4], values[:-4])
            np.testing.assert_allclose(other_loss, loss, rtol=1e-5)

    def test_keras_reads_them_without_this_package(self, tmp_path):
        shared_cluster(*TWO).call(saved.save, "last", "model", str(tmp_path))
        code = """
import sys, keras
model = keras.saving.load_model(sys.argv[1])
print(model.count_params())
assert "keras_meshdist" not in sys.modules
"""
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "model.keras"],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert done.stdout.split() == [str(17 * 32 + 4 * 32 + 33 * 8)]


FAILURES = {
    "alone": ("DisagreementError: All processes must make the same calls", ""),
    "nowhere": (
        "FileNotFoundError: The folder that a file is saved in must exist",
        "process 0 raised FileNotFoundError",
    ),
    "other": ("DisagreementError: All processes must bring the same", ""),
    "in the middle": (
        "model.weights.h5', which couldn't be written (no space left)",
        "process 0 raised OSError: A file must be whole",
    ),
    "value": ("DisagreementError", "for variable 'saved/up/bias'"),
    "model": ("DisagreementError", "for variable 'saved/up/bias'"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_error_on_one_is_one_on_all(kind, tmp_path):
    answers = shared_cluster(*TWO).call(saved.fail, kind, str(tmp_path))
    first, other = FAILURES[kind]
    assert first in answers[0][0]
    assert (other or first) in answers[1][0]
    for _, names, unchanged in answers:
        assert names == ["model.weights.h5"]
        assert unchanged


@pytest.mark.extra
def test_keras_callbacks(tmp_path):
    whole = shared_cluster(*TWO).call(
        saved.callbacks, str(tmp_path / "whole"), 4
    )
    (losses, shown), (others, shown_there) = whole
    assert losses == others
    # One process shows and writes.
    assert shown - shown_there == {"CSVLogger", "ProgbarLogger"}
    assert "ModelCheckpoint" in shown_there
    folder = str(tmp_path / "parts")
    parts = [
        shared_cluster(*TWO).call(saved.callbacks, folder, epochs)[0][0]
        for epochs in (2, 4)
    ]
    assert len(losses) == 4
    assert parts[0] + parts[1] == losses
    for name, epochs in ("whole", [0, 1, 2, 3]), ("parts", [0, 1, 2, 3]):
        lines = (tmp_path / name / "log.csv").read_text().splitlines()
        assert [int(line.split(",")[0]) for line in lines[1:]] == epochs
        assert (tmp_path / name / "new" / "best.keras").is_file()


def test_what_is_loaded_is_never_whole_on_a_device(tmp_path, monkeypatch):
    path = tmp_path / "model.weights.h5"
    saved.with_scope(None)
    model = saved.build(1)
    model.save_weights(path)
    expected = model.get_weights()
    with saved.distribution("first").scope():
        model = saved.build(2)

        def whole(value, *args, **kwargs):
            assert np.shape(value) not in ((16, 32), (32, 8))
            return as_array(value, *args, **kwargs)

        as_array = jax.numpy.asarray
        monkeypatch.setattr(jax.numpy, "asarray", whole)
        model.load_weights(path)
        for weight, value in zip(model.weights, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(weight), value)


class TestDistributeModel:
    @parameterized.expand([(ONE,), (TWO,)])
    @pytest.mark.extra
    def test_training_goes_on_as_on_one_device(self, processes):
        expected = saved.move(None, None)
        for numbers, values, on in shared_cluster(*processes).call(
            saved.move, "first", "fsdp"
        ):
            np.testing.assert_allclose(numbers, expected[0], rtol=1e-5)
            for (path, got), (_, one) in zip(values, expected[1], strict=True):
                np.testing.assert_allclose(
                    got, one, rtol=1e-4, atol=1e-5, err_msg=path
                )
            assert set(on) == {1}

    def test_a_model_that_was_built_before(self):
        self.check_forgotten(TWO, False)

    @pytest.mark.extra
    def test_a_model_that_was_trained_before(self):
        self.check_forgotten(ONE, True)

    def check_forgotten(self, processes, trained):
        for said, calls, before, after in shared_cluster(*processes).call(
            saved.forgotten, "last", trained
        ):
            assert set(said) == calls
            for message in said.values():
                assert message.startswith("A model must lie on the mesh of the")
                assert "Received: variable 'saved/up/kernel' on " in message
                assert "or move it: `kmd.distribute_model(model, d" in message
            np.testing.assert_allclose(after, before, rtol=1e-4)

    def test_slots_lie_as_their_weights(self):
        parts = saved.spread("first")
        kernels = {p: n for p, n in parts.items() if "kernel" in p}
        assert len(kernels) == 6
        assert set(kernels.values()) == {2}
        assert parts["saved/norm/gamma"] == 1

    def test_a_compiled_model_that_has_not_been_trained(self):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
        dist = kmd.DataParallel()
        with dist.scope():
            kmd.distribute_model(model, dist)
            model.predict(np.ones((3, 4)), verbose=0)  # Keras would warn
        devices = model.optimizer.iterations.value.devices()
        assert len(devices) == jax.device_count()

    def test_a_model_that_is_not_built(self):
        model = keras.Sequential([keras.layers.Dense(3)])
        with pytest.raises(ValueError, match="must be built.*Received: 'seq"):
            kmd.distribute_model(model)

    def test_a_distribution_of_keras(self):
        model = saved.build(1)
        with pytest.raises(ValueError, match="must be a `kmd.ModelParallel`"):
            kmd.distribute_model(model, keras.distribution.DataParallel())
