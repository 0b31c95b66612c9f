"""The growth of rank 0's work for a step: it is as fast as the number of ranks, and no faster."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from hvdgloo._engine.connection import ControlConnection
from hvdgloo._engine.control import Control
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import (
    Abort,
    Decoder,
    Execute,
    Failed,
    Gathered,
    Message,
    Observe,
    Part,
    Request,
    Response,
    Submit,
    encode,
    frame,
)
from hvdgloo._engine.negotiation import Negotiator
from hvdgloo._engine.readiness import bits_of, masks_of
from hvdgloo._engine.run_lengths import runs_of_mask, runs_of_masks
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo._engine.tree import Aggregator
from hvdgloo._engine.tree_position import position_of
from hvdgloo._net.handshake import Link
from hvdgloo.errors import BackendError, HorovodInternalError
from hvdgloo.types import Collective, DType, TensorSpec
from tests.support.effort import effort
from tests.support.links import link_pair

FEW, MANY = 64, 256
MOST = 4.2
"""Times what it costs for a quarter of the ranks."""

TENSORS = 12
SPEC = TensorSpec(DType.FLOAT32, (2,))
JOIN = Request("join", Collective.JOIN)


def requests(rank: int = 0, tensors: int = TENSORS) -> tuple[Request, ...]:
    """Return the requests of a rank in a step. For an allgather, each rank has other rows."""
    gather = Request("gather", Collective.ALLGATHER, (TensorSpec(DType.FLOAT32, (rank, 2)),))
    return (*(Request(f"allreduce.{i}", Collective.ALLREDUCE, (SPEC,)) for i in range(tensors - 1)), gather)


class Job:
    """Rank 0's bookkeeping, after a first step of all ranks if there was one."""

    def __init__(self, ranks: int, tensors: int = TENSORS, *, first_step: bool = True) -> None:
        self.ranks = range(ranks)
        self.tensors = tensors
        self.negotiator = Negotiator({0: tuple(self.ranks)}, 1024)
        self.decoder = Decoder()
        self.numbers: tuple[int, ...] = ()
        if first_step:
            self.say({rank: [Submit((), requests(rank, tensors))] for rank in self.ranks})
            items = self.negotiator.take().items
            self.numbers = tuple([item.signature for item in items if isinstance(item, Response)])
            assert len(self.numbers) == tensors

    def say(self, submissions: Mapping[int, Sequence[Submit]]) -> None:
        """Every rank's messages arrive, one from each rank in turn."""
        for turn in range(max(map(len, submissions.values()))):
            for rank, messages in submissions.items():
                if turn < len(messages):
                    message = self.decoder.decode(encode(messages[turn]))
                    assert isinstance(message, Submit)
                    assert self.negotiator.absorb(rank, message, 0.0) == []

    def step(self, submissions: Mapping[int, Sequence[Submit]]) -> Callable[[], None]:
        """One that ends with everything ordered."""

        def work() -> None:
            self.say(submissions)
            assert len(self.negotiator.take().items) == self.tensors

        return work


def alike(ranks: Iterable[int], *messages: Submit) -> dict[int, Sequence[Submit]]:
    return dict.fromkeys(ranks, messages)


class Silent:
    """An observer that does nothing, as a timeline does nearly."""

    def arrived(self, rank: int, request: Request) -> None: ...
    def settled(self, request: Request, *, executed_here: bool) -> None: ...


def first_step(ranks: int) -> Callable[[], None]:
    job = Job(ranks, first_step=False)
    return job.step({rank: [Submit((), requests(rank))] for rank in job.ranks})


def known(ranks: int) -> Callable[[], None]:
    job = Job(ranks)
    half = TENSORS // 2
    return job.step(alike(job.ranks, Submit(job.numbers[:half]), Submit(job.numbers[half:])))


def each_in_an_order_of_its_own(ranks: int) -> Callable[[], None]:
    job, rng = Job(ranks), random.Random(5)
    orders = {rank: rng.sample(job.numbers, TENSORS) for rank in job.ranks}
    return job.step({rank: [Submit(tuple(order[:5])), Submit(tuple(order[5:]))] for rank, order in orders.items()})


def observed(ranks: int) -> Callable[[], None]:
    job = Job(ranks)
    job.negotiator.observer = Silent()
    return job.step(alike(job.ranks, Submit(job.numbers)))


def bytes_along(ranks: int) -> Callable[[], None]:
    job = Job(ranks)
    payload = bytes(SPEC.nbytes)
    return job.step(alike(job.ranks, *[Submit((number,), (), payload) for number in job.numbers]))


def joins(ranks: int) -> Callable[[], None]:
    """Half of the ranks join while the others are within a step, which they go on with."""
    job = Job(ranks)
    submissions = alike(job.ranks, Submit(job.numbers[:4]), Submit(job.numbers[4:]))
    return job.step(submissions | alike(job.ranks[1::2], Submit((), (JOIN,))))


