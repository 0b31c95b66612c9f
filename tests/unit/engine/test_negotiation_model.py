"""A model of a whole job: ranks that submit, join, add and remove process sets, over a network that delays at will.

Ranks are programs (generators) over the real Member, rank 0 has the real Negotiator, every message goes through its
bytes, and hypothesis chooses programs, delays and failures. Checked: all ranks see one order, nothing is executed twice
or forgotten, and when a rank is lost every handle ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Execute, Request
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.errors import MismatchError, PeerLostError
from hvdgloo.types import Buffer, Collective, DType, TensorSpec
from tests.support.negotiation import Negotiation


@dataclass(frozen=True)
class Round:
    """The steps of a job before its ranks wait for everything.

    Attributes:
        operations: process set (by its place among the sets) and shape of each; the name tells which of a set's it is.
        quitters: ranks that join instead of taking part.
        alone: quitters first submit something that no other rank does.
        add, remove: a set that is then added, the place of one that is removed.
    """

    operations: tuple[tuple[int, int, Collective], ...]
    quitters: frozenset[int]
    alone: bool
    add: frozenset[int]
    remove: int


@dataclass
class Job(Negotiation):
    """The model's state."""

    size: int
    capacity: int
    inline: int
    rng: random.Random
    executed: list[list[tuple[tuple[int, ...], str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.size, self.capacity, self.inline)
        self.executed = [[] for _ in range(self.size)]
        self.handles: list[Handle] = []

    # What a rank's program does.

    def submit(self, rank: int, request: Request) -> Handle:
        buffers = [Buffer.of_array(np.full(spec.shape, float(rank), np.float32)) for spec in request.tensors]
        operation = Submission(PersistentRequest(request), buffers, buffers)
        self.members[rank].add(operation)
        self.handles.append(operation.handle)
        return operation.handle

    def program(self, rank: int, rounds: list[Round]) -> Iterator[None]:
        """One rank, which yields when it waits."""
        order = random.Random(self.rng.random())
        sets = [0]
        ranks: dict[int, tuple[int, ...]] = {0: tuple(range(self.size))}
        for number, round_ in enumerate(rounds):
            handles = []
            quits = rank in round_.quitters
            mine = [] if quits else list(enumerate(round_.operations))
            if quits and round_.alone:
                # Submitted before the join, and by no other rank: it goes on without the others.
                spec = TensorSpec(DType.FLOAT32, (2,))
                alone = Request(f"alone.{rank}", Collective.ALLREDUCE, (spec,))
                handles.append((Collective.ALLREDUCE, 0, self.submit(rank, alone)))
            order.shuffle(mine)
            for place, (which, rows, collective) in mine:
                process_set = sets[which % len(sets)]
                if rank not in ranks[process_set]:
                    continue
                shape = (rows + rank,) if collective is Collective.ALLGATHER else (rows,)
                request = Request(
                    f"op{place}", collective, (TensorSpec(DType.FLOAT32, shape),), process_set=process_set
                )
                handles.append((collective, process_set, self.submit(rank, request)))
                if order.random() < 0.3:
                    yield
            if round_.quitters:
                if not quits:
                    yield from self.wait([handle for _, _, handle in handles])
                handles.append((Collective.JOIN, 0, self.submit(rank, Request("join", Collective.JOIN))))
            yield from self.wait([handle for _, _, handle in handles])
            for collective, process_set, handle in handles:
                gone = collective is Collective.ALLGATHER and round_.quitters & set(ranks[process_set])
                assert isinstance(handle.error, MismatchError) if gone else handle.error is None, handle.error
            if len(round_.add) and tuple(sorted(round_.add)) not in ranks.values():
                members = tuple(sorted(round_.add))
                change = self.submit(rank, Request(f"add.{number}", Collective.ADD_PROCESS_SET, ranks=members))
                yield from self.wait([change])
                sets.append(change.value)
                ranks[change.value] = members
            elif round_.remove and len(sets) > 1:
                removed = sets.pop(1 + round_.remove % (len(sets) - 1))
                change = self.submit(
                    rank, Request(f"remove.{number}", Collective.REMOVE_PROCESS_SET, ranks=ranks.pop(removed))
                )
                yield from self.wait([change])
                assert change.value == removed

    @staticmethod
    def wait(handles: list[Handle]) -> Iterator[None]:
        while not all(handle.done() for handle in handles):
            yield

    def execute(self, rank: int, message: Execute) -> None:
        for response, operation in self.members[rank].accept(message, 0.0):
            request = response.request
            # Numbers of sets come again, so the ranks stand for the set.
            ranks = self.members[rank].sets[request.process_set]
            key = (ranks, request.name, sum(spec.count for spec in request.tensors))
            self.executed[rank].append(key)
            assert not operation.handle.done(), f"{key} was executed twice"
            operation.handle.resolve(operation.outputs, value=response.value)


ROUNDS = st.builds(
    Round,
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 2),
            st.sampled_from([Collective.ALLREDUCE, Collective.ALLREDUCE, Collective.ALLGATHER]),
        ),
        max_size=5,
    ).map(tuple),
    st.frozensets(st.integers(0, 4), max_size=2),
    st.booleans(),
    st.frozensets(st.integers(0, 4), max_size=4),
    st.integers(0, 3),
)


