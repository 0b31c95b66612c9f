"""A process's counters of itself: steps and their parts, times blocked, the last rank."""

from __future__ import annotations

import pytest

from hvdgloo._observe import counters as counters_module
from hvdgloo._observe.counters import Counters
from hvdgloo._observe.lateness import BUCKETS, RECENT, LatenessBook, bucket_of
from hvdgloo._observe.samples import Late


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(counters_module, "time", clock)
    return clock


class Operation:
    name = "allreduce.x"

    def __init__(self, ordered: float = 0.0) -> None:
        self.ordered = ordered


def block(counters: Counters, clock: Clock, seconds: float, *, ordered_after: float | None) -> None:
    """The program waits for an operation, which is ordered on the way; None: before."""
    operation = Operation(clock.now - 1 if ordered_after is None else 0.0)
    counters.blocked_since, counters.blocked_in = clock.now, operation
    if ordered_after is not None:
        operation.ordered = clock.now + ordered_after
    clock.now += seconds
    counters.unblocked(operation.ordered, clock.now)


class TestSteps:
    def test_the_first_has_no_length_and_the_others_are_added_up(self, clock: Clock) -> None:
        counters = Counters()
        counters.step()
        assert (counters.steps, counters.step_seconds) == (1, 0.0)
        for seconds in (0.5, 0.25):
            clock.now += seconds
            counters.step()
        assert (counters.steps, counters.step_seconds, counters.last_step) == (3, 0.75, 0.25)

    def test_their_time_is_split_by_what_the_program_was_blocked_for(self, clock: Clock) -> None:
        counters = Counters()
        block(counters, clock, 9.0, ordered_after=8.0)  # before the first step
        counters.step()
        clock.now += 1.0  # computes
        block(counters, clock, 0.75, ordered_after=0.5)
        block(counters, clock, 0.125, ordered_after=None)
        counters.step()
        assert counters.step_seconds == 1.875
        assert counters.step_waiting == 0.5
        assert counters.step_communicating == 0.375

    def test_a_slow_input_shows_before_the_first_submission(self, clock: Clock) -> None:
        counters = Counters()
        counters.step()
        counters.first = clock.now + 0.25
        clock.now += 1.0
        counters.step()
        assert (counters.before_first, counters.first) == (0.25, 0.0)

    def test_one_in_which_the_engine_changes_is_not_timed(self, clock: Clock) -> None:
        counters = Counters()
        counters.step()
        clock.now += 60.0
        counters.engine_begins(coordinates=False)
        counters.step()
        assert (counters.steps, counters.step_seconds) == (2, 0.0)


class TestBlocked:
    def test_what_lasts_is_counted_up_to_now(self, clock: Clock) -> None:
        counters = Counters()
        operation = Operation()
        counters.blocked_since, counters.blocked_in = 100.0, operation
        assert counters.blocked(102.0) == (2.0, 0.0)
        operation.ordered = 102.0
        assert counters.blocked(105.0) == (2.0, 3.0)

    def test_what_was_never_ordered_was_waited_for(self, clock: Clock) -> None:
        counters = Counters()
        counters.blocked_since, counters.blocked_in = 100.0, Operation()
        counters.unblocked(0.0, 101.5)
        assert (counters.waiting, counters.communicating) == (1.5, 0.0)


def test_a_plane_is_busy_while_any_bucket_is_on_it() -> None:
    traffic = Counters().carried("gloo", 0)
    traffic.begun(1.0)
    traffic.begun(2.0)
    traffic.ended(3.0, 2, 20)
    traffic.ended(5.0, 1, 10)
    traffic.begun(9.0)
    traffic.dropped()
    assert (traffic.operations, traffic.bytes, traffic.seconds) == (3, 30, 4.0)


def test_totals_cover_all_planes_and_sets() -> None:
    counters = Counters()
    for plane, number in (("gloo", 0), ("gloo", 1), ("nccl", 0)):
        counters.carried(plane, number).ended(0.0, 1, 10)
    counters.carried("gloo", 0).ended(0.0, 1, 10)
    assert (counters.operations, counters.bytes) == (4, 40)


class TestLateness:
    def test_without_steps_each_operation_is_a_round(self) -> None:
        book = LatenessBook()
        for rank, seconds in ((3, 0.5), (1, 0.25), (3, 1.0)):
            book.came_last(rank, seconds)
        totals = book.totals()
        assert (totals.rounds, totals.recent) == (3, 3)
        assert totals.ranks == (Late(1, 1, 0.25, 1, 0.25), Late(3, 2, 1.5, 2, 1.5))

    def test_of_a_step_the_operation_counts_for_which_others_waited_longest(self) -> None:
        book = LatenessBook()
        book.came_last(0, 9.0)  # before any step: parameters are broadcast
        book.end_round()
        for rank, seconds in ((1, 0.001), (3, 0.014), (2, 0.002)):
            book.came_last(rank, seconds)
        book.end_round()
        book.end_round()  # a step without operations
        totals = book.totals()
        assert totals.rounds == 1
        assert totals.ranks == (Late(3, 1, 0.014, 1, 0.014),)

    def test_the_first_step_is_a_new_beginning(self) -> None:
        book = LatenessBook()
        for _ in range(5):
            book.came_last(2, 1.0)
        assert book.totals().rounds == 5
        book.end_round()
        assert book.totals() == LatenessBook().totals()

    def test_the_recent_ones_are_the_last_thousand_and_nothing_grows(self) -> None:
        book = LatenessBook()
        for _ in range(5 * RECENT):
            book.came_last(1, 0.5)
        for _ in range(RECENT // 2):
            book.came_last(2, 0.25)
        totals = book.totals()
        assert (totals.rounds, totals.recent, sum(totals.waits)) == (5500, RECENT, 5500)
        assert totals.ranks == (Late(1, 5000, 2500.0, 500, 250.0), Late(2, 500, 125.0, 500, 125.0))

    def test_steps_without_a_reader_take_no_memory(self) -> None:
        book = LatenessBook()
        for _ in range(5000):
            book.end_round()
        assert len(book._arrivals) < 2000

    @pytest.mark.parametrize(
        ("seconds", "bucket"),
        [(0.0, 0), (0.99e-4, 0), (1e-4, 1), (1.99e-4, 1), (2.01e-4, 2), (1.0, 14), (1e6, BUCKETS - 1)],
    )
    def test_each_bucket_reaches_twice_as_far_as_the_one_before(self, seconds: float, bucket: int) -> None:
        assert bucket_of(seconds) == bucket
