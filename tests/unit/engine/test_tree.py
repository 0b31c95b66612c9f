"""The tree between rank 0 and all others: a model of whole jobs, and the same programs with and without it.

The programs and their checks are ``test_engine_model``'s. Here, every leader has the real Aggregator and rank 0
the real Coordinator, and every message travels as its bytes, link by link.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdgloo._engine.control import VERDICT_SECONDS
from hvdgloo._engine.conventions import ATTRIBUTION_SECONDS, EVERYONE, ping_interval
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.messages import (
    FOR_EVERYONE,
    Abort,
    AskAlive,
    AskStacks,
    Bye,
    Drained,
    End,
    Execute,
    Failed,
    Gathered,
    Leave,
    Lost,
    Message,
    Observe,
    Part,
    Ping,
    Pong,
    Request,
    Resend,
    Response,
    Said,
    Silent,
    Stacks,
    Submit,
    To,
    decode,
    encode,
)
from hvdgloo._engine.readiness import masks_of
from hvdgloo._engine.run_lengths import mask_of_runs, masks_of_runs, runs_of_mask, runs_of_masks
from hvdgloo._engine.tree import Aggregator
from hvdgloo._engine.tree_operations import BATCH_SECONDS
from hvdgloo._engine.tree_position import position_of
from hvdgloo.errors import PeerLostError
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec
from tests.support.effort import effort
from tests.unit.engine.test_coordinator import TIMEOUT, WARNING, request
from tests.unit.engine.test_coordinator import Job as Star
from tests.unit.engine.test_negotiation_model import LATE_JOIN, ROUNDS, Job, Round, one_order, possible, run

NEVER = float("inf")
CALM = CoordinatorSettings(TIMEOUT, 1024, 0.0, False, 60.0, 0.0)


class Network:
    """Leaders, the root, and what is on its way between ranks.

    Args:
        heard: what is done when a rank is told something.
        patience: of the leaders, in seconds.
        sets: further process sets.
    """

    def __init__(
        self,
        slots: Sequence[int],
        fanin: int,
        rules: CoordinatorSettings,
        heard: Callable[[int, Message], None],
        patience: float = 1.0,
        sets: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.size = sum(slots)
        everyone = {0: tuple(range(self.size)), **(sets or {})}
        self.now = 0.0
        self.seats = [position_of(rank, slots, fanin) for rank in range(self.size)]
        self.aggregators = {
            each.rank: Aggregator(each, everyone, patience, rules.operation_timeout)
            for each in self.seats
            if each.below
        }
        self.coordinator = Coordinator(
            self.size, everyone, rules, lambda rank: f"rank {rank} (h{rank}, pid {100 + rank})", self.seats[0]
        )
        self.up: list[deque[bytes]] = [deque() for _ in range(self.size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(self.size)]
        self.orders: list[Message] = []
        self.mute: set[int] = set()  # ranks that read and say nothing
        self._heard = heard

    def say(self, rank: int, message: Message) -> None:
        """A rank's own part speaks to its leader, which may be itself."""
        if rank in self.aggregators:
            self.aggregators[rank].receive(rank, message, self.now)
        else:
            self.up[rank].append(encode(message))

    def actions(self) -> list[Callable[[], None]]:
        """Return the possible next actions."""
        found: list[Callable[[], None]] = []
        for rank in range(self.size):
            if self.up[rank]:
                found.append(lambda rank=rank: self.absorb(rank))
            if self.down[rank] and rank not in self.mute:
                found.append(lambda rank=rank: self.deliver(rank))
        found += [
            lambda leader=leader: self.climb(leader)
            for leader, aggregator in self.aggregators.items()
            if aggregator.is_due(self.now) and leader not in self.mute
        ]
        is_over = self.coordinator.over or 0 in self.mute
        if self.coordinator.outbox or (self.coordinator.has_ready and not is_over):
            found.append(self.release)
        return found

    def absorb(self, rank: int) -> None:
        message = decode(self.up[rank].popleft())
        if rank in self.mute:
            return
        parent = self.seats[rank].parent
        if parent == 0:
            self.coordinator.heard(rank, self.now)
        self.aggregators[parent].receive(rank, message, self.now)

    def climb(self, leader: int) -> None:
        aggregator = self.aggregators[leader]
        for message in aggregator.up.take(self.now):
            if leader:
                self.up[leader].append(encode(message))
                continue
            for ranks, numbers in self.coordinator.hear(message, self.now):
                aggregator.operations.ask_back(ranks, numbers, asked_here=False)
        down, aggregator.down = aggregator.down, []
        for child, message in down:
            if child == leader:
                self._heard(leader, message)
            else:
                self.down[child].append(encode(message))

    def release(self) -> None:
        self.coordinator.release(self.now)
        outbox, self.coordinator.outbox = self.coordinator.outbox, []
        for destination, message in outbox:
            if 0 in self.mute:
                continue
            if destination == EVERYONE:
                self.orders.append(message)
                self.spread(0, message)
            elif destination == 0:
                self._heard(0, message)
            elif isinstance(message, AskStacks):
                self.aggregators[0].send(1 << destination, message)
            else:
                self.down[destination].append(encode(message))

    def spread(self, leader: int, message: Message) -> None:
        for child in self.seats[leader].children:
            self.down[child].append(encode(message))
        self.aggregators[leader].pass_down(message, self.now)
        self._heard(leader, message)

    def deliver(self, rank: int) -> None:
        message = decode(self.down[rank].popleft())
        if rank not in self.aggregators:
            self._heard(rank, message)
        elif isinstance(message, FOR_EVERYONE):
            self.spread(rank, message)
        else:
            self.aggregators[rank].pass_down(message, self.now)

    def tick(self) -> None:
        for leader, aggregator in self.aggregators.items():
            if leader not in self.mute:
                aggregator.tick(self.now)
        root = self.aggregators[0]
        self.coordinator.gathering = root.operations.holds or root.asked_from_below(self.now)
        self.coordinator.tick(self.now)

    def deadline(self) -> float:
        times = [aggregator.deadline() for leader, aggregator in self.aggregators.items() if leader not in self.mute]
        return min([time for time in [*times, self.coordinator.deadline()] if time is not None], default=NEVER)

    def lose(self, victim: int) -> None:
        """A rank is killed: what it has sent arrives, then those at the other ends of its connections know."""
        self.mute.add(victim)
        text = f"rank {victim} was lost"
        for child in self.seats[victim].children:
            while self.down[child] and child not in self.mute:
                self.deliver(child)
            if child in self.aggregators:
                self.spread(child, Abort("peer", text, victim))
            else:
                self._heard(child, Abort("peer", text, victim))
        if victim:
            parent = self.seats[victim].parent
            queue, self.mute = self.up[victim], self.mute - {victim}
            while queue:
                self.absorb(victim)
            self.mute.add(victim)
            self.aggregators[parent].lost(victim, "its connection ended")

    def settle(self) -> bool:
        """Let everything arrive that is on its way, in the order of ranks; whether there was anything."""
        for turn in range(100_000):
            actions = self.actions()
            if actions:
                actions[0]()
            elif any(g.up.deadline is not None for leader, g in self.aggregators.items() if leader not in self.mute):
                self.now += BATCH_SECONDS
            else:
                return turn > 0
        raise AssertionError("messages without end")

    @property
    def at_rest(self) -> bool:
        return not any(
            below.holds or below._asked or below._joined or below._late_joins
            for below in (aggregator.operations for aggregator in self.aggregators.values())
        )


