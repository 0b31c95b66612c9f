"""Requests that were put aside go on once each: at their event, or when their time has passed."""

from __future__ import annotations

from hvdgloo.rendezvous._server.pauses import Pause, PausedRequests
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
