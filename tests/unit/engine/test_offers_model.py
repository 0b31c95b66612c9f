"""A model of a job on one host whose ranks offer small operations to each other, over a network that delays at will.

Each rank has the real Member, rank 0 the real Coordinator; every message goes through its bytes. What a blocking call
does at the shared memory happens step by step, between the steps of everything else. Hypothesis chooses which ranks
wait, which submit without waiting, which join or disagree, and when a thread is interrupted or a rank is lost.

Checked: each operation completes once on each rank, in the same way on all of them (by offers or by an order) and with
the data of one and the same call; and the job never waits for ever.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdgloo._engine import member as member_module
from hvdgloo._engine.conventions import EVERYONE
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Execute, Message, Offer, Request, Resend, decode, encode
from hvdgloo._engine.offers import PLACES, OwnOffer, suits
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.errors import MismatchError, PeerLostError
from hvdgloo.types import Buffer, Collective, DType, TensorSpec

MOST_STEPS = 60_000


@dataclass(frozen=True)
class Round:
    """A stretch of every rank's program.

    Attributes:
        operations: each one's name and the ranks that submit it without waiting. A name that is a digit stands for an
            automatic one, and for the number of elements; "g" is for an allgather, "-" for a barrier.
        together: its blocking calls are made by threads of their own, all at once.
        quitters: ranks that make only the first call and join.
        rivals: ranks that then call a broadcast of the name by which the others call an allreduce, or an allreduce of
            another shape if these have automatic names; none for no call.
        unnamed: the latter.
    """

    operations: tuple[tuple[str, frozenset[int]], ...]
    together: bool
    quitters: frozenset[int]
    rivals: frozenset[int]
    unnamed: bool = False


@dataclass
class Job:
    """The model's state.

    Attributes:
        how: for each call of the program, the ways in which ranks have completed it.
        placed: for each item of the common order, the calls for which ranks have taken it.
    """

    size: int
    capacity: int
    rng: random.Random
    interrupts: bool
    how: dict[object, set[str]] = field(default_factory=dict)
    placed: dict[int, set[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Some ranks, and some directions of the network, are much slower than others.
        self.speeds = [10 ** -self.rng.uniform(0, 2) for _ in range(4 * self.size + 1)]
        everyone = {0: tuple(range(self.size))}
        self.members = [Member(rank, everyone, 0) for rank in range(self.size)]
        rules = CoordinatorSettings(10.0, self.capacity, 0.0, False, 60.0, 0.0)
        self.coordinator = Coordinator(self.size, everyone, rules, str)
        self.coordinator.offers.has_ended = self.has_ended
        self.up: list[deque[bytes]] = [deque() for _ in range(self.size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(self.size)]
        self.places: list[list[tuple[int, object]]] = [[(0, None)] * self.size for _ in range(PLACES)]
        self.known: dict[tuple[int, str], PersistentRequest] = {}
        self.calls: dict[Handle, object] = {}
        self.counts: list[Counter[Collective]] = [Counter() for _ in range(self.size)]  # of automatic names
        self.own: list[dict[Handle, OwnOffer]] = [{} for _ in range(self.size)]
        self.offered = self.lost = False

    # The shared memory.

    def is_whole(self, place: int, word: int) -> bool:
        return all(posted == word for posted, _ in self.places[place])

    def has_ended(self, offer: Offer) -> bool:
        return self.members[0].turn > offer.turn or self.is_whole(offer.turn % PLACES, offer.word)

    def settle(self, rank: int) -> None:
        own = self.members[rank].own_offer
        if own is None or not self.is_whole(own.place, own.word):
            return
        call = self.calls[own.operation.handle]
        assert {data for _, data in self.places[own.place]} == {call}, "the data of different calls were combined"
        assert self.members[rank].complete(own)
        self.how.setdefault(call, set()).add("offers")
        assert own.operation.handle.resolve()

    # What a rank's program does.

    def submission(self, rank: int, name: str, call: object) -> Submission:
        kind = Collective(name.partition(".")[0])
        automatic = name[-2:-1] == "."
        elements = int(name[-1]) if name[-1].isdigit() and automatic else 1
        specs = (TensorSpec(DType.FLOAT32, (elements,)),) if kind.has_tensors else ()
        root = 0 if kind.has_root else -1
        full_name = f"{kind.value}.noname" if automatic else name
        persistent = self.known.setdefault((rank, name), PersistentRequest(Request(full_name, kind, specs, root=root)))
        if automatic:
            self.counts[rank][kind] += 1
            persistent = persistent.numbered(self.counts[rank][kind])
        buffers = [Buffer.of_array(np.zeros(elements, np.float32)) for _ in specs]
        operation = Submission(persistent, buffers, buffers)
        self.calls[operation.handle] = call
        return operation

    def start(self, rank: int, name: str, call: object) -> Handle:
        operation = self.submission(rank, name, call)
        self.members[rank].add(operation)
        return operation.handle

    def waited(self, rank: int, name: str, call: object, handles: list[Handle]) -> Iterator[None]:
        """A blocking call, which may be interrupted: what it was for goes on."""
        self.settle(rank)
        operation, member = self.submission(rank, name, call), self.members[rank]
        handles.append(operation.handle)
        own = member.offer(operation) if suits(operation.request, 1 << 16) else None
        if own is None:
            member.add(operation)
            while not operation.handle.done():
                yield
            return
        self.offered = True
        yield
        self.places[own.place][rank] = own.word, call
        while not operation.handle.done():
            yield
            if self.interrupts and own.is_due and self.rng.random() < 0.1:
                return
            if member.own_offer is own:
                self.settle(rank)
            if self.rng.random() < 0.2:
                own.is_due = True

    def program(self, rank: int, rounds: list[Round]) -> Iterator[None]:
        for number, each in enumerate(rounds):
            handles: list[Handle] = []
            quits = rank in each.quitters
            threads: list[Iterator[None]] = []
            for place, (name, asynchronous) in enumerate(each.operations[:1] if quits else each.operations):
                call = number, place
                kind = "barrier" if name == "-" else "allgather" if name == "g" and not each.quitters else "allreduce"
                name = f"{kind}.{name}{place if name.isalpha() else ''}"
                if rank in asynchronous:
                    handles.append(self.start(rank, name, call))
                    continue
                thread = self.waited(rank, name, call, handles)
                if each.together or quits:
                    threads.append(thread)
                    next(thread, None)
                else:
                    yield from thread
            if each.quitters:
                if not quits:
                    yield from self.end(rank, threads, handles)
                handles.append(self.start(rank, "join", ("join", number)))
            yield from self.end(rank, threads, handles)
            if each.quitters:
                self.counts[rank].clear()
            assert self.lost or all(handle.error is None for handle in handles), [handle.error for handle in handles]
            if each.rivals and len(each.rivals) < self.size:
                names = ("allreduce.1", "allreduce.2") if each.unnamed else ("allreduce.a0", "broadcast.a0")
                failing: list[Handle] = []
                name = names[rank in each.rivals]
                yield from self.end(rank, [self.waited(rank, name, ("rival", number), failing)], failing)
                assert self.lost or isinstance(failing[0].error, MismatchError), failing[0].error

    def end(self, rank: int, threads: list[Iterator[None]], handles: list[Handle]) -> Iterator[None]:
        """Wait for everything, and complete what interrupted threads have left."""
        while threads or not all(handle.done() for handle in handles):
            yield
            if threads:
                thread = threads[self.rng.randrange(len(threads))]
                try:
                    next(thread)
                except StopIteration:
                    threads.remove(thread)
            else:
                self.settle(rank)

    # What control threads and the network do.

    def actions(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the next possible events, each with its weight."""
        found: list[tuple[float, Callable[[], None]]] = []
        speeds = [self.speeds[at :: self.size] for at in range(self.size)]
        for rank, member in enumerate(self.members):
            own = member.own_offer
            if member._new or (own is not None and own.is_due and not own.is_told):
                found.append((speeds[rank][1], lambda rank=rank: self.speak(rank)))
            if self.up[rank]:
                found.append((speeds[rank][2], lambda rank=rank: self.hear(rank)))
            if self.down[rank]:
                found.append((speeds[rank][3], lambda rank=rank: self.deliver(rank)))
        if self.coordinator.has_ready:
            found.append((self.speeds[-1], self.release))
        return found

    def speak(self, rank: int) -> None:
        submission, offer = self.members[rank].drain(), self.members[rank].take_offer()
        self.up[rank].extend(encode(message) for message in (offer, submission) if message is not None)

    def hear(self, rank: int) -> None:
        self.coordinator.receive(rank, decode(self.up[rank].popleft()), 0.0)
        self.send()

    def release(self) -> None:
        self.coordinator.release(0.0)
        self.send()

    def send(self) -> None:
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        for rank, message in outbox:
            for queue in self.down if rank == EVERYONE else [self.down[rank]]:
                queue.append(encode(message))

    def deliver(self, rank: int) -> None:
        message: Message = decode(self.down[rank].popleft())
        member = self.members[rank]
        if isinstance(message, Resend):
            self.up[rank].append(encode(member.resend(message.signatures)))
            return
        assert isinstance(message, Execute)
        before = member._ordered
        operations = {**member._pending}
        batch = dict(enumerate(member.accept(message)))
        for position, item in enumerate(message.items):
            if not isinstance(item, int) and item.error:
                continue
            request = item.request if not isinstance(item, int) else None
            mine = [operation for _, operation in batch.values() if operation.handle.order == before + position]
            for operation in mine:
                call = self.calls.get(operation.handle)
                if call is not None:  # it was submitted here: this rank has not joined
                    assert operation in operations.values()
                    self.how.setdefault(call, set()).add("order")
                    self.placed.setdefault(before + position, set()).add(call)
                assert operation.handle.resolve(value=-1 if request is None else 0)


