"""Rank 0's decisions about offers, one by one; ``test_offers_model`` has whole jobs."""

from __future__ import annotations

import numpy as np
import pytest

from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Execute, Offer, Request, Response, Submit
from hvdgloo._engine.offers import is_even, suits, word_of
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec

SIZE = 3
SPEC = TensorSpec(DType.FLOAT32, (4,))
X = Request("allreduce.x", Collective.ALLREDUCE, (SPEC,))
JOIN = Request("join", Collective.JOIN)


class Job:
    """Rank 0's coordinator; all ranks have agreed upon ``X``."""

    def __init__(self) -> None:
        rules = CoordinatorSettings(10.0, 8, 0.0, True, 60.0, 0.0)
        self.coordinator = Coordinator(SIZE, {0: tuple(range(SIZE))}, rules, str)
        self.ended: set[int] = set()
        self.coordinator.offers.has_ended = lambda offer: offer.word in self.ended
        for rank in range(SIZE):
            self.submit(rank, Submit((), (X,)))
        self.ordered()

    def submit(self, rank: int, submission: Submit) -> None:
        self.coordinator.receive(rank, submission, 1.0)

    def offer(self, rank: int, instance: int = 1, now: float = 1.0) -> None:
        self.coordinator.receive(rank, Offer(X, 0, word_of(0, instance), instance - 1), now)

    def ordered(self) -> list[str]:
        """Return what was ordered since the last call."""
        self.coordinator.release(1.0)
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        items = [item for _, message in outbox if isinstance(message, Execute) for item in message.items]
        return [X.name if item == 0 else item.error or item.request.name for item in items if item == 0 or item]  # type: ignore[union-attr]


def test_what_all_ranks_offer_is_not_ordered() -> None:
    job = Job()
    for rank in range(SIZE):
        job.offer(rank)
    assert job.ordered() == []


def test_an_offer_is_ordered_once_some_rank_submits_without_one() -> None:
    for first in (0, 1, 2):
        job = Job()
        for rank in {0, 1, 2} - {first} if first else {1, 2}:
            job.offer(rank)
        assert job.ordered() == []
        job.submit(first, Submit((0,)))
        assert job.ordered() == [X.name]


def test_an_offer_that_comes_later_is_ordered_at_once() -> None:
    job = Job()
    job.submit(2, Submit((0,)))
    job.offer(0)
    assert job.ordered() == []
    job.offer(1)
    assert job.ordered() == [X.name]


def test_offers_that_all_ranks_have_made_do_not_count_for_the_next_operation() -> None:
    job = Job()
    job.offer(0)
    job.ended.add(word_of(0, 1))
    for rank in (1, 2):
        job.submit(rank, Submit((0,)))
    job.offer(0, instance=1)  # it was slow to arrive
    assert job.ordered() == []
    job.submit(0, Submit((0,)))
    assert job.ordered() == [X.name]


def test_a_rank_that_joins_without_an_offer_has_it_ordered() -> None:
    job = Job()
    job.offer(0)
    job.offer(1)
    job.submit(2, Submit((), (JOIN,)))
    assert job.ordered() == [X.name]
    job.offer(0, instance=2)
    job.offer(1, instance=2)
    assert job.ordered() == [X.name]


def test_a_rank_that_joins_after_its_offer_has_made_it() -> None:
    job = Job()
    job.offer(0)
    job.offer(2)
    job.submit(2, Submit((), (JOIN,)))
    job.offer(1)
    assert job.ordered() == []


def test_a_number_that_was_forgotten_is_spelled_out_for_the_order() -> None:
    job = Job()
    for other in range(8):
        for rank in range(SIZE):
            job.submit(rank, Submit((), (Request(f"allreduce.{other}", Collective.ALLREDUCE, (SPEC,)),)))
    job.ordered()
    job.offer(0)
    job.offer(1)
    job.submit(2, Submit((), (X,)))
    assert job.ordered() == [X.name]


def test_stalls_name_what_is_offered_until_all_ranks_have_made_the_offer() -> None:
    job = Job()
    job.offer(2, now=5.0)
    job.offer(0, now=6.0)
    (waiting,) = job.coordinator.waiting(7.0, 0.0)
    assert (waiting.name, waiting.since, waiting.submitted, waiting.missing) == (X.name, 5.0, (0, 2), (1,))
    assert job.coordinator.waiting(7.0, 3.0) == []
    job.ended.add(word_of(0, 1))
    assert job.coordinator.waiting(7.0, 0.0) == []


