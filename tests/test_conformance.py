"""Any dataset, any batch size, any number of processes, against one device."""

import importlib.util

import pytest
from parameterized import parameterized

from tests import conformance
from tests.clusters import shared_cluster
from tests.kinds import NEEDS

# Cases of one process layout share its processes.
PAIRWISE = sorted(conformance.pairwise(), key=lambda case: case.processes)
REST = sorted(
    set(conformance.all_cases()) - set(PAIRWISE),
    key=lambda case: (case.processes, str(case)),
)


def _name(function, _, parameters):
    return f"{function.__name__}_{parameters.args[0]}"


def _run(case):
    needed = NEEDS.get(case.kind)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    results = shared_cluster(*case.processes).call(conformance.train, case)
    conformance.check(case, results)


class TestConformance:
    @parameterized.expand([(case,) for case in PAIRWISE], name_func=_name)
    def test_pairwise(self, case):
        _run(case)

    @parameterized.expand([(case,) for case in REST], name_func=_name)
    @pytest.mark.full
    def test_rest(self, case):
        _run(case)
