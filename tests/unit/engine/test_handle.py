"""A handle is resolved once, tells everyone who waits, and waits no longer than it was told to."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hvdgloo._engine.handle import Handle
from hvdgloo._observe.counters import Counters
from hvdgloo.errors import PeerLostError, WaitTimeoutError
from hvdgloo.types import Buffer
from tests.support.interrupting import Line, at_each_line, interrupted_at
from tests.support.threads import Task, at_once


@pytest.mark.parametrize("timeout", [0, 0.02, -1])
def test_a_wait_ends_at_its_deadline_and_the_handle_stays_pending(timeout: float) -> None:
    handle = Handle("x")
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"x has not completed within .* still pending"):
        handle.wait(timeout)
    assert time.monotonic() - begin >= max(0, timeout) * 0.9
    assert not handle.done()
    handle.resolve()
    assert handle.wait(0) == ()


def test_an_endless_timeout_is_a_timeout() -> None:
    handle = Handle("x")
    waiting = Task(lambda: handle.wait(float("inf")))
    handle.resolve()
    assert waiting.result() == ()


def test_everyone_who_waits_gets_the_result() -> None:
    handle = Handle("x")
    output = Buffer.of_array(np.zeros(3))
    waiting = [Task(lambda: handle.wait(10)) for _ in range(5)]
    assert handle.resolve([output])
    assert [task.result() for task in waiting] == [(output,)] * 5
    assert handle.error is None
    assert handle.outputs == (output,)


def test_everyone_who_waits_gets_the_error_again_and_again() -> None:
    handle = Handle("x")
    error = PeerLostError("rank 1 was lost", rank=1)
    waiting = [Task(lambda: handle.wait(10)) for _ in range(4)]
    handle.resolve(error=error)
    waiting.append(Task(lambda: handle.wait(10)))
    assert [task.failure() is error for task in waiting] == [True] * 5
    assert handle.error is error


def test_a_repeated_error_does_not_pile_up_its_traceback() -> None:
    handle = Handle("x")
    handle.resolve(error=PeerLostError("lost"))
    depths = []
    for _ in range(3):
        with pytest.raises(PeerLostError) as caught:
            handle.wait()
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_only_the_first_resolution_counts() -> None:
    handle = Handle("x")
    calls: list[Handle] = []
    handle.add_done_callback(calls.append)
    assert handle.resolve()
    assert not handle.resolve(error=PeerLostError("too late"))
    handle.wait(0)
    assert handle.error is None
    assert calls == [handle]


def test_many_resolvers_one_wins() -> None:
    for _ in range(50):
        handle = Handle("x")
        barrier = threading.Barrier(3)

        def resolve(handle: Handle = handle, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(10)
            return handle.resolve()

        assert sorted(at_once(*[resolve] * 3)) == [False, False, True]


def test_callbacks_see_a_handle_that_is_done_whenever_they_were_added() -> None:
    handle = Handle("x")
    seen: list[tuple[str, bool]] = []
    handle.add_done_callback(lambda h: seen.append(("first", h.done())))
    handle.add_done_callback(lambda h: seen.append(("second", h.wait(0) == ())))
    assert seen == []
    handle.resolve()
    handle.add_done_callback(lambda h: seen.append(("late", h.done())))
    assert seen == [("first", True), ("second", True), ("late", True)]


def test_a_callback_may_add_another() -> None:
    handle = Handle("x")
    seen: list[int] = []
    handle.add_done_callback(lambda h: h.add_done_callback(lambda _: seen.append(1)))
    handle.resolve()
    assert seen == [1]


def test_no_callback_is_lost_or_called_twice_in_a_race() -> None:
    for _ in range(50):
        handle = Handle("x")
        calls: list[int] = []
        barrier = threading.Barrier(2)

        def add(handle: Handle = handle, calls: list[int] = calls, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            for number in range(20):
                handle.add_done_callback(lambda _, number=number: calls.append(number))  # type: ignore[misc]

        adding = Task(add)
        barrier.wait(10)
        handle.resolve()
        adding.result()
        assert sorted(calls) == list(range(20))


@pytest.mark.parametrize("known", [True, False])
def test_the_time_of_a_result_that_comes_with_the_order_is_spent_waiting(known: bool) -> None:
    """No clock is read for it again. Where the order was noted before the wait began, the clock is."""
    counters, handle = Counters(), Handle("allreduce.x")
    handle.counters = counters
    began = time.monotonic()

    def before_waiting(handle: Handle) -> None:
        handle.ordered = handle.ended = began + 100.0 if known else began - 1.0
        handle.resolve()

    handle.before_waiting = before_waiting
    handle.wait()
    assert counters.blocked_in is None
    if known:
        assert 10.0 < counters.waiting <= 100.0
        assert counters.communicating == 0.0
    else:
        assert counters.waiting == 0.0
        assert 0.0 <= counters.communicating < 100.0


def test_a_wait_that_ctrl_c_ended_has_not_taken_place() -> None:
    def trial(line: Line) -> None:
        handle = Handle("x")

        def wait() -> None:
            with pytest.raises(WaitTimeoutError):
                handle.wait(0.0)

        interrupted_at(line, wait)
        wait()
        assert handle.resolve(value=5)
        handle.wait()
        assert handle.value == 5

    at_each_line(trial)