@dataclass
class TreeJob(Job):
    """The model's state, with a tree of hosts."""

    slots: Sequence[int] = ()
    fanin: int = 2
    patience: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = replace(CALM, cache_capacity=self.capacity)
        self.network = Network(self.slots, self.fanin, rules, self.heard, self.patience)
        self.negotiator = self.network.coordinator._negotiator

    def actions(self) -> list[Callable[[], None]]:
        found = self.network.actions()
        found += [lambda rank=rank: self.drain(rank) for rank in range(self.size) if self.members[rank]._new]
        if self.rng.random() < 0.02:
            found.append(self.let_time_pass)
        return found

    def let_time_pass(self) -> None:
        self.network.now += self.rng.choice([BATCH_SECONDS, 0.4])
        self.network.tick()

    def drain(self, rank: int) -> None:
        submission = self.members[rank].drain()
        assert submission is not None
        self.network.say(rank, submission)

    def heard(self, rank: int, message: Message) -> None:
        if isinstance(message, Resend):
            self.network.say(rank, self.members[rank].resend(message.signatures))
        elif isinstance(message, Execute):
            self.inlined += len(message.results) if rank == 0 else 0
            self.execute(rank, message)
        elif isinstance(message, Abort):
            for operation in self.members[rank].close(PeerLostError(message.text, rank=message.rank)):
                operation.handle.resolve(error=self.members[rank].closed)


SLOTS = st.lists(st.integers(1, 4), min_size=1, max_size=6).filter(lambda slots: 2 <= sum(slots) <= 12)
WHOLE = st.tuples(
    SLOTS,
    st.integers(1, 3),
    st.lists(ROUNDS, min_size=1, max_size=6),
    st.sampled_from([0, 1, 2, 1024]),
    st.sampled_from([0, 8]),
    st.integers(0, 2**32),
)
"""Hosts, fan-in, what the programs do, how many numbers are remembered, the bytes that travel inline, and a seed."""


REMEMBERED_BY_SOME = [
    Round(
        ((0, 0, Collective.ALLREDUCE), (0, 1, Collective.ALLREDUCE), (0, 0, Collective.ALLGATHER)),
        frozenset({0}),
        True,
        frozenset({0, 1, 3}),
        3,
    ),
    *(
        Round(
            (
                (3, 2, Collective.ALLREDUCE),
                (0, 0, Collective.ALLREDUCE),
                (2, 2, Collective.ALLGATHER),
                (3, 2, Collective.ALLGATHER),
                (2, 1, Collective.ALLREDUCE),
            ),
            quitters,
            not quitters,
            add,
            1,
        )
        for quitters, add in ((frozenset({1, 3}), frozenset({0, 2, 3})), (frozenset[int](), frozenset({1, 3})))
    ),
]
"""An operation goes up by number for some ranks and spelled out for others, while the root forgets the number."""


FORGOTTEN_BEFORE_A_JOIN = [
    Round(((0, 0, Collective.ALLREDUCE),) * 4, frozenset({1}), True, frozenset({0}), 0),
    Round(((1, 0, Collective.ALLREDUCE),), frozenset(), False, frozenset(), 0),
    Round(
        ((0, 0, Collective.ALLREDUCE), (0, 0, Collective.ALLREDUCE), (1, 0, Collective.ALLREDUCE)),
        frozenset({1}),
        True,
        frozenset(),
        0,
    ),
]
"""A number goes up with the join that follows it, and the root, which has forgotten it, has it spelled out."""


@pytest.mark.extended
@example(([3], 1, FORGOTTEN_BEFORE_A_JOIN, 2, 0, 229))
@example(([1, 1], 1, LATE_JOIN, 1, 0, 197))
@example(([3, 1], 2, REMEMBERED_BY_SOME, 2, 8, 1634))
@given(WHOLE)
@settings(max_examples=120, deadline=None)
def test_every_job_ends_with_one_order_for_all(
    case: tuple[list[int], int, list[Round], int, int, int],
) -> None:
    slots, fanin, rounds, capacity, inline, seed = case
    # Whatever is held back comes in the end, also without a leader's losing patience.
    patience = 0.5 if seed % 2 else NEVER
    job = TreeJob(sum(slots), capacity, inline, random.Random(seed), slots=slots, fanin=fanin, patience=patience)
    run(job, possible(rounds, job.size))
    one_order(job)
    assert not job.negotiator.has_ready
    assert not job.negotiator.has_pending
    assert all(handle.done() for handle in job.handles)
    assert not any(member.has_pending for member in job.members)
    while actions := job.network.actions():
        actions[0]()
    assert job.network.at_rest


def in_step(job: Job, rounds: list[Round], seed: int, settle: Callable[[], list[Execute]]) -> list[list[Any]]:
    """Run a job in which everything arrives before the next thing is said; what was ordered each time, without order
    and without numbers."""
    rng = random.Random(seed)
    programs = {rank: job.program(rank, rounds) for rank in range(job.size)}
    known: dict[int, Response] = {}
    history: list[list[Any]] = []
    for _ in range(20_000):
        if not programs:
            return history
        rank = rng.choice(list(programs))
        try:
            next(programs[rank])
        except StopIteration:
            del programs[rank]
        ordered = []
        for message in settle():
            for item in message.items:
                response = known[item] if isinstance(item, int) else item
                known[response.signature] = response
                ordered.append((response.request.key, response.rows, response.error, response.value))
        if ordered:
            history.append(sorted(ordered))
    raise AssertionError("the job does not end")


