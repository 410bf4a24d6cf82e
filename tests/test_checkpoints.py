"""Checkpoints: bit-equal on any other mesh, and resumed mid-epoch."""

import json
import signal

import jax
import keras
import numpy as np
import pytest
from packaging.version import Version
from parameterized import parameterized

import keras_meshdist as kmd
from keras_meshdist.checkpoints import digests
from keras_meshdist.checkpoints.keys import variables_of
from tests import checkpointed, saved
from tests.clusters import shared_cluster

ONE, TWO, FOUR = (1, 8), (2, 4), (4, 2)
needs_try_get = pytest.mark.skipif(
    Version(jax.__version__) < Version("0.5"),
    reason="Orbax asks JAX's coordination service on several processes for "
    "what JAX 0.4.38 doesn't have (`key_value_try_get`)",
)
COVERING = (
    ("bfloat16", ONE, "data", FOUR, "first"),
    ("int8", TWO, "fsdp", ONE, "data"),
    ("lora", ONE, "last", TWO, "first"),
)
REST = tuple(
    (dtype, processes, where, others, other)
    for dtype in ("float32", "bfloat16", *saved.TUNED)
    for processes in (ONE, TWO, FOUR)
    for where, other in (("first", "fsdp"), ("last", "data"), ("data", "last"))
    for others in (ONE, TWO, FOUR)
)
KINDS = ("arrays", "tf", "several steps")
OTHER_KINDS = ("tf with steps", "PyDataset", "generator")


def same(expected, got):
    assert len(expected) == len(got)
    for (path, one), (_, other) in zip(expected, got, strict=True):
        assert one.dtype == other.dtype, path
        assert one.tobytes() == other.tobytes(), path


def close(expected, got):
    for (path, one), (_, other) in zip(expected, got, strict=True):
        scale = max(1.0, np.abs(one.astype("float64")).max())
        np.testing.assert_allclose(
            other.astype("float64"),
            one.astype("float64"),
            atol=1e-5 * scale,
            err_msg=path,
        )


def name(function, number, parameters):
    dtype, processes, where, others, other = parameters.args
    shapes = [f"{n}x{d}" for n, d in (processes, others)]
    return (
        f"{function.__name__}_{dtype}_{shapes[0]}_{where}_{shapes[1]}_{other}"
    )


def round_trip(folder, dtype, processes, where, others, other):
    saved_values = shared_cluster(*processes).call(
        checkpointed.save, where, str(folder), dtype
    )
    for values in saved_values[1:]:
        same(saved_values[0], values)
    results = shared_cluster(*others).call(
        checkpointed.restore, other, str(folder), dtype
    )
    results.append(checkpointed.restore(None, str(folder), dtype))
    for step, values in results:
        assert step == 8
        same(saved_values[0], values)


class TestRoundTrips:
    @parameterized.expand(COVERING, name_func=name)
    @pytest.mark.extra
    @needs_try_get
    def test_covering(self, *case):
        with saved.folder() as folder:
            round_trip(folder / "saved", *case)

    @parameterized.expand(REST, name_func=name)
    @pytest.mark.full
    @needs_try_get
    def test_rest(self, *case):
        with saved.folder() as folder:
            round_trip(folder / "saved", *case)


def resumed(folder, kind, first, then, stop_after=13, **settings):
    """Runs whole, and in two parts; returns what each process has of each."""
    (processes, where), (others, other) = first, then
    whole = shared_cluster(*processes).call(checkpointed.run, where, None, kind)
    settings = {"save_freq": 3, **settings}
    parts = shared_cluster(*processes).call(
        checkpointed.run, where, folder, kind, stop_after, **settings
    )
    rest = shared_cluster(*others).call(
        checkpointed.run, other, folder, kind, resume=True, **settings
    )
    return whole, parts, rest


