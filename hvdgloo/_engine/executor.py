"""The data thread: executes agreed operations in the common order.

A bucket of several tensors is packed into one buffer, handed to the backend, scaled and unpacked. A few buckets are
under way at once, so that copying one overlaps with transferring another. Where the GPU keeps the order itself
(``Memory.in_order``) all of that is given to its stream at once, without waiting for the buckets before it.

When a bucket fails, the thread keeps its memory and waits: the coordinator finds out why, every rank's backend is then
aborted, and the handles are failed only when the backend has released the memory.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hvdgloo._backends.base import Mark, Plane, Several, has_ended
from hvdgloo._engine.fusion import Bucket, Part, Planner
from hvdgloo._engine.messages import Response, Tune
from hvdgloo._engine.planes import DEPTH, Group
from hvdgloo._engine.submission import Submission
from hvdgloo._engine.threads import ThreadOwner
from hvdgloo._engine.transfer import Batch, Phases, Transfer, begin, deliver
from hvdgloo._observe.counters import Counters
from hvdgloo._platform.queues import take_within
from hvdgloo.errors import BackendError, HorovodInternalError
from hvdgloo.types import Collective, ReduceOp

if TYPE_CHECKING:
    from hvdgloo._engine.timeline import Timeline, Timelines

logger = logging.getLogger(__name__)

QUICK_BYTES = 1 << 16
CALLER_BYTES = 1 << 22
QUICK_SECONDS = 0.005
"""While the data thread is idle, a bucket of at most this size (the second one on the thread of a waiting caller) may
be executed on the thread that ordered it, for at most this many seconds: this saves a thread switch, which is a good
part of a small operation's latency."""

_LOOK_SECONDS = 0.2
"""Seconds between two checks, while waiting for the backend, whether the job was aborted."""

_LET_GO_SECONDS = 0.3
"""Seconds that the backend has to end what is under way after ``abort``. For about one killed rank in fifty, Gloo never
ends an operation although all its connections have been shut down. Handles are failed all the same. Memory and process
group are released when what uses them has ended, else never."""

_GPU_LETS_GO_SECONDS = 2.0
"""The same for a GPU, whose stream may have much to do before it gets to what was aborted. What has not ended keeps its
memory, and a communicator, for as long as the process lives, in an elastic job each time. Less than ``_STUCK_SECONDS``.
"""

_NOT_WORTH_FUSING = 1 << 18
"""A bucket of this size that a GPU's stream has been given keeps no later one waiting: nothing is gained from fusing
what becomes ready meanwhile. A smaller one does until it has completed, but no longer than ``_FUSING_SECONDS``."""

_FUSING_SECONDS = 1e-3
"""Seconds for which a small bucket on a GPU's stream keeps later ones waiting."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two looks at a GPU: CUDA has no wait with a deadline, nor one for whichever comes first, the end of a
bucket or another one to begin."""

_STUCK_SECONDS = 3.0
"""After an abort, how long the data thread has to end before handles are failed without it."""

_SLOWEST_NETWORK = 1 << 20
"""Bytes per second that any usable network moves; the operation timeout is extended by the transfer time at this rate.
"""