@given(WHOLE)
@settings(max_examples=60, deadline=None)
def test_the_same_program_gets_the_same_responses_through_a_star_and_a_tree(
    case: tuple[list[int], int, list[Round], int, int, int],
) -> None:
    slots, fanin, rounds, capacity, inline, seed = case
    size = sum(slots)
    rounds = possible(rounds, size)
    star = Job(size, capacity, inline, random.Random(seed))
    tree = TreeJob(size, capacity, inline, random.Random(seed), slots=slots, fanin=fanin, patience=NEVER)
    orders: list[Execute] = []

    def settle_star() -> list[Execute]:
        while actions := star.actions():
            if star.negotiator.has_ready:
                message = star.negotiator.take()
                orders.append(message)
                for queue in star.down:
                    queue.append(encode(message))
            else:
                actions[0]()
        found, orders[:] = orders[:], []
        return found

    def settle_tree() -> list[Execute]:
        while True:
            for rank in range(size):
                if tree.members[rank]._new:
                    tree.drain(rank)
            tree.network.settle()
            if not any(member._new for member in tree.members):
                break
        found, tree.network.orders = tree.network.orders, []
        return [message for message in found if isinstance(message, Execute)]

    assert in_step(tree, rounds, seed, settle_tree) == in_step(star, rounds, seed, settle_star)


@given(WHOLE, st.integers(0, 150), st.integers(0, 11))
@settings(max_examples=80, deadline=None)
def test_when_a_rank_or_a_leader_is_lost_every_handle_of_the_others_ends(
    case: tuple[list[int], int, list[Round], int, int, int], lose_after: int, victim: int
) -> None:
    slots, fanin, rounds, capacity, inline, seed = case
    job = TreeJob(sum(slots), capacity, inline, random.Random(seed), slots=slots, fanin=fanin)
    victim %= job.size
    programs = {rank: job.program(rank, possible(rounds, job.size)) for rank in range(job.size)}
    for _ in range(lose_after):
        actions = job.actions()
        choice = job.rng.randrange(len(actions) + len(programs)) if actions or programs else -1
        if 0 <= choice < len(actions):
            actions[choice]()
        elif choice >= 0:
            rank = list(programs)[choice - len(actions)]
            if next(programs[rank], "ended") == "ended":
                del programs[rank]
    job.network.lose(victim)
    job.network.settle()
    one_order(job)
    for rank in set(range(job.size)) - {victim}:
        closed = job.members[rank].closed
        assert isinstance(closed, PeerLostError)
        assert closed.rank == victim
        assert not job.members[rank].has_pending


class Tree:
    """Ranks that say what a test has them say, as ``Star`` has them; a clock that only the test moves.

    Args:
        answering: the ranks that answer pings.
        stacks: those that say where they are.
    """

    def __init__(
        self,
        slots: Sequence[int] = (2, 2, 1),
        fanin: int = 1,
        *,
        stall_check: bool = True,
        shutdown: float = 0.0,
        answering: Sequence[int] | None = None,
        stacks: Sequence[int] = (),
    ) -> None:
        rules = CoordinatorSettings(TIMEOUT, 1024, 0.0, stall_check, WARNING, shutdown)
        self.network = Network(slots, fanin, rules, self._heard, sets={1: ()})
        self.network.now = 1000.0
        self.answering = set(range(sum(slots)) if answering is None else answering)
        self.network.mute |= set(self.network.aggregators) - self.answering
        self.stacks = stacks
        self.told: list[tuple[float, int, Message]] = []

    @property
    def now(self) -> float:
        return self.network.now

    def _heard(self, rank: int, message: Message) -> None:
        self.told.append((self.now, rank, message))
        if isinstance(message, Ping) and rank in self.answering:
            self.network.say(rank, Pong())
        if isinstance(message, AskStacks) and rank in self.stacks:
            self.network.say(rank, Stacks(f"stack of {rank}"))

    def says(self, rank: int, message: Message) -> None:
        self.network.say(rank, message)
        self.network.settle()

    def submits(self, rank: int, *names: str, process_set: int = 0) -> None:
        self.says(rank, Submit((), tuple(request(name, process_set) for name in names)))

    def run_until(self, when: float) -> None:
        """Let time pass from deadline to deadline, as the control threads do."""
        network = self.network
        for _ in range(10_000):
            network.tick()
            if network.settle():
                continue  # what arrives wakes control threads, which tick
            deadline = network.deadline()
            if deadline > when:
                network.now = max(network.now, when)
                return
            network.now = max(network.now, deadline)
        raise AssertionError("the tree spins")

    def ordered(self) -> list[Message]:
        orders, self.network.orders = self.network.orders, []
        return orders

    def warned(self) -> list[str]:
        coordinator = self.network.coordinator
        notes, coordinator.notes = coordinator.notes, []
        return [text for kind, text in notes if kind == "stall"]

    def of(self, kind: type) -> list[tuple[float, int, Message]]:
        return [(at, rank, message) for at, rank, message in self.told if isinstance(message, kind)]


def by_star(script: Callable[[Star | Tree], None], **options: Any) -> tuple[list[Message], list[str]]:
    """Return the messages to every rank, and rank 0's warnings, when a script runs through a star of 5 ranks."""
    stacks, answering = options.pop("stacks", ()), options.pop("answering", range(5))
    star = Star(5, timeout=TIMEOUT, **options)
    orders: list[Message] = []
    real = star.run_until

    def run_until(when: float) -> None:
        orders.extend(m for _, to, m in real(when, answering=answering, stacks=stacks) if to == EVERYONE)

    def says(rank: int, message: Message) -> None:
        star.coordinator.receive(rank, message, star.now)
        star.coordinator.release(star.now)
        for to, sent in star.sent():
            if to == EVERYONE:
                orders.append(sent)
            elif isinstance(sent, Ping) and to in answering:
                star.coordinator.receive(to, Pong(), star.now)

    star.run_until, star.says = run_until, says  # type: ignore[method-assign, assignment]
    script(star)
    return orders, star.warned()


def by_tree(
    script: Callable[[Star | Tree], None], slots: Sequence[int], **options: Any
) -> tuple[list[Message], list[str]]:
    tree = Tree(slots, **options)
    script(tree)
    return tree.ordered(), tree.warned()


def stalls(job: Star | Tree) -> None:
    """Ranks 1 and 4 are late: first altogether, then one of them with one of two tensors, then for ever."""
    for rank in (0, 2, 3):
        job.submits(rank, "a", "b")
    job.run_until(1065.0)
    job.submits(1, "a", "b")
    job.submits(4, "a")
    job.run_until(1130.0)
    job.run_until(1190.0)