def continues(whole, parts, rest, exact):
    """The second part has the losses, logs and weights of the whole run."""
    for (losses, epochs, values, ended), part, (others, logs, got, end) in zip(
        whole * 4, parts * 4, rest, strict=False
    ):
        assert ended is None
        assert end is None
        assert part[3] is not None
        # Losses are means over the epoch so far: metrics go on as well.
        assert 0 < len(others) < len(losses)
        assert len(part[0]) + len(others) >= len(losses)
        tail = losses[-len(others) :]
        if exact:
            assert others == tail
            same(values, got)
        else:
            np.testing.assert_allclose(others, tail, rtol=1e-5)
            close(values, got)
        for one, other in zip(epochs[-len(logs) :], logs, strict=True):
            assert one.keys() == other.keys()
            np.testing.assert_allclose(
                [*other.values()], [*one.values()], rtol=1e-5
            )


def resumes_on_one_process(kind):
    with saved.folder() as folder:
        one = (ONE, "first")
        after = 5 if kind == "several steps" else 13
        runs = resumed(str(folder / "c"), kind, one, one, after)
        continues(*runs, exact=True)


class TestResume:
    @parameterized.expand(KINDS)
    @pytest.mark.extra
    def test_on_one_process(self, kind):
        resumes_on_one_process(kind)

    @parameterized.expand(OTHER_KINDS)
    @pytest.mark.full
    def test_other_kinds_on_one_process(self, kind):
        resumes_on_one_process(kind)

    @pytest.mark.extra
    @needs_try_get
    def test_on_other_processes(self):
        with saved.folder() as folder:
            runs = resumed(
                str(folder / "c"), "arrays", (TWO, "last"), (FOUR, "fsdp")
            )
            continues(*runs, exact=False)

    @parameterized.expand(KINDS[1:])
    @pytest.mark.full
    @needs_try_get
    def test_kinds_on_other_processes(self, kind):
        with saved.folder() as folder:
            after = 5 if kind == "several steps" else 13
            runs = resumed(
                str(folder / "c"), kind, (TWO, "last"), (FOUR, "first"), after
            )
            continues(*runs, exact=False)

    @pytest.mark.extra
    def test_at_the_end_of_an_epoch(self):
        """Which takes eight batches: the best of three is kept besides one."""
        with saved.folder() as folder:
            folder = str(folder / "c")
            settings = {"save_freq": "epoch", "keep": 1, "monitor": "loss"}
            one = (ONE, "first")
            runs = resumed(folder, "arrays", one, one, 20, **settings)
            continues(*runs, exact=True)
            assert checkpointed.steps_in(folder) == [24]
            losses = [logs["loss"] for logs in runs[0][0][1]]
            assert min(losses) == losses[-1]

    @pytest.mark.extra
    @needs_try_get
    def test_when_asked_to_end(self):
        """SIGTERM to one process: all save, and others go on."""
        with saved.folder() as folder:
            folder = str(folder / "c")
            whole = shared_cluster(*TWO).call(checkpointed.run, "last", None)
            parts = shared_cluster(*TWO).call(
                checkpointed.run, "last", folder, asked=11
            )
            assert all(ended == "SystemExit: 143" for *_, ended in parts)
            assert len({len(losses) for losses, *_ in parts}) == 1
            done = len(parts[0][0])
            assert 11 <= done <= 13
            assert checkpointed.steps_in(folder)[-1] == done
            rest = shared_cluster(*FOUR).call(
                checkpointed.run, "first", folder, resume=True
            )
            assert len(rest[0][0]) == 24 - done
            continues(whole, parts, rest, exact=False)

    @pytest.mark.extra
    def test_the_best_one(self):
        with saved.folder() as folder:
            folder = str(folder / "c")
            settings = {"monitor": "val_loss", "mode": "max", "keep": 1}
            checkpointed.run("first", folder, **settings)
            # The loss falls, so the best by "max" is the first.
            assert checkpointed.steps_in(folder) == [8, 24]
            with saved.distribution("first").scope():
                model = built()
                assert kmd.restore(model, folder, best=True) == 8
                assert kmd.restore(model, folder) == 24
                assert kmd.restore(model, folder, step=8) == 8
                assert kmd.restore(model, f"{folder}/8") == 8

    @pytest.mark.extra
    def test_from_another_directory(self, tmp_path):
        """Restored first, then trained on in a new directory."""
        whole = checkpointed.run("first", None)
        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        checkpointed.run("first", first, stop_after=13, save_freq=5)
        saved.with_scope("first")
        try:
            model = saved.build(9)
            kmd.restore(model, first, step=5)
            watched = checkpointed.recorder()
            callback = kmd.callbacks.Checkpoint(second, resume=True)
            model.fit(
                *checkpointed.data(),
                batch_size=8,
                epochs=3,
                verbose=0,
                callbacks=[callback, watched],
            )
        finally:
            keras.distribution.set_distribution(None)
        assert watched.losses == whole[0][5:]
        same(whole[2][:-4], saved.values(model)[:-4])