class Executor(ThreadOwner):
    """Owns the data thread.

    Args:
        name: of the thread.
        groups: by process set id; the executor adds and removes what ``open_group`` returns.
        open_group: makes this rank's part of a new process set, from its id and global ranks, on the data thread, while
            the other members do the same; None if this rank is not in it.
        fusion_threshold: bytes.
        deterministic: results must not depend on what happens to be ready at the same time.
        operation_timeout: seconds that one backend call may take beyond its transfer time.
        follow_streams: resolve handles as soon as a GPU's stream has been given all that there is to do; who waits for
            one makes its own stream wait. Else they resolve when the GPU has done it.
        verdict_timeout: seconds that a failed bucket's memory is kept for a control thread that does not abort.
        counters: of this process, if it counts.
    """

    def __init__(
        self,
        name: str,
        groups: dict[int, Group],
        open_group: Callable[[int, tuple[int, ...]], Group | None],
        *,
        fusion_threshold: int,
        separate_groups: bool,
        deterministic: bool = False,
        operation_timeout: float,
        follow_streams: bool = False,
        verdict_timeout: float = 10.0,
        counters: Counters | None = None,
    ) -> None:
        self._groups = groups
        self._open_group = open_group
        alone = partial(_depends_on_its_place, groups) if deterministic else None
        self._planner = Planner(fusion_threshold, separate_groups=separate_groups, alone=alone)
        self._operation_timeout = operation_timeout
        self._follow_streams = follow_streams
        self._verdict_timeout = verdict_timeout
        self._counters = counters
        self._on_room: Callable[[], None] = _nothing
        self._on_failure: Callable[[BaseException], None] = _nothing
        self._queue: queue.SimpleQueue[tuple[Bucket, Batch] | Transfer | Exception | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._under_way: deque[Transfer] = deque()
        self._unresolved: dict[Submission, None] = {}  # in order
        self.tuned: Tune | None = None
        """The settings that the data planes were last changed to; None if they never were."""
        self._waiting_here: tuple[Bucket, Batch] | None = None  # the only one queued, if not executed at once
        self._submitted = 0
        self._completed = 0
        self._verdict: HorovodInternalError | None = None
        self._aborted = threading.Event()
        self._is_stuck = False
        self._pause = _SHORTEST_PAUSE
        self.timeline: Timeline | Timelines | None = None
        super().__init__(name, self._run)

    @property
    def backlog(self) -> int:
        """Buckets that were ordered and keep later ones waiting: they have not completed."""
        return self._submitted - self._completed

    @property
    def has_unresolved(self) -> bool:
        """True while operations that were ordered have not ended."""
        return bool(self._unresolved)

    @property
    def is_aborted(self) -> bool:
        """True after ``abort``."""
        return self._aborted.is_set()

    @property
    def is_stuck(self) -> bool:
        """True if the backend has not let go of some operation."""
        return self._is_stuck

    def set_callbacks(self, *, on_room: Callable[[], None], on_failure: Callable[[BaseException], None]) -> None:
        """Set the callbacks; to be called before ``start``.

        Args:
            on_room: called after each bucket, on the thread that completed it.
            on_failure: called once with the first failure.
        """
        self._on_room, self._on_failure = on_room, on_failure

    def clear_callbacks(self) -> None:
        """Keep nothing alive that was called back, once the thread has ended."""
        self._on_room = self._on_failure = self._open_group = _nothing

    def start(self) -> None:
        _let_go(())
        super().start()

    def execute(self, batch: Batch, *, may_wait: bool = True, caller_waits: bool = False) -> None:
        """Queue one batch, or execute it here if it is quick.

        Called in the common order, by the thread that does the control thread's work.

        Args:
            may_wait: this thread may wait briefly for other ranks.
            caller_waits: this is the thread of a caller that waits for the batch and has nothing else to do.
        """
        if not batch:
            return
        if self.timeline is not None:
            self.timeline.ordered(batch)
        self._unresolved.update(dict.fromkeys([operation for _, operation in batch]))
        buckets = self._planner.plan(batch)
        self._waiting_here = None
        if len(buckets) == 1 and not self.backlog:
            if may_wait and self._is_quick(buckets[0], batch, CALLER_BYTES if caller_waits else QUICK_BYTES):
                self._submitted += 1
                self._execute_here(buckets[0], batch)
                return
            self._waiting_here = buckets[0], batch
        for bucket in buckets:
            self._submitted += 1
            self._queue.put((bucket, batch))

    def tune(self, settings: Tune) -> None:
        """Use these settings for all that is ordered from now on. Called as ``execute`` is."""
        self._planner.set_limit(settings.fusion_threshold)
        # Data planes change where the data thread comes to this place in the order; until then nothing is executed
        # on other threads.
        self._submitted += 1
        self._queue.put(partial(self._tune_planes, settings))

    def _tune_planes(self, settings: Tune) -> None:
        self.tuned = settings
        for group in self._groups.values():
            group.tune(settings.hierarchical_threshold)
        self._completed += 1
        self._on_room()

    def execute_queued(self) -> None:
        """Do on a waiting caller's thread what ``execute`` has just left to the data thread, if that has not begun it
        and it is quick. Called as ``execute`` is."""
        queued, self._waiting_here = self._waiting_here, None
        if queued is None or self.backlog != 1 or not self._is_quick(*queued, CALLER_BYTES):
            return
        if self._under_way:  # the data thread looks at a GPU from time to time, and ``take_within`` wants it all
            return
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, tuple):
            self._execute_here(*item)
        else:
            self._queue.put(item)

    def _execute_here(self, bucket: Bucket, batch: Batch) -> None:
        """Do the data thread's work while that is idle; it takes over if this bucket turns out to be slow, or fails."""
        try:
            transfer = self._begin(bucket, batch)
            if not transfer.work.completes_within(QUICK_SECONDS):
                self._queue.put(transfer)
                return
            self._complete(transfer)
        except Exception as error:  # noqa: BLE001 - whatever broke, the data thread reports it
            self._queue.put(error)

    def _is_quick(self, bucket: Bucket, batch: Batch, limit: int) -> bool:
        """True if no part of it can take long, as far as this rank is concerned."""
        if not bucket.collective.quick or _is_adasum(bucket, batch):
            return False
        if bucket.nbytes > limit:
            return False
        if self._groups[batch[0][0].request.process_set].host.backend.blocks:
            return False
        # Only the data thread touches a GPU, even for the tensors of a rank that has joined, which are the host's.
        return all(
            batch[part.operation][1].ready is None and (part.tensor < 0 or not _is_of_device(batch, part))
            for part in bucket.parts
        )

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back on the data thread once all that was queued before has completed."""
        self._queue.put(callback)

    def stop(self) -> None:
        """Let the thread end once everything queued has been executed."""
        self._queue.put(None)

    def abort(self, error: HorovodInternalError) -> None:
        """Fail everything that is under way or queued with ``error``. Callable from any thread, more than once."""
        if self._verdict is None:
            self._verdict = error
        for group in list(self._groups.values()):
            group.abort()
        first = not self._aborted.is_set()
        self._aborted.set()
        self._queue.put(None)
        if first and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # at the interpreter's end no thread can be started
                threading.Thread(target=self._guard, name=f"{self._thread.name}-guard", daemon=True).start()

    def _guard(self) -> None:
        """After an abort: fail what is left if the data thread does not, since it is stuck inside a data plane.

        Everything stays referenced by the executor, which that thread holds: what it is stuck in may use the memory.
        """
        if self.join(_STUCK_SECONDS):
            return
        self._is_stuck = True
        error = self._verdict
        logger.warning("the data thread has not ended %g s after the job did; it is left as it is", _STUCK_SECONDS)
        for operation in list(self._unresolved):
            operation.handle.resolve(error=error)

    # The data thread.

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - whatever broke, the other ranks must learn of it
            if not self._aborted.is_set():
                self._on_failure(error)
        self._settle()

    def _serve(self) -> None:
        while not self._aborted.is_set():
            item = None  # while waiting for more, keep no tensors alive
            # Streams and the host get on independently of each other.
            of_stream, of_host = self._first(in_order=True), self._first(in_order=False)
            try:
                if of_stream is not None and of_host is None:
                    item = take_within(self._queue, self._pause)
                else:
                    item = self._queue.get(block=of_host is None)
            except queue.Empty:
                if of_stream is None:
                    assert of_host is not None
                    self._finish(of_host)
                    continue
                if of_host is not None:
                    self._look_at(of_host, self._pause)
                self._look_at(of_stream, 0.0)
                continue
            if isinstance(item, tuple):
                self._make_room(*item)
                self._under_way.append(self._begin(*item))
                if isinstance(self._under_way[-1].work, Phases):
                    self._drain()
                self._pause = _SHORTEST_PAUSE
                continue
            if isinstance(item, Transfer):
                self._under_way.append(item)
                continue
            if isinstance(item, Exception):
                raise item
            self._drain()
            if item is None:
                return
            item()

    def _make_room(self, bucket: Bucket, batch: Batch) -> None:
        """Complete the buckets that must have ended before this one begins."""
        if bucket.collective.exclusive or _is_adasum(bucket, batch):
            self._drain()
            return
        waited_for = [transfer for transfer in self._under_way if not transfer.in_order]
        if len(waited_for) < DEPTH:
            return
        part = bucket.parts[0]
        request = batch[part.operation][0].request
        device = request.tensors[part.tensor].device if part.tensor >= 0 else "cpu"
        if not self._groups[request.process_set].is_in_order(device):
            self._finish(waited_for[0])

    def _drain(self) -> None:
        while self._under_way:
            self._finish(self._under_way[0])

    def _first(self, *, in_order: bool) -> Transfer | None:
        """The first bucket under way that a stream keeps in order, or that does not."""
        return next((transfer for transfer in self._under_way if transfer.in_order is in_order), None)

    def _settle(self) -> None:
        """Fail what is left, once the backend has released its memory."""
        if not (self._unresolved or self._under_way):
            return
        # The control thread aborts with a verdict in a second or two.
        self._aborted.wait(self._verdict_timeout)
        error = self._verdict or HorovodInternalError("the engine ended before this operation did")
        self._is_stuck = not _let_go(self._under_way)
        for operation in list(self._unresolved):
            operation.handle.resolve(error=error)
        self._unresolved.clear()
        self._under_way.clear()

    def _begin(self, bucket: Bucket, batch: Batch) -> Transfer:
        group = self._groups[batch[bucket.parts[0].operation][0].request.process_set]
        plane = self._plane(bucket, batch, group)
        timeline, counters = self.timeline, self._counters
        begun = timeline.now() if timeline is not None else 0.0
        started = time.monotonic() if counters is not None else 0.0
        fenced = timeline.now() if (waited := self._fence(bucket, batch)) and timeline is not None else begun
        readable = time.monotonic() if waited and counters is not None else started
        ready = plane.memory.mark() if plane.memory.in_order else None
        if bucket.collective.changes_sets:
            self._change_sets(batch[bucket.parts[0].operation][0])
        transfer = Transfer(bucket, batch, group, plane, self._planner.limit)
        try:
            begin(transfer)
        except Exception:
            if plane.memory.in_order:  # a stream may still have to pack the tensors
                transfer.work, transfer.in_order = plane.memory.mark(), True
                self._under_way.append(transfer)
            raise
        if counters is not None:
            transfer.count_departure(counters, started, readable)
        if timeline is not None:
            transfer.times = begun, fenced, timeline.now()
        if plane.memory.in_order and not isinstance(transfer.work, Phases):
            deliver(transfer)
            mark = plane.memory.mark()
            transfer.work = Several([transfer.work, mark])
            transfer.in_order = True
            self._begun_in_order(transfer, mark)
        transfer.ready = ready
        transfer.sent = time.monotonic()
        transfer.deadline = self._due(transfer, transfer.sent)
        return transfer

    def _due(self, transfer: Transfer, now: float) -> float:
        """Return the time from which a bucket that is ready now counts as lost."""
        return now + self._operation_timeout + transfer.nbytes / _SLOWEST_NETWORK

    def _begun_in_order(self, transfer: Transfer, mark: Mark) -> None:
        """A stream has been given all of a bucket."""
        transfer.begun = time.monotonic()
        if transfer.nbytes >= _NOT_WORTH_FUSING:
            self._no_longer_counts(transfer)
        if self._follow_streams:
            for part in transfer.bucket.parts:
                transfer.batch[part.operation][1].handle.follow = mark.order
            self._resolve(transfer)

    def _plane(self, bucket: Bucket, batch: Batch, group: Group) -> Plane:
        part = bucket.parts[0]
        response, operation = batch[part.operation]
        if part.tensor < 0 or response.request.tensors[part.tensor].device == "cpu":
            return group.host
        device = response.request.tensors[part.tensor].device
        plane = group.plane(device, operation.inputs[part.tensor], on_host=_is_adasum(bucket, batch))
        if self._verdict is not None:
            plane.backend.abort()  # the abort may not have seen it
        return plane

    @staticmethod
    def _fence(bucket: Bucket, batch: Batch) -> bool:
        """Wait until a bucket's tensors are ready to be read; False if they were from the beginning."""
        waited = False
        for index in {part.operation for part in bucket.parts}:
            fence = batch[index][1].ready
            if fence is not None:
                fence()
                waited = True
        return waited

    def _change_sets(self, response: Response) -> None:
        if response.request.collective is Collective.REMOVE_PROCESS_SET:
            group = self._groups.pop(response.value, None)
            if group is not None:
                for backend in group.backends:
                    backend.close()
            return
        opened = self._open_group(response.value, response.request.ranks)
        if opened is not None:
            self._groups[response.value] = opened
            if self.tuned is not None:
                opened.tune(self.tuned.hierarchical_threshold)
            if self._verdict is not None:
                opened.host.backend.abort()  # the abort did not see it

    def _finish(self, transfer: Transfer) -> None:
        """Wait for a bucket; if it fails it stays under way, as some of it may still be on its way."""
        while not transfer.work.completes_within(_LOOK_SECONDS):
            self._check(transfer)
        self._under_way.remove(transfer)
        self._complete(transfer)

    def _look_at(self, first: Transfer, timeout: float) -> None:
        """See whether a bucket under way comes to its end within a time, in seconds."""
        if first.work.completes_within(timeout):
            self._under_way.remove(first)
            self._pause = _SHORTEST_PAUSE
            self._complete(first)
            return
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._check(first)
        for transfer in self._under_way:
            if not transfer.counted and time.monotonic() - transfer.begun >= _FUSING_SECONDS:
                self._no_longer_counts(transfer)

    def _check(self, transfer: Transfer) -> None:
        """Raise BackendError if a bucket that is under way is not worth waiting for."""
        if transfer.ready is not None:
            if transfer.ready.completes_within(0.0):
                transfer.ready = None
            transfer.deadline = self._due(transfer, time.monotonic())
        if time.monotonic() >= transfer.deadline:
            raise BackendError(f"{transfer} has not completed within its time")
        if self._aborted.is_set():
            raise BackendError("it did not end when it was aborted")

    def _complete(self, transfer: Transfer) -> None:
        """Put the results of a bucket whose transfer has ended in their places, and resolve its handles."""
        timeline = self.timeline
        done = timeline.now() if timeline is not None else 0.0
        arrived = time.monotonic() if transfer.traffic is not None else 0.0
        deliver(transfer)
        if transfer.traffic is not None and self._counters is not None:
            transfer.count_arrival(self._counters, transfer.traffic, arrived)
        if timeline is not None and transfer.times:
            name = f"{transfer.plane.backend.name}_{transfer.bucket.collective.value}".upper()
            timeline.executed(transfer.bucket, transfer.batch, name, (*transfer.times, done), transfer.packed)
        if not (transfer.in_order and self._follow_streams):
            self._resolve(transfer)
        self._no_longer_counts(transfer)

    def _resolve(self, transfer: Transfer) -> None:
        """Resolve the handles whose last bucket this is."""
        for part in transfer.bucket.parts:
            response, operation = transfer.batch[part.operation]
            operation.remaining -= 1
            if not operation.remaining:
                del self._unresolved[operation]
                operation.handle.resolve(operation.outputs, value=response.value)
        self._waiting_here = None  # it keeps tensors alive

    def _no_longer_counts(self, transfer: Transfer) -> None:
        """Later buckets need not wait for this one."""
        if not transfer.counted:
            transfer.counted = True
            self._completed += 1
            self._on_room()