def spells_differently(job: Star | Tree) -> None:
    for rank in range(5):
        spec = TensorSpec(DType.FLOAT32 if rank != 3 else DType.FLOAT64, (2 if rank < 2 else 3,))
        job.says(rank, Submit((), (Request("x", Collective.ALLREDUCE, (spec,)),)))


def calls_differently(job: Star | Tree) -> None:
    spec = (TensorSpec(DType.FLOAT32, (2,)),)
    for rank in range(5):
        kind = Collective.ALLREDUCE if rank in (0, 3) else Collective.BROADCAST
        job.says(rank, Submit((), (Request(f"{kind.value}.x", kind, spec, root=0 if rank not in (0, 3) else -1),)))


def calls_known_ones_differently(job: Star | Tree) -> None:
    spec = (TensorSpec(DType.FLOAT32, (2,)),)
    for each in (
        Request("allreduce.x", Collective.ALLREDUCE, spec),
        Request("broadcast.x", Collective.BROADCAST, spec, root=0),
    ):
        for rank in range(5):
            job.says(rank, Submit((), (each,)))
    for rank in (4, 3, 2, 1, 0):
        job.says(rank, Submit((rank % 2,)))


def joins_an_allgather(job: Star | Tree) -> None:
    for rank in (1, 4):
        job.says(rank, Submit((), (Request("join", Collective.JOIN),)))
    for rank in (0, 2, 3):
        spec = TensorSpec(DType.FLOAT32, (rank, 2))
        job.says(rank, Submit((), (Request("allgather.x", Collective.ALLGATHER, (spec,)),)))
        job.submits(rank, "allreduce.y")
        job.says(rank, Submit((), (Request("add", Collective.ADD_PROCESS_SET, ranks=(0, 3)),)))
    for rank in (1, 4):
        job.says(rank, Submit((), (Request("add", Collective.ADD_PROCESS_SET, ranks=(0, 3)),)))
    for rank in (0, 2, 3):
        job.says(rank, Submit((), (Request("join", Collective.JOIN),)))


def leaves(job: Star | Tree) -> None:
    for rank in range(4):
        job.submits(rank, "a")
    job.says(3, Leave("an error"))
    job.submits(4, "a")
    for rank in range(5):
        job.says(rank, Drained())


def does_not_drain(job: Star | Tree) -> None:
    job.says(4, Leave())
    for rank in (0, 1, 2, 4):
        job.says(rank, Drained())
    job.run_until(1000.0 + TIMEOUT)


def reports_a_failure(job: Star | Tree) -> None:
    job.submits(0, "a")
    job.says(2, Failed("the wire is cut"))
    job.says(4, Failed("mine, too"))
    job.run_until(1003.0)


PROGRAMS: list[tuple[Callable[[Star | Tree], None], dict[str, Any]]] = [
    (stalls, {"stacks": (1,)}),
    (stalls, {"stacks": (1, 4), "shutdown": 120.0}),
    (spells_differently, {}),
    (calls_differently, {}),
    (calls_known_ones_differently, {}),
    (joins_an_allgather, {}),
    (leaves, {}),
    (does_not_drain, {}),
    (reports_a_failure, {}),
    (reports_a_failure, {"answering": (0, 1, 2, 4)}),
]


@pytest.mark.parametrize(("slots", "fanin"), [((2, 2, 1), 1), ((1, 3, 1), 2), ((1, 1, 1, 1, 1), 1)], ids=str)
@pytest.mark.parametrize(("script", "options"), PROGRAMS, ids=[f"{s.__name__} {o or ''}" for s, o in PROGRAMS])
def test_the_same_is_said_word_for_word(
    script: Callable[[Star | Tree], None], options: dict[str, Any], slots: Sequence[int], fanin: int
) -> None:
    ordered, warned = by_star(script, **options)
    assert by_tree(script, slots, fanin=fanin, **options) == (ordered, warned)
    assert ordered


class Leader:
    """The Aggregator of ranks 2 and 3's leader, which reports to rank 0; the leader of ranks 4 and 5 reports to it."""

    def __init__(self, patience: float = 1.0) -> None:
        self.aggregator = Aggregator(position_of(2, (2, 2, 2), 1), {0: range(6), 1: (0, 3)}, patience, TIMEOUT)
        self.now = 1000.0

    def hears(self, child: int, *messages: Message) -> None:
        for message in messages:
            self.aggregator.receive(child, decode(encode(message)), self.now)

    def is_told(self, *messages: Message) -> None:
        for message in messages:
            self.aggregator.pass_down(decode(encode(message)), self.now)

    def knows(self, *names: str) -> None:
        """These have been agreed upon, under the numbers from 0 on."""
        self.is_told(Execute(tuple(Response(request(name), signature=at) for at, name in enumerate(names))))

    def sends_up(self) -> list[Message]:
        return self.aggregator.up.take(self.now)

    def sends_down(self) -> list[tuple[int, Message]]:
        down, self.aggregator.down = self.aggregator.down, []
        return down

    def waits(self, seconds: float) -> None:
        self.now += seconds
        self.aggregator.tick(self.now)


BELOW = (2, 4)  # ranks 2 to 5, as runs
JOIN = Request("join", Collective.JOIN)


class TestSeats:
    @pytest.mark.parametrize("fanin", [1, 2, 16])
    def test_every_rank_is_below_the_root_once(self, fanin: int) -> None:
        slots = [3, 1, 8, 2, 5] * 5
        seats = [position_of(rank, slots, fanin) for rank in range(sum(slots))]
        for each in seats:
            assert sum(each.below.values()) == sum(1 << rank for below in each.below.values() for rank in _ranks(below))
            for child in each.children:
                assert seats[child].parent == each.rank
                assert each.below[child] == (sum(seats[child].below.values()) or 1 << child)
        assert sum(seats[0].below.values()) == (1 << len(seats)) - 1

    def test_the_effort_grows_as_the_number_of_hosts_does(self) -> None:
        few, many = ([8] * hosts for hosts in (64, 256))
        assert effort(lambda: position_of(8, many, 16)) <= 4.2 * effort(lambda: position_of(8, few, 16))
        # What sum() does inside itself is not counted, so its arguments are.
        assert _Slices([8] * 64).by(lambda slots: position_of(8, slots, 16)) == 0

    def test_128_hosts_of_8_by_the_default_fan_in(self) -> None:
        slots = [8] * 128
        root, leader, member = (
            position_of(0, slots, 16),
            position_of(8 * 20, slots, 16),
            position_of(8 * 20 + 3, slots, 16),
        )
        assert len(root.children) == 7 + 16
        assert root.height == root.levels == 2
        assert (leader.parent, leader.height, len(leader.children)) == (8, 0, 7)
        assert (member.parent, member.below) == (8 * 20, {})

    def test_a_rank_that_asks_waits_longer_than_those_below_but_not_for_ever(self) -> None:
        for hosts, fanin in ((128, 16), (40, 1)):
            slots = [1] * hosts
            seconds = [position_of(rank, slots, fanin).attribution_seconds for rank in range(hosts)]
            assert all(seconds[position_of(rank, slots, fanin).parent] > seconds[rank] for rank in range(1, hosts))
            assert ATTRIBUTION_SECONDS == min(seconds) < max(seconds) < VERDICT_SECONDS - 0.5