def built():
    model = saved.build(2)
    model.optimizer.build(model.trainable_variables)
    return model


class TestKeys:
    def test_a_second_build_has_the_same(self):
        def build():
            rows = keras.Input((4,))
            x = keras.layers.Dense(8)(rows)
            x = keras.layers.Dropout(0.5)(keras.layers.Dense(8, name="own")(x))
            return keras.Model(rows, keras.layers.Dense(8)(x))

        models = []
        for _ in range(2):
            model = build()
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
            models.append(model)
        first, second = map(variables_of, models)
        assert list(first) == list(second)
        paths = [[v.path for v in keys.values()] for keys in (first, second)]
        assert paths[0] != paths[1]  # or this shows nothing
        assert "model/dense:1/kernel" in first
        assert "model/own/kernel" in first
        assert "optimizer/dense/bias/velocity" in first
        assert any("seed_generator" in key for key in first)
        for key, variable in first.items():
            assert variable.shape == second[key].shape


class TestDigests:
    @parameterized.expand(
        [
            *("float32", "bfloat16", "float16", "int8", "uint8", "bool"),
            *("int32", "int4", "complex64"),
        ]
    )
    def test_each_element_counts(self, dtype):
        rng = np.random.default_rng(0)
        values = rng.integers(0, 2, size=(6, 8)).astype(jax.numpy.dtype(dtype))
        expected = digests.of_arrays({"a": jax.numpy.asarray(values)})
        mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("a", "b"))
        for spec in (("a", "b"), ("a", None), (None, ("b", "a")), ()):
            spread = jax.device_put(
                values,
                jax.sharding.NamedSharding(
                    mesh, jax.sharding.PartitionSpec(*spec)
                ),
            )
            for function in (digests.of_arrays, digests.on_devices):
                found = function({"a": spread})
                assert not digests.different(expected, found)
        for place in np.ndindex(values.shape):
            other = values.copy()
            other[place] = (
                1 - other[place] if dtype != "bool" else ~other[place]
            )
            found = digests.of_arrays({"a": jax.numpy.asarray(other)})
            assert digests.different(expected, found) == ["a"]
        other = values[::-1]
        found = digests.of_arrays({"a": jax.numpy.asarray(other)})
        assert digests.different(expected, found)

    @parameterized.expand([((),), ((1,),), ((0, 3),), ((4, 1),), ((2, 3, 4),)])
    def test_shapes(self, shape):
        array = jax.numpy.arange(1.0, 1 + np.prod(shape)).reshape(shape)
        assert not digests.different(
            digests.of_arrays({"a": array}), digests.on_devices({"a": array})
        )

    def test_large_arrays_are_added_up_in_portions(self, monkeypatch):
        arrays = {
            str(shape): jax.random.normal(jax.random.key(0), shape)
            for shape in ((300,), (7, 100), (100, 7), (5, 6, 9))
        }
        expected = digests.on_devices(arrays)
        for elements in (1, 5, 64):
            monkeypatch.setattr(digests, "_AT_A_TIME", elements)
            found = digests.of_arrays(arrays)
            assert not digests.different(expected, found)

    @pytest.mark.extra
    def test_on_several_processes(self):
        (expected, _), *_ = shared_cluster(*ONE).call(
            checkpointed.digest, "first"
        )
        for where in ("last", "fsdp"):
            for answers in shared_cluster(*TWO).call(
                checkpointed.digest, where
            ):
                for found in answers:
                    assert found.keys() == expected.keys()
                    assert not digests.different(expected, found)

    def test_signs_count(self):
        values = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
        expected = digests.of_arrays({"a": jax.numpy.asarray(values)})
        found = digests.of_arrays({"a": jax.numpy.asarray(-values)})
        assert digests.different(expected, found) == ["a"]

    def test_values_before_they_are_donated(self):
        array = jax.numpy.arange(4096.0)
        expected = digests.of_arrays({"a": array})["a"]
        later = digests.begin({"a": array})
        step = jax.jit(lambda x: x + 1, donate_argnums=0)
        jax.block_until_ready(step(step(array)))
        np.testing.assert_array_equal(later()[0], expected)


