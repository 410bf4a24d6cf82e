"""The recipe for Ray on its page: two workers that join JAX's own job."""

import os
import re
from pathlib import Path

import pytest

import keras_meshdist as kmd
from tests import joined
from tests.clusters import local_only

ROOT = Path(__file__).parents[1]

ray = pytest.importorskip("ray", reason="Ray isn't installed: nox -s ray")

pytestmark = [local_only, pytest.mark.extra, pytest.mark.timeout(280)]


def recipe():
    """The code on the page, as it stands there."""
    page = (ROOT / "docs" / "multi-host.md").read_text()
    section = page.partition("## Ray\n")[2].partition("\n## ")[0]
    namespace = {"__name__": "__main__", "train": joined.train}
    exec(re.search(r"^```py\n(.*?)^```$", section, re.M | re.S)[1], namespace)
    return namespace


@pytest.fixture
def local_ray():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


def test_two_workers_train_as_one_process(local_ray):
    variables = kmd.cluster.environment(4, {})
    first, second = recipe()["train_on_ray"](
        joined.train, 2, runtime_env={"env_vars": variables}
    )
    assert (first["processes"], first["devices"]) == (2, 8)
    assert (first["process"], second["process"]) == (0, 1)
    assert first["launcher"] == second["launcher"] == "Ray"
    for name in ("losses", "weights"):
        assert first[name] == second[name]
    expected = joined.train(mesh=False)
    for mine, other in zip(first["losses"], expected["losses"], strict=True):
        assert abs(mine - other) < 1e-5 * abs(other)
    assert os.getpid() not in (first["pid"], second["pid"])