class _Slices(list[int]):
    """Counts how often it is copied in part."""

    copies = 0

    def __getitem__(self, at: Any) -> Any:
        self.copies += isinstance(at, slice)
        return super().__getitem__(at)

    def by(self, work: Callable[[list[int]], object]) -> int:
        """Return the number of copies that a call makes."""
        work(self)
        return self.copies


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


class TestRuns:
    @given(st.integers(0, 2**200), st.integers(0, 3000))
    def test_a_set_of_ranks_is_a_few_numbers(self, mask: int, first: int) -> None:
        runs = runs_of_mask(mask)
        assert mask_of_runs(runs) == mask
        assert runs_of_mask(mask, first) == tuple(n + first * (at % 2 == 0) for at, n in enumerate(runs))

    @given(st.frozensets(st.integers(0, 5000)))
    def test_so_is_a_set_of_numbers(self, numbers: frozenset[int]) -> None:
        masks = masks_of(tuple(sorted(numbers)))
        assert sorted(masks_of_runs(runs_of_masks(masks))) == sorted(masks)

    def test_a_run_that_crosses_blocks_is_taken_apart(self) -> None:
        assert masks_of_runs((1020, 8)) == masks_of(tuple(range(1020, 1028)))

    @pytest.mark.parametrize("decoded", [mask_of_runs, masks_of_runs])
    @pytest.mark.parametrize("runs", [(1,), (0, 1 << 40), (0, 1 << 19, 1 << 20, 1 << 21)], ids=str)
    def test_neither_can_be_made_to_fill_memory(self, decoded: Callable[[Any], Any], runs: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="not a control message"):
            decoded(runs)

    @pytest.mark.parametrize("runs", [(5, 2, 0, 3), (0, 3, 2, 4), (0, 3, 0, 3), (4, 0)], ids=str)
    def test_ranks_in_any_order_are_refused(self, runs: tuple[int, ...]) -> None:
        """Each run costs as much time as all ranks up to it; so there may be no more runs than ranks."""
        with pytest.raises(ValueError, match="not a control message"):
            mask_of_runs(runs)

    def test_runs_of_no_numbers_are_refused(self) -> None:
        with pytest.raises(ValueError, match="not a control message"):
            masks_of_runs((7, 0))


class TestGathering:
    def test_known_numbers_go_up_together_when_all_below_are_there(self) -> None:
        leader = Leader()
        leader.knows(*(f"t{number}" for number in range(300)))
        leader.hears(2, Submit(tuple(range(300))))
        leader.hears(3, Submit(tuple(range(200))))
        leader.hears(4, Gathered((0, 300)))
        (message,) = leader.sends_up()
        assert message == Gathered((0, 200))
        assert len(encode(message)) < 10
        leader.is_told(Execute(tuple(range(200))))
        leader.hears(3, Submit(tuple(range(200, 300))))
        assert leader.sends_up() == [Gathered((200, 100))]

    def test_what_is_spelled_out_equally_goes_up_once(self) -> None:
        leader = Leader()
        for rank in (2, 3):
            leader.hears(rank, Submit((), (request("a"),)))
        assert leader.sends_up() == []
        leader.hears(4, Gathered((), (Part((4, 2), request("a")),)))
        assert leader.sends_up() == [Gathered((), (Part(BELOW, request("a")),))]

    def test_different_requests_go_up_with_the_ranks_that_made_them(self) -> None:
        leader = Leader()
        leader.knows("a")
        other = Request("a", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (7,)),))
        leader.hears(2, Submit((0,)))
        leader.hears(3, Submit((), (other,)))
        leader.hears(4, Gathered((0, 1)))
        assert leader.sends_up() == [Gathered((), (Part((2, 1, 4, 2), 0), Part((3, 1), other)))]

    def test_a_set_without_all_ranks_waits_for_its_members_only(self) -> None:
        leader = Leader()
        leader.hears(3, Submit((), (request("a", 1),)))
        assert leader.sends_up() == [Gathered((), (Part((3, 1), request("a", 1)),))]

    def test_the_first_goes_at_once_and_the_next_with_the_answer_or_after_a_moment(self) -> None:
        leader = Leader()
        leader.knows("a", "b", "c", "d")
        for number in range(3):
            for child, said in ((2, Submit((number,))), (3, Submit((number,))), (4, Gathered((number, 1)))):
                leader.hears(child, said)
            if number == 0:
                assert leader.sends_up() == [Gathered((0, 1))]
            else:
                assert leader.sends_up() == []
        assert leader.aggregator.deadline() == leader.now + BATCH_SECONDS
        leader.is_told(Execute((0,)))
        assert leader.sends_up() == [Gathered((1, 2))]
        for child, said in ((2, Submit((3,))), (3, Submit((3,))), (4, Gathered((3, 1)))):
            leader.hears(child, said)
        assert leader.sends_up() == []
        leader.waits(BATCH_SECONDS)
        assert leader.sends_up() == [Gathered((3, 1))]

    def test_what_has_waited_for_a_second_goes_up_as_it_is_and_the_rest_follows_at_once(self) -> None:
        leader = Leader()
        leader.knows("a", "b")
        leader.hears(2, Submit((0,), (request("c"),)))
        assert leader.aggregator.deadline() == leader.now + 1.0
        leader.waits(0.5)
        leader.hears(4, Gathered((1, 1)))
        leader.waits(0.5)
        assert leader.sends_up() == [Gathered((), (Part((2, 1), request("c"), b"", 1.0), Part((2, 1), 0, b"", 1.0)))]
        leader.is_told(Execute((1,)))  # any answer
        leader.hears(3, Submit((0,)))
        assert leader.sends_up() == [Gathered((), (Part((3, 1), 0),))]

    def test_once_ordered_it_is_held_back_again(self) -> None:
        leader = Leader()
        leader.knows("a")
        leader.hears(2, Submit((0,)))
        leader.waits(1.0)
        assert leader.sends_up()
        leader.is_told(Execute((0,)))
        leader.hears(2, Submit((0,)))
        assert leader.sends_up() == []
        leader.hears(3, Submit((0,)))
        leader.hears(4, Gathered((0, 1)))
        assert leader.sends_up() == [Gathered((0, 1))]

    def test_what_another_leader_has_opened_is_not_held_here(self) -> None:
        leader = Leader()
        leader.hears(4, Gathered((), (Part((5, 1), request("a"), b"", 1.5),)))
        assert leader.sends_up() == [Gathered((), (Part((5, 1), request("a"), b"", 1.5),))]

    def test_different_kinds_under_one_name_are_not_held(self) -> None:
        leader = Leader()
        spec = (TensorSpec(DType.FLOAT32, (2,)),)
        one = Request("allreduce.x", Collective.ALLREDUCE, spec)
        other = Request("broadcast.x", Collective.BROADCAST, spec, root=0)
        leader.hears(2, Submit((), (one,)))
        leader.hears(3, Submit((), (other,)))
        assert leader.sends_up() == [Gathered((), (Part((2, 1), one), Part((3, 1), other)))]

    def test_while_rank_0_writes_a_timeline_every_rank_is_seen_to_come(self) -> None:
        leader = Leader()
        leader.knows("a")
        leader.hears(2, Submit((0,)))
        leader.is_told(Observe(True))
        leader.hears(3, Submit((0,)))
        assert leader.sends_up() == [Gathered((), (Part((2, 1), 0), Part((3, 1), 0)))]
        leader.is_told(Execute((0,)), Observe(False))
        leader.hears(3, Submit((0,)))
        assert leader.sends_up() == []