_kept: list[Transfer] = []
"""Transfers that had not ended when their engine did. Their memory may still be read and written."""


def _let_go(transfers: Iterable[Transfer]) -> bool:
    """Give what was aborted a moment to end; what does not is kept until it has, if only a later engine notices.

    Returns:
        whether all of it has ended.
    """
    begin = time.monotonic()
    earlier, _kept[:] = list(_kept), []
    _kept.extend(each for each in earlier if not has_ended(each.work, 0.0))
    left = []
    for each in transfers:
        until = begin + (_GPU_LETS_GO_SECONDS if each.in_order else _LET_GO_SECONDS)
        if not has_ended(each.work, max(0.0, until - time.monotonic())):
            left.append(each)
    _kept.extend(left)
    return not left


def _nothing(*_: object) -> None:
    """Do nothing, in place of a callback."""


def _depends_on_its_place(groups: Mapping[int, Group], response: Response, tensor: int) -> bool:
    """Return whether a tensor's sums depend on its position in a fused buffer."""
    request = response.request
    if not request.collective.reduces:
        return False
    return request.tensors[tensor].device != "cpu" or not groups[request.process_set].host.backend.in_rank_order


def _is_adasum(bucket: Bucket, batch: Batch) -> bool:
    return batch[bucket.parts[0].operation][0].request.op is ReduceOp.ADASUM


def _is_of_device(batch: Batch, part: Part) -> bool:
    return batch[part.operation][0].request.tensors[part.tensor].device != "cpu"
