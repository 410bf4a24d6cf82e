"""`meshdist demo`."""

import importlib.util
import io
import math
import signal

import numpy as np
import pytest
from rich.console import Console

from keras_meshdist import cli, demo
from keras_meshdist.cluster import ClusterError
from keras_meshdist.demo import cases, command, comparison, picture, report
from keras_meshdist.demo.cases import Case
from keras_meshdist.demo.comparison import Outcome
from keras_meshdist.demo.progress import Progress
from keras_meshdist.demo.runs import Result
from keras_meshdist.demo.training import Trained

_MESH = (("model", 4), ("batch", 2))


def trained(*losses, weight=1.0, accuracy=0.95):
    return Trained(list(losses), accuracy, [np.full((2, 3), weight)])


def results():
    """A result of every kind."""
    two_losses = [trained(2.3, 12.3), trained(2.2, 40.4)]
    ways = [
        {"NumPy": Outcome("same", "same", [trained(2.0, 0.1)])},
        {
            "NumPy": Outcome("error", "error: ValueError"),
            "tf.data": comparison.finished(two_losses, trained(2.0, 0.1)),
        },
        {"NumPy": Outcome("error", "error: IndivisibleError")},
        {
            "NumPy": Outcome("error", "error: ValueError"),
            "tf.data": Outcome("hang", "hang, cut off at 20 s"),
        },
        {"NumPy": Outcome("crash", "crash: SIGABRT")},
    ]
    found = [
        Result(case, [trained(2.0, 0.1)], 3e-7, keras=way)
        for case, way in zip(cases.default_cases(), ways, strict=False)
    ]
    references = dict.fromkeys(result.case.reference for result in found)
    return [
        *(Result(case, [trained(2.0, 0.1)]) for case in references),
        *found,
    ]