class TestPayloads:
    def test_tiny_tensors_are_combined_on_the_way(self) -> None:
        leader = Leader()
        scaled = Request("a", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (2,)),), ReduceOp.AVERAGE, prescale=2.0)
        for rank in (2, 3):
            leader.hears(rank, Submit((), (scaled,), np.full(2, float(rank), np.float32).tobytes()))
        leader.hears(4, Gathered((), (Part((4, 2), scaled, np.full(2, 100.0, np.float32).tobytes()),)))
        ((part,),) = [message.parts for message in leader.sends_up() if isinstance(message, Gathered)]
        assert part.ranks == BELOW
        assert np.frombuffer(part.payload, np.float32).tolist() == [110.0, 110.0]  # 100 has been prescaled below

    def test_if_some_have_sent_none_nothing_is_sent(self) -> None:
        leader = Leader()
        leader.hears(2, Submit((), (request("a"),), bytes(8)))
        leader.hears(3, Submit((), (request("a"),)))
        leader.hears(4, Gathered((), (Part((4, 2), request("a"), bytes(8)),)))
        assert leader.sends_up() == [Gathered((), (Part(BELOW, request("a")),))]

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX, ReduceOp.PRODUCT])
    def test_the_result_is_the_star_s(self, op: ReduceOp) -> None:
        spec = (TensorSpec(DType.FLOAT64, (3,)),)
        asked = Request("a", Collective.ALLREDUCE, spec, op, prescale=0.5, postscale=3.0)
        star, tree = Star(5), Tree()
        results = []
        for job in (star, tree):
            for rank in range(5):
                job.says(rank, Submit((), (asked,), np.array([rank, 1.0, 2.0 + rank]).tobytes()))
        star.coordinator.release(star.now)
        for sent in ([message for _, message in star.sent()], tree.ordered()):
            (message,) = sent
            assert isinstance(message, Execute)
            ((position, result),) = message.results
            assert position == 0
            results.append(np.frombuffer(result))
        np.testing.assert_allclose(results[1], results[0], rtol=1e-15)


class TestJoins:
    def test_a_join_takes_along_what_the_rank_has_submitted_before(self) -> None:
        leader = Leader()
        leader.hears(3, Submit((), (request("a"),)), Submit((), (JOIN,)))
        assert leader.sends_up() == [Gathered((), (Part((3, 1), request("a")), Part((3, 1), JOIN)))]

    def test_those_who_have_joined_are_not_waited_for(self) -> None:
        leader = Leader()
        leader.hears(3, Submit((), (JOIN,)))
        leader.hears(2, Submit((), (request("a"),)))
        leader.hears(4, Gathered((), (Part((4, 2), request("a")),)))
        assert leader.sends_up() == [Gathered((), (Part((3, 1), JOIN), Part((2, 1, 4, 2), request("a"))))]

    def test_but_for_changes_of_process_sets_they_are(self) -> None:
        leader = Leader()
        change = Request("add", Collective.ADD_PROCESS_SET, ranks=(0, 3))
        leader.hears(3, Submit((), (JOIN,)))
        leader.sends_up()
        leader.hears(2, Submit((), (change,)))
        leader.hears(4, Gathered((), (Part((4, 2), change),)))
        leader.waits(BATCH_SECONDS)
        assert leader.sends_up() == []
        leader.hears(3, Submit((), (change,)))
        assert leader.sends_up() == [Gathered((), (Part(BELOW, change),), last=3, waited=round(BATCH_SECONDS * 1e6))]

    def test_when_all_have_joined_all_are_waited_for_again(self) -> None:
        leader = Leader()
        leader.hears(3, Submit((), (JOIN,)))
        leader.sends_up()
        leader.is_told(Execute((Response(JOIN, value=5),)))
        leader.hears(2, Submit((), (request("a"),)))
        leader.hears(4, Gathered((), (Part((4, 2), request("a")),)))
        assert leader.sends_up() == []

    @pytest.mark.parametrize("asked", ["here", "above"])
    def test_a_join_does_not_overtake_what_a_rank_is_being_asked_for(self, asked: str) -> None:
        leader = Leader()
        if asked == "here":
            leader.hears(3, Submit((7,)))
        else:
            leader.is_told(To((3, 1), Resend((7,))))
        assert leader.sends_down() == [(3, Resend((7,)))]
        leader.hears(3, Submit((), (JOIN,)))
        assert leader.sends_up() == []
        leader.hears(3, Submit((), (request("a"),), resent=True))
        answered = () if asked == "here" else (Part((3, 1), None),)
        parts = (Part((3, 1), request("a")), *answered, Part((3, 1), JOIN))
        assert leader.sends_up() == [Gathered((), parts)]


