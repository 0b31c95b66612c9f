"""The engine of one rank: takes collectives from any thread, agrees on an order with all ranks, executes that order.

It owns two threads, control and data, and is independent of frameworks: tensors arrive as Buffers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hvdgloo._backends.base import Backend, Offering, Plane, Sharing, Tunable, label_of
from hvdgloo._engine.control import Control
from hvdgloo._engine.conventions import COORDINATOR
from hvdgloo._engine.executor import Executor
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Leave, Observe, Request, Tune
from hvdgloo._engine.offering import Offers
from hvdgloo._engine.offers import PLACES
from hvdgloo._engine.open_timelines import OpenTimelines
from hvdgloo._engine.planes import Group
from hvdgloo._engine.settings import Choice
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo._net.descriptors import close_keeping_numbers
from hvdgloo._net.handshake import Link
from hvdgloo._observe.counters import Counters
from hvdgloo._platform import interrupts
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError, JobShutdownError
from hvdgloo.topology import Topology
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec, WireFormat

if TYPE_CHECKING:
    from hvdgloo._engine.negotiation import Waiting
    from hvdgloo._engine.timeline import Timeline, Timelines
    from hvdgloo._engine.tree_position import TreePosition
    from hvdgloo._engine.tuning import AutotuneSettings

logger = logging.getLogger(__name__)

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})

_BATCH = 32
"""Operations that may collect here, not yet sent to the others, while earlier ones are being agreed upon: a message
for each would cost more than everything else. The control thread gets its turn when a thread waits, or computes without
the interpreter's lock."""

_CLOSE_MARGIN = 5.0
"""Seconds that closing may take beyond the operation timeout, which limits what was ordered before."""

_ABORTED_MARGIN = 4.0
"""The same after an abort, when the data thread has nothing left to do; if it has not ended by then, it is stuck."""


OpenBackend: TypeAlias = Callable[[int, tuple[int, ...], Callable[[], bool]], Backend]


class OpenDevice(Protocol):
    """Opens the data planes of a process set's CUDA tensors; see ``Engine`` and ``planes.OpenDevice``."""

    def __call__(
        self, number: int, ranks: Sequence[int], host: Backend, example: Buffer, /, *, cancelled: Callable[[], bool]
    ) -> Sequence[Plane]: ...


@dataclass(frozen=True)
class EngineSettings:
    """An engine's settings. Those that shape plans must be the same on all ranks: ``fusion_threshold``,
    ``separate_groups`` and ``deterministic``; and those that become part of requests, ``wire`` and ``wire_threshold``.

    Times are in seconds, thresholds in bytes, the capacity in tensors.
    """

    fusion_threshold: int
    inline_threshold: int
    separate_groups: bool
    operation_timeout: float
    cache_capacity: int
    cycle_time: float
    stall_check: bool
    stall_warning_time: float
    stall_shutdown_time: float
    spin_time: float = 0.0
    deterministic: bool = False
    follow_streams: bool = False
    wire: WireFormat = WireFormat.FULL
    wire_threshold: int = 0
    autotune: AutotuneSettings | None = None


