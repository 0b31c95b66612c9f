"""The control thread: sleeps until a submission, a message or a deadline wakes it, then carries out what the pure parts
decide.

An idle job sends nothing and uses no CPU time. On rank 0 the thread also runs the Coordinator, whose messages to rank 0
itself bypass the socket. In a tree, the thread of a leader also runs an Aggregator, for the ranks that report to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hvdgloo._engine.connection import ControlConnection, Peers
from hvdgloo._engine.conventions import COORDINATOR, EVERYONE
from hvdgloo._engine.executor import Executor
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.liveness import Liveness
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import (
    FOR_EVERYONE,
    Abort,
    AskStacks,
    Bye,
    Decoder,
    Drained,
    End,
    Execute,
    Failed,
    Message,
    Ping,
    Pong,
    Resend,
    Stacks,
    Tune,
    decode,
    frame,
)
from hvdgloo._engine.planes import DEPTH
from hvdgloo._engine.threads import ThreadOwner, python_stacks
from hvdgloo._net import framing
from hvdgloo._net.handshake import Link
from hvdgloo._platform import interrupts
from hvdgloo.errors import (
    BackendError,
    HorovodInternalError,
    HvdglooError,
    JobShutdownError,
    PeerLostError,
    StallError,
)

if TYPE_CHECKING:
    from hvdgloo._engine.coordinator import Coordinator
    from hvdgloo._engine.negotiation import Waiting
    from hvdgloo._engine.tree import Aggregator
    from hvdgloo._observe.counters import Counters

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 3.0
"""Seconds that a rank whose data plane broke waits for the coordinator to say why."""

_FLUSH_SECONDS = 1.0

_ANSWER_SECONDS = 0.2
"""Seconds that a caller who asks what ranks wait for stays patient while another thread has the turn."""


class Control(ThreadOwner):
    """Owns the control thread of one rank.

    Args:
        rank: this rank.
        links: connections with those that this rank reports to, or that report to it.
        coordinator: on rank 0, else None.
        parent: whom this rank reports to, unless it is rank 0.
        aggregator: in a tree, on rank 0 and on leaders, else None.
        operation_timeout: seconds after which a silent rank counts as lost.
        spin_time: seconds that a waiting caller polls for the answer before it goes to sleep; 0 for not at all.
        on_end: called once, on the thread, with the error that later submissions get.
        counters: of this process, if it counts.

    Attributes:
        peers: the ranks at the other ends of the connections.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        member: Member,
        executor: Executor,
        coordinator: Coordinator | None,
        *,
        parent: int = COORDINATOR,
        aggregator: Aggregator | None = None,
        operation_timeout: float,
        spin_time: float,
        describe: Callable[[int], str],
        on_end: Callable[[HorovodInternalError], None],
        counters: Counters | None = None,
    ) -> None:
        self._rank = rank
        self._member = member
        self._executor = executor
        self._coordinator = coordinator
        self._aggregator = aggregator
        # What takes the messages of this rank and of those below; None if this one only reports to its parent.
        self._hub: Aggregator | Coordinator | None = aggregator or coordinator
        self._parent = parent
        self._spin_time = spin_time
        self._describe = describe
        self._on_end = on_end
        self._counters = counters
        # Ranks say the same to whom they report to, who says something new each time.
        read = Decoder().decode
        read_orders = decode if aggregator is None else self._read_order
        self.peers = Peers(
            {peer: ControlConnection(link, read_orders if peer == parent else read) for peer, link in links.items()}
        )
        self.wake = self.peers.wake  # has the thread check for work; callable from any thread
        self._parent_watch: Liveness | None = None
        if coordinator is None:
            in_tree = aggregator is not None or parent != COORDINATOR
            self._parent_watch = Liveness((parent,), operation_timeout, at_once=in_tree)
        self._orders: deque[bytes] = deque()  # what has just been read and is for everyone below, too
        self._to_send: deque[Message] = deque()
        self._failure: BaseException | None = None
        self._failure_deadline = 0.0
        self._ordered_end: HorovodInternalError | None = None
        self._ended: HorovodInternalError | None = None
        self._finished = False
        # Held by the thread that does the work: the control thread except while it sleeps, or one that submits.
        self._turn_lock = threading.Lock()
        self._sleeps_until: float | None = None
        # What the thread that has the turn may do: wait briefly for other ranks; take longer, since it waits anyway.
        self._may_wait, self._caller_waits = True, False
        executor.set_callbacks(on_room=self.room, on_failure=self.data_plane_failed)
        super().__init__(f"control-{rank}", self._run)

    def submitted(self, *, waits: bool) -> None:
        """An operation was filed; callable from any thread.

        If the control thread sleeps, the caller does at once what it would wake for: this saves a thread switch on the
        path of every synchronous operation.

        Args:
            waits: the caller is about to wait for the operation, so the engine may use its thread for a moment.
        """
        if self._turn_lock.acquire(blocking=False):
            self._work_here(None, may_wait=waits)
        else:
            self.wake()

    def work_while_waiting(self, awaited: Handle) -> None:
        """The calling thread waits for an operation: have it do the control thread's work until that has ended, but not
        for long. The others' answers usually arrive sooner than a thread can go to sleep and be woken."""
        held = interrupts.hold()  # before the turn is taken
        try:
            if self._turn_lock.acquire(blocking=False):
                self._work_here(awaited, may_wait=True)
        finally:
            interrupts.release(held)

    def _work_here(self, awaited: Handle | None, *, may_wait: bool) -> None:
        """Do the control thread's work on a caller's thread, which has taken the turn, and give the turn back."""
        try:
            try:
                self._may_wait, self._caller_waits = may_wait, awaited is not None
                if awaited is None:
                    self._look_around(time.monotonic())
                elif not self._finished:
                    self._executor.execute_queued()
                    if self._spin_time:
                        self._spin(awaited)
            except BaseException as error:
                # As on the thread itself: a message that was only partly sent must fail the job, not hang it. What
                # another signal's handler raises just here, or a second Ctrl-C, belongs to the caller.
                self._give_up(
                    HorovodInternalError(f"the control plane of rank {self._rank} was interrupted: {error!r}")
                )
                if not isinstance(error, Exception):
                    raise
                logger.exception("the control plane of rank %d failed", self._rank)
            deadline = self._deadline()
            oversleeps = deadline is not None and (self._sleeps_until is None or deadline < self._sleeps_until)
            must_wake = oversleeps or self._finished or self.peers.has_unsent
        finally:
            self._may_wait, self._caller_waits = True, False
            self._turn_lock.release()
        if must_wake:
            self.wake()

    def say(self, message: Message) -> None:
        """Tell the coordinator something; callable from any thread."""
        self._to_send.append(message)
        self.wake()

    def data_plane_failed(self, error: BaseException) -> None:
        """The executor's first failure; callable from any thread."""
        self._failure = error
        self._failure_deadline = time.monotonic() + VERDICT_SECONDS
        expected = isinstance(error, HvdglooError)
        logger.log(
            logging.DEBUG if expected else logging.ERROR, "rank %d: an operation failed", self._rank, exc_info=error
        )
        self.say(Failed(str(error) if expected else f"{type(error).__name__}: {error}"))

    def room(self) -> None:
        """The data plane has completed a bucket; callable from any thread."""
        if self._coordinator is not None and self._coordinator.has_ready:
            self.wake()

    def abort(self, error: HorovodInternalError) -> None:
        """End the job at once on all ranks, without blaming any; callable from any thread."""
        self._ordered_end = error
        self.wake()

    def clear_callbacks(self) -> None:
        """Keep nothing alive that was called back, once the thread has ended."""
        self._on_end = lambda error: None

    def close(self) -> None:
        """Close connections at once, for an engine whose thread did not end on its own."""
        self.peers.shutdown()
        self.wake()

    # The thread.

    def _run(self) -> None:
        try:
            with self._turn_lock:
                while not self._finished:
                    self._turn()
        except Exception as error:  # a defect of ours must fail the job, not hang it
            logger.exception("the control thread of rank %d failed", self._rank)
            self._give_up(HorovodInternalError(f"the control thread failed: {error!r}"))
        finally:
            self.peers.close(_FLUSH_SECONDS)

    def _turn(self) -> None:
        """Do what there is to do, then wait for a peer, a wake or a deadline. Others may take a turn meanwhile."""
        self._look_around(time.monotonic())
        self.peers.watch_writes()
        if self._finished:
            return
        deadline = self._sleeps_until = self._deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        self._turn_lock.release()
        try:
            has_arrived = self.peers.wait(timeout)
        finally:
            self._turn_lock.acquire()
        if has_arrived:
            self.peers.serve(self._receive, self._lose)

    def _spin(self, awaited: Handle) -> None:
        """Read the others' messages until an operation has ended, or its execution has begun elsewhere."""
        self.peers.take_over()  # or what arrives would wake the thread
        try:
            until = time.monotonic() + self._spin_time
            while not (awaited.done() or self._executor.backlog or self._finished) and time.monotonic() < until:
                if self.peers.serve(self._receive, self._lose):
                    self._attend(time.monotonic())
        finally:
            self.peers.hand_back()

    def _look_around(self, now: float) -> None:
        """Everything but reading sockets."""
        self._speak(now)
        self._attend(now)
        self._tick(now)
        self._attend(now)

    def _attend(self, now: float) -> None:
        """Do what follows from what was said, and send it."""
        if self._aggregator is not None:
            self._gather(self._aggregator, now)
        if self._coordinator is not None:
            self._conduct(self._coordinator, now)
            while self._aggregator is not None and self._aggregator.is_due(now):
                self._gather(self._aggregator, now)
                self._conduct(self._coordinator, now)

    def _speak(self, now: float) -> None:
        """Send the messages of this rank's other threads."""
        submission = self._member.drain(idle=self._executor.backlog == 0)
        offer = self._member.take_offer()
        if offer is not None:
            self._to_coordinator(offer, now)
        if submission is not None:
            self._to_coordinator(submission, now)
        while self._to_send:
            self._to_coordinator(self._to_send.popleft(), now)

    def _to_coordinator(self, message: Message, now: float) -> None:
        if self._hub is not None:
            self._hub.receive(self._rank, message, now)
        else:
            self.peers.send(self._parent, frame(message))

    def _gather(self, aggregator: Aggregator, now: float) -> None:
        """Leaders: send up what has been gathered, and down what is for some of those below."""
        while True:
            for message in aggregator.up.take(now):
                if self._coordinator is None:
                    self.peers.send(self._parent, frame(message))
                    continue
                for ranks, numbers in self._coordinator.hear(message, now):
                    aggregator.operations.ask_back(ranks, numbers, asked_here=False)
            if not aggregator.down:
                return
            down, aggregator.down = aggregator.down, []
            for child, message in down:
                if child == self._rank:
                    self._receive_verdict(message, now)
                else:
                    self.peers.send(child, frame(message))

    def _conduct(self, coordinator: Coordinator, now: float) -> None:
        """Rank 0: order what is ready if there is room."""
        if coordinator.has_ready and self._executor.backlog < DEPTH and coordinator.may_release(now):
            coordinator.release(now)
        self._deliver(coordinator, now)
        coordinator.busy = self._executor.backlog > 0
        below = self._aggregator
        coordinator.gathering = below is not None and (below.operations.holds or below.asked_from_below(now))

    def _deliver(self, coordinator: Coordinator, now: float) -> None:
        """Rank 0: send the coordinator's messages, and log its notes."""
        while coordinator.outbox:
            outbox, coordinator.outbox = coordinator.outbox, []
            for destination, message in outbox:
                if destination == EVERYONE:
                    self._order(message, None, now)
                elif destination == self._rank:
                    self._receive_verdict(message, now)
                elif self._aggregator is not None and isinstance(message, AskStacks):
                    self._aggregator.send(1 << destination, message)
                else:
                    self.peers.send(destination, frame(message))
        for kind, text in coordinator.notes:
            if kind != "stall ended":
                logger.warning("%s", text)  # who has asked for autotune sees what it has chosen, at the usual level
            if self._counters is not None:
                self._counters.note(kind, text)
        coordinator.notes.clear()

    def overdue(self, least: float) -> tuple[list[Waiting], dict[int, str]]:
        """Rank 0: ``Coordinator.waiting`` and ``stacks``; callable from any thread. Nothing is known on other ranks,
        nor while this one is busy."""
        coordinator = self._coordinator
        if coordinator is None or not self._turn_lock.acquire(timeout=_ANSWER_SECONDS):
            return [], {}
        try:
            return coordinator.waiting(time.monotonic(), least), coordinator.stacks
        finally:
            self._turn_lock.release()

    def _order(self, message: Message, framed: bytes | bytearray | None, now: float) -> None:
        """Send those below what is for everyone, and take it in.

        Args:
            framed: the message as it came, on all ranks but rank 0.
        """
        self._send_below(message, framed)
        if self._aggregator is not None:
            self._aggregator.pass_down(message, now)
        self._receive_verdict(message, now)

    def _send_below(self, message: Message, framed: bytes | bytearray | None = None) -> None:
        below = [peer for peer in self.peers.connections if peer != self._parent]
        if below:
            framed = frame(message) if framed is None else framed
            for peer in below:
                self.peers.send(peer, framed)

    def _read_order(self, data: bytes | memoryview) -> Message:
        """Leaders: a message from above."""
        message = decode(data)
        if isinstance(message, FOR_EVERYONE):
            self._orders.append(framing.head(len(data)) + bytes(data))
        return message

    def _receive(self, peer: int, message: Message, now: float) -> None:
        if self._parent_watch is not None and peer == self._parent:
            self._parent_watch.heard(peer, now)
            if self._aggregator is None:
                self._receive_verdict(message, now)
            elif isinstance(message, FOR_EVERYONE):
                self._order(message, self._orders.popleft(), now)
            else:
                self._aggregator.pass_down(message, now)
        elif self._hub is not None:
            if self._coordinator is not None and self._aggregator is not None:
                self._coordinator.heard(peer, now)
            self._hub.receive(peer, message, now)

    def _receive_verdict(self, message: Message, now: float) -> None:
        """A message from the coordinator to this rank."""
        if isinstance(message, Execute):
            if self._ended is None:
                self._executor.execute(
                    self._member.accept(message, now), may_wait=self._may_wait, caller_waits=self._caller_waits
                )
        elif isinstance(message, Tune):
            if self._ended is None:
                self._member.tune(message)
                self._executor.tune(message)
        elif isinstance(message, Resend):
            self._to_coordinator(self._member.resend(message.signatures), now)
        elif isinstance(message, Ping):
            self._to_coordinator(Pong(), now)
        elif isinstance(message, AskStacks):
            self._to_coordinator(Stacks(python_stacks()), now)
        elif isinstance(message, End):
            self._leave_together(message)
        elif isinstance(message, Abort):
            self._end(_abort_error(message, self._describe))
        elif isinstance(message, Bye):
            self._finished = True
            self._executor.stop()

    def _leave_together(self, order: End) -> None:
        """A rank has left: finish what was ordered before, refuse everything else."""
        self._ended = _end_error(order, "this rank" if order.rank == self._rank else self._describe(order.rank))
        self._on_end(self._ended)
        self._executor.when_drained(lambda: self.say(Drained()))

    def _lose(self, peer: int, reason: str) -> None:
        if peer != self._parent:
            if self._hub is not None:
                self._hub.lost(peer, reason)
        elif not self._finished:
            self._parent_lost(reason)

    def _parent_lost(self, reason: str) -> None:
        text = f"{self._describe(self._parent)} was lost: {reason}"
        self._give_up(PeerLostError(text, rank=self._parent), Abort("peer", text, self._parent))

    def _give_up(self, error: HorovodInternalError, verdict: Abort | None = None) -> None:
        """This rank cannot go on, nor can those below. They are told why, or they would blame this rank for the end of
        the connection.

        Args:
            verdict: what they are told; by default that it happened here.
        """
        if verdict is None:
            kind = "backend" if isinstance(error, BackendError) else "peer"
            verb = "reports" if kind == "backend" else "was lost"
            verdict = Abort(kind, f"{self._describe(self._rank)} {verb}: {error}", self._rank)
        try:
            self._send_below(verdict)
        finally:
            self._end(error)

    def _end_by_order(self, error: HorovodInternalError) -> None:
        """End the job, since it is known from elsewhere that the ranks cannot go on together. No rank is to blame for
        the connections that end now: the ranks above and below are told so."""
        verdict = Abort("peer", str(error))
        self.peers.send(self._parent, frame(verdict))
        self._give_up(error, verdict)

    def _end(self, error: HorovodInternalError) -> None:
        """Everything fails with ``error``, now."""
        self._finished = True
        if self._ended is None:
            self._ended = error
        self._executor.abort(error)
        self._on_end(error)

    def _tick(self, now: float) -> None:
        if self._ordered_end is not None and not self._finished:
            self._end_by_order(self._ordered_end)
        if self._failure is not None and now >= self._failure_deadline and not self._finished:
            self._give_up(BackendError(f"{type(self._failure).__name__}: {self._failure}"))
        if self._aggregator is not None:
            self._aggregator.busy = self._waits
            self._aggregator.tick(now)
        if self._coordinator is not None:
            self._coordinator.tick(now)
        elif self._parent_watch is not None and not self._finished:
            self._watch_parent(self._parent_watch, now)

    @property
    def _waits(self) -> bool:
        """True if this rank itself waits for others."""
        return bool(self._member.has_pending or self._executor.backlog or self._ended)

    def _watch_parent(self, watch: Liveness, now: float) -> None:
        """Other ranks: check that the one above still answers, while something is pending."""
        if watch.rests(now):
            return
        active = self._waits or (self._aggregator is not None and self._aggregator.asked_from_below(now))
        ping, lost = watch.tick(now, active=active)
        for _, reason in lost:
            self._parent_lost(reason)
        if ping and not lost:
            self.peers.send(self._parent, frame(Ping()))

    def _deadline(self) -> float | None:
        times = [part.deadline() for part in (self._coordinator, self._aggregator) if part is not None]
        if self._failure is not None:
            times.append(self._failure_deadline)
        if self._parent_watch is not None:
            times.append(self._parent_watch.deadline)
        return min([time for time in times if time is not None], default=None)


def _abort_error(message: Abort, describe: Callable[[int], str]) -> HorovodInternalError:
    if message.kind == "peer":
        return PeerLostError(message.text, rank=None if message.rank < 0 else message.rank)
    if message.kind == "stall":
        return StallError(
            "stalled for longer than the stall shutdown time (rank 0 has warned where the late ranks are): "
            f"{message.text}"
        )
    return BackendError(message.text)


def _end_error(message: End, leaver: str) -> JobShutdownError:
    if message.reason:
        text = f"{leaver} ended with {message.reason}, which ends collective operations on all ranks"
    else:
        text = f"{leaver} called hvd.shutdown() or exited, which ends collective operations on all ranks"
    return JobShutdownError(text, rank=message.rank)