class TestForgotten:
    def test_a_rank_that_waits_under_a_forgotten_number_spells_it_out_again(self) -> None:
        leader = Leader()
        leader.knows("a", "b")
        leader.hears(2, Submit((0, 1)))
        leader.hears(4, Gathered((0, 1)))
        leader.is_told(Execute((), (0,)))
        assert leader.sends_down() == [(2, Resend((0,))), (4, To((4, 2), Resend((0,))))]
        leader.hears(2, Submit((), (request("a"),), resent=True))
        leader.hears(4, Gathered((), tuple(Part((rank, 1), request("a")) for rank in (4, 5))))
        leader.hears(4, Gathered((), tuple(Part((rank, 1), None) for rank in (4, 5))))
        leader.hears(3, Submit((), (request("a"),)))
        parts = [part for message in leader.sends_up() if isinstance(message, Gathered) for part in message.parts]
        assert sorted(rank for part in parts for rank in _ranks(mask_of_runs(part.ranks))) == [2, 3, 4, 5]
        assert {part.what for part in parts} == {request("a")}

    def test_only_the_members_of_the_set_are_asked_for_what_is_unknown_altogether(self) -> None:
        coordinator = Coordinator(
            6, {0: range(6), 1: (1, 4)}, replace(CALM, cache_capacity=1), str, position_of(0, [2] * 3, 1)
        )
        for name in ("a", "b"):
            coordinator.hear(Gathered((), (Part((1, 1, 4, 1), request(name, 1)),)), 0.0)
            coordinator.release(0.0)
        assert coordinator.hear(Gathered((0, 1)), 0.0) == [(0b010010, [0])]

    def test_what_began_earlier_elsewhere_goes_up_when_it_has_waited_for_long_altogether(self) -> None:
        leader = Leader()
        leader.hears(4, Gathered((), (Part((4, 2), request("a"), age=0.7),)))
        leader.waits(0.3)
        assert leader.sends_up() == [Gathered((), (Part((4, 2), request("a"), age=pytest.approx(1.0)),))]

    def test_answers_are_not_held_for_those_who_spelled_it_out_at_once(self) -> None:
        leader = Leader()
        leader.knows("a")
        leader.hears(2, Submit((0,)))
        leader.hears(3, Submit((), (request("a"),)))
        leader.hears(4, Gathered((0, 1)))
        both = Part((2, 1, 4, 2), 0), Part((3, 1), request("a"))
        assert leader.sends_up() == [Gathered((), both)]
        leader.now += BATCH_SECONDS
        leader.aggregator.operations.ask_back(0b110100, [0])  # as the root does, which has just forgotten it
        leader.hears(2, Submit((), (request("a"),), resent=True))
        assert leader.sends_up() == [Gathered((), (Part((2, 1), request("a")),))]

    def test_what_was_asked_for_above_is_not_held(self) -> None:
        leader = Leader()
        leader.is_told(To((2, 1, 4, 2), Resend((9,))))
        assert leader.sends_down() == [(2, Resend((9,))), (4, To((4, 2), Resend((9,))))]
        leader.hears(2, Submit((), (request("a"),), resent=True))
        assert leader.sends_up() == [Gathered((), (Part((2, 1), request("a")), Part((2, 1), None)))]

    def test_a_removed_set_leaves_nothing_behind(self) -> None:
        leader = Leader()
        change = Request("remove", Collective.REMOVE_PROCESS_SET, ranks=(0, 2, 3))
        leader.is_told(Execute((Response(replace_ranks("add", (0, 2, 3)), value=2),)))
        leader.is_told(Execute((Response(request("a", 2), signature=5),)))
        leader.hears(3, Submit((5,), (request("b", 2),)))
        assert leader.aggregator.operations.holds
        leader.is_told(Execute((Response(change, value=2),), (5,)))
        assert not leader.aggregator.operations.holds
        assert leader.sends_down() == []
        leader.hears(2, Submit((), (request("b", 2),)))
        assert leader.sends_up() == []


class TestWhatIsNotForAChildToSay:
    """Authentic, but of another version or with a defect: that child's connection ends, not the leader's thread."""

    @pytest.mark.parametrize(
        ("child", "message"),
        [
            (3, Submit((), (request("a"),), resent=True)),
            (4, Gathered((), (Part((4, 1), None),))),
            (4, Gathered((), (Part((3, 1), request("a")),))),
            (4, Submit((), (request("a"),))),
            (3, Gathered((), (Part((3, 1), request("a")),))),
            (3, Observe(True)),
            (3, Said(3, Leave())),
            (4, Said(3, Leave())),
            (4, Lost(2, "why")),
            (4, Silent(4, (3, 1))),
            (3, Drained((2, 2))),
            (4, Drained((3, 3))),
        ],
        ids=str,
    )
    def test_is_refused(self, child: int, message: Message) -> None:
        leader = Leader()
        with pytest.raises(ValueError, match=r"answers what it was not asked|not for it to send|not below it"):
            leader.hears(child, message)


def replace_ranks(name: str, ranks: tuple[int, ...]) -> Request:
    return Request(name, Collective.ADD_PROCESS_SET, ranks=ranks)


