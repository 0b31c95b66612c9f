"""Requests that were put aside go on once each: when they are released, or when their time has passed."""

from __future__ import annotations

import threading

from hvdgloo.rendezvous._server.pauses import Pause, PausedRequests, Waiters
from hvdgloo.rendezvous._store import Latch


def pause(seconds: float) -> Pause:
    return Pause(Latch(), seconds, lambda: None)


def test_a_request_goes_on_at_its_event_and_not_again_when_its_time_has_passed() -> None:
    events: list[None] = []
    paused: PausedRequests[str] = PausedRequests(lambda: events.append(None))
    soon = pause(0.0)
    paused.put("a", soon)
    assert not events
    soon.latch.release()
    assert len(events) == 1
    assert paused.deadline == 0.0
    assert list(paused.over()) == [("a", True)]
    assert not paused
    assert paused.deadline is None


def test_a_request_goes_on_when_its_time_has_passed_and_not_again_at_its_event() -> None:
    paused: PausedRequests[str] = PausedRequests(lambda: None)
    first, second = pause(0.0), pause(3600.0)
    paused.put("a", first)
    paused.put("b", second)
    assert list(paused.over()) == [("a", False)]
    first.latch.release()
    assert list(paused.over()) == []
    assert len(paused) == 1
    second.latch.release()
    assert list(paused.over()) == [("b", True)]


def test_one_that_is_put_aside_again_meanwhile_goes_on_as_well() -> None:
    paused: PausedRequests[str] = PausedRequests(lambda: None)
    first, second = pause(3600.0), pause(3600.0)
    second.latch.release()
    paused.put("a", first)
    first.latch.release()
    seen = []
    for request, released in paused.over():
        seen.append((request, released))
        if len(seen) == 1:
            paused.put(request, second)
    assert seen == [("a", True), ("a", True)]


class Waiting:
    """Requests that wait, each with its pause and the rest of its steps."""

    def __init__(self, names: str) -> None:
        self.lock = threading.Lock()
        self.waiters = Waiters(self.lock)
        self.steps = [self.waiters.wait(name, 60.0) for name in names]
        self.latches = [next(steps).latch for steps in self.steps]

    def released(self) -> list[int]:
        """Those that were released since the last call."""
        return [number for number, latch in enumerate(self.latches) if latch.wait(0)]

    def goes_on(self, number: int) -> None:
        assert list(self.steps[number]) == []


def test_requests_that_wait_are_released_one_after_the_other() -> None:
    """Each releases the next one when it continues; a thousand at once would be in each other's way."""
    waiting = Waiting("abc")
    waiting.waiters.release()
    for number in range(3):
        assert waiting.released() == [number]
        waiting.goes_on(number)
    assert not waiting.waiters


def test_a_request_whose_time_has_passed_does_not_break_the_chain() -> None:
    waiting = Waiting("abc")
    waiting.waiters.release()
    assert waiting.released() == [0]
    waiting.goes_on(1)
    waiting.goes_on(0)
    assert 2 in waiting.released()


def test_only_requests_of_the_name_are_released() -> None:
    waiting = Waiting("abab")
    waiting.waiters.release("b")
    assert waiting.released() == [1]
    waiting.goes_on(1)
    assert waiting.released() == [3]
    waiting.goes_on(3)
    assert waiting.released() == []
    assert len(waiting.waiters) == 1
