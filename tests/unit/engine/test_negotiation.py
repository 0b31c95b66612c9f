"""Negotiation, by pushing one side's output into the other: members and coordinator's bookkeeping without a network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Execute, Request, Response, Submit
from hvdgloo._engine.negotiation import Negotiator, Waiting, agree, format_ranks
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.errors import (
    DuplicateNameError,
    HorovodInternalError,
    InvalidArgumentError,
    JobShutdownError,
    MismatchError,
)
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec
from tests.support.negotiation import Negotiation


def spec(*shape: int, dtype: DType = DType.FLOAT32, device: str = "cpu") -> TensorSpec:
    return TensorSpec(dtype, shape, device)


def reduce(name: str, *shape: int, **options: object) -> Request:
    return Request(name, Collective.ALLREDUCE, (spec(*shape),), **options)  # type: ignore[arg-type]


def taken(negotiation: Negotiator) -> tuple[tuple[int | Response, ...], tuple[int, ...]]:
    message = negotiation.take()
    return message.items, message.forgotten


def negotiator(size: int, capacity: int = 1024) -> Negotiator:
    return Negotiator({0: tuple(range(size))}, capacity)


class TestOrder:
    @given(st.integers(1, 4), st.integers(1, 8), st.randoms(use_true_random=False))
    def test_any_interleaving_yields_everything_once_when_it_is_complete(
        self, size: int, count: int, rng: random.Random
    ) -> None:
        negotiation = negotiator(size)
        queues = []
        for _ in range(size):
            names = [f"t{i}" for i in range(count)]
            rng.shuffle(names)
            queues.append(names)
        seen = {f"t{i}": 0 for i in range(count)}
        order: list[str] = []
        while any(queues):
            rank = rng.choice([r for r in range(size) if queues[r]])
            some = [queues[rank].pop() for _ in range(rng.randint(1, len(queues[rank])))]
            assert negotiation.absorb(rank, Submit((), tuple(reduce(name, 2) for name in some)), 0.0) == []
            complete = []
            for name in some:
                seen[name] += 1
                if seen[name] == size:
                    complete.append(name)
            items, forgotten = taken(negotiation)
            assert [item.request.name for item in items if isinstance(item, Response)] == complete
            assert forgotten == ()
            order += complete
        assert sorted(order) == sorted(seen)
        assert not negotiation.has_pending
        assert not negotiation.has_ready

    def test_sets_are_ready_by_themselves_and_names_belong_to_a_set(self) -> None:
        members = {0: (0, 1, 2), 7: (1, 2)}
        negotiation = Negotiator(members, 10)
        negotiation.absorb(1, Submit((), (reduce("x", 2), reduce("x", 3, process_set=7))), 0.0)
        negotiation.absorb(2, Submit((), (reduce("x", 3, process_set=7), reduce("x", 2))), 0.0)
        (item,), _ = taken(negotiation)
        assert isinstance(item, Response)
        assert (item.request.process_set, item.request.tensors[0].shape) == (7, (3,))
        negotiation.absorb(0, Submit((), (reduce("x", 2),)), 0.0)
        (item,), _ = taken(negotiation)
        assert isinstance(item, Response)
        assert item.request.process_set == 0

    def test_a_set_may_come_later(self) -> None:
        negotiation = negotiator(2)
        for rank in (0, 1):
            addition = Request("add", Collective.ADD_PROCESS_SET, ranks=(1,))
            negotiation.absorb(rank, Submit((), (addition,)), 0.0)
        (added,), _ = taken(negotiation)
        assert isinstance(added, Response)
        assert added.value == 1
        negotiation.absorb(1, Submit((), (reduce("x", 2, process_set=1),)), 0.0)
        assert negotiation.has_ready

    def test_waiting_tells_who_is_missing_oldest_first(self) -> None:
        negotiation = negotiator(3)
        negotiation.absorb(2, Submit((), (reduce("late", 1),)), 5.0)
        negotiation.absorb(0, Submit((), (reduce("early", 1),)), 3.0)
        negotiation.absorb(2, Submit((), (reduce("early", 1),)), 9.0)
        assert negotiation.waiting() == [
            Waiting("early", 3.0, (0, 2), (1,)),
            Waiting("late", 5.0, (2,), (0, 1)),
        ]


class TestSignatures:
    def test_a_second_step_goes_by_number(self) -> None:
        negotiation = negotiator(2)
        requests = tuple(reduce(f"g{i}", i) for i in range(3))
        for rank in range(2):
            negotiation.absorb(rank, Submit((), requests), 0.0)
        items, _ = taken(negotiation)
        numbers = tuple(item.signature for item in items if isinstance(item, Response))
        assert numbers == (0, 1, 2)
        for rank in range(2):
            assert negotiation.absorb(rank, Submit(numbers[::-1]), 1.0) == []
        assert taken(negotiation) == ((2, 1, 0), ())

    def test_runs_of_numbers_are_ordered_as_the_last_rank_completes_them(self) -> None:
        negotiation = negotiator(3)
        for rank in range(3):
            negotiation.absorb(rank, Submit((), tuple(reduce(name, 3) for name in "abcd")), 0.0)
        taken(negotiation)
        negotiation.absorb(1, Submit((0, 1, 2, 3)), 1.0)
        negotiation.absorb(0, Submit((3, 2)), 2.0)
        assert negotiation.has_pending
        negotiation.absorb(2, Submit((2, 0, 3)), 3.0)
        assert taken(negotiation) == ((2, 3), ())
        assert [(w.name, w.since, w.submitted, w.missing) for w in negotiation.waiting()] == [
            ("a", 1.0, (1, 2), (0,)),
            ("b", 1.0, (1,), (0, 2)),
        ]
        # The rest comes partly by number and partly spelled out.
        negotiation.absorb(0, Submit((1,), (reduce("a", 3),)), 4.0)
        negotiation.absorb(2, Submit((1,)), 5.0)
        items, forgotten = taken(negotiation)
        assert [item if isinstance(item, int) else item.request.name for item in items] == ["a", 1]
        assert forgotten == (0,)
        assert not negotiation.has_pending

    def test_an_unknown_number_is_returned(self) -> None:
        negotiation = negotiator(2)
        assert negotiation.absorb(0, Submit((5, 6), (reduce("x", 1),)), 0.0) == [5, 6]
        assert [waiting.name for waiting in negotiation.waiting()] == ["x"]

    def test_a_changed_shape_gets_a_new_number_and_the_old_one_is_forgotten(self) -> None:
        negotiation = negotiator(2)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (reduce("x", 2),)), 0.0)
        taken(negotiation)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (reduce("x", 3),)), 0.0)
        (item,), forgotten = taken(negotiation)
        assert isinstance(item, Response)
        assert (item.request.tensors[0].shape, item.signature, forgotten) == ((3,), 1, (0,))
        assert negotiation.absorb(0, Submit((0,)), 0.0) == [0]

    def test_one_rank_by_number_and_one_spelled_out(self) -> None:
        negotiation = negotiator(2)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (reduce("x", 2),)), 0.0)
        taken(negotiation)
        negotiation.absorb(0, Submit((0,)), 0.0)
        negotiation.absorb(1, Submit((), (reduce("x", 3),)), 0.0)
        (item,), forgotten = taken(negotiation)
        assert isinstance(item, Response)
        assert "rank 0" in item.error
        assert "rank 1" in item.error
        assert (item.signature, forgotten) == (-1, (0,))

    def test_each_ranks_own_rows_are_remembered(self) -> None:
        negotiation = negotiator(2)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (Request("g", Collective.ALLGATHER, (spec(rank + 1, 4),)),)), 0.0)
        (first,), _ = taken(negotiation)
        assert isinstance(first, Response)
        assert first.rows == ((1, 2),)
        negotiation.absorb(0, Submit((0,)), 0.0)
        negotiation.absorb(1, Submit((), (Request("g", Collective.ALLGATHER, (spec(9, 4),)),)), 0.0)
        (second,), _ = taken(negotiation)
        assert isinstance(second, Response)
        assert second.rows == ((1, 9),)

    def test_the_least_recently_used_is_evicted(self) -> None:
        negotiation = negotiator(1, capacity=2)
        negotiation.absorb(0, Submit((), (reduce("a", 1), reduce("b", 1))), 0.0)
        negotiation.absorb(0, Submit((0,)), 0.0)
        negotiation.absorb(0, Submit((), (reduce("c", 1),)), 0.0)
        _, forgotten = taken(negotiation)
        assert forgotten == (1,)
        assert negotiation.absorb(0, Submit((0, 1, 2)), 0.0) == [1]

    def test_capacity_one(self) -> None:
        negotiation = negotiator(1, capacity=1)
        negotiation.absorb(0, Submit((), (reduce("a", 1), reduce("b", 1))), 0.0)
        items, forgotten = taken(negotiation)
        assert [item.signature for item in items if isinstance(item, Response)] == [0, 1]
        assert forgotten == (0,)

    def test_without_capacity_everything_is_spelled_out(self) -> None:
        negotiation = negotiator(1, capacity=0)
        negotiation.absorb(0, Submit((), (reduce("a", 1),)), 0.0)
        (item,), forgotten = taken(negotiation)
        assert isinstance(item, Response)
        assert (item.signature, forgotten) == (-1, ())

    def test_evicted_while_some_ranks_had_sent_its_number(self) -> None:
        negotiation = negotiator(2, capacity=1)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (reduce("a", 1),)), 0.0)
        negotiation.absorb(0, Submit((0,)), 0.0)
        for rank in range(2):
            negotiation.absorb(rank, Submit((), (reduce("b", 1),)), 0.0)
        _, forgotten = taken(negotiation)
        assert forgotten == (0,)
        assert negotiation.absorb(1, Submit((0,)), 0.0) == [0]
        negotiation.absorb(1, Submit((), (reduce("a", 1),)), 0.0)
        (item,), _ = taken(negotiation)
        assert isinstance(item, Response)
        assert (item.request.name, item.error, item.signature) == ("a", "", 2)


R = ReduceOp
MISMATCHES: list[tuple[str, Request, Request]] = [
    (
        "number of tensors",
        Request("x", Collective.ALLREDUCE, (spec(2),)),
        Request("x", Collective.ALLREDUCE, (spec(2), spec(2))),
    ),
    (
        "dtype",
        Request("x", Collective.ALLREDUCE, (spec(2),)),
        Request("x", Collective.ALLREDUCE, (spec(2, dtype=DType.INT8),)),
    ),
    ("operation", Request("x", Collective.ALLREDUCE, (spec(2),)), Request("x", Collective.BROADCAST, (spec(2),))),
    ("number of dimensions", reduce("x", 2, 3), reduce("x", 6)),
    ("shape", reduce("x", 2, 3), reduce("x", 3, 2)),
    ("prescale factor", reduce("x", 2, prescale=0.5), reduce("x", 2)),
    ("postscale factor", reduce("x", 2, postscale=0.5), reduce("x", 2)),
    ("reduce operation", reduce("x", 2, op=R.MIN), reduce("x", 2, op=R.MAX)),
    (
        "root rank",
        Request("x", Collective.BROADCAST, (spec(2),), root=0),
        Request("x", Collective.BROADCAST, (spec(2),), root=1),
    ),
    ("device type", reduce("x", 2), Request("x", Collective.ALLREDUCE, (spec(2, device="cuda"),))),
]


class TestAgreement:
    @pytest.mark.parametrize(("what", "one", "other"), MISMATCHES, ids=[m[0] for m in MISMATCHES])
    def test_each_mismatch_names_both_sides(self, what: str, one: Request, other: Request) -> None:
        response = agree({0: one, 1: other, 2: one}, (0, 1, 2))
        assert response.error.startswith(f"x: ranks disagree about its {what}: ")
        assert "on ranks 0, 2" in response.error
        assert "on rank 1" in response.error
        assert response.signature == -1

    def test_the_first_in_the_documented_order_is_reported(self) -> None:
        """Each request differs in one more respect from the first; the earliest respect wins."""
        base = Request("x", Collective.ALLREDUCE, (spec(2, 3),))
        changes: list[tuple[str, Callable[[Request], Request]]] = [
            ("device type", lambda r: _with(r, device="cuda")),
            ("reduce operation", lambda r: _with(r, op=R.MAX)),
            ("postscale factor", lambda r: _with(r, postscale=3.0)),
            ("prescale factor", lambda r: _with(r, prescale=3.0)),
            ("shape", lambda r: _with(r, shape=(3, 2))),
            ("number of dimensions", lambda r: _with(r, shape=(6,))),
            ("operation", lambda r: _with(r, collective=Collective.BROADCAST)),
            ("dtype", lambda r: _with(r, dtype=DType.INT8)),
        ]
        other = base
        for what, change in changes:
            other = change(other)
            assert f"its {what}: " in agree({0: base, 1: other}, (0, 1)).error

    def test_gathers_may_differ_in_the_first_dimension_only(self) -> None:
        def gather(*shape: int) -> Request:
            return Request("g", Collective.ALLGATHER, (spec(*shape), spec(1)))

        response = agree({0: gather(2, 3), 1: gather(0, 3), 4: gather(5, 3)}, (0, 1, 4))
        assert (response.error, response.rows) == ("", ((2, 0, 5), (1, 1, 1)))
        assert "first dimensions may differ" in agree({0: gather(2, 3), 1: gather(2, 4)}, (0, 1)).error

    def test_rows_are_in_the_order_of_members(self) -> None:
        requests = {r: Request("g", Collective.ALLGATHER, (spec(r * 10),)) for r in (3, 1, 2)}
        assert agree(requests, (1, 2, 3)).rows == ((10, 20, 30),)

    def test_what_means_nothing_to_a_collective_is_not_compared(self) -> None:
        def of(collective: Collective, **options: object) -> Request:
            return Request("x", collective, (spec(2),), **options)  # type: ignore[arg-type]

        for collective in (Collective.ALLGATHER, Collective.BROADCAST):
            assert not agree({0: of(collective, op=R.MAX, prescale=2.0), 1: of(collective)}, (0, 1)).error
        assert not agree({0: of(Collective.ALLREDUCE, root=1), 1: of(Collective.ALLREDUCE)}, (0, 1)).error

    def test_ranks_in_a_sentence(self) -> None:
        assert format_ranks([3]) == "rank 3"
        assert format_ranks([1, 2, 5]) == "ranks 1, 2, 5"
        assert format_ranks(range(20), limit=2) == "ranks 0, 1 and 18 more"


def _with(request: Request, **changes: Any) -> Request:
    of_tensor = {name: changes.pop(name) for name in ("shape", "dtype", "device") if name in changes}
    return replace(request, tensors=(replace(request.tensors[0], **of_tensor),), **changes)


def operation(request: Request) -> Submission:
    return Submission(PersistentRequest(request), (), ())


JOIN = Request("join", Collective.JOIN)


class TestJoin:
    @pytest.mark.parametrize("last", [0, 1])
    def test_what_was_submitted_before_the_join_goes_on_no_matter_who_joins_last(self, last: int) -> None:
        negotiation = negotiator(2)
        negotiation.absorb(1, Submit((), (reduce("own", 2),)), 0.0)
        for rank in (1 - last, last):
            negotiation.absorb(rank, Submit((), (JOIN,)), 0.0)
        items, _ = taken(negotiation)
        assert [item.request.name for item in items if isinstance(item, Response)] == ["own", "join"]
        assert [item.value for item in items if isinstance(item, Response)] == [-1, last]
        assert not negotiation.has_pending
        assert not negotiation.joined

    def test_what_has_to_be_spelled_out_again_comes_before_the_join_that_follows_it(self) -> None:
        negotiation = negotiator(2, capacity=1)
        gather = Request("gather", Collective.ALLGATHER, (spec(2),))
        for request in (gather, reduce("evicts", 1)):
            for rank in (0, 1):
                assert negotiation.absorb(rank, Submit((), (request,)), 0.0) == []
        negotiation.take()
        assert negotiation.absorb(0, Submit((0,), (JOIN,)), 0.0) == [0]
        assert negotiation.absorb(1, Submit((), (gather,)), 0.0) == []
        assert not negotiation.has_ready
        negotiation.absorb(0, Submit((), (gather,), resent=True), 0.0)
        (item,) = negotiation.take().items
        assert isinstance(item, Response)
        assert (item.request, item.error) == (gather, "")
        assert negotiation.joined

    @pytest.mark.parametrize("change", [Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET])
    def test_sets_are_not_changed_in_the_absence_of_those_who_have_joined(self, change: Collective) -> None:
        """They have to be connected with, and could be told of no number."""
        negotiation = negotiator(2)
        negotiation.absorb(1, Submit((), (JOIN,)), 0.0)
        negotiation.absorb(0, Submit((), (Request("change", change, ranks=(0,)),)), 0.0)
        assert not negotiation.has_ready
        assert [waiting.missing for waiting in negotiation.waiting()] == [(1,)]


class TestMember:
    def test_tells_how_many_wait_to_be_drained_and_whether_others_were(self) -> None:
        member = Member(0, {0: (0, 1)}, 0)
        assert member.drain() is None
        assert member.add(operation(reduce("a", 1))) == (1, False)
        assert member.add(operation(reduce("b", 1))) == (2, False)
        submission = member.drain()
        assert submission is not None
        assert [request.name for request in submission.requests] == ["a", "b"]
        assert member.drain() is None
        assert member.add(operation(reduce("c", 1))) == (1, True)

    def test_a_name_in_flight_is_refused_and_leaves_no_trace(self) -> None:
        member = Member(0, {0: (0, 1), 1: (0,)}, 0)
        member.add(operation(reduce("a", 1)))
        with pytest.raises(DuplicateNameError, match="a is already in flight") as caught:
            member.add(operation(reduce("a", 2)))
        assert caught.value.name == "a"
        submission = member.drain()
        assert submission is not None
        assert submission.requests == (reduce("a", 1),)
        member.add(operation(reduce("a", 1, process_set=1)))  # another set's names are its own

    def test_an_operation_of_a_set_that_was_just_removed_is_refused(self) -> None:
        """It was checked when the set was still there."""
        member = Member(0, {0: (0, 1), 1: (0, 1)}, 0)
        removal = operation(Request("gone", Collective.REMOVE_PROCESS_SET, ranks=(0, 1)))
        member.add(removal)
        member.drain()
        member.accept(Execute((Response(removal.request, value=1),)))
        with pytest.raises(InvalidArgumentError, match="there is no process set 1"):
            member.add(operation(reduce("late", 1, process_set=1)))
        assert member.drain() is None

    def test_a_mismatch_fails_the_operation_alone_and_frees_its_name(self) -> None:
        member = Member(0, {0: (0, 1)}, 0)
        failed, fine = operation(reduce("a", 1)), operation(reduce("b", 1))
        member.add(failed)
        member.add(fine)
        member.drain()
        responses = (Response(reduce("a", 1), error="a: ranks disagree"), Response(reduce("b", 1)))
        assert [op for _, op in member.accept(Execute(responses))] == [fine]
        with pytest.raises(MismatchError, match="a: ranks disagree") as caught:
            failed.handle.wait(0)
        assert caught.value.name == "a"
        assert not fine.handle.done()
        member.add(operation(reduce("a", 1)))

    def test_once_closed_everything_is_refused_with_the_first_error(self) -> None:
        member = Member(0, {0: (0, 1)}, 0)
        pending = operation(reduce("a", 1))
        member.add(pending)
        error = JobShutdownError("over", rank=1)
        assert member.close(error) == [pending]
        assert member.close(HorovodInternalError("later")) == []
        assert member.closed is error
        assert member.drain() is None
        with pytest.raises(JobShutdownError) as caught:
            member.add(operation(reduce("b", 1)))
        assert caught.value is error

    def test_an_operation_that_was_ordered_and_forgotten_in_one_message(self) -> None:
        member = Member(0, {0: (0, 1)}, 0)
        member.add(operation(reduce("a", 1)))
        member.drain()
        member.accept(Execute((Response(reduce("a", 1), signature=0),)))
        again = operation(reduce("a", 1))
        member.add(again)
        assert member.drain() == Submit((0,))
        assert [op for _, op in member.accept(Execute((0,), forgotten=(0,)))] == [again]
        member.add(operation(reduce("a", 1)))
        assert member.drain() == Submit((), (reduce("a", 1),))


class Net(Negotiation):
    def __init__(self, size: int, capacity: int, rng: random.Random) -> None:
        super().__init__(size, capacity)
        self.rng = rng
        self.executed: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(size)]

    def submit(self, rank: int, request: Request) -> Submission:
        op = operation(request)
        self.members[rank].add(op)
        return op

    def step(self) -> bool:
        """Do one thing that can be done; False if there is none."""
        actions = self.actions()
        if not actions:
            return False
        self.rng.choice(actions)()
        return True

    def execute(self, rank: int, message: Execute) -> None:
        for response, op in self.members[rank].accept(message):
            assert response.request.key == op.request.key
            own = op.request.tensors[0].shape
            if response.request.collective is Collective.ALLGATHER:
                assert response.rows[0][rank] == own[0]  # never another step's rows
            else:
                assert response.request.tensors[0].shape == own  # never another step's shape
            self.executed[rank].append((op.request.name, own))
            op.handle.resolve()


def run_schedule(size: int, capacity: int, names: int, steps: int, rng: random.Random) -> Net:
    """Every rank submits every name in every step, in its own order, sometimes with other shapes, at its own pace."""
    net = Net(size, capacity, rng)
    shapes = {(s, n): rng.choice([2, 2, 2, 3]) for s in range(steps) for n in range(names)}
    odd = {(s, n): rng.randrange(size) for s in range(steps) for n in range(names) if rng.random() < 0.1}
    todo: list[list[tuple[int, int]]] = []
    for _ in range(size):
        mine = []
        for s in range(steps):
            order = [(s, n) for n in range(names)]
            rng.shuffle(order)
            mine += order
        todo.append(mine)
    outcomes: dict[tuple[int, int], set[bool]] = {}
    open_handles: list[list[tuple[tuple[int, int], Submission]]] = [[] for _ in range(size)]
    for _ in range(200_000):
        ready = []
        for rank in range(size):
            for done in [entry for entry in open_handles[rank] if entry[1].handle.done()]:
                open_handles[rank].remove(done)
                outcomes.setdefault(done[0], set()).add(done[1].handle.error is None)
            in_flight = {key[1] for key, _ in open_handles[rank]}
            if todo[rank] and todo[rank][0][1] not in in_flight:
                ready.append(rank)
        if ready and rng.random() < 0.5:
            rank = rng.choice(ready)
            step, name = key = todo[rank].pop(0)
            length = shapes[key] + (odd.get(key) == rank)
            request = (
                Request(f"g{name}", Collective.ALLGATHER, (spec(length + rank, 2),))
                if name % 3 == 2
                else reduce(f"r{name}", length)
            )
            open_handles[rank].append((key, net.submit(rank, request)))
        elif not net.step() and not ready:
            break
    assert not any(todo)
    assert not any(open_handles)  # nothing was left waiting
    assert len(outcomes) == names * steps
    for (step, name), verdicts in outcomes.items():
        mismatched = (step, name) in odd and name % 3 != 2 and size > 1
        assert verdicts == {not mismatched}  # the same on every rank, and the right one
    assert not net.negotiator.has_pending
    return net


class TestTogether:
    @pytest.mark.parametrize("capacity", [0, 1, 2, 3, 1000])
    @pytest.mark.parametrize("seed", range(4))
    def test_any_schedule_ends_with_one_order(self, capacity: int, seed: int) -> None:
        net = run_schedule(3, capacity, names=5, steps=6, rng=random.Random(seed))
        orders = [[name for name, _ in executed] for executed in net.executed]
        assert orders[0] == orders[1] == orders[2]
        assert orders[0]
        if capacity == 1000:
            assert net.resends == 0

    def test_eviction_races_occur_in_these_schedules(self) -> None:
        """Without a Resend under way now and then, the schedules above would prove nothing about them."""
        assert sum(run_schedule(3, 2, names=5, steps=6, rng=random.Random(seed)).resends for seed in range(5)) > 0

    @settings(max_examples=30, deadline=None)
    @given(
        st.integers(1, 4), st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False)
    )
    def test_small_schedules_by_hypothesis(
        self, size: int, capacity: int, names: int, steps: int, rng: random.Random
    ) -> None:
        net = run_schedule(size, capacity, names, steps, rng)
        orders: Sequence[list[str]] = [[name for name, _ in executed] for executed in net.executed]
        assert all(order == orders[0] for order in orders)
