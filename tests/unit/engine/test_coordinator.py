"""Rank 0's verdicts, with a clock of the test's own; and the stall report (pains 21, 22)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from hvdgloo._engine.conventions import EVERYONE, ping_interval
from hvdgloo._engine.coordinator import (
    ATTRIBUTION_SECONDS,
    STACKS_SECONDS,
    Coordinator,
    CoordinatorSettings,
)
from hvdgloo._engine.messages import (
    Abort,
    AskStacks,
    Bye,
    Drained,
    End,
    Execute,
    Failed,
    Leave,
    Message,
    Ping,
    Pong,
    Request,
    Resend,
    Response,
    Stacks,
    Submit,
)
from hvdgloo._engine.negotiation import Waiting
from hvdgloo._engine.stall import missing_ranks, overdue, report, verdict
from hvdgloo.types import Collective, DType, TensorSpec

TIMEOUT = 20.0
WARNING = 60.0


class Job:
    """A Coordinator with a clock that only the test moves."""

    def __init__(
        self,
        size: int = 3,
        *,
        cycle_time: float = 0.0,
        stall_check: bool = True,
        shutdown: float = 0.0,
        timeout: float = TIMEOUT,
        members: Sequence[int] | None = None,
    ) -> None:
        rules = CoordinatorSettings(timeout, 1024, cycle_time, stall_check, WARNING, shutdown)
        sets = {0: tuple(range(size)), 1: tuple(members or ())}
        self.coordinator = Coordinator(size, sets, rules, lambda rank: f"rank {rank} (h{rank}, pid {100 + rank})")
        self.now = 1000.0

    def says(self, rank: int, message: Message) -> None:
        self.coordinator.receive(rank, message, self.now)

    def submits(self, rank: int, *names: str, process_set: int = 0) -> None:
        self.says(rank, Submit((), tuple(request(name, process_set) for name in names)))

    def sent(self) -> list[tuple[int, Message]]:
        """Return the messages sent since the last call."""
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        return outbox

    def warned(self) -> list[str]:
        notes, self.coordinator.notes = self.coordinator.notes, []
        return [text for kind, text in notes if kind == "stall"]

    def run_until(self, when: float, *, answering: Sequence[int] = (), stacks: Sequence[int] = ()) -> list[tuple]:
        """Let time pass from deadline to deadline, as the control thread does; returns (time, destination, message)."""
        log = []
        for _ in range(10_000):
            self.coordinator.tick(self.now)
            answered = False
            for destination, message in self.sent():
                log.append((self.now, destination, message))
                if isinstance(message, Ping) and destination in answering:
                    self.says(destination, Pong())
                if isinstance(message, AskStacks) and destination in stacks:
                    self.says(destination, Stacks(f"stack of {destination}"))
                    answered = True
            if answered:
                continue  # what ranks say wakes the control thread, which ticks
            deadline = self.coordinator.deadline()
            if deadline is None or deadline > when:
                break
            self.now = max(self.now, deadline)
        else:
            raise AssertionError("the coordinator spins")
        self.now = when
        return log


def request(name: str, process_set: int = 0) -> Request:
    return Request(name, Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (2,)),), process_set=process_set)


def only(sent: list[tuple[int, Message]], kind: type) -> list[tuple[int, Message]]:
    return [(destination, message) for destination, message in sent if isinstance(message, kind)]


class TestOrdering:
    def test_what_is_ready_waits_for_release_and_goes_to_everyone(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        assert not job.coordinator.has_ready
        job.submits(1, "a")
        assert job.coordinator.has_ready
        assert job.sent() == []
        job.coordinator.release(job.now)
        assert job.sent() == [(EVERYONE, Execute((Response(request("a"), signature=0),)))]
        job.coordinator.release(job.now)
        assert job.sent() == []

    def test_a_forgotten_number_is_asked_back_from_its_sender_alone(self) -> None:
        job = Job(2)
        job.says(1, Submit((7, 9)))
        assert job.sent() == [(1, Resend((7, 9)))]

    def test_a_cycle_time_is_the_least_delay_between_batches(self) -> None:
        job = Job(1, cycle_time=0.5)
        assert job.coordinator.may_release(job.now)  # nothing was released before
        job.submits(0, "a")
        job.coordinator.release(job.now)
        job.submits(0, "b")
        assert not job.coordinator.may_release(job.now + 0.4)
        job.coordinator.tick(job.now + 0.4)
        assert job.coordinator.deadline() == job.now + 0.5
        assert job.coordinator.may_release(job.now + 0.5)

    def test_a_passed_cycle_time_does_not_spin_while_the_data_plane_is_full(self) -> None:
        job = Job(1, cycle_time=0.5, stall_check=False)
        job.submits(0, "a")
        job.coordinator.tick(job.now)
        assert job.coordinator.deadline() is None  # due at once; if there is no room, the executor will wake us
        job.coordinator.release(job.now)
        job.submits(0, "b")
        job.coordinator.tick(job.now + 0.5)
        assert job.coordinator.deadline() is None

    def test_without_cycle_time_nothing_is_delayed(self) -> None:
        job = Job(1)
        job.submits(0, "a")
        job.coordinator.release(job.now)
        assert job.coordinator.may_release(job.now)


class TestIdle:
    def test_an_idle_job_has_no_deadline_and_says_nothing(self) -> None:
        """Pain 28: no idle cycles."""
        job = Job(4)
        assert job.coordinator.deadline() is None
        for _ in range(5):
            job.now += 3600
            job.coordinator.tick(job.now)
        assert job.sent() == []
        assert job.coordinator.deadline() is None

    def test_it_is_idle_again_after_work(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        job.run_until(job.now + 7, answering=[1])
        job.submits(1, "a")
        job.coordinator.release(job.now)
        job.sent()
        job.run_until(job.now + 3600)
        assert job.coordinator.deadline() is None
        assert job.sent() == []
        assert not job.coordinator.over

    def test_hours_of_idleness_are_not_held_against_a_rank(self) -> None:
        job = Job(2)
        job.submits(1, "a")
        job.submits(0, "a")
        job.coordinator.release(job.now)
        job.now += 7200
        job.submits(0, "b")
        job.coordinator.tick(job.now)
        assert not job.coordinator.over

    def test_a_job_of_one_never_pings(self) -> None:
        job = Job(1)
        job.coordinator.busy = True
        assert job.run_until(job.now + 100) == []
        job.coordinator.tick(job.now)
        assert job.coordinator.deadline() is None


class TestSignsOfLife:
    def test_pings_flow_while_something_is_pending(self) -> None:
        job = Job(3)
        job.submits(0, "a")
        log = job.run_until(job.now + 11, answering=[1, 2])
        assert [(when - 1000.0, who) for when, who, message in log if isinstance(message, Ping)] == [
            (5.0, 1),
            (5.0, 2),
            (10.0, 1),
            (10.0, 2),
        ]

    def test_pings_flow_while_the_data_plane_is_busy(self) -> None:
        job = Job(2)
        job.coordinator.busy = True
        log = job.run_until(job.now + 6, answering=[1])
        assert [type(message) for _, _, message in log] == [Ping]

    def test_a_silent_rank_is_lost_after_the_operation_timeout(self) -> None:
        job = Job(3, stall_check=False)
        job.submits(0, "a")
        log = job.run_until(job.now + 100, answering=[1])
        when, destination, abort = log[-1]
        assert (when, destination) == (1000.0 + TIMEOUT, EVERYONE)
        assert isinstance(abort, Abort)
        assert (abort.kind, abort.rank) == ("peer", 2)
        assert re.search(r"rank 2 \(h2, pid 102\) was lost: .* for 20 s", abort.text)
        assert "HVDGLOO_OPERATION_TIMEOUT" in abort.text
        assert job.coordinator.over
        assert job.coordinator.deadline() is None

    def test_a_rank_that_has_joined_waits_for_the_living_only(self) -> None:
        job = Job(3)
        job.says(0, Submit((), (Request("join", Collective.JOIN),)))
        log = job.run_until(job.now + 45, answering=[1])
        (abort,) = [message for _, _, message in log if isinstance(message, Abort)]
        assert abort.rank == 2
        assert "has not answered" in abort.text
        assert not job.warned()  # that others train on is no stall

    def test_a_rank_that_answers_is_waited_for(self) -> None:
        job = Job(3, stall_check=False)
        job.submits(0, "a")
        log = job.run_until(job.now + 1000 * TIMEOUT, answering=[1, 2])
        assert log
        assert not job.coordinator.over

    def test_anything_a_rank_says_is_a_sign_of_life(self) -> None:
        job = Job(2, stall_check=False)
        job.submits(0, "a")
        for number in range(10):
            job.run_until(job.now + TIMEOUT - 1)
            job.submits(1, f"other{number}")
        assert not job.coordinator.over

    def test_a_ping_is_answered(self) -> None:
        job = Job(2)
        job.says(1, Ping())
        assert job.sent() == [(1, Pong())]

    @pytest.mark.parametrize("timeout", [1.0, 8.0, 20.0, 300.0])
    def test_there_are_several_chances_to_answer(self, timeout: float) -> None:
        assert 0 < ping_interval(timeout) <= min(5.0, timeout / 4)


class TestLeaving:
    def test_leave_end_drained_bye(self) -> None:
        job = Job(3)
        job.says(1, Leave())
        assert job.sent() == [(EVERYONE, End(1))]
        job.says(0, Drained())
        job.says(2, Drained())
        assert job.sent() == []
        assert not job.coordinator.over
        job.says(1, Drained())
        assert job.sent() == [(EVERYONE, Bye())]
        assert job.coordinator.over
        assert job.coordinator.deadline() is None

    def test_what_was_ready_is_ordered_before_the_end(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        job.submits(1, "a")
        job.says(1, Leave())
        assert [type(message) for _, message in job.sent()] == [Execute, End]

    def test_nothing_is_ordered_after_the_end(self) -> None:
        job = Job(2, cycle_time=0.1)
        job.submits(1, "a")
        job.says(1, Leave())
        job.sent()
        job.submits(0, "a")  # sent before the end arrived there
        assert not job.coordinator.has_ready
        job.coordinator.release(job.now)
        assert only(job.sent(), Execute) == []

    def test_what_ranks_have_given_up_waiting_for_is_no_stall_any_more(self) -> None:
        job = Job(2, timeout=300.0)
        job.submits(0, "a")
        job.run_until(job.now + WARNING - 1, answering=[1])
        job.says(1, Leave())
        log = job.run_until(job.now + 3 * WARNING, answering=[1])
        assert not any(isinstance(message, AskStacks) for _, _, message in log)
        assert job.warned() == []

    def test_the_first_leaver_counts(self) -> None:
        job = Job(2)
        job.says(1, Leave())
        job.says(0, Leave())
        assert job.sent() == [(EVERYONE, End(1))]

    def test_a_rank_may_go_once_it_has_drained(self) -> None:
        job = Job(3)
        job.says(1, Leave())
        job.says(1, Drained())
        job.sent()
        job.coordinator.lost(1, "its connection ended")
        assert job.sent() == []
        assert not job.coordinator.over

    def test_a_rank_that_is_lost_before_it_has_drained_fails_the_job(self) -> None:
        job = Job(3)
        job.says(1, Leave())
        job.says(1, Drained())
        job.sent()
        job.coordinator.lost(2, "its connection ended")
        ((_, abort),) = job.sent()
        assert isinstance(abort, Abort)
        assert abort.rank == 2

    def test_draining_has_a_deadline(self) -> None:
        job = Job(2)
        job.says(0, Leave())
        log = job.run_until(job.now + 100, answering=[1])
        assert log[-1] == (1000.0 + TIMEOUT, EVERYONE, Bye())
        assert job.coordinator.over

    def test_once_over_nothing_more_is_said(self) -> None:
        job = Job(2)
        for message in (Leave(), Drained()):
            job.says(0, message)
            job.says(1, message)
        job.sent()
        job.says(1, Ping())
        job.says(1, Failed("x"))
        job.submits(1, "a")
        job.coordinator.lost(1, "gone")
        job.coordinator.tick(job.now + 1000)
        job.coordinator.release(job.now)
        assert job.sent() == []


class TestFailure:
    def test_a_lost_rank_is_named_at_once(self) -> None:
        """Pain 22."""
        job = Job(3)
        job.coordinator.lost(2, "its connection ended")
        assert job.sent() == [
            (EVERYONE, Abort("peer", "rank 2 (h2, pid 102) was lost: its connection ended", 2)),
        ]
        assert job.coordinator.over

    def test_the_first_loss_counts(self) -> None:
        job = Job(3)
        job.coordinator.lost(2, "first")
        job.coordinator.lost(1, "second")
        assert len(job.sent()) == 1

    def test_an_attribution_asks_everyone_else(self) -> None:
        job = Job(4)
        job.says(2, Failed("connection reset"))
        assert job.sent() == [(1, Ping()), (3, Ping())]
        assert job.coordinator.deadline() == job.now + ATTRIBUTION_SECONDS

    def test_an_attribution_names_the_rank_that_is_silent(self) -> None:
        job = Job(4)
        job.says(2, Failed("connection reset"))
        job.says(1, Pong())
        log = job.run_until(job.now + 5)
        assert len([m for _, _, m in log if isinstance(m, Abort)]) == 1
        when, destination, abort = log[-1]
        assert (when, destination) == (1000.0 + ATTRIBUTION_SECONDS, EVERYONE)
        assert isinstance(abort, Abort)
        assert (abort.kind, abort.rank) == ("peer", 3)
        assert abort.text.startswith("rank 3 (h3, pid 103) does not answer, and rank 2 (h2, pid 102) reports: conn")

    def test_several_silent_ranks(self) -> None:
        job = Job(4)
        job.says(0, Failed("reset"))
        job.says(2, Pong())
        abort = job.run_until(job.now + 5)[-1][2]
        assert isinstance(abort, Abort)
        assert (abort.kind, abort.rank) == ("peer", 1)
        assert abort.text.startswith("ranks 1, 3 do not answer")

    def test_if_all_answer_the_backend_is_to_blame(self) -> None:
        job = Job(3)
        job.says(1, Failed("no space left"))
        job.says(2, Pong())
        abort = job.run_until(job.now + 5)[-1][2]
        assert abort == Abort("backend", "rank 1 (h1, pid 101) reports: no space left", 1)

    def test_who_failed_as_well_is_not_silent_and_the_first_report_counts(self) -> None:
        job = Job(3)
        job.says(1, Failed("first"))
        job.says(2, Failed("second"))
        abort = job.run_until(job.now + 5)[-1][2]
        assert isinstance(abort, Abort)
        assert (abort.kind, abort.rank) == ("backend", 1)
        assert "first" in abort.text

    def test_an_attribution_ends_when_the_culprits_connection_does(self) -> None:
        job = Job(3)
        job.says(1, Failed("reset by peer"))
        job.sent()
        job.now += 0.01
        job.coordinator.lost(2, "its connection ended")
        ((_, abort),) = job.sent()
        assert isinstance(abort, Abort)
        assert (abort.kind, abort.rank) == ("peer", 2)


class TestStalls:
    def test_late_ranks_are_asked_and_a_warning_follows_at_once(self) -> None:
        """Pain 21."""
        job = Job(3)
        job.submits(0, "allreduce.fc", "allreduce.conv")
        job.submits(2, "allreduce.fc")
        log = job.run_until(job.now + WARNING + 1, answering=[1, 2], stacks=[0, 1, 2])
        asked = [(when - 1000.0, who) for when, who, message in log if isinstance(message, AskStacks)]
        assert asked == [(WARNING, 0), (WARNING, 1), (WARNING, 2)]
        (warning,) = job.warned()
        assert "allreduce.fc: for 60 s, submitted by ranks 0, 2, missing on rank 1" in warning
        assert "allreduce.conv: for 60 s, submitted by rank 0, missing on ranks 1, 2" in warning
        assert "rank 1 (h1, pid 101) is here:\n    stack of 1" in warning
        assert "stack of 2" in warning
        # The one that waits may be the one that should not: a call that only rank 0 makes, say.
        assert "rank 0 (h0, pid 100), which waits, is here:\n    stack of 0" in warning

    def test_one_warning_in_a_warning_time(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        log = job.run_until(job.now + 5 * WARNING + 1, answering=[1], stacks=[0, 1])
        times = [when - 1000.0 for when, who, message in log if isinstance(message, AskStacks) and who == 1]
        assert [who for _, who, message in log if isinstance(message, AskStacks)] == [0, 1, 1, 1, 1, 1]
        assert times == [WARNING * n for n in range(1, 6)]
        assert len(job.warned()) == 5
        assert not job.coordinator.over

    def test_what_was_told_is_not_repeated(self) -> None:
        job = Job(3)
        job.submits(0, "a")
        job.run_until(job.now + 2 * WARNING + 1, answering=[1, 2], stacks=[0, 1, 2])
        first, second = job.warned()
        assert first.startswith("Stalled")
        assert second.startswith("Still stalled")
        assert "a: for 120 s" in second
        assert "rank 1 (h1, pid 101) is where it was." in second
        assert "stack of 1" not in second
        assert "stack of 0" not in second
        assert "Usual causes" not in second

    def test_a_stall_after_one_that_has_passed_is_told_in_full(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 1, answering=[1], stacks=[0, 1])
        job.submits(1, "a")
        job.coordinator.release(job.now)
        job.run_until(job.now + WARNING, answering=[1])
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 1, answering=[1], stacks=[0, 1])
        first, second = job.warned()
        assert first.startswith("Stalled")
        assert second.startswith("Stalled")
        assert "stack of 1" in second

    def test_a_rank_that_tells_no_stacks_holds_the_warning_up_for_a_moment_only(self) -> None:
        job = Job(3)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + STACKS_SECONDS - 0.1, answering=[1, 2], stacks=[2])
        assert job.warned() == []
        job.run_until(job.now + 0.2, answering=[1, 2])
        (warning,) = job.warned()
        assert "rank 1 (h1, pid 101) does not answer." in warning
        assert "stack of 2" in warning

    def test_rank_0_may_be_the_late_one(self) -> None:
        job = Job(2)
        job.submits(1, "a")
        log = job.run_until(job.now + WARNING + 1, answering=[1], stacks=[0, 1])
        assert (1000.0 + WARNING, 0, AskStacks()) in log
        assert "stack of 0" in job.warned()[0]

    def test_only_members_of_the_set_are_missing(self) -> None:
        job = Job(4, members=(1, 3))
        job.submits(3, "a", process_set=1)
        log = job.run_until(job.now + WARNING + 1, answering=[1, 2, 3], stacks=[1, 3])
        assert [who for _, who, message in log if isinstance(message, AskStacks)] == [1, 3]

    def test_what_arrives_in_time_is_no_stall(self) -> None:
        job = Job(2)
        for step in range(100):
            job.submits(0, f"step{step}")
            job.run_until(job.now + WARNING / 2, answering=[1])
            job.submits(1, f"step{step}")
            job.coordinator.release(job.now)
            assert [type(m) for _, m in job.sent()] == [Execute]
        assert job.warned() == []

    def test_what_arrives_while_stacks_are_collected_is_not_reported(self) -> None:
        job = Job(2)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 0.5, answering=[1])
        job.submits(1, "a")
        job.run_until(job.now + 10, answering=[1])
        assert job.warned() == []

    def test_the_same_name_submitted_again_is_another_operation(self) -> None:
        """A late step ends while stacks are collected, and the next step uses the same names."""
        job = Job(2)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 0.5, answering=[1])
        job.submits(1, "a")
        job.coordinator.release(job.now)
        job.submits(0, "a")
        job.run_until(job.now + 10, answering=[1])
        assert job.warned() == []

    def test_a_rank_that_came_while_stacks_were_collected_is_not_called_missing(self) -> None:
        job = Job(3)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 0.5, answering=[1, 2])
        job.submits(1, "a")
        job.run_until(job.now + 10, answering=[1, 2])
        (warning,) = job.warned()
        assert "submitted by ranks 0, 1, missing on rank 2" in warning
        assert "rank 1 (h1" not in warning

    def test_the_shutdown_time_aborts(self) -> None:
        job = Job(2, shutdown=150.0)
        job.submits(0, "a")
        log = job.run_until(job.now + 1000, answering=[1], stacks=[0, 1])
        when, destination, abort = log[-1]
        assert (when, destination) == (1000.0 + 150.0, EVERYONE)
        assert isinstance(abort, Abort)
        assert abort.kind == "stall"
        assert abort.text == "a: for 150 s, submitted by rank 0, missing on rank 1 (h1, pid 101)"
        assert job.coordinator.over
        assert len(job.warned()) == 3

    def test_the_shutdown_time_belongs_to_what_waits_longest(self) -> None:
        job = Job(2, shutdown=150.0)
        job.submits(0, "a")
        job.run_until(job.now + WARNING + 1, answering=[1], stacks=[0, 1])
        job.submits(0, "b")
        log = job.run_until(job.now + 1000, answering=[1], stacks=[0, 1])
        assert [when for when, _, message in log if isinstance(message, Abort)] == [1000.0 + 150.0]

    def test_no_check_no_deadline(self) -> None:
        job = Job(1, stall_check=False, members=(0, 1))
        job.submits(0, "a", process_set=1)
        assert job.coordinator.deadline() is None

    def test_stacks_that_were_not_asked_for_are_ignored(self) -> None:
        job = Job(2)
        job.says(1, Stacks("x"))
        assert job.sent() == []


class TestReport:
    def waiting(self, name: str, since: float, submitted: tuple[int, ...], missing: tuple[int, ...]) -> Waiting:
        return Waiting(name, since, submitted, missing)

    def test_overdue(self) -> None:
        old, new = self.waiting("old", 0.0, (0,), (1,)), self.waiting("new", 5.0, (0,), (1,))
        assert overdue([old, new], 10.0, 10.0) == [old]
        assert overdue([old, new], 9.9, 10.0) == []

    def test_missing_ranks(self) -> None:
        operations = [self.waiting("a", 0, (0,), (3, 1)), self.waiting("b", 0, (0,), (2, 3))]
        assert missing_ranks(operations) == (1, 2, 3)

    def test_names_are_grouped_by_who_is_missing_and_shortened(self) -> None:
        operations = [self.waiting(f"t{i}", i, (0,), (1,)) for i in range(25)] + [self.waiting("z", 0, (0, 1), (2,))]
        text = report(operations, 30.0, lambda rank: f"R{rank}", {1: "line one\nline two", 2: None})
        assert "t0, t1, " in text
        assert "t9 and 15 more: for 30 s, submitted by rank 0, missing on rank 1" in text
        assert "t10" not in text
        assert "z: for 30 s, submitted by ranks 0, 1, missing on rank 2" in text
        assert "R1 is here:\n    line one\n    line two\n" in text
        assert "R2 does not answer." in text
        assert "Usual causes" in text

    @pytest.mark.parametrize(
        ("other", "told"),
        [("allreduce.loss1", True), ("broadcast.loss1", False)],
        ids=["of one kind", "of two kinds"],
    )
    def test_two_names_that_may_be_of_one_call_are_pointed_out(self, other: str, told: bool) -> None:
        one, two = self.waiting("allreduce.loss0", 0, (0,), (1,)), self.waiting(other, 9, (1,), (0,))
        text = report([one], 10.0, lambda rank: f"R{rank}", {1: "here"}, None, [one, two])
        assert ("allreduce.loss0 and allreduce.loss1 waits for the ranks that submitted the other one" in text) is told
        assert ("give it the same name on all ranks" in text) is told

    def test_names_of_two_steps_are_not_taken_for_one(self) -> None:
        one, two = self.waiting("allreduce.a", 0, (0,), (1,)), self.waiting("allreduce.b", 0, (0,), (1,))
        third = self.waiting("allreduce.c", 0, (2,), (0,))
        text = report([one, two], 10.0, lambda rank: f"R{rank}", {1: "here"}, None, [one, two, third])
        assert "the other one" not in text

    def test_an_error_s_text_stays_short(self) -> None:
        operations = [self.waiting(f"t{i}", i, (0,), (i % 3 + 1, 4)) for i in range(6)]
        operations += [self.waiting(f"u{i}", 20, (0,), (5 + i,)) for i in range(4)]
        assert verdict(operations, 30.0, lambda rank: f"R{rank}").splitlines() == [
            "t0, t3: for 30 s, submitted by rank 0, missing on ranks 1, 4",
            "  t1, t4: for 29 s, submitted by rank 0, missing on ranks 2, 4",
            "  t2, t5: for 28 s, submitted by rank 0, missing on ranks 3, 4",
            "  u0: for 10 s, submitted by rank 0, missing on R5",
            "  and 3 more, which other ranks have not submitted",
        ]

    def test_a_rank_that_got_on_is_told_again(self) -> None:
        operations = [self.waiting("a", 0, (0,), (1, 2, 3))]
        stacks = {1: "one\ntwo", 2: "moved", 3: None}
        text = report(operations, 30.0, lambda rank: f"R{rank}", stacks, {1: "one\ntwo", 2: "before", 3: "there"})
        assert "R1 is where it was.\n" in text
        assert "R2 is here:\n    moved\n" in text
        assert text.endswith("R3 does not answer.")
