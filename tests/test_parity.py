"""Every mesh on every process layout against one device."""

import pytest
from parameterized import parameterized

from tests import parity
from tests.clusters import shared_cluster
from tests.meshes import (
    COVERING,
    OVERLAPPING,
    POD,
    SMALL_BATCHES,
    SPECIAL,
    WINDOWS,
    all_meshes,
)

ALL = (*all_meshes(), *SPECIAL)


def _name(function, _, parameters):
    return f"{function.__name__}_{parameters.args[0]}"


def _run(processes, devices, case, everything=True):
    # How programs are partitioned is the same, and XLA takes minutes to
    # optimize the code of convolutions.
    optimize = case in COVERING and case.model != "windows" and processes == 1
    results = shared_cluster(processes, devices).call(
        parity.train, case, optimize=optimize, everything=everything
    )
    parity.check(case, results, everything)


def _cases(cases):
    return parameterized.expand([(case,) for case in cases], name_func=_name)


REST = tuple(case for case in ALL if case not in COVERING)
PLAIN = tuple(case for case in REST if case not in SPECIAL)
# Models whose programs take long to compile, and which others of COVERING and
# of SPECIAL have too.
LONG = tuple(
    case
    for case in SPECIAL
    if case.model == "windows" or (case.model, case.rows) == ("rows", 29)
)


class TestOneProcess:
    @_cases(COVERING)
    def test_1x8(self, case):
        _run(1, 8, case)

    @_cases(PLAIN)
    @pytest.mark.matrix
    def test_1x8_rest(self, case):
        _run(1, 8, case, everything=False)

    @_cases(case for case in SPECIAL if case in REST and case not in LONG)
    @pytest.mark.matrix
    def test_1x8_special(self, case):
        _run(1, 8, case)

    @_cases(LONG)
    @pytest.mark.full
    def test_1x8_long(self, case):
        _run(1, 8, case)

    @_cases(PLAIN)
    @pytest.mark.full
    def test_1x8_everything(self, case):
        _run(1, 8, case)

    @_cases(WINDOWS)
    @pytest.mark.full
    def test_1x8_windows(self, case):
        _run(1, 8, case)


class TestTwoProcesses:
    @_cases(COVERING)
    def test_2x4(self, case):
        _run(2, 4, case)

    @_cases(PLAIN)
    @pytest.mark.matrix
    def test_2x4_rest(self, case):
        _run(2, 4, case, everything=False)

    @_cases(REST)
    @pytest.mark.full
    def test_2x4_everything(self, case):
        _run(2, 4, case)


# The covering ten are on four or on eight processes.
EIGHT = COVERING[5:8]
FOUR = tuple(case for case in COVERING if case not in EIGHT)


class TestFourProcesses:
    @_cases(FOUR)
    def test_4x2(self, case):
        _run(4, 2, case)

    @_cases(case for case in ALL + COVERING if case not in FOUR)
    @pytest.mark.full
    def test_4x2_rest(self, case):
        _run(4, 2, case)


@pytest.mark.crowd
class TestEightProcesses:
    @_cases(EIGHT)
    @pytest.mark.matrix
    def test_8x1(self, case):
        _run(8, 1, case, everything=False)

    @_cases(ALL + COVERING)
    @pytest.mark.full
    def test_8x1_everything(self, case):
        _run(8, 1, case)


class TestThreeProcesses:
    @_cases(OVERLAPPING[:1])
    def test_3x2(self, case):
        _run(3, 2, case)

    @_cases(OVERLAPPING[1:])
    @pytest.mark.full
    def test_3x2_rest(self, case):
        _run(3, 2, case)


class TestMoreDevicesThanRows:
    @_cases(SMALL_BATCHES)
    @pytest.mark.crowd
    @pytest.mark.full
    def test_8x4(self, case):
        _run(8, 4, case)

    @_cases(POD[:1])
    @pytest.mark.extra
    def test_1x256(self, case):
        _run(1, 256, case)

    @_cases(POD[1:])
    @pytest.mark.full
    def test_1x256_rest(self, case):
        _run(1, 256, case)
