"""Any dataset, any batch size, any number of processes, against one device."""

import dataclasses
import importlib.util

import pytest
from parameterized import parameterized

from tests import conformance
from tests.clusters import shared_cluster
from tests.kinds import NEEDS

GRAIN_IN_KERAS = "keras.src.trainers.data_adapters.grain_dataset_adapter"


def _order(case):
    """Cases that share processes, a model and its programs follow another."""
    return case.processes, case.mesh, case.style, case.size, str(case)


PAIRWISE = sorted(conformance.pairwise(), key=_order)
WITH_AUC = {case for case in PAIRWISE if case.processes != (4, 2)}
REST = sorted(set(conformance.all_cases()) - WITH_AUC, key=_order)


def _name(function, _, parameters):
    return f"{function.__name__}_{parameters.args[0]}"


def _run(case):
    needed = NEEDS.get(case.kind)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: nox -s full")
    if needed == "grain" and importlib.util.find_spec(GRAIN_IN_KERAS) is None:
        pytest.skip("this version of Keras takes no Grain datasets")
    results = shared_cluster(*case.processes).call(conformance.train, case)
    conformance.check(case, results)


def _cases(chosen):
    return parameterized.expand([(case,) for case in chosen], name_func=_name)


def _on(processes):
    return _cases(
        case
        for case in PAIRWISE
        if case.processes == processes and case.style != "eagerly"
    )


class TestConformance:
    @_on((1, 8))
    @pytest.mark.matrix
    def test_pairwise_on_one_process(self, case):
        _run(case)

    @_on((2, 4))
    @pytest.mark.matrix
    def test_pairwise_on_two_processes(self, case):
        _run(case)

    @_on((4, 2))
    def test_pairwise_on_four_processes(self, case):
        # Each of them compiles; the whole matrix has an AUC here too.
        _run(dataclasses.replace(case, auc=False))

    @_cases(case for case in PAIRWISE if case.style == "eagerly")
    @pytest.mark.extra
    def test_pairwise_eagerly(self, case):
        # Each operation is compiled for itself.
        _run(dataclasses.replace(case, auc=case in WITH_AUC))

    @_cases(REST)
    @pytest.mark.full
    def test_rest(self, case):
        _run(case)