class TestSignsOfLife:
    def test_neighbours_only_are_pinged_while_a_rank_below_waits(self) -> None:
        leader = Leader()
        leader.hears(2, Submit((), (request("a"),)))
        for _ in range(3):
            leader.waits(0.0)
            assert leader.sends_down() == [(3, Ping()), (4, Ping())]
            leader.now += ping_interval(TIMEOUT)
            leader.hears(3, Pong())
            leader.hears(4, Pong())
        assert not [message for message in leader.sends_up() if isinstance(message, Lost)]

    @pytest.mark.parametrize("silent", [3, 4])
    def test_a_silent_child_is_lost_after_the_operation_timeout(self, silent: int) -> None:
        leader = Leader()
        leader.hears(2, Submit((), (request("a"),)))
        leader.waits(0.0)
        begun = leader.now
        lost: list[Message] = []
        while not lost:
            deadline = leader.aggregator.deadline()
            assert deadline is not None
            leader.waits(deadline - leader.now)
            leader.hears(7 - silent, Pong())
            lost = [message for message in leader.sends_up() if isinstance(message, Lost)]
        assert leader.now - begun == TIMEOUT
        (message,) = lost
        assert message == Lost(silent, message.reason)  # type: ignore[attr-defined]
        assert "it has not answered for 20 s (stopped, swapping" in message.reason  # type: ignore[attr-defined]

    @pytest.mark.parametrize("silent", [1, 2, 5])
    def test_the_timeout_is_the_same_on_every_level(self, silent: int) -> None:
        """Nothing is pending in the agreement: only the root knows that a rank waits."""
        tree = Tree((1,) * 6, answering=[rank for rank in range(6) if rank != silent])
        begun, tree.network.coordinator.busy = tree.now, True
        tree.run_until(begun + TIMEOUT + 1.0)
        ((at, _, abort), *_) = tree.of(Abort)
        assert isinstance(abort, Abort)
        assert abort.rank == silent
        assert at - begun <= TIMEOUT + 0.1

    def test_a_leader_that_waits_itself_has_its_children_watched(self) -> None:
        leader = Leader()
        leader.aggregator.busy = True
        leader.waits(0.0)
        assert leader.sends_down() == [(3, Ping()), (4, Ping())]
        leader.aggregator.busy = False
        leader.waits(ping_interval(TIMEOUT))
        assert leader.sends_down() == []
        assert leader.aggregator.deadline() is None

    def test_a_rank_that_asks_whether_those_above_are_alive_has_the_other_branch_watched(self) -> None:
        """A process set of ranks 2 and 3, whose data plane is at work; the others hold nothing."""
        tree = Tree((1, 1, 1, 1), 2, answering=(0, 1, 2))
        for second in range(int(TIMEOUT) + 1):
            tree.run_until(1000.0 + second)
            tree.network.aggregators[0].receive(2, Ping(), tree.now)
        tree.run_until(1000.0 + TIMEOUT + 1.0)
        assert {message.rank for _, _, message in tree.of(Abort)} == {3}  # type: ignore[attr-defined]

    def test_a_ping_from_above_is_passed_on_to_those_below_but_not_back(self) -> None:
        leader = Leader()
        leader.is_told(Ping())
        assert leader.sends_up() == [Pong()]
        for seconds in (0.0, ping_interval(TIMEOUT)):
            leader.waits(seconds)
            assert leader.sends_down() == [(3, Ping()), (4, Ping())]
        assert not leader.aggregator.asked_from_below(leader.now)
        leader.waits(3 * ping_interval(TIMEOUT))
        assert leader.sends_down() == []

    def test_a_ping_from_below_has_the_one_above_asked(self) -> None:
        leader = Leader()
        leader.hears(3, Ping())
        assert leader.sends_down() == [(3, Pong())]
        assert leader.aggregator.asked_from_below(leader.now)
        assert not leader.aggregator.asked_from_below(leader.now + 2 * ping_interval(TIMEOUT))

    def test_an_attribution_is_answered_when_all_below_have_or_when_it_is_time(self) -> None:
        leader = Leader()
        leader.is_told(AskAlive())
        assert leader.sends_down() == [(3, Ping()), (4, AskAlive())]
        leader.hears(3, Pong())
        assert leader.sends_up() == []
        leader.hears(4, Silent(4, (5, 1)))
        assert leader.sends_up() == [Silent(2, (5, 1))]
        leader.is_told(AskAlive())
        leader.hears(4, Said(5, Failed("late")))  # no word of rank 4
        leader.waits(ATTRIBUTION_SECONDS + 0.25)
        assert leader.sends_up()[-1] == Silent(2, (3, 2))

    def test_a_silent_leader_is_named_and_those_behind_it_are_not(self) -> None:
        tree = Tree((1, 2, 2), answering=(0, 3, 4))
        tree.says(0, Failed("broken"))
        tree.run_until(1002.0)
        (abort,) = tree.ordered()
        assert isinstance(abort, Abort)
        assert abort.rank == 1
        assert abort.text.startswith("rank 1 (h1, pid 101) does not answer, and rank 0 (h0, pid 100) reports: broken")


class TestTheEnd:
    def test_what_was_said_before_a_farewell_is_heard_before_it(self) -> None:
        leader = Leader()
        for rank in (2, 3):
            leader.hears(rank, Submit((), (request("a", 0),)))
        leader.hears(4, Gathered((), (Part((4, 2), request("a")),)), Said(5, Leave("why")))
        assert leader.sends_up() == [Gathered((), (Part(BELOW, request("a")),)), Said(5, Leave("why"))]

    def test_who_has_drained_is_counted(self) -> None:
        leader = Leader()
        leader.is_told(End(5))
        leader.hears(2, Drained())
        leader.hears(4, Drained((4, 2)))
        assert leader.sends_up() == []
        leader.hears(3, Drained())
        assert leader.sends_up() == [Drained(BELOW)]

    def test_a_rank_that_is_lost_after_it_has_drained_is_no_loss(self) -> None:
        leader = Leader()
        leader.is_told(End(5))
        leader.hears(3, Drained())
        leader.aggregator.lost(3, "its connection ended")
        assert leader.sends_up() == [Drained((3, 1)), Lost(3, "its connection ended")]

    def test_a_leader_that_is_lost_ends_the_ranks_below_it_that_have_not_drained(self) -> None:
        """It has drained itself, but no leader is left through which the others could say that they have."""
        for drained, ordered in (((1,), Abort), ((1, 2, 3, 4), End)):
            tree = Tree((1, 2, 2))
            tree.says(0, Leave())
            for rank in drained:
                tree.says(rank, Drained())
            tree.network.lose(1)
            tree.network.settle()
            assert isinstance(tree.ordered()[-1], ordered)

    def test_what_crosses_with_the_end_is_dropped(self) -> None:
        leader = Leader()
        leader.hears(2, Submit((), (request("a"),)))
        leader.is_told(End(5))
        assert not leader.aggregator.operations.holds
        leader.hears(3, Submit((), (request("a"),)))
        leader.hears(4, Gathered((), (Part((4, 2), request("a")),)))
        assert leader.sends_up() == []

    def test_a_goodbye_comes_when_all_have_drained(self) -> None:
        tree = Tree()
        tree.says(3, Leave())
        for rank in range(5):
            assert Bye() not in tree.ordered()
            tree.says(rank, Drained())
        assert tree.ordered() == [Bye()]


def test_late_ranks_are_asked_where_they_are_by_way_of_their_leaders() -> None:
    tree = Tree(stacks=(0, 1, 3, 4))
    for rank in (0, 2):
        tree.submits(rank, "a")
    tree.run_until(1000.0 + WARNING)
    assert [rank for _, rank, _ in tree.of(AskStacks)] == [0, 1, 3, 4]
    (warning,) = tree.warned()
    for rank in (1, 3, 4):
        assert f"rank {rank} (h{rank}, pid {100 + rank}) is here:\n    stack of {rank}" in warning