def printed(renderable, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


class TestCases:
    def test_all_tries_every_order_on_every_shape(self):
        found = cases.all_cases()

        assert len(set(found)) == len(found) == 3 * (2 + 2 + 6) * 2
        assert {case.shape for case in found} == {"1×8", "2×4", "4×2"}  # noqa: RUF001

    def test_default_has_several_processes_and_an_odd_batch(self):
        found = cases.default_cases()

        assert {case.devices * case.processes for case in found} == {8}
        assert any(
            case.batch == cases.ODD_BATCH and case.processes > 1
            for case in found
        )

    def test_rows_divide_as_promised(self):
        assert cases.TRAIN_ROWS % cases.EVEN_BATCH == 0
        assert cases.TEST_ROWS % cases.EVEN_BATCH == 0
        assert cases.TRAIN_ROWS % cases.SHORT_LAST_BATCH == 16


class TestComparison:
    def test_difference_is_relative_to_the_largest_magnitude(self):
        reference = trained(8.0, 4.0, weight=2.0)

        assert comparison.difference(reference, reference) == 0
        assert comparison.difference(
            trained(8.0, 4.4, weight=2.0), reference
        ) == pytest.approx(0.05)
        assert comparison.difference(
            trained(8.0, 4.0, weight=3.0), reference
        ) == pytest.approx(0.5)

    def test_difference_of_what_is_not_finite(self):
        reference = trained(1.0, 1.0)

        assert comparison.difference(
            trained(1.0, math.nan), reference
        ) == float("inf")

    @pytest.mark.parametrize(
        ("losses", "text"),
        [
            ([0.5, 0.5], "same"),
            ([0.41, 0.39], "wrong: loss 0.41 / 0.39"),
            ([44.3, 40.9, 44.3, 40.9], "wrong: loss 44 / 41"),
            ([3.0, 1.0, 2.0, 4.0], "wrong: loss 1.00 to 4.00"),
            ([math.nan, math.nan], "wrong: loss nan"),
            ([0.501, 0.5], "wrong: off by 1e-03"),
        ],
    )
    def test_finished(self, losses, text):
        outcome = comparison.finished(
            [trained(1.0, loss) for loss in losses], trained(1.0, 0.5)
        )

        assert outcome.text == text
        assert outcome.kind == text.partition(":")[0]

    def test_failed_names_the_exception(self):
        traceback = (
            "Traceback (most recent call last):\n"
            '  File "x.py", line 3, in f\n    g()\n'
            "KeyError: 'a'\n\n"
            "During handling of the above exception, another occurred:\n\n"
            "Traceback (most recent call last):\n"
            "jax._src.sharding.IndivisibleError: Sharding P('batch'),\n"
            "Received: 61 rows\n"
        )
        error = ClusterError("process 0 failed", 0, traceback)

        outcome = comparison.failed(error, None, took=30.0, limit=20.0)

        assert outcome == Outcome("error", "error: IndivisibleError")

    @pytest.mark.parametrize(
        ("returncode", "took", "outcome"),
        [
            (-signal.SIGKILL, 20.1, Outcome("hang", "hang, cut off at 20 s")),
            (-signal.SIGABRT, 3.0, Outcome("crash", "crash: SIGABRT")),
            (3, 3.0, Outcome("crash", "crash: exit status 3")),
            (None, 0.0, Outcome("crash", "crash")),
        ],
    )
    def test_failed_without_an_exception(self, returncode, took, outcome):
        error = ClusterError("process 0", 0)

        assert comparison.failed(error, returncode, took, 20.0) == outcome


class TestReport:
    @pytest.mark.parametrize("width", [80, 100])
    def test_table_fits(self, width):
        text = printed(report.table(results(), width), width)

        assert max(map(len, text.splitlines())) <= width
        words = " ".join(text.split())
        assert "tf.data: wrong: loss 12 / 40" in words
        assert "error: IndivisibleError" in words
        assert "…" not in text

    def test_table_of_a_case_that_failed(self):
        failed = Result(Case(2, _MESH, 61), error="process 1 failed\n  Trace")

        text = printed(report.table([failed], 100), 100)

        assert "failed" in text
        assert report.faults([failed]) == [
            "2×4 model=4 batch=2, batch 61: process 1 failed\n  Trace"  # noqa: RUF001
        ]

    @pytest.mark.parametrize(
        ("result", "fault"),
        [
            (Result(Case(2, _MESH, 64), [trained(0.1)], 9e-5), ""),
            (
                Result(Case(2, _MESH, 64), [trained(0.1)], 2e-4),
                "differs by 2.0e-04 from one device",
            ),
            (
                Result(Case(2, _MESH, 64), [trained(0.1)], math.nan),
                "differs by nan from one device",
            ),
            (
                Result(Case(2, _MESH, 64), [trained(0.1, accuracy=0.9)]),
                "has an accuracy of only 90.0%",
            ),
        ],
    )
    def test_fault(self, result, fault):
        assert result.fault == fault

    def test_picture(self, tmp_path):
        path = tmp_path / "curves.png"

        picture.save(results(), str(path))

        assert path.read_bytes().startswith(b"\x89PNG")


class TestProgress:
    def test_line_shows_what_the_processes_have_done(self):
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        with Progress(console, epochs=5) as progress:
            progress.total = 12
            progress.step("a case")
            with open(progress.path, "ab") as file:
                file.write(b"...")
            line = printed(progress.line(), 80)

        assert "1/12" in line
        assert "a case" in line
        assert "epoch 3/5" in line

    def test_log_where_there_is_no_terminal(self):
        console = Console(file=io.StringIO(), width=80)
        with Progress(console, epochs=5) as progress:
            progress.total = 2
            progress.step("a case")
            progress.step("another case")

        lines = console.file.getvalue().splitlines()
        assert [line.split("s ", 1)[1] for line in lines] == [
            "1/2 a case",
            "2/2 another case",
        ]


class TestCommand:
    def test_missing_extras(self, monkeypatch, capsys):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

        assert demo.run() == 2
        assert capsys.readouterr().err == (
            "meshdist demo: it needs scikit-learn and matplotlib. Run: "
            'pip install "keras-meshdist[demo]"\n'
        )

    def test_missing_folder(self, tmp_path, capsys):
        output = str(tmp_path / "none" / "x.png")

        assert cli.main(["demo", "--output", output]) == 2
        assert "folder of --output must exist" in capsys.readouterr().err

    def test_status_of_a_fault(self, monkeypatch, tmp_path, capsys):
        faulty = results()
        faulty[-1].difference = 0.5
        monkeypatch.setattr(command, "run_cases", lambda *args: faulty)

        status = demo.run(str(tmp_path / "x.png"))

        assert status == 1
        captured = capsys.readouterr()
        assert f"{faulty[-1].case}: differs by 5.0e-01" in captured.err
        assert "equal one device" not in captured.out

    def test_status_when_one_device_fails(self, monkeypatch, tmp_path, capsys):
        def fail(*args):
            raise ClusterError("process 0 failed")

        monkeypatch.setattr(command, "run_cases", fail)

        assert demo.run(str(tmp_path / "x.png")) == 1
        assert "process 0 failed" in capsys.readouterr().err

    @pytest.mark.full
    @pytest.mark.timeout(400)
    def test_two_cases(self, monkeypatch, tmp_path, capsys):
        few = [Case(processes, _MESH, cases.EVEN_BATCH) for processes in (1, 2)]
        monkeypatch.setattr(cases, "default_cases", lambda: few)
        output = tmp_path / "curves.png"

        status = cli.main(["demo", "--output", str(output)])

        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert "All 2 cases equal one device" in captured.out
        assert output.exists()

    @pytest.mark.full
    @pytest.mark.timeout(900)
    def test_all_of_the_default(self, tmp_path, capsys):
        output = tmp_path / "curves.png"

        status = cli.main(["demo", "--output", str(output)])

        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert "All 7 cases equal one device" in captured.out
        assert output.exists()
