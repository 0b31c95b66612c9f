"""The record of calls in shared memory: who has begun a call, and who was the last."""

from __future__ import annotations

from typing import cast

from hvdgloo._backends.shm.calls import Call, Calls
from hvdgloo._backends.shm.segment import PAGE, Segment
from hvdgloo.types import DType

SUM = Call("all_reduce", DType.FLOAT32, "SUM", count=4)


class Words:
    """The pages of words of ``size`` ranks, as one rank sees them."""

    def __init__(self, pages: list[memoryview[int]], rank: int) -> None:
        self.rank, self.size, self._pages = rank, len(pages), pages

    def words_of(self, rank: int) -> memoryview[int]:
        return self._pages[rank]


def ranks(size: int) -> list[Calls]:
    pages = [memoryview(bytearray(PAGE)).cast("Q") for _ in range(size)]
    return [Calls(cast(Segment, Words(pages, rank))) for rank in range(size)]


def test_each_rank_knows_the_last_one_and_how_long_it_and_the_first_one_waited() -> None:
    first, last, other = ranks(3)
    for begun in (1000.0, 2000.0):
        first.begin(SUM, begun)
        assert first.absent() == [1, 2]
        assert first.arrivals() is None
        other.begin(SUM, begun + 0.25)
        last.begin(SUM, begun + 1.0)
        assert first.absent() == last.absent() == other.absent() == []
        assert first.arrivals() == (1, 1_000_000, 1_000_000)
        assert last.arrivals() == (1, 0, 1_000_000)
        assert other.arrivals() == (1, 750_000, 1_000_000)


def test_a_rank_that_is_further_ahead_still_tells_when_it_came() -> None:
    """The ring keeps as many calls as a rank may be ahead; one from a lap before says nothing."""
    slow, fast = ranks(2)
    for number in range(200):
        slow.begin(SUM, 10.0 + number)
        assert slow.arrivals() is None
        fast.begin(SUM, 10.5 + number)
        assert slow.arrivals() == (1, 500_000, 500_000)
    for ahead in range(10):
        fast.begin(Call("barrier"), 300.0 + ahead)
    slow.begin(Call("barrier"), 301.0)
    assert slow.arrivals() == (0, 0, 1_000_000)
    assert slow.mismatch() is None


def test_a_call_has_the_bytes_that_each_rank_gives() -> None:
    assert SUM.nbytes == 16
    assert Call("broadcast", count=10).nbytes == 10
    assert Call("all_to_all").nbytes == 0