class TestErrors:
    @pytest.fixture
    def folder(self, tmp_path):
        checkpointed.run("first", str(tmp_path / "c"), epochs=2)
        return tmp_path / "c"

    def restore(self, folder, **arguments):
        with saved.distribution("first").scope():
            model = arguments.pop("model", built)()
            before = saved.values(model)
            try:
                return kmd.restore(model, folder, **arguments)
            finally:
                self.before, self.after = before, saved.values(model)

    def test_no_directory(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="Received: .*nowhere"):
            self.restore(tmp_path / "nowhere")

    def test_no_checkpoint(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has the steps \[\]"):
            self.restore(tmp_path)

    @pytest.mark.extra
    def test_no_such_step(self, folder):
        with pytest.raises(FileNotFoundError, match=r"has the steps \[8, 16\]"):
            self.restore(folder, step=5)

    @pytest.mark.extra
    def test_no_best(self, folder):
        with pytest.raises(ValueError, match="no checkpoint has a monitored"):
            self.restore(folder, best=True)

    def test_foreign(self, tmp_path):
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(tmp_path) as manager:
            values = {"a": np.ones(3)}
            manager.save(3, args=ocp.args.StandardSave(values))
        with pytest.raises(ValueError, match="must be one that"):
            self.restore(tmp_path)

    def test_not_built(self, folder):
        model = keras.Sequential([keras.layers.Dense(2)])
        with pytest.raises(ValueError, match="must be built"):
            kmd.restore(model, folder)

    @pytest.mark.extra
    def test_other_variables(self, folder):
        def build():
            model = keras.Sequential(
                [
                    keras.Input((16,)),
                    keras.layers.Dense(4, name="up"),
                    keras.layers.Dense(3, name="more"),
                ],
                name="saved",
            )
            model.compile("sgd", "mse")
            return model

        with pytest.raises(ValueError, match="must have the vari") as caught:
            self.restore(folder, model=build)
        message = str(caught.value)
        assert "model/saved/more/kernel" in message
        assert "not in the model: model/saved/norm/gamma" in message
        assert (
            "model/saved/up/kernel [[16, 32], 'float32'] instead of "
            "[[16, 4], 'float32']" in message
        )
        same(self.before, self.after)
        assert self.restore(folder, model=build, strict=False) == 16

    @pytest.mark.extra
    def test_nothing_is_drawn_for_what_is_restored(self, folder, monkeypatch):
        def draw(*args, **kwargs):
            raise AssertionError("drawn")

        self.restore(folder)
        with saved.distribution("first").scope():
            for name in ("uniform", "normal", "truncated_normal"):
                monkeypatch.setattr(jax.random, name, draw)
            with kmd.skip_initializers():
                model = built()
                assert kmd.restore(model, folder) == 16
            same(self.after[:7], saved.values(model)[:7])

    @pytest.mark.extra
    def test_not_compiled(self, folder):
        def uncompiled():
            layers = saved.build(3).layers
            return keras.Sequential([keras.Input((16,)), *layers], name="saved")

        with saved.distribution("first").scope():
            weights = []
            for build in built, uncompiled:
                model = build()
                assert kmd.restore(model, folder) == 16
                weights.append(model.get_weights())
        for one, other in zip(*weights, strict=True):
            np.testing.assert_array_equal(one, other)

    @parameterized.expand(["other bytes", "truncated", "gone"])
    @pytest.mark.extra
    # Orbax drops tasks of its event loop when a read fails.
    @pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    )
    def test_corrupt(self, how):
        with saved.folder() as folder:
            folder = folder / "c"
            checkpointed.run("first", str(folder), epochs=2)
            files = [p for p in (folder / "16").rglob("d/*") if p.is_file()]
            largest = max(files, key=lambda p: p.stat().st_size)
            content = bytearray(largest.read_bytes())
            if how == "other bytes":
                for i in range(200, len(content) - 200, 50):
                    content[i] ^= 1
                largest.write_bytes(content)
            elif how == "truncated":
                largest.write_bytes(content[: len(content) // 2])
            else:
                largest.unlink()
            with pytest.raises(OSError, match=r"step 16 of .*"):
                self.restore(folder)
            assert self.restore(folder, step=8) == 8

    @pytest.mark.extra
    def test_digests(self, folder):
        path = folder / "16" / "digests" / "digests"
        digests_ = json.loads(path.read_text())
        meta = json.loads((folder / "16" / "meta" / "metadata").read_text())
        assert digests_.keys() == meta["variables"].keys()
        key = list(digests_)[1]
        for change, message in (
            ({key: [1, 2]}, f"the values of {key} have other digests"),
            (None, "whose digests can't be read"),
        ):
            path.unlink()
            if change is not None:
                path.write_text(json.dumps(digests_ | change))
            with pytest.raises(OSError, match=message):
                self.restore(folder)
            assert self.restore(folder, step=8) == 8

    @pytest.mark.extra
    def test_a_directory_of_another_run(self, folder):
        with pytest.raises(ValueError, match="resume=True"):
            checkpointed.run("first", str(folder))
        assert checkpointed.steps_in(folder) == [8, 16]

    def test_without_a_distribution(self, tmp_path):
        model = built()
        callback = kmd.callbacks.Checkpoint(tmp_path / "c")
        with pytest.raises(ValueError, match="Checkpoints need a distribution"):
            model.fit(*saved.data(), verbose=0, callbacks=[callback])

    @parameterized.expand(
        [
            ({"mode": "auto"}, "`mode` must be"),
            ({"save_freq": 0}, "`save_freq` must be"),
            ({"save_freq": "batch"}, "`save_freq` must be"),
            ({"keep": 0}, "`keep` must be"),
        ]
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            kmd.callbacks.Checkpoint("c", **arguments)

    @pytest.mark.extra
    def test_a_name_that_is_not_logged(self, tmp_path):
        with pytest.warns(UserWarning, match="Received: 'val_los', where"):
            checkpointed.run(
                "first", str(tmp_path / "c"), monitor="val_los", epochs=1
            )

    @pytest.mark.extra
    @pytest.mark.parametrize("asynchronous", [True, False])
    def test_a_failed_save_ends_the_run(self, tmp_path, asynchronous):
        """Where the directory was is a file; what had been saved is moved."""
        folder, moved = tmp_path / "c", tmp_path / "moved"

        class TakeAway(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if not moved.exists() and checkpointed.steps_in(folder):
                    folder.rename(moved)
                    folder.write_text("")

        saved.with_scope("first")
        try:
            model = saved.build(1)
            callback = kmd.callbacks.Checkpoint(
                folder, save_freq=4, asynchronous=asynchronous
            )
            with pytest.raises(Exception, match="Not a directory|File exists"):
                model.fit(
                    *checkpointed.data(),
                    batch_size=8,
                    epochs=50,
                    verbose=0,
                    callbacks=[callback, TakeAway()],
                )
        finally:
            keras.distribution.set_distribution(None)
        assert self.restore(moved) == checkpointed.steps_in(moved)[-1]

    @pytest.mark.extra
    def test_a_signal_after_a_failed_run_ends_the_process(self, tmp_path):
        """Nobody tells a callback that `fit` has raised."""
        received = []
        before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
        try:
            saved.with_scope("first")
            model = saved.build(1)
            callback = kmd.callbacks.Checkpoint(tmp_path / "d")
            watched = checkpointed.recorder(stop_after=3)
            with pytest.raises(KeyboardInterrupt):
                model.fit(
                    *saved.data(),
                    batch_size=2,
                    verbose=0,
                    callbacks=[callback, watched],
                )
            signal.raise_signal(signal.SIGTERM)
            assert received == [1]
        finally:
            keras.distribution.set_distribution(None)
            signal.signal(signal.SIGTERM, before)
