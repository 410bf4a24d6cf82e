"""Keras' own tests of distribution and training, with our package there.

Hooks must leave foreign distributions alone, and our class must do what
Keras' tests ask of Keras' class, but for what contradicts a promise of ours.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from keras_meshdist import cluster
from tests.clusters import local_only
from tests.upstream import runner

pytestmark = local_only

DISTRIBUTION = "keras.src.distribution.distribution_lib_test"
BACKEND = "keras.src.backend.jax.distribution_lib_test"
PROCESSES = "keras.src.backend.jax.jax_multi_process_distribution_test"
TRAINER = "keras.src.trainers.trainer_test"

_DATASETS = (
    "every process iterates over the same global dataset, and Keras' own "
    "sharding of datasets is off"
)
_SHARDING = "TfDatasetDistributionTest::test_"
_FEEDS = (
    "JaxMultiProcessDistributeTest::test_dataset_distribution_model_parallel_"
)
_SPARSE = {
    f"TestTrainer::test_{call}_sparse_{kind}_{mode}": (
        "a sparse batch is refused with a message that says so; Keras' own "
        "class fails on it deep inside JAX"
    )
    for call in ("fit", "evaluate", "predict")
    for kind in ("tf", "jax", "scipy")
    for mode in ("eager", "graph")
}

# What Keras' tests demand of `ModelParallel` and ours doesn't do: by file, way
# and number of processes the tests, each with the promise that it contradicts.
# A test in here that passes is an error too.
CONTRADICTED = {
    (DISTRIBUTION, "substituted", 1): {
        "ModelParallelDistributionTest::test_distribute_weights": (
            "a rule whose layout has another rank than the variable raises; "
            "the test's kernel is `np.arange(8, 4)`, of one dimension"
        ),
        "ModelParallelDistributionTest::test_num_processes_validation": (
            "any number of processes may hold the batch shards, 4 processes "
            "3 of them too"
        ),
        f"{_SHARDING}distribute_tf_dataset_error_not_divisible": (
            "any batch size works"
        ),
        f"{_SHARDING}distribute_tf_dataset_multiple_replicas_per_process": (
            _DATASETS
        ),
        f"{_SHARDING}unknown_batch_size": (
            "a tf.data dataset may be mapped after it was batched"
        ),
        f"{_SHARDING}unsupported_dataset_type": "all kinds of datasets work",
        "DataShardingIntegrationTest::"
        "test_distribute_dataset_sharding_behavior": _DATASETS,
    },
    # On one process there is nothing to shard, and these pass.
    (PROCESSES, "substituted", 4): {
        f"{_FEEDS}data_only": _DATASETS,
        f"{_FEEDS}data_model": _DATASETS,
        f"{_FEEDS}model_data": _DATASETS,
    },
    (TRAINER, "under", 1): _SPARSE,
    (TRAINER, "under", 2): {
        **_SPARSE,
        "JAXTrainerCorrectnessTest::"
        "test_jit_fit_with_out_shardings_logic_distributed": (
            "foreign distributions are untouched: this is Keras' DataParallel, "
            "which takes no arrays on several processes"
        ),
    },
}

full, extra = pytest.mark.full, pytest.mark.extra


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("module", "mode", "some"),
    [
        pytest.param(DISTRIBUTION, "installed", "", marks=extra),
        pytest.param(DISTRIBUTION, "substituted", "", marks=extra),
        pytest.param(BACKEND, "installed", "", marks=full),
        pytest.param(BACKEND, "substituted", "", marks=full),
        pytest.param(PROCESSES, "installed", "", marks=full),
        pytest.param(
            PROCESSES, "substituted", "data_model or list_device", marks=extra
        ),
        pytest.param(PROCESSES, "substituted", "", marks=full),
        pytest.param(TRAINER, "installed", "", marks=full),
        pytest.param(TRAINER, "substituted", "", marks=full),
        pytest.param(TRAINER, "under", "", marks=full),
    ],
)
def test_one_process(module, mode, some):
    outcomes = run(module, mode, some)
    listed = CONTRADICTED.get((module, mode, 1), {})
    others = {
        test: outcome
        for test, (outcome, _) in outcomes.items()
        if outcome != "passed" and test not in listed
    }
    # What Keras alone skips or fails, for instance for want of a package.
    plain = run(module, "plain", some) if others else {}
    alike = {
        test for test, outcome in others.items() if plain[test][0] == outcome
    }
    for test in sorted(alike):
        print(f"{others[test]} without our package too: {test}")
    check(listed, {t: o for t, o in outcomes.items() if t not in alike})


@full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("module", "mode", "processes", "devices", "some"),
    [
        # The number of processes that Keras' file asks for.
        (PROCESSES, "installed", 4, 2, ""),
        (PROCESSES, "substituted", 4, 2, ""),
        # Its PyDataset works on a device of the first process, wherever it is.
        (TRAINER, "under", 2, 4, "not py_dataset"),
    ],
)
def test_several_processes(module, mode, processes, devices, some):
    with cluster.Cluster(processes, devices, timeout=1700) as several:
        results = several.call(runner.run, mode, arguments(module, some))
    listed = CONTRADICTED.get((module, mode, processes), {})
    for outcomes in results:
        # Whether a test is skipped is compared on one process.
        check(listed, {t: o for t, o in outcomes.items() if o[0] != "skipped"})


def arguments(module, some):
    """The file of a test module of Keras, and which of its tests to run."""
    found = importlib.util.find_spec(module)
    if found is None:
        version = importlib.metadata.version("keras")
        pytest.skip(f"Keras {version} has no tests in its wheel")
    return [found.origin, *(["-k", some] if some else [])]


@functools.cache
def run(module, mode, some):
    """The outcomes of a file, from a process of its own.

    One for each file: one of them replaces Keras' backend by a mock.
    """
    command = [sys.executable, "-m", "tests.upstream.runner", mode]
    environment = {**os.environ, **cluster.environment(8)}
    # Options for the tests that run now, not for those started here.
    environment.pop("PYTEST_ADDOPTS", None)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "outcomes.json"
        done = subprocess.run(
            [*command, report, *arguments(module, some)],
            cwd=pathlib.Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=850,
        )
        assert done.returncode == 0, done.stdout
        return json.loads(report.read_text())


def check(listed, outcomes):
    """Raises unless exactly the listed tests failed."""
    assert outcomes
    failed = {
        test: reason
        for test, (outcome, reason) in outcomes.items()
        if outcome != "passed"
    }
    unexpected = failed.keys() - listed.keys()
    assert not unexpected, "\n\n".join(
        f"{test}\n{failed[test]}" for test in sorted(unexpected)
    )
    passed = {test for test in listed if test in outcomes} - failed.keys()
    assert not passed, f"listed as contradicted, but passed: {sorted(passed)}"