class Engine:
    """One rank's engine.

    Args:
        rank: this rank.
        topology: of all ranks.
        links: control connections; see ``Control``.
        backend: the data plane of the set of all ranks. The engine owns it from now on.
        settings: see ``EngineSettings``.
        open_backend: makes the data plane of a process set that is added later, given a number that was never used
            before (the same on all ranks), the members' global ranks in ascending order, and what tells it to give up;
            called on the data thread of every member. Without it, no sets can be added.
        open_device: makes the data planes of a process set's CUDA tensors, see ``planes.OpenDevice``, given that number
            and those ranks (0 for the set of all). Without it, there are none.
        position: this rank's place in the tree, if the job's control plane is one.
        counters: what this process counts, for one engine at a time; None if nothing is to be counted.

    Attributes:
        wire: the form in which gradients cross between hosts if the program does not choose one.
        wire_threshold: bytes below which they cross as they are.
        timelines: the traces of this rank's operations.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        links: Mapping[int, Link],
        backend: Backend,
        settings: EngineSettings,
        open_backend: OpenBackend | None = None,
        open_device: OpenDevice | None = None,
        position: TreePosition | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.wire, self.wire_threshold = settings.wire, settings.wire_threshold
        self.counters = counters
        if counters is not None:
            counters.engine_begins(coordinates=rank == 0 and topology.size > 1)
        everyone = tuple(range(topology.size))
        self._open_backend = open_backend
        self._open_device = open_device
        self._groups = {0: self._group(0, everyone, backend)}
        self._sets_added = 0
        # Sums that travel with the agreement are added in rank order, and whether they do depends on which rank came
        # first.
        steady = backend.in_rank_order or not settings.deterministic
        inline_threshold = settings.inline_threshold if steady else 0
        self._member = Member(rank, {0: everyone}, inline_threshold, counters)
        self._forked = False
        self._closing = threading.Lock()
        self._executor = Executor(
            f"data-{rank}",
            self._groups,
            self._open_group,
            fusion_threshold=settings.fusion_threshold,
            separate_groups=settings.separate_groups,
            deterministic=settings.deterministic,
            operation_timeout=settings.operation_timeout,
            follow_streams=settings.follow_streams,
            counters=counters,
        )
        hierarchical_threshold = backend.hierarchical_threshold if isinstance(backend, Tunable) else 0
        self._start_settings = Choice(
            settings.fusion_threshold, settings.cycle_time, hierarchical_threshold, inline_threshold
        )
        coordinator = None
        if rank == 0:
            from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings  # the other ranks do not need it

            rules = CoordinatorSettings(
                settings.operation_timeout,
                settings.cache_capacity,
                settings.cycle_time,
                settings.stall_check,
                settings.stall_warning_time,
                settings.stall_shutdown_time,
            )
            lateness = None if counters is None else counters.lateness
            tuner = None
            if settings.autotune is not None and topology.size > 1:
                from hvdgloo._engine.tuning import Tuner

                tuner = Tuner(self._start_settings, settings.autotune, deterministic=settings.deterministic)
            coordinator = Coordinator(topology.size, {0: everyone}, rules, topology.describe, position, lateness, tuner)
        aggregator = None
        if position is not None and position.below:
            from hvdgloo._engine.tree import PATIENCE_SECONDS, Aggregator

            patience = min(PATIENCE_SECONDS, settings.stall_warning_time / 2)
            aggregator = Aggregator(position, {0: everyone}, patience, settings.operation_timeout)
        self._coordinator = coordinator
        self._in_tree = position is not None
        self.timelines = OpenTimelines(rank, self._show_timelines)
        self._control = Control(
            rank,
            links,
            self._member,
            self._executor,
            coordinator,
            parent=COORDINATOR if position is None else position.parent,
            aggregator=aggregator,
            operation_timeout=settings.operation_timeout,
            spin_time=settings.spin_time,
            describe=topology.describe,
            on_end=self._end,
            counters=counters,
        )
        self._work_while_waiting = self._control.work_while_waiting
        self._offers = self._offers_through(backend, settings, counters)
        if coordinator is not None and self._offers is not None:
            coordinator.offers.has_ended = self._offers.has_ended
        self._close_timeout = settings.operation_timeout + _CLOSE_MARGIN
        self._closed = False
        _ENGINES.add(self)

    def _offers_through(self, backend: Backend, settings: EngineSettings, counters: Counters | None) -> Offers | None:
        """Return what offers small operations to the other ranks; None if they are all ordered by rank 0.

        Autotune compares orders, and in a tree ranks are on several hosts.
        """
        if self._in_tree or settings.autotune is not None or not isinstance(backend, Offering):
            return None
        lane = backend.lane(PLACES, may_spin=settings.spin_time > 0)
        if lane is None:
            return None
        control = self._control
        return Offers(
            lane,
            self.rank,
            self.topology.size,
            self._member,
            lambda: control.submitted(waits=False),
            control.work_while_waiting,
            label_of(backend),
            counters,
        )

    def start(self) -> None:
        """Start both threads."""
        self._executor.start()
        self._control.start()

    def pin(self, core: int) -> None:
        """Restrict both threads, which must be running, to one core.

        Raises:
            OSError: this process may not use it, or the system cannot do this.
        """
        if not hasattr(os, "sched_setaffinity"):
            raise OSError("this system pins no threads to cores")
        for thread in (self._executor, self._control):
            os.sched_setaffinity(thread.native_id, {core})

    @property
    def error(self) -> HorovodInternalError | None:
        """The reason why nothing may be submitted any more; None while the engine runs."""
        return self._member.closed

    def submit(
        self,
        request: Request,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] | None = None,
        *,
        allocate: Callable[[int, TensorSpec], Buffer] | None = None,
        ready: Callable[[], None] | None = None,
        splits: Sequence[int] = (),
    ) -> Handle:
        """Take part in a collective once: ``launch`` with a request that is not repeated, and a new Handle."""
        handle = Handle(request.name)
        self.launch(PersistentRequest(request), handle, inputs, outputs, allocate=allocate, ready=ready, splits=splits)
        return handle

    def launch(
        self,
        persistent: PersistentRequest,
        handle: Handle,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer] | None = None,
        *,
        allocate: Callable[[int, TensorSpec], Buffer] | None = None,
        ready: Callable[[], None] | None = None,
        splits: Sequence[int] = (),
        waits: bool = False,
    ) -> None:
        """Take part in a collective. Returns at once; callable from any thread.

        Args:
            persistent: what to do, made for this engine; the request's ``tensors`` describe ``inputs``. It is checked
                unless it was agreed upon before.
            handle: resolved at the end. Its outputs are in the order of the tensors; an alltoall has a second one, with
                the number of rows (int64) that came from each rank of the set.
            inputs: contiguous memory, not written unless it is also an output. Must stay as it is until the handle
                has resolved; the Buffers' owners are kept alive meanwhile.
            outputs: where results go, of the same specs as the inputs (in a reducescatter, of this rank's rows); the
                same memory as the inputs means in place. Not for an allgather or alltoall, whose results' first
                dimensions are known only later.
            allocate: for allgather and alltoall: called on an engine thread with a tensor's index and the result's
                spec.
            ready: called on an engine thread just before the memory is read; blocks until it may be.
            splits: for an alltoall: how many rows go to each rank of the set.
            waits: the caller is about to wait without a timeout, so its thread may do the engine's work for a moment.

        Raises:
            InvalidArgumentError: the request makes no sense on any rank.
            DuplicateNameError: the name is in flight.
            HorovodInternalError: the engine has ended; the same error that pending operations got.
        """
        if self._forked:
            raise HorovodInternalError(
                "this process was forked from a rank of the job and is not a rank itself; collective operations belong "
                "to the parent (start workers with the 'spawn' method and hvd.init() if they are to be ranks)"
            )
        request = persistent.request
        signature = (persistent.template or persistent).signature
        if signature is None or signature.number < 0:
            _check(request, self.members_of(request.process_set, request.name))
        results = inputs if request.collective.sized_late else outputs or ()
        if len(inputs) != len(request.tensors) or len(results) != len(request.tensors):
            raise InvalidArgumentError(
                f"{request.name}: {len(request.tensors)} tensors are described, but there are {len(inputs)} inputs and "
                f"{len(results)} outputs"
            )
        handle.before_waiting = self._work_while_waiting
        handle.counters = self.counters
        submission = Submission(persistent, inputs, results, allocate, ready, splits, handle)
        held = interrupts.hold()  # what was filed must also be sent
        try:
            if waits and self._offers is not None:
                # A barrier ends after everything that was ordered before it.
                may_overtake = bool(request.tensors) or not self._executor.has_unresolved
                if may_overtake and self._offers.launch(submission):
                    return
            filed, agreeing = self._member.add(submission)
            if filed == _BATCH or (filed == 1 and not agreeing):
                self._control.submitted(waits=waits)
            elif filed == 1:
                self._control.wake()
        finally:
            interrupts.release(held)

    @property
    def start_settings(self) -> Choice:
        """The settings that may change while the job runs, as they were in the beginning."""
        return self._start_settings

    @property
    def settings_in_use(self) -> Choice:
        """The same, as they are now on this rank."""
        tuned = self._executor.tuned
        if tuned is None:
            return self._start_settings
        return Choice(*[getattr(tuned, each.name) for each in fields(Choice)])

    def tune(self, choice: Choice) -> None:
        """On rank 0: have all ranks use other settings, from the same operation on. It is one of those that this rank
        submits from now on, or an earlier one that is not yet ordered."""
        self._control.say(Tune(*astuple(choice)))

    def _show_timelines(self, timeline: Timeline | Timelines | None) -> None:
        self._member.timeline = self._executor.timeline = timeline
        if self.counters is not None:
            self.counters.timeline = timeline
        if self._coordinator is not None:
            self._coordinator.show(timeline)
            if self._in_tree:
                self._control.say(Observe(timeline is not None))

    def abort(self, error: HorovodInternalError) -> None:
        """Fail everything with ``error``: it is known from elsewhere that the ranks cannot go on together. Returns at
        once; callable from any thread."""
        self._control.abort(error)

    def close(self, reason: str = "") -> None:
        """End this rank's part of the job, and thereby every rank's; waits until what was ordered before has completed.

        Args:
            reason: the error that this rank ends with, shown in the others' messages.

        Safe to call twice, from any thread, and in a forked child, where it does nothing.
        """
        if self._forked:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._control.say(Leave(reason))
            is_silent = self._control.join(self._close_timeout)
            error = JobShutdownError("hvd.shutdown() has been called on this rank", rank=self.rank)
            if not is_silent:
                self._executor.abort(error)
                self._control.close()
                is_silent = self._control.join(_CLOSE_MARGIN)
            self._end(error)
            self._executor.stop()
            margin = _ABORTED_MARGIN if self._executor.is_aborted else _CLOSE_MARGIN
            ended = self._executor.join(margin) and not self._executor.is_stuck
            if self._offers is not None:
                ended = self._offers.close(_CLOSE_MARGIN) and is_silent and ended
            for group in self._groups.values():
                for backend in group.backends:
                    try:
                        (backend.close if ended else backend.abandon)()
                    except Exception:  # one that does not end well must not keep the others from it
                        logger.exception("the %s data plane was not closed", backend.name)
            self.timelines.close()
            if self._coordinator is not None and self._coordinator.undecided and not reason:
                logger.warning("%s", self._coordinator.undecided)
            if ended and is_silent:
                self._break_cycles()

    def _break_cycles(self) -> None:
        """Break the reference cycles between the two threads, which have ended: the planes and their memory would live
        until the next garbage collection, which in an elastic job may be many epochs later."""
        self._open_backend = self._open_device = None
        self._groups.clear()  # the Context, which others may still refer to, keeps no memory
        self._control.clear_callbacks()
        self._executor.clear_callbacks()

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """The global ranks of every process set by id; 0 is the set of all ranks."""
        return dict(self._member.sets)

    def members_of(self, process_set: int, what: str) -> tuple[int, ...]:
        """The global ranks of a process set that this rank is in.

        Args:
            what: what the set is needed for, for messages.

        Raises:
            InvalidArgumentError: there is no such set, or this rank is not in it.
        """
        members = self._member.sets.get(process_set)
        if members is None:
            raise InvalidArgumentError(f"{what}: there is no process set {process_set}")
        if self.rank not in members:
            raise InvalidArgumentError(
                f"{what}: rank {self.rank} is not in process set {process_set}, whose ranks are {list(members)}"
            )
        return members

    def oldest_pending(self) -> tuple[str, float]:
        """Return the operation that this rank has waited longest for other ranks to submit: its name, and the time at
        which this rank submitted it, on the monotonic clock; an empty name if there is none. Any thread may call."""
        return self._member.oldest_pending()

    def overdue(self, least: float) -> tuple[list[Waiting], dict[int, str]]:
        """On rank 0: what has waited at least ``least`` seconds for ranks that have not submitted it, oldest first, and
        what late ranks did when a stall was last reported; nothing on other ranks. Any thread may call."""
        return self._control.overdue(least)

    @property
    def planes(self) -> list[tuple[int, str, Plane, tuple[int, ...]]]:
        """The data planes that are open: the process set's number, whose tensors they carry ("cpu" or "cuda"), the
        plane, and the set's global ranks."""
        return [
            (number, device, plane, group.ranks)
            for number, group in sorted(self._groups.copy().items())
            for device, plane in group.planes
        ]

    def allocate(self, process_set: int, nbytes: int) -> Any | None:
        """Memory in which a set's data plane can use tensors without copying them; see ``Sharing``.

        Returns:
            an object with a buffer; None where the data plane has no such memory, or none left.
        """
        group = self._groups.get(process_set)
        backend = None if group is None or self._closed else group.host.backend
        return backend.allocate(nbytes) if isinstance(backend, Sharing) else None

    def _open_group(self, number: int, ranks: tuple[int, ...]) -> Group | None:
        self._sets_added += 1
        if self.rank not in ranks:
            return None
        if self._open_backend is None:
            raise HorovodInternalError("this engine was made without a way to connect further process sets")
        backend = self._open_backend(self._sets_added, ranks, lambda: self._executor.is_aborted)
        return self._group(self._sets_added, ranks, backend)

    def _group(self, number: int, ranks: tuple[int, ...], backend: Backend) -> Group:
        open_device = None
        if self._open_device is not None:
            open_device = partial(self._open_device, number, ranks, cancelled=lambda: self._executor.is_aborted)
        return Group(backend, ranks, ranks.index(self.rank), open_device)

    def _end(self, error: HorovodInternalError) -> None:
        """Refuse submissions; fail those that were never ordered. The executor is responsible for the rest."""
        spared = None
        if self._offers is not None:
            self._offers.settle()
            spared = self._offers.certain
        for operation in self._member.close(error, spared):
            operation.handle.resolve(error=error)

    def _after_fork_in_child(self) -> None:
        """A forked child that kept a connection open would hide this rank's death from its peers."""
        self._forked = True
        self.timelines.after_fork_in_child()
        if self.counters is not None:
            self.counters.timeline = None
        close_keeping_numbers(self._control.peers.descriptors)
        for group in self._groups.values():
            for backend in group.backends:
                forget = getattr(backend, "after_fork_in_child", None)
                if forget is not None:
                    forget()


def _check(request: Request, members: Sequence[int]) -> None:
    for spec in request.tensors:
        if request.collective.reduces:
            _check_arithmetic(request, spec)
        if request.collective.along_rows and not spec.shape:
            raise InvalidArgumentError(
                f"{request.name}: a zero-dimensional tensor has no first dimension for {request.collective.value}; "
                "give it one (reshape to (1,))"
            )
    if request.collective.has_root:
        _check_root(request, members)


def _check_arithmetic(request: Request, spec: TensorSpec) -> None:
    if request.collective is Collective.REDUCESCATTER and request.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise InvalidArgumentError(f"{request.name}: a reducescatter knows Sum and Average only")
    if request.op is ReduceOp.ADASUM and spec.dtype not in _FLOATS:
        raise InvalidArgumentError(f"{request.name}: Adasum is defined for floating-point tensors, not {spec.dtype}")
    scales = request.op is ReduceOp.AVERAGE or request.prescale != 1.0 or request.postscale != 1.0
    if math.isnan(request.prescale) or math.isnan(request.postscale):
        raise InvalidArgumentError(f"{request.name}: a scale factor is not a number")
    if spec.dtype is DType.BOOL and scales:
        raise InvalidArgumentError(
            f"{request.name}: bool has no average and cannot be scaled; use op=Sum (any), Min (all), or convert it"
        )


def _check_root(request: Request, members: Sequence[int]) -> None:
    if request.root not in members:
        where = f"in process set {request.process_set}" if request.process_set else "in the job"
        ranks = f"{members[0]} to {members[-1]}" if not request.process_set else ", ".join(map(str, members))
        raise InvalidArgumentError(
            f"{request.name}: root rank {request.root} does not exist {where}; ranks are {ranks} (a root is a global "
            "rank in every process set)"
        )


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_ENGINES):
        engine._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
