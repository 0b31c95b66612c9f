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


def test_a_call_that_differed_is_found_by_ranks_that_are_ahead_or_behind() -> None:
    """The root of a broadcast need not wait for others, and a third rank may be behind."""
    ahead, other, behind = ranks(3)
    for each in (ahead, other, behind):
        each.begin(SUM, 1.0)
    ahead.begin(Call("broadcast", root=0, count=16), 2.0)
    ahead.begin(Call("barrier"), 3.0)
    other.begin(Call("broadcast", root=1, count=16), 2.0)
    assert ahead.mismatch() is behind.mismatch() is None
    found = [each.earlier_mismatch() for each in (ahead, other, behind)]
    one, two = "rank 0 called broadcast(16 bytes, root 0)", "rank 1 called broadcast(16 bytes, root 1)"
    assert found == [f"{one}, but {two}", f"{two}, but {one}", f"{one}, but {two}"]


def test_the_first_of_several_calls_that_differ_is_named_even_if_numbers_begin_again() -> None:
    one, other = ranks(2)
    for number in range((1 << 16) - 2):
        one.begin(SUM, 1.0)
        other.begin(SUM, 1.0)
        if number % 5000 == 0:
            assert one.earlier_mismatch() is None
    for kind in ("all_gather", "all_to_all", "barrier"):
        one.begin(SUM, 1.0)
        other.begin(Call(kind), 1.0)
    difference = "rank 0 called all_reduce(SUM, 4 x float32), but rank 1 called all_gather()"
    assert one.earlier_mismatch() == difference


def test_a_rank_that_has_made_no_call_differs_from_none() -> None:
    """Such as one that receives messages: only those that send them count."""
    receiver, sender = ranks(2)
    for _ in range(1 << 16):
        sender.begin(Call("message"), 1.0)
    assert receiver.mismatch() is receiver.earlier_mismatch() is None


def test_the_latest_call_of_a_rank_is_known_and_whether_it_is_the_current_one() -> None:
    one, other = ranks(2)
    assert one.latest(1) == (None, False, 0.0)
    other.begin(SUM, 10.0)
    one.begin(SUM, 10.0)
    assert one.latest(1) == (SUM, True, 10.0)
    one.begin(Call("barrier"), 20.0)
    assert one.latest(1) == (SUM, False, 10.0)
    other.begin(Call("barrier"), 30.0)
    assert one.latest(1) == (Call("barrier"), True, 30.0)


def test_ranks_are_called_by_their_numbers_in_the_group() -> None:
    pages = [memoryview(bytearray(PAGE)).cast("Q") for _ in range(2)]
    one, other = (Calls(cast(Segment, Words(pages, rank)), 4) for rank in range(2))
    other.begin(Call("barrier"), 1.0)
    one.begin(SUM, 1.0)
    assert one.mismatch() == "rank 4 called all_reduce(SUM, 4 x float32), but rank 5 called barrier"
