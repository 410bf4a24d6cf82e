"""Each process yields its own rows: `auto_shard_dataset=False`."""

import pytest
from parameterized import parameterized

from tests import datasets, processes
from tests.clusters import shared_cluster
from tests.conformance import Case
from tests.test_conformance import _name, _run

FOUR, TWO = (4, 2), (2, 4)


def case(processes, feeds, mesh="first", kind="numpy", style="plain", size=8):
    rows = (sum(feeds), size)
    return Case(kind, processes, rows, mesh, style, feeds)


CASES = (
    # Processes that share a feed.
    case(TWO, (19,), mesh="last", style="train_step"),
)
MORE = (
    # 61 rows dealt to four feeds, in batches of eight.
    case(FOUR, (16, 15, 15, 15)),
    # Feeds that have ended, or never begin.
    case(FOUR, (17, 0, 3, 0)),
)
REST = (
    case(FOUR, (5, 4, 4, 4), mesh="two", kind="tf"),
    case(FOUR, (1, 0, 0, 0), kind="tf_mapped", size=1),
    case(FOUR, (9, 20), mesh="halves"),
    case(FOUR, (3, 17, 1, 9), mesh="two", kind="py_dataset"),
    case(FOUR, (9, 8, 8, 1), style="executions"),
    case(FOUR, (9, 8, 0, 1), style="eagerly", kind="tf_filtered"),
    case(TWO, (19, 13), kind="jax"),
)


def _cases(cases):
    return parameterized.expand([(c,) for c in cases], name_func=_name)


class TestOwnFeeds:
    @_cases(CASES)
    def test_every_row_once(self, chosen):
        _run(chosen)

    @_cases(MORE)
    @pytest.mark.extra
    def test_every_row_once_more(self, chosen):
        _run(chosen)

    @_cases(REST)
    @pytest.mark.full
    def test_every_row_once_full(self, chosen):
        _run(chosen)


def fit(dataset, processes_and_devices=FOUR, **arguments):
    return shared_cluster(*processes_and_devices).call(
        processes.fit_on,
        {"b": 2, "m": 4},
        dataset,
        auto_shard_dataset=False,
        **arguments,
    )


@pytest.mark.parametrize(
    ("dataset", "seen"),
    [
        (datasets.odd_more_rows, "0: 8 rows; process 1: 9 rows"),
        (datasets.odd_longer, "process 0: no batch, its dataset has ended"),
        (datasets.odd_other_contents, "contents"),
        (datasets.odd_other_dtype, "float64"),
    ],
)
def test_processes_that_share_a_feed_must_agree(dataset, seen):
    answers = fit(dataset, epochs=1, shuffle=False)
    assert len(set(answers)) == 1
    assert answers[0].startswith("DisagreementError: ")
    assert seen in answers[0]


def test_feeds_of_other_structure_are_an_error():
    answers = fit(datasets.half_other_dtype, epochs=1, shuffle=False)
    assert len(set(answers)) == 1
    assert "feeds of all processes must have the same structure" in answers[0]
    assert "processes 2, 3: " in answers[0]


def test_arrays_of_different_rows_are_an_error():
    answers = fit(datasets.uneven, epochs=1)
    assert "equally many rows" in answers[0]
    assert "[(8, 4), (7, 2)]" in answers[0]


@pytest.mark.parametrize("auto_shard_dataset", [True, False])
def test_each_row_is_seen_once(auto_shard_dataset):
    """Counted by a metric, on the devices."""
    for counts in shared_cluster(*FOUR).call(
        processes.count_rows, auto_shard_dataset
    ):
        assert counts == [1.0] * 37


def test_a_pipeline_reads_only_its_shard():
    """As the documentation shows it, with tf.data."""
    answers = shared_cluster(*FOUR).call(processes.sharded_pipeline)
    for losses, read, shard in answers:
        assert losses == answers[0][0]
        assert read == [n for n in range(32) if n % 2 == shard]
