"""Barriers and values between processes."""

import threading
import time

import pytest

from keras_meshdist import coordination
from tests.clusters import local_only, shared_cluster

# Above what JAX 0.4 takes in one message.
LARGE = 9 * 2**20


def shared():
    return shared_cluster(3, 2)


def exchange_own(name, times=1):
    me = coordination.process_id()
    for i in range(times):
        values = coordination.exchange(name, f"{me}:{i}".encode(), 30)
    return values


def exchange_large(name):
    me = coordination.process_id()
    value = bytes([me]) * (LARGE if me == 1 else me)
    values = coordination.exchange(name, value, 60)
    return [(len(value), set(value)) for value in values]


def keys_left():
    from jax._src import distributed

    client = distributed.global_state.client
    return client.key_value_dir_get_bytes("meshdist/")


def broadcast_own(name):
    me = coordination.process_id()
    value = b"from 0" if me == 0 else None
    return coordination.broadcast(name, value, 30)


def wait_for_last(name):
    """When each passed the barrier, and when the last came to it."""
    me, passed = coordination.process_id(), []
    for last in (1, 2, 0):
        if me == last:
            time.sleep(0.3)
        came = time.monotonic()
        coordination.barrier(name, 30)
        passed.append((came, time.monotonic()))
    return passed


def come_late(kind):
    """Process 0 waits for half a second, the others come after three."""

    def call(timeout):
        if kind == "barrier":
            coordination.barrier("late barrier", timeout)
        else:
            coordination.exchange("late exchange", b"x", timeout)

    coordination.barrier("start", 30)
    late = coordination.process_id() != 0
    if late:
        # The service looks at its time limits about once a second.
        time.sleep(3.0)
    start = time.monotonic()
    try:
        call(timeout=30 if late else 0.5)
    except RuntimeError as error:
        return str(error), None, None, time.monotonic() - start
    except coordination.MissingProcessError as error:
        took = time.monotonic() - start
        return str(error), error.name, error.missing, took
    return "no error"


def from_a_thread():
    values = []
    thread = threading.Thread(
        target=lambda: values.append(exchange_own("thread"))
    )
    thread.start()
    thread.join(30)
    return values


@local_only
def test_one_process_never_waits():
    assert coordination.process_count() == 1
    assert coordination.process_id() == 0
    assert not coordination.initialized()
    coordination.barrier("alone", timeout=0.001)
    assert coordination.exchange("alone", b"mine", 0.001) == [b"mine"]
    assert coordination.broadcast("alone", b"mine", 0.001) == b"mine"


@local_only
def test_broadcast_needs_a_value_on_process_0():
    with pytest.raises(ValueError, match=r"'alone'.*Received: value=None"):
        coordination.broadcast("alone", None)


@pytest.mark.timeout(240)
def test_every_process_gets_all_values_in_order():
    expected = [b"0:0", b"1:0", b"2:0"]
    assert shared().call(exchange_own, "order") == [expected] * 3


@pytest.mark.timeout(240)
def test_a_name_may_be_used_again_and_leaves_no_keys():
    expected = [b"0:19", b"1:19", b"2:19"]
    assert shared().call(exchange_own, "again", times=20) == [expected] * 3
    assert shared().call(keys_left) == [[], [], []]


@pytest.mark.timeout(240)
def test_values_may_be_empty_or_larger_than_a_message():
    expected = [(0, set()), (LARGE, {1}), (2, {2})]
    assert shared().call(exchange_large, "large") == [expected] * 3
    assert shared().call(keys_left) == [[], [], []]


@pytest.mark.timeout(240)
def test_broadcast_gives_the_value_of_process_0():
    assert shared().call(broadcast_own, "cast") == [b"from 0"] * 3


@pytest.mark.timeout(240)
@local_only  # the clocks of several hosts can't be compared
def test_nobody_passes_a_barrier_before_the_last_has_come():
    for round_ in zip(*shared().call(wait_for_last, "gate"), strict=True):
        last_came = max(came for came, _ in round_)
        assert all(passed >= last_came for _, passed in round_)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["barrier", "exchange"])
def test_missing_processes_are_named(kind):
    first, second, third = shared().call(come_late, kind)
    message, name, missing, took = first
    assert missing == (1, 2)
    assert name == f"late {kind}"
    assert f"come to 'late {kind}' within 0.5 seconds" in message
    assert "nothing from processes 1, 2" in message
    assert "this is process 0 of 3" in message
    assert 0.4 < took < 20
    message, _, _, took = second
    assert f"come to 'late {kind}' in time" in message
    assert "have given up waiting (this is process 1 of 3)" in message
    assert took < 20
    assert "this is process 2 of 3" in third[0]
    assert shared().call(keys_left) == [[], [], []]


@pytest.mark.timeout(240)
def test_works_from_a_thread():
    expected = [[b"0:0", b"1:0", b"2:0"]]
    assert shared().call(from_a_thread) == [expected] * 3
