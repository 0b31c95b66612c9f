"""The time that an epoch's workers have to come, by a clock that only the test moves."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from hvdgloo.rendezvous._server.epochs import Epochs, NotYet, Placed, _Round
from hvdgloo.rendezvous._server.membership import Membership
from hvdgloo.rendezvous._server.pauses import waited
from hvdgloo.rendezvous._store import Latch
from tests.support.rendezvous import info


class Gathering:
    """An epoch of two workers that must come within 10 seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.epochs = Epochs(10.0, clock=lambda: self.now)
        self.epochs.open(0, size=2)

    def comes(self, client: str) -> Placed | NotYet:
        return waited(self.epochs.register(0, client, info(), timeout=0), lambda hang_up: nullcontext())


def test_an_epoch_is_opened_once() -> None:
    epochs = Epochs(10.0)
    epochs.open(0, size=1)
    with pytest.raises(ValueError, match="already open"):
        epochs.open(0, size=1)


def test_it_starts_with_the_first_worker_that_stays() -> None:
    gathering = Gathering()
    gathering.comes("goes away")
    gathering.epochs.client_left("goes away")
    gathering.now += 9
    assert isinstance(gathering.comes("a"), NotYet)
    gathering.now += 9
    assert isinstance(gathering.comes("b"), Placed)


def test_a_worker_of_a_failed_attempt_does_not_count_for_the_next() -> None:
    gathering = Gathering()
    gathering.comes("too early")
    gathering.now += 10
    assert isinstance(gathering.comes("a"), NotYet)
    assert "no further worker came for 10 s, and 1 of 2 workers are in" in gathering.epochs.last_failure()
    assert isinstance(gathering.comes("b"), Placed)


class Many(Gathering):
    """An epoch of many workers, the next of which must come within 10 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs.open(1, size=100)

    def comes(self, client: str) -> Placed | NotYet:
        return waited(self.epochs.register(1, client, info(), timeout=0), lambda hang_up: nullcontext())


def test_many_on_few_cores_start_however_late_each_comes() -> None:
    gathering = Many()
    for number in range(99):
        answer = gathering.comes(f"worker {number}")
        assert isinstance(answer, NotYet)
        assert answer.idle == 0
        gathering.now += 9.9
    again = gathering.comes("worker 0")
    assert isinstance(again, NotYet)
    assert round(again.idle, 3) == 9.9, "asking again is no progress"
    assert isinstance(gathering.comes("the last one"), Placed)
    assert gathering.now > 1000 + 900


def test_one_that_comes_and_goes_again_and_again_keeps_no_other_waiting() -> None:
    gathering = Many()
    gathering.comes("stays")
    for number in range(4):
        gathering.now += 4
        if gathering.epochs.last_failure():
            break
        gathering.comes(f"restarted {number}")
        gathering.epochs.client_left(f"restarted {number}")
    assert "no further worker came for 10 s, and 1 of 100 workers are in" in gathering.epochs.last_failure()
    assert gathering.now == 1016


def test_those_who_wait_are_let_go_one_after_the_other() -> None:
    """Each lets the next one go when it has its answer; a thousand at once would be in each other's way."""
    latches = [Latch() for _ in range(3)]
    gathering = _Round(Membership(0, size=3), waiting={str(each): [latch] for each, latch in enumerate(latches)})
    gathering.release()
    assert [latch.wait(0) for latch in latches] == [True, False, False]