def test_each_rank_waits_for_another_kind() -> None:
    job = Job()
    broadcast = Request("broadcast.x", Collective.BROADCAST, (SPEC,), root=0)
    job.submit(1, Submit((), (broadcast,)))
    job.offer(0)
    assert job.ordered() == []
    job.offer(2)
    assert [text.partition(":")[2] for text in job.ordered()] == [
        " ranks disagree about the kind of collective: allreduce on ranks 0, 2; broadcast on rank 1"
    ] * 2


def test_a_rank_whose_offer_of_another_kind_has_ended_does_not_wait_for_it() -> None:
    job = Job()
    broadcast = Request("broadcast.x", Collective.BROADCAST, (SPEC,), root=0)
    for rank in (1, 2):
        job.coordinator.receive(rank, Offer(broadcast, 1, word_of(1, 1), 0), 1.0)
    job.ended.add(word_of(1, 1))
    job.offer(0)
    job.ended.add(word_of(0, 1))  # the others have made it as well, and need not tell
    for rank in range(SIZE):
        job.offer(rank, instance=2)
    assert job.ordered() == []
    assert len(job.coordinator.waiting(7.0, 0.0)) == 1


def submission_of(persistent: PersistentRequest) -> Submission:
    buffer = Buffer.of_array(np.zeros(4, np.float32))
    buffers = [buffer] if persistent.request.tensors else []
    return Submission(persistent, buffers, buffers)


def member_that_knows_x(size: int = 2) -> tuple[Member, PersistentRequest]:
    member, persistent = Member(0, {0: tuple(range(size))}, 0), PersistentRequest(X)
    member.add(submission_of(persistent))
    member.drain()
    member.accept(Execute((Response(X, signature=0),)))
    return member, persistent


@pytest.mark.parametrize("pending", ["an operation", "a join", "an offer"])
def test_nothing_is_offered_while_anything_waits_for_other_ranks(pending: str) -> None:
    """Rank 0 compares what ranks wait for, and takes a rank that waits for something to offer nothing else."""
    member, persistent = member_that_knows_x()
    other = PersistentRequest(JOIN if pending == "a join" else Request("allreduce.y", Collective.ALLREDUCE, (SPEC,)))
    if pending == "an offer":
        assert member.offer(submission_of(persistent)) is not None
        own, persistent = member.own_offer, PersistentRequest(X)
    else:
        member.add(submission_of(other))
        own = None
    assert member.offer(submission_of(persistent)) is None
    assert member.own_offer is own


UNNAMED = Request("allreduce.noname", Collective.ALLREDUCE, (SPEC,))


def ordered(template: PersistentRequest, instance: int, signature: int, member: Member) -> None:
    """Have a call with an automatic name ordered."""
    numbered = template.numbered(instance)
    member.add(submission_of(numbered))
    assert member.drain() == Submit((), (numbered.request,))
    member.accept(Execute((Response(numbered.request, signature=signature),)))


def offered(template: PersistentRequest, instance: int, member: Member) -> int:
    """Have a call with an automatic name made by all ranks; return its word."""
    own = member.offer(submission_of(template.numbered(instance)))
    assert own is not None
    assert own.operation.request.name == f"allreduce.noname.{instance}"
    assert member.complete(own)
    return own.word


def test_calls_with_automatic_names_are_offered_once_one_of_their_kind_is_known() -> None:
    member, template = Member(0, {0: (0, 1)}, 0), PersistentRequest(UNNAMED)
    assert member.offer(submission_of(template.numbered(1))) is None
    ordered(template, 1, 7, member)
    assert offered(template, 2, member) == word_of(7, 2)
    other = PersistentRequest(Request("allreduce.noname", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT64, (4,)),)))
    assert member.offer(submission_of(other.numbered(3))) is None
    ordered(template, 4, 9, member)
    again = PersistentRequest(UNNAMED)  # as another front-end makes it
    assert [offered(template, 5, member), offered(again, 6, member)] == [word_of(9, 5), word_of(9, 6)]
    member.accept(Execute((), forgotten=(7,)))
    assert offered(template, 7, member) == word_of(9, 7)
    member.accept(Execute((), forgotten=(9,)))
    assert member.offer(submission_of(template.numbered(8))) is None


def test_words_of_automatic_names_that_a_join_counts_anew_are_not_given_twice() -> None:
    member, template, words = Member(0, {0: (0, 1)}, 0), PersistentRequest(UNNAMED), []
    for number in (0, 1):
        assert member.offer(submission_of(template.numbered(1))) is None
        ordered(template, 1, number, member)
        words += [offered(template, instance, member) for instance in (2, 3)]
        member.add(submission_of(PersistentRequest(JOIN)))
        member.drain()
        member.accept(Execute((Response(JOIN, value=1),)))
    assert len({*words}) == 4


