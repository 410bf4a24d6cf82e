"""Runs Keras' own test files, as they lie in its wheel, in this process.

`python -m tests.upstream.runner MODE REPORT FILE... [pytest options]` writes
the outcomes as JSON into the file REPORT.
"""

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import pytest

# `plain`: Keras alone. `installed`: our package is imported, so its hooks are
# there. `substituted`: our class also stands wherever Keras' tests look for
# `ModelParallel`. `under`: each test also runs under one of our distributions.
MODES = ("plain", "installed", "substituted", "under")

# The batch axis last, where Keras' own arithmetic goes wrong first.
_MESH = (2, 4), ("model", "batch")

Outcomes = dict[str, tuple[str, str]]


def run(mode: str, arguments: Sequence[str]) -> Outcomes:
    """Runs test files and returns `{test: (outcome, reason)}`."""
    plugin = _Plugin(mode)
    # Neither the settings nor the conftest files of the project, whose strict
    # warnings are not meant for these tests.
    own = ["-c", os.devnull, "--rootdir=/", "--noconftest", "-q", "--tb=short"]
    off = ["-p", "no:cacheprovider", "-p", "no:faulthandler"]
    status = pytest.main([*own, *off, *arguments], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"Keras' tests did not run: {status!r}.")
    return plugin.outcomes


class _Plugin:
    def __init__(self, mode: str):
        if mode not in MODES:
            raise ValueError(f"Received: mode={mode!r}. Valid: {MODES}.")
        self._mode = mode
        self.outcomes: Outcomes = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        for marker in ("multi_device", "requires_trainable_backend"):
            config.addinivalue_line("markers", f"{marker}: one of Keras'")
        # A test of Keras empties `os.environ`, the number of virtual devices
        # with it, so the devices have to exist before.
        import jax

        jax.devices()
        if self._mode == "plain":
            return
        import keras_meshdist as kmd

        if self._mode != "installed":
            _substitute(kmd)
        if self._mode == "under":
            _set_around_tests(kmd)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What stands before `::` is where this machine keeps its packages.
        name = report.nodeid.partition("::")[2]
        known, _ = self.outcomes.setdefault(name, ("passed", ""))
        if report.outcome == "passed" or known == "failed":
            return
        reason = report.longreprtext.strip()
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        self.outcomes[name] = (report.outcome, reason)


def _substitute(kmd: Any) -> None:
    import keras
    from keras.src import distribution
    from keras.src.distribution import distribution_lib

    for module in (keras.distribution, distribution, distribution_lib):
        # Keras' LayoutMap stays: who changes nothing but the distribution's
        # constructor gives us one of those.
        module.ModelParallel = kmd.ModelParallel


def _set_around_tests(kmd: Any) -> None:
    import keras
    from keras.src.testing import TestCase

    set_up = TestCase.setUp

    def set_up_under(self):
        # Keras' own part clears the global state, so it has to come first.
        set_up(self)
        mesh = keras.distribution.DeviceMesh(*_MESH)
        distribution = kmd.ModelParallel(
            layout_map=keras.distribution.LayoutMap(mesh),
            batch_dim_name="batch",
        )
        keras.distribution.set_distribution(distribution)
        self.addCleanup(keras.distribution.set_distribution, None)

    TestCase.setUp = set_up_under


if __name__ == "__main__":
    _mode, _report, *_arguments = sys.argv[1:]
    pathlib.Path(_report).write_text(json.dumps(run(_mode, _arguments)))
