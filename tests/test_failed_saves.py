"""Saves that fail: an error on all processes, and the last good one stays."""

import inspect

import keras
import pytest
from parameterized import parameterized

import keras_meshdist as kmd
from keras_meshdist import cluster
from tests import checkpointed, saved, written
from tests.clusters import close_all, local_only, shared_cluster
from tests.test_checkpoints import needs_try_get


class TestFullDisk:
    @parameterized.expand(list(written.SAVED))
    @local_only
    def test_plain_files(self, file):
        self.check((1, 8), file)

    @parameterized.expand(list(written.SAVED))
    @pytest.mark.extra
    @local_only
    def test_plain_files_on_several_processes(self, file):
        self.check((2, 4), file)

    def check(self, shape, file):
        parameters = inspect.signature(keras.Model.save_weights).parameters
        if file == "pieces" and "max_shard_size" not in parameters:
            pytest.skip("this version of Keras saves to one file only")
        with saved.folder() as folder:
            answers = shared_cluster(*shape).call(
                written.fill, "last", file, str(folder)
            )
            for process, (error, unchanged) in enumerate(answers):
                assert written.SAVED[file] in error
                assert "couldn't be written" in error
                assert "File too large" in error or "errno = 27" in error
                assert ("process 0 raised" in error) == (process == 1)
                assert unchanged

    @parameterized.expand([(True, 1)])
    @pytest.mark.extra
    @local_only
    @needs_try_get
    def test_checkpoints_of_one_process(self, asynchronous, failing):
        self.check_checkpoints(asynchronous, failing)

    @parameterized.expand([(True, 0), (False, 1)])
    @pytest.mark.full
    @local_only
    @needs_try_get
    def test_more_checkpoints_of_one_process(self, asynchronous, failing):
        self.check_checkpoints(asynchronous, failing)

    def check_checkpoints(self, asynchronous, failing):
        close_all()
        with saved.folder() as folder:
            with cluster.Cluster(2, 4, forward=False) as running:
                answers = running.call(
                    written.fail_to_checkpoint,
                    "last",
                    str(folder),
                    asynchronous,
                    failing,
                )
                assert len({steps for _, steps in answers}) == 1
                for error, _ in answers:
                    assert "OSError" in error
                    assert f"process {failing} can't write" in error
                    assert str(folder / "c") in error
                    assert "oo large" in error or "errno = 27" in error
            found = checkpointed.steps_in(folder / "c")
            assert found[0] == 4
            with saved.distribution("first").scope():
                model = written.build(2)
                assert kmd.restore(model, folder / "c") == found[-1]


@pytest.mark.extra
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_where_no_directory_can_be(tmp_path, shape):
    """Also as root, who may write to what is read-only."""
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "c")
    for error in shared_cluster(*shape).call(
        written.no_directory, "last", path
    ):
        assert "A checkpoint must be written whole" in error
        assert "Not a directory" in error
        assert path in error