def test_an_offer_with_an_automatic_name_is_ordered_under_that_name() -> None:
    job = Job()
    first, second = (Request(f"allreduce.noname.{n}", Collective.ALLREDUCE, (SPEC,)) for n in (1, 2))
    for rank in range(SIZE):
        job.submit(rank, Submit((), (first,)))
    assert job.ordered() == [first.name]
    for rank in (0, 1):
        job.coordinator.receive(rank, Offer(second, 1, word_of(1, 2), 0), 1.0)
    assert [(each.name, each.missing) for each in job.coordinator.waiting(2.0, 0.0)] == [(second.name, (2,))]
    job.submit(2, Submit((), (second,)))
    assert job.ordered() == [second.name]


def test_offers_of_one_operation_with_different_words_fail_if_ranks_disagree() -> None:
    job = Job()
    for rank in range(SIZE):
        spec = TensorSpec(DType.FLOAT32, (4 + (rank == 1),))
        request = Request("allreduce.noname.3", Collective.ALLREDUCE, (spec,))
        job.coordinator.receive(rank, Offer(request, rank == 1, word_of(rank == 1, 3), 0), 1.0)
    (text,) = job.ordered()
    assert text == "allreduce.noname.3: ranks disagree about its shape: (4,) on ranks 0, 2; (5,) on rank 1"


def test_rank_0_is_told_of_an_offer_before_a_join_of_the_same_rank() -> None:
    member, persistent = member_that_knows_x()
    own = member.offer(submission_of(persistent))
    assert own is not None
    assert member.take_offer() is None, "all ranks may still offer it at once"
    member.add(Submission(PersistentRequest(JOIN), [], []))
    assert member.drain() == Submit((), (JOIN,))
    assert member.take_offer() == Offer(X, 0, word_of(0, 0), 0)
    assert member.take_offer() is None


def test_an_operation_that_failed_by_an_order_is_not_offered_under_the_same_word() -> None:
    member, persistent = member_that_knows_x()
    words = []
    for message in (Execute((Response(X, error="ranks disagree"),)), Execute((0,))):
        persistent.signature.was_declined = False  # type: ignore[union-attr]
        own = member.offer(submission_of(persistent))
        assert own is not None
        words.append(own.word)
        member.accept(message)
    assert words == [word_of(0, 0), word_of(0, 1)]


def test_words_of_different_operations_differ() -> None:
    words = [word_of(number, instance) for number in range(20) for instance in range(20)]
    assert len({*words}) == len(words)
    assert 0 not in words
    assert max(word_of((1 << 28) - 2, (1 << 36) - 1), 0) < 1 << 64
    assert word_of((1 << 28) - 1, 0) == word_of(0, 1 << 36) == word_of(-1, 3) == 0


def test_only_small_operations_of_all_ranks_on_the_host_are_offered() -> None:
    def request(dtype: DType = DType.FLOAT32, count: int = 4, device: str = "cpu", **more: object) -> Request:
        return Request("allreduce.x", Collective.ALLREDUCE, (TensorSpec(dtype, (count,), device),), **more)  # type: ignore[arg-type]

    assert suits(request(), 16)
    assert not suits(request(), 15)
    assert not suits(request(count=0), 16)
    assert not suits(request(DType.BFLOAT16), 16)
    assert not suits(request(device="cuda"), 16)
    assert not suits(request(op=ReduceOp.ADASUM), 16)
    assert not suits(request(process_set=1), 16)
    assert not suits(Request("allreduce.x", Collective.ALLREDUCE, (SPEC, SPEC)), 1000)
    assert suits(Request("barrier.x", Collective.BARRIER), 16)
    assert not suits(Request("barrier.x", Collective.BARRIER, process_set=1), 16)
    half = TensorSpec(DType.BFLOAT16, (8,))
    for kind in (Collective.ALLGATHER, Collective.BROADCAST):
        assert suits(Request(f"{kind.value}.x", kind, (half,)), 16)
        assert not suits(Request(f"{kind.value}.x", kind, (half,)), 15)
    for kind in (Collective.ALLTOALL, Collective.REDUCESCATTER, Collective.JOIN):
        assert not suits(Request(f"{kind.value}.x", kind, (SPEC,)), 16)


def test_parts_of_different_sizes_are_not_offered() -> None:
    request = Request("allgather.x", Collective.ALLGATHER, (SPEC,))
    assert is_even(Response(request, ((4, 4, 4),)))
    assert not is_even(Response(request, ((4, 4, 3),)))
    assert is_even(Response(X))
