"""The time that an epoch's workers have to come, by a clock that only the test moves."""

from __future__ import annotations

from contextlib import nullcontext

from hvdgloo.rendezvous._server.epochs import Epochs, NotYet, Placed
from tests.support.rendezvous import info


class Gathering:
    """An epoch of two workers that must come within 10 seconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.epochs = Epochs(10.0, clock=lambda: self.now)
        self.epochs.open(0, size=2)

    def comes(self, client: str) -> Placed | NotYet:
        return self.epochs.register(0, client, info(), timeout=0, watch=lambda hang_up: nullcontext())


def test_it_starts_with_the_first_worker_that_stays() -> None:
    gathering = Gathering()
    gathering.comes("goes away")
    gathering.epochs.client_left("goes away")
    gathering.now += 9
    assert isinstance(gathering.comes("a"), NotYet)
    gathering.now += 9
    assert isinstance(gathering.comes("b"), Placed)


def test_who_came_in_vain_does_not_count_for_the_next_attempt() -> None:
    gathering = Gathering()
    gathering.comes("in vain")
    gathering.now += 10
    assert isinstance(gathering.comes("a"), NotYet)
    assert "within 10 s: 1 of 2 workers are in" in gathering.epochs.last_failure()
    assert isinstance(gathering.comes("b"), Placed)