NAMES = st.sampled_from("ab12g-")
RANKS = st.frozensets(st.integers(0, 3), max_size=2)
ROUNDS = st.builds(
    Round,
    st.lists(st.tuples(NAMES, st.one_of(st.just(frozenset()), RANKS)), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.one_of(st.just(frozenset()), RANKS),
    st.one_of(st.just(frozenset()), RANKS),
    st.booleans(),
)


def possible(rounds: list[Round], size: int) -> list[Round]:
    """The rounds with the ranks that there are; not all may quit."""
    return [
        Round(
            each.operations,
            each.together,
            frozenset(rank for rank in each.quitters if rank < size - 1),
            frozenset(rank for rank in each.rivals if rank < size),
            each.unnamed,
        )
        for each in rounds
    ]


def run(job: Job, rounds: list[Round], lose_after: int = -1) -> None:
    """Interleave programs and network until nothing is left to do, or a rank is lost."""
    programs = {rank: job.program(rank, rounds) for rank in range(job.size)}
    for step in range(MOST_STEPS):
        if step == lose_after:
            lose(job)
        actions, waiting = [] if job.lost else job.actions(), list(programs)
        if not waiting:
            return
        weights = [weight for weight, _ in actions] + [job.speeds[rank] for rank in waiting]
        (choice,) = job.rng.choices(range(len(weights)), weights)
        if choice < len(actions):
            actions[choice][1]()
        elif next(programs[waiting[choice - len(actions)]], job) is job:
            del programs[waiting[choice - len(actions)]]
    raise AssertionError(f"ranks {list(programs)} wait for ever; rank 0 knows of {job.coordinator._waiting()}")


def lose(job: Job) -> None:
    """All ranks learn that one is lost: what all have offered does not fail, everything else does."""
    job.lost = True
    error = PeerLostError("a rank was lost", rank=0)
    for rank, member in enumerate(job.members):
        own = member.own_offer
        spared = own if own is not None and job.is_whole(own.place, own.word) else None
        for operation in member.close(error, spared):
            assert operation.handle.resolve(error=error)
        assert [*member._pending.values()] == ([] if spared is None else [spared.operation])
        job.settle(rank)


def agree(job: Job) -> None:
    mixed = {call: ways for call, ways in job.how.items() if len(ways) > 1}
    assert not mixed, "ranks have completed a call in different ways"
    assert all(len(calls) == 1 for calls in job.placed.values()), job.placed


ALONE, WITH_A_JOIN = (
    Round((("g", frozenset()),), quits, frozenset([0]) if quits else frozenset(), frozenset())
    for quits in (False, True)
)


@example([ALONE, WITH_A_JOIN, ALONE], 2, 2, False, 0)  # another kind of the same name, whose offers had ended
@settings(max_examples=150, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=5), st.integers(2, 4), st.integers(1, 4), st.booleans(), st.integers(0))
def test_every_call_completes_once_and_in_one_way_on_all_ranks(
    rounds: list[Round], size: int, capacity: int, interrupts: bool, seed: int
) -> None:
    job = Job(size, capacity, random.Random(seed), interrupts)
    with mock.patch.object(member_module, "_RETRY", 1):
        run(job, [*possible(rounds, size)] * 3)
    agree(job)
    while actions := job.actions():
        actions[0][1]()
    assert job.coordinator.waiting(1e9, 0.0) == []
    assert not job.coordinator._has_pending
    assert len({member.turn for member in job.members}) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=3), st.integers(2, 4), st.integers(0, 400), st.integers(0))
def test_when_a_rank_is_lost_every_call_ends_and_what_all_have_offered_succeeds(
    rounds: list[Round], size: int, lose_after: int, seed: int
) -> None:
    job = Job(size, 8, random.Random(seed), interrupts=False)
    rounds = [Round(each.operations, each.together, frozenset(), frozenset()) for each in rounds]
    with contextlib.suppress(PeerLostError):  # of what is submitted after the loss
        run(job, rounds * 3, lose_after)
    assert not job.lost or not any(member.has_pending for member in job.members)