def steps_with_half_of_the_ranks(ranks: int) -> Callable[[], None]:
    job = Job(ranks)
    job.say(alike(job.ranks[::2], Submit((), (JOIN,))))
    return job.step(alike(job.ranks[1::2], Submit(job.numbers)))


def who_is_missing(ranks: int) -> Callable[[], None]:
    job = Job(ranks)
    job.say(alike(job.ranks[::2], Submit(job.numbers)))

    def ask() -> None:
        assert [len(waiting.missing) for waiting in job.negotiator.waiting()] == [ranks // 2] * TENSORS

    return ask


@pytest.mark.parametrize(
    "case",
    [
        first_step,
        known,
        each_in_an_order_of_its_own,
        observed,
        bytes_along,
        joins,
        steps_with_half_of_the_ranks,
        who_is_missing,
    ],
)
def test_the_agreement_costs_what_ranks_cost(case: Callable[[int], Callable[[], None]]) -> None:
    few, many = effort(case(FEW)), effort(case(MANY))
    assert many <= MOST * few


class Below:
    """A leader's Aggregator, or the root's, which knows a step's operations by number; eight ranks on each host."""

    def __init__(self, place: int, ranks: int) -> None:
        self.position = position_of(place, [8] * (ranks // 8), 4)
        self.aggregator = Aggregator(self.position, {0: range(ranks)}, 1.0, 60.0)
        items = tuple(Response(each, signature=at) for at, each in enumerate(requests()))
        self.aggregator.pass_down(Execute(items), 0.0)

    def say(self, whole: Sequence[int] = (), spelled: Sequence[Request] = (), *, children: slice = slice(None)) -> None:
        """The same, by these children and for all ranks for which they speak."""
        for child, ranks in list(self.position.below.items())[children]:
            if child in self.position.leaders:
                parts = tuple(Part(runs_of_mask(ranks), each) for each in spelled)
                message: Message = Gathered(runs_of_masks(masks_of(tuple(whole))), parts)
            else:
                message = Submit(tuple(whole), tuple(spelled))
            self.aggregator.receive(child, message, 0.0)

    def join(self) -> None:
        """Every second rank does, one by one."""
        for child, ranks in self.position.below.items():
            for rank in bits_of(ranks)[::2]:
                parts = (Part((rank, 1), JOIN),)
                joins = Gathered((), parts) if child in self.position.leaders else Submit((), (JOIN,))
                self.aggregator.receive(child, joins, 0.0)

    def sent(self) -> int:
        return len(self.aggregator.up.take(0.0)) + len(self.aggregator.down)


NUMBERS = range(TENSORS)
ALL_BUT_ONE = slice(None, -1)


def gathers_what_is_known(below: Below) -> None:
    below.say(NUMBERS)


def gathers_what_is_spelled_out(below: Below) -> None:
    below.say((), requests())


def gathers_for_a_timeline(below: Below) -> None:
    below.aggregator.pass_down(Observe(True), 0.0)
    below.say(NUMBERS)


def passes_up_what_has_waited(below: Below) -> None:
    below.say(NUMBERS, children=ALL_BUT_ONE)
    below.aggregator.tick(1.0)


def asks_back(below: Below) -> None:
    below.say(NUMBERS, children=ALL_BUT_ONE)
    below.aggregator.pass_down(Execute((), tuple(NUMBERS)), 0.0)


def passes_joins_up(below: Below) -> None:
    below.say(NUMBERS, children=ALL_BUT_ONE)
    below.join()


@pytest.mark.parametrize("place", [0, 8], ids=["root", "leader"])
@pytest.mark.parametrize(
    "case",
    [
        gathers_what_is_known,
        gathers_what_is_spelled_out,
        gathers_for_a_timeline,
        passes_up_what_has_waited,
        asks_back,
        passes_joins_up,
    ],
)
def test_a_leader_does_for_a_step_what_the_ranks_below_cost(case: Callable[[Below], None], place: int) -> None:
    efforts = []
    for ranks in (FEW, MANY):
        below = Below(place, ranks)
        efforts.append(effort(lambda below=below: case(below)))
        assert below.sent()
    assert efforts[1] <= MOST * efforts[0]


def test_a_step_costs_the_same_however_many_tensors_its_messages_name() -> None:
    efforts = []
    for tensors in (TENSORS, 8 * TENSORS):
        job = Job(FEW, tensors)
        efforts.append(effort(job.step(alike(job.ranks, Submit(job.numbers)))))
    assert efforts[1] <= 1.5 * efforts[0]


class Compared(int):
    """A rank that counts with how many it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_who_submits_does_not_look_for_itself_among_all_ranks() -> None:
    ranks = [Compared(rank) for rank in range(MANY)]
    member = Member(Compared(MANY - 1), {0: ranks}, 0)
    Compared.comparisons = 0
    for request in requests():
        member.add(Submission(PersistentRequest(request), (), ()))
    assert Compared.comparisons < TENSORS


def test_equal_submissions_are_decoded_and_kept_once() -> None:
    job = Job(FEW, first_step=False)
    spelled_out = [encode(Submit((), requests())) for _ in job.ranks]
    messages = [job.decoder.decode(data) for data in spelled_out]
    assert all(message is messages[0] for message in messages)
    for rank, message in enumerate(messages):
        assert isinstance(message, Submit)
        job.negotiator.absorb(rank, message, 0.0)
    kept = [signature.requests for signature in job.negotiator._signatures.values()]
    assert [(len(each), each.others) for each in kept] == [(FEW, {})] * TENSORS


class Idle:
    """An Executor without a data plane."""

    backlog = 0

    def __init__(self) -> None:
        self.executed = 0

    def set_callbacks(self, **callbacks: object) -> None: ...
    def abort(self, error: BaseException) -> None: ...
    def execute(self, batch: Sequence[object], **how: bool) -> None:
        self.executed += len(batch)


class Rank0:
    """Rank 0's Control, whose turns this thread takes, and the other ends of its connections."""

    def __init__(self, ranks: int) -> None:
        links: dict[int, Link] = {}
        self.others: dict[int, ControlConnection] = {}
        for rank in range(1, ranks):
            links[rank], far = link_pair()
            self.others[rank] = ControlConnection(far)
        everyone = {0: tuple(range(ranks))}
        rules = CoordinatorSettings(60.0, 1024, 0.0, True, 60.0, 0.0)
        self.executor = Idle()
        self.control = Control(
            0,
            links,
            Member(0, everyone, 0),
            self.executor,  # type: ignore[arg-type]
            Coordinator(ranks, everyone, rules, str),
            operation_timeout=60.0,
            spin_time=0.0,
            describe=str,
            on_end=lambda error: None,
        )
        self.control._turn_lock.acquire()

    def hear(self, message: Submit) -> None:
        """The other ranks' messages arrive one by one, and each wakes the thread."""
        for other in self.others.values():
            other.send_frame(frame(message))
            self.control._turn()
        self.control._look_around(0.0)

    def said(self) -> list[list[Message]]:
        return [other.receive() for other in self.others.values()]

    def close(self) -> None:
        self.control._turn_lock.release()
        self.control.peers.close(1.0)
        for other in self.others.values():
            other.close()


def test_a_turn_of_the_control_thread_does_not_look_at_all_connections() -> None:
    efforts = []
    for ranks in (FEW, MANY):
        rank0 = Rank0(ranks)
        try:
            own = Submit((), requests()[:1])
            rank0.control._to_coordinator(own, 0.0)
            rank0.hear(own)
            numbered = [[Execute((Response(own.requests[0], signature=0),))]] * (ranks - 1)
            assert rank0.said() == numbered
            rank0.control._to_coordinator(Submit((0,)), 0.0)
            efforts.append(effort(lambda rank0=rank0: rank0.hear(Submit((0,)))))
            assert rank0.said() == [[Execute((0,))]] * (ranks - 1)
        finally:
            rank0.close()
    assert efforts[1] <= MOST * efforts[0]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (BackendError("the wire is cut"), Abort("backend", "0 reports: BackendError: the wire is cut", 0)),
        (None, Abort("peer", "0 was lost: the control thread failed: KeyError(5)", 0)),
    ],
    ids=["no verdict", "a defect"],
)
def test_who_ends_by_itself_tells_those_below_why(failure: BackendError | None, told: Abort) -> None:
    """Else they would take the end of the connection for the death of the one above, which it is not."""
    rank0 = Rank0(3)
    try:
        if failure is not None:
            rank0.control._failure, rank0.control._failure_deadline = failure, 1.0
            rank0.control._tick(1.0)
        else:
            rank0.control._give_up(HorovodInternalError("the control thread failed: KeyError(5)"))
        assert rank0.said() == [[told], [told]]
        assert rank0.control._finished
    finally:
        rank0.close()


def test_what_a_connection_does_not_take_at_once_is_sent_when_it_does() -> None:
    rank0 = Rank0(3)
    deadline = threading.Timer(10.0, rank0.others[2].shutdown)
    deadline.start()
    try:
        large = Failed("x" * (4 << 20))
        connection = rank0.control.peers.connections[2]
        rank0.control.peers.send(2, frame(large))
        assert connection.pending
        arrived: list[Message] = []
        while connection.pending and not rank0.control._finished:
            arrived += rank0.others[2].receive()
            rank0.control._turn()  # the only thing that can wake it is that the connection takes more
        assert arrived + rank0.others[2].receive() == [large]
    finally:
        deadline.cancel()
        rank0.close()
