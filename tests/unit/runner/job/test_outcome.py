"""The outcome of a job: exit codes, and the cause in words."""

from __future__ import annotations

import pytest

from hvdgloo.runner.job.outcome import Failure, JobOutcome, as_shown, blame, describe_loss, describe_status


class TestOutcome:
    def test_status_in_words(self) -> None:
        assert describe_status(3) == "exited with status 3"
        assert describe_status(-9) == "was killed by signal 9 (SIGKILL)"
        assert describe_status(-64) == "was killed by signal 64 (SIGRTMAX)"
        assert describe_status(-99) == "was killed by signal 99"

    @pytest.mark.parametrize(
        ("status", "said_why", "text"),
        [
            (None, False, "closed its stream"),
            (0, False, "exited with status 0"),
            (3, True, "exited with status 3"),
            (137, False, "was killed by signal 9 (SIGKILL)"),
            (-9, True, "or the command that leads to it was killed by signal 9 (SIGKILL)"),
            (255, True, "lost its connection"),
            (255, False, "was killed, or lost its connection"),
            (254, False, "exited with status 254"),
        ],
    )
    def test_how_agents_are_lost(self, status: int | None, said_why: bool, text: str) -> None:
        assert describe_loss(status, said_why) == text

    @pytest.mark.parametrize(
        ("status", "reason"), [(4, "exited with status 4"), (-11, "was killed by signal 11 (SIGSEGV)"), (-15, "failed")]
    )
    def test_pain_22_the_culprit_is_named_and_not_who_merely_noticed(self, status: int, reason: str) -> None:
        noticed = "hvdgloo.errors.JobShutdownError: rank 2 (host b, pid 7) called hvd.shutdown() or exited, which ends"
        causes = {0: noticed, 2: "ValueError: culprit"}
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: -15, 2: status})
        found = blame(outcome, {0: "a", 1: "a", 2: "b"}, causes.__getitem__)
        assert found == Failure(2, "b", 1 if status == -15 else status, reason)

    def test_a_rank_that_was_stopped_is_reported_as_the_others_found_it(self) -> None:
        silence = "was lost: it has not answered for 7 s (stopped, swapping, or cut off from the network); X sets"
        was_in = "this rank was in allreduce.a, called at t.py:4 in <module>"
        noticed = f"hvdgloo.errors.PeerLostError: rank 1 (host b, pid 7) {silence}; {was_in}"
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: -15})
        assert blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed) == Failure(1, "b", 1, silence)

    def test_a_rank_that_left_while_the_others_went_on_is_named(self) -> None:
        """It exited with 0, so the job's status comes from the first one that failed because of it."""
        noticed = "hvdgloo.errors.JobShutdownError: rank 1 (host b, pid 7) called hvd.shutdown() or exited, which"
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: 0})
        blamed = blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed)
        assert blamed is not None
        assert (blamed.rank, blamed.host, blamed.exit_code) == (1, "b", 1)
        assert "ended with status 0 while others were still in collective operations" in blamed.reason
        assert "hvd.join()" in blamed.reason

    def test_what_the_others_were_in_is_named_and_who_called_it(self) -> None:
        noticed = (
            "hvdgloo.errors.JobShutdownError: rank 1 (host b, pid 7) called hvd.shutdown() or exited, which ends "
            "collective operations on all ranks; this rank was in allreduce.noname.1, called at /a b/t.py:4 in evaluate"
        )
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: 0})
        blamed = blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed)
        assert blamed is not None
        assert "(rank 0 in allreduce.noname.1, called at /a b/t.py:4 in evaluate), which" in blamed.reason

    def test_no_other_rank_is_blamed_without_a_reason(self) -> None:
        noticed = "hvdgloo.errors.PeerLostError: rank 1 (host b, pid 7) is gone"
        first = Failure(0, "a", 1, "exited with status 1")
        assert blame(JobOutcome(first=first, statuses={0: 1}), {0: "a"}, lambda _: "") == first
        both = JobOutcome(first=first, statuses={0: 1, 1: 1})
        circle = {0: noticed, 1: noticed.replace("rank 1", "rank 0")}
        assert blame(both, {0: "a", 1: "b"}, circle.__getitem__) is not None
        lost = Failure(None, "b", 1, "the agent on host b ended")
        assert blame(JobOutcome(first=lost), {}, lambda _: "") == lost

    @pytest.mark.parametrize(
        ("statuses", "rank"),
        [({0: 1, 1: 1}, 1), ({0: 1, 1: -15}, 0), ({0: 1, 1: None}, 0), ({0: 1}, 0)],
        ids=["alike", "stopped", "lost", "unknown"],
    )
    def test_of_ranks_that_failed_alike_the_one_that_was_shown_is_named(
        self, statuses: dict[int, int | None], rank: int
    ) -> None:
        first = Failure(0, "a", 1, "exited with status 1")
        outcome = JobOutcome(first=first, statuses=statuses)
        assert as_shown(first, outcome, {0: "a", 1: "b"}, {0: 1}.__getitem__) == Failure(
            rank, "ab"[rank], 1, first.reason
        )
        host = Failure(None, "b", 1, "the agent on host b ended")
        assert as_shown(host, outcome, {0: "a", 1: "b"}, {}.__getitem__) == host

    def test_exit_codes(self) -> None:
        assert JobOutcome().exit_code == 0
        assert JobOutcome(first=Failure(0, "h", 3, "")).exit_code == 3
        assert JobOutcome(first=Failure(0, "h", -11, "")).exit_code == 139
        assert JobOutcome(interrupted=2).exit_code == 130
