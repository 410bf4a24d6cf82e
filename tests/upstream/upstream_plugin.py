"""A pytest plugin under which Keras' own test files run with our package.

It is loaded with `-p upstream_plugin` into a process of its own, and is told
by environment variables what to do:

* `UPSTREAM_MODE`: `plain` (Keras alone), `installed` (our package imported,
  so its hooks are there), `substituted` (our class also stands wherever Keras'
  tests look for `ModelParallel`) or `under` (each test also runs under one of
  our distributions).
* `UPSTREAM_REPORT`: the JSON file that gets `{test id: [outcome, reason]}`.
"""

import json
import os
import pathlib

MODE = os.environ["UPSTREAM_MODE"]
REPORT = pathlib.Path(os.environ["UPSTREAM_REPORT"])
# The batch axis last: the order that a plain division by rank gets wrong.
MESH = (2, 4), ("model", "batch")

_outcomes = {}


def pytest_configure(config):
    for marker in ("multi_device", "requires_trainable_backend"):
        config.addinivalue_line("markers", f"{marker}: Keras' own marker")
    if "KERAS_DISTRIBUTION_NUM_PROCESSES" in os.environ:
        import keras

        keras.distribution.initialize()
    # Keras' `MultiProcessInitializeTest` empties `os.environ`, `XLA_FLAGS`
    # with it: the devices have to exist before its tests run.
    import jax

    jax.devices()
    if MODE != "plain":
        import keras_meshdist as kmd

        if MODE in ("substituted", "under"):
            _substitute(kmd)
        if MODE == "under":
            _set_distribution_around_tests(kmd)


def _substitute(kmd):
    import keras
    import keras.src.distribution

    modules = [
        keras.distribution,
        keras.src.distribution,
        keras.src.distribution.distribution_lib,
    ]
    for module in modules:
        # Keras' own LayoutMap stays: a user who changes the distribution's
        # constructor and nothing else hands us one of those.
        module.ModelParallel = kmd.ModelParallel


def _set_distribution_around_tests(kmd):
    import keras
    from keras.src.testing import TestCase

    keras_set_up = TestCase.setUp

    def set_up(self):
        # Keras' setUp clears the global state, so this has to come after it.
        keras_set_up(self)
        mesh = keras.distribution.DeviceMesh(*MESH)
        distribution = kmd.ModelParallel(
            layout_map=keras.distribution.LayoutMap(mesh),
            batch_dim_name="batch",
        )
        keras.distribution.set_distribution(distribution)
        self.addCleanup(keras.distribution.set_distribution, None)

    TestCase.setUp = set_up


def pytest_runtest_logreport(report):
    # The folder before `::` differs from one environment to the next.
    name = report.nodeid.partition("::")[2]
    outcome, reason = _outcomes.get(name, ("passed", ""))
    if report.outcome != "passed" and outcome != "failed":
        outcome = report.outcome
        reason = report.longreprtext.strip()
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
    _outcomes[name] = (outcome, reason)


def pytest_sessionfinish():
    REPORT.write_text(json.dumps(_outcomes, indent=1))
