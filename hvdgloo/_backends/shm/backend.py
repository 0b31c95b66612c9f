"""Shared memory as the engine sees it: operations that begin at once and go on whenever a thread waits for them.

No thread of its own moves the data: an operation advances in the thread that begins it, as far as it gets without
waiting, and then in the one that waits for it. Operations advance in the order in which they began, which is the same
on all ranks.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdgloo._backends.base import Done, RendezvousStore, Work
from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.arena import Arena, arena_bytes
from hvdgloo._backends.shm.calls import Calls
from hvdgloo._backends.shm.lane import Lane
from hvdgloo._backends.shm.reduction import Reducer, Reduction, scale
from hvdgloo._backends.shm.segment import PAGE, PLACES, smallest
from hvdgloo._backends.shm.segment_collectives import Course, SegmentCollectives, Steps, Wait
from hvdgloo._backends.shm.segment_setup import SegmentSetup
from hvdgloo._backends.shm.signals import FutexSignals
from hvdgloo._backends.shm.small import MOST_BYTES, SmallCollectives
from hvdgloo._backends.shm.system import Unsupported
from hvdgloo._backends.shm.tensors import Tensors
from hvdgloo._backends.shm.zero_copy import CHUNK, RESIDENT_FROM, ZeroCopy
from hvdgloo._net.descriptors import close_keeping_numbers
from hvdgloo._net.handshake import Handshake
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, ReduceOp

__all__ = ["ShmBackend", "Unsupported"]

logger = logging.getLogger(__name__)

_MOST_KNOWN = 32
"""Sets of tensors whose pieces are kept: what a training step has in flight."""


class _ShmWork:
    """An operation under way."""

    def __init__(self, backend: ShmBackend, what: str, steps: Steps, keep: Sequence[object]) -> None:
        self._backend = backend
        self.what = what
        self.steps = steps
        self.waits_for: Wait | None = None
        self.ended = False
        self._keep = keep

    def completes_within(self, timeout: float) -> bool:
        return self.ended or self._backend.advance(self, time.monotonic() + timeout)


class ShmBackend:
    """One rank's membership in a set of ranks on one host.

    Args:
        store: of the rendezvous.
        prefix: of this set's keys in it, the same on all ranks and never used before.
        rank, size: within the set; at least two.
        secret: of the job.
        describe: names a rank of the set.
        connect_timeout: seconds within which the others must arrive.
        limit: bytes of the segment per rank at most.
        arena: bytes per rank that ``allocate`` can give out; None for as much as this machine has.
        pipes: whether numbers travel through pipes; None to decide by the processor.
        cancelled: asked now and then whether to give up connecting.

    Settings are rank 0's.

    Raises:
        Unsupported: memory cannot be shared; raised on all ranks.
        ConnectError: some rank did not come.
        BackendError: it was cancelled.
    """

    name = "shm"
    blocks = False
    in_rank_order = True

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        secret: bytes,
        describe: Callable[[int], str],
        *,
        connect_timeout: float,
        limit: int,
        arena: int | None = None,
        pipes: bool | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._rank = rank
        self._segment, self._signals = SegmentSetup(
            store,
            prefix,
            rank,
            size,
            Handshake(secret, 0, 0, f"shared memory connection for {prefix}"),
            describe,
            timeout=connect_timeout,
            limit=max(limit // PAGE * PAGE, smallest(size)),
            arena=arena_bytes(size) if arena is None else arena // PAGE * PAGE,
            pipes=not system.has_strong_order() if pipes is None else pipes,
            cancelled=cancelled,
        ).meet()
        reducer, course = Reducer(rank, size, max(CHUNK, self._segment.limit)), Course()
        self._rounds = SegmentCollectives(self._segment, self._signals, reducer, course)
        self._arena = Arena(self._segment)
        self._resident = None
        if self._segment.arena:
            self._resident = ZeroCopy(self._segment, self._signals, reducer, course, self._arena)
        self._known: dict[tuple[object, ...], Tensors] = {}
        self._under_way: deque[_ShmWork] = deque()
        self._failure: BackendError | None = None
        self._lane: Lane | None = None

    @property
    def segment_bytes(self) -> int:
        """Bytes of the segment that each rank uses at present."""
        return self._rounds.capacity

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        return self.allreduce_several([buffer], [buffer], op)

    def allreduce_several(
        self,
        sources: Sequence[Buffer],
        targets: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Work:
        """See ``Scattered``."""
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source.nbytes]
        if not pairs:
            return Done()
        reduction = Reduction(pairs[0][0].dtype, op, prescale, postscale)
        if len(pairs) == 1:
            (source, target), nbytes = pairs[0], pairs[0][0].nbytes
            return self._begin("allreduce", nbytes, self._allreduce_one(source, target, reduction), pairs)

        several, results = self._tensors([pair[0] for pair in pairs]), self._tensors([pair[1] for pair in pairs])
        return self._begin("allreduce", several.nbytes, self._rounds.allreduce(several, results, reduction), pairs)

    def _allreduce_one(self, source: Buffer, target: Buffer, reduction: Reduction) -> Steps:
        one, result = self._tensors([source]), self._tensors([target])
        elsewhere = self._rounds.allreduce(one, result, reduction)
        if self._resident is None or one.nbytes < RESIDENT_FROM:
            return elsewhere
        in_place = source.address == target.address
        return self._resident.allreduce(one if in_place else Tensors([]), reduction, elsewhere)

    def _tensors(self, buffers: Sequence[Buffer]) -> Tensors:
        """Tensors of a program come again and again at the same addresses, and to cut them into pieces takes time."""
        key = buffers[0].dtype, *[(buffer.address, buffer.nbytes) for buffer in buffers]
        known = self._known.pop(key, None) or Tensors(buffers)
        self._known[key] = known
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    def small_collectives(self, *, may_spin: bool) -> SmallCollectives:
        """Return this rank's part in collectives that are waited for at once, while nothing else is under way.

        All ranks must call this. From then on this backend does collectives of that size in the same way, since each
        rank chooses for itself whether it waits for one at once.

        Args:
            may_spin: True if each rank of the host has a core of its own.
        """
        self._rounds.at_once_bytes = MOST_BYTES
        return SmallCollectives(self._segment, self._signals, self._rounds, may_spin=may_spin)

    def lane(self, places: int, *, may_spin: bool) -> Lane | None:
        """See ``Offering``."""
        if not isinstance(self._signals, FutexSignals) or places > PLACES:
            return None
        self._lane = Lane(self._segment, may_spin=may_spin)
        return self._lane

    def calls(self, first_rank: int = 0) -> Calls:
        """Return this rank's record of calls, which no other part of the backend uses.

        Args:
            first_rank: number in messages of the first rank here.
        """
        return Calls(self._segment, first_rank)

    def late(self) -> list[int]:
        """Return the ranks that have made fewer steps than this one."""
        return self._signals.late()

    def wait(self, which: int, peer: int, value: int, deadline: float) -> bool:
        """See ``Signals``."""
        return self._signals.wait(which, peer, value, deadline)

    def allocate(self, nbytes: int) -> Any | None:
        """See ``Sharing``."""
        return self._arena.allocate(nbytes)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        total = sum(nbytes)
        steps = self._rounds.allgather(source, target, nbytes)
        return self._begin("allgather", total, steps, (source, target)) if total else Done()

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        steps = self._rounds.broadcast(buffer, root)
        return self._begin("broadcast", buffer.nbytes, steps, (buffer,)) if buffer.nbytes else Done()

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        steps = self._rounds.alltoall(source, target, sent, received)
        return self._begin("alltoall", sum(received), steps, (source, target))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        total = sum(nbytes)
        steps = self._rounds.reducescatter(source, target, nbytes, Reduction(source.dtype, op))
        return self._begin("reducescatter", total, steps, (source, target)) if total else Done()

    def scale(self, buffer: Buffer, factor: float) -> None:
        if buffer.nbytes:
            scale(buffer.array(), buffer.dtype, factor)

    def abort(self) -> None:
        self._signals.abort()

    def close(self) -> None:
        self._arena.close()
        if self._lane is not None:
            self._lane.close()
        self._signals.close()
        self._segment.close()

    def abandon(self) -> None:
        # A thread that is still at it reads and writes this memory, be it at the interpreter's exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def after_fork_in_child(self) -> None:
        """Let go of descriptors in a forked child. Its mapping stays: a rank's death shows elsewhere."""
        close_keeping_numbers([self._segment.descriptor, *self._signals.descriptors])

    def advance(self, work: _ShmWork, deadline: float) -> bool:
        """Go on with all operations up to ``work``; True if it has ended by ``deadline`` on the monotonic clock."""
        if self._failure is not None:
            raise BackendError(str(self._failure)) from self._failure
        while not work.ended:
            first = self._under_way[0]
            try:
                if not self._run(first, deadline):
                    return False
            except Exception as error:
                self._failure = BackendError(f"shared memory {first.what}: {error or type(error).__name__}")
                # No rank may go on with this rank's memory, which its owner gets back now.
                self._signals.abort()
                raise self._failure from error
            first.ended = True
            self._under_way.popleft()
        return True

    def _begin(self, what: str, nbytes: int, steps: Steps, keep: Sequence[object]) -> Work:
        work = _ShmWork(self, f"{what} of {nbytes} bytes", steps, keep)
        self._under_way.append(work)
        self.advance(work, 0.0)
        return work

    def _run(self, work: _ShmWork, deadline: float) -> bool:
        """Resume an operation until it ends, which is True, or has to wait beyond the deadline."""
        signals = self._signals
        while True:
            if work.waits_for is not None and not signals.wait(*work.waits_for, deadline):
                return False
            try:
                work.waits_for = next(work.steps)
            except StopIteration:
                return True
            if work.waits_for is None:
                signals.check_peers()
                if time.monotonic() >= deadline:
                    return False