def possible(rounds: list[Round], size: int) -> list[Round]:
    """The rounds with the ranks that there are; not all may quit."""
    return [
        Round(
            each.operations,
            frozenset(rank for rank in each.quitters if rank < size - 1),
            each.alone,
            frozenset(rank for rank in each.add if rank < size),
            each.remove,
        )
        for each in rounds
    ]


def run(job: Job, rounds: list[Round], *, lose_after: int | None = None) -> None:
    """Interleave programs and network until nothing is left to do, or a rank is lost."""
    programs = {rank: job.program(rank, rounds) for rank in range(job.size)}
    steps = 0
    while programs:
        if lose_after is not None and steps >= lose_after:
            for member in job.members:
                for operation in member.close(PeerLostError("a rank was lost", rank=0)):
                    assert operation.handle.resolve(error=member.closed)
            return
        steps += 1
        actions = job.actions()
        waiting = list(programs)
        choice = job.rng.randrange(len(actions) + len(waiting))
        if choice < len(actions):
            actions[choice]()
            continue
        rank = waiting[choice - len(actions)]
        before = len(job.handles)
        try:
            next(programs[rank])
        except StopIteration:
            del programs[rank]
        assert actions or before != len(job.handles) or steps < 100_000, "the job waits for something that never comes"
        if steps > 100_000:
            raise AssertionError(f"ranks {list(programs)} wait for ever; pending: {job.negotiator.waiting()}")


def one_order(job: Job) -> None:
    """Any two ranks execute what both take part in, in the same order."""
    numbered: list[list[tuple[object, int]]] = []
    for executed in job.executed:
        times: Counter[object] = Counter()
        numbered.append([])
        for key in executed:
            times[key] += 1
            numbered[-1].append((key, times[key]))
    for first in numbered:
        for second in numbered:
            shared = set(first) & set(second)
            assert [key for key in first if key in shared] == [key for key in second if key in shared]


# A rank submits something that was forgotten, and joins before it can say it again.
LATE_JOIN = [
    Round(((0, 0, Collective.ALLREDUCE),), frozenset([0]), False, frozenset(), 0),
    Round((), frozenset([0]), True, frozenset([1]), 0),
    Round(((1, 0, Collective.ALLREDUCE),), frozenset([0]), True, frozenset(), 0),
]


@example(2, LATE_JOIN, 1, 0, 197)
@given(
    st.integers(2, 5),
    st.lists(ROUNDS, min_size=1, max_size=6),
    st.sampled_from([0, 1, 3, 1024]),
    st.sampled_from([0, 8]),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_every_job_ends_with_one_order_for_all(
    size: int, rounds: list[Round], capacity: int, inline: int, seed: int
) -> None:
    job = Job(size, capacity, inline, random.Random(seed))
    run(job, possible(rounds, size))
    one_order(job)
    assert not job.negotiator.has_ready
    assert not job.negotiator.has_pending
    assert all(handle.done() for handle in job.handles)
    assert not any(member.has_pending for member in job.members)


@given(
    st.integers(2, 5),
    st.lists(ROUNDS, min_size=1, max_size=4),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_when_a_rank_is_lost_every_handle_ends(size: int, rounds: list[Round], lose_after: int, seed: int) -> None:
    job = Job(size, 1024, 8, random.Random(seed))
    run(job, possible(rounds, size), lose_after=lose_after)
    one_order(job)
    assert all(handle.done() for handle in job.handles)
