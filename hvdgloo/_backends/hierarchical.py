"""Several ranks on each of several hosts: reduced in the host first, so that each byte crosses a wire once.

An allreduce is a reduce-scatter among the ranks of a host, which leaves each with a slice; an allreduce of each slice
across the hosts, by all its owners at once, so that several connections share the wire; and an allgather in the host.
Each host then sends 2(h-1)/h times the tensor's size, whatever the number of its ranks. A flat ring in the order of
hosts sends 2(p-1)/p times as much for p ranks. All of it happens in the tensor's own memory, from which Gloo sends and
into which it receives. Tensors go in chunks, so that one chunk is reduced in memory while another is on the wire.
(Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005, has the costs of
the flat algorithms.)

The other collectives work the same way. Where each rank has a block, the blocks of one host's ranks are a region, which
crosses each wire once; block sizes and numbers of ranks may differ from host to host.

What is too small to be cut takes the same path in one piece: only the first rank of each host, its leader, goes across.
Few ranks in all send small tensors to each other in one step instead. An alltoall is flat in any case, since each of
its bytes crosses a wire at most once as it is.

This backend is composed of others: one among the ranks of this host, one across hosts among the owners of one slice,
and a flat one among all, which is opened when it is first needed.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.base import Backend, Done, Encoding, Several, Work
from hvdgloo._backends.codec import Values
from hvdgloo.types import Buffer, ReduceOp, TensorSpec, WireFormat

logger = logging.getLogger(__name__)

Steps: TypeAlias = Iterator[Work]
Across: TypeAlias = Callable[[Backend, Buffer], Work]
"""Begins to reduce a buffer with the other hosts."""

CHUNK = 20 << 20
"""Approximate number of bytes that are reduced in memory while others are on the wire. Measured with 64 MiB on 4 hosts
with 2 ranks each, all on 2 cores. Where these are the limit, 1 chunk takes 0.70 of flat Gloo's time, 2 or 3 take 0.70
to 0.75, 4 take 0.77, and 16 take 1.1. Where a slow wire is the limit, 3 or more take 0.88, 2 take 0.89, and 1 takes
0.90."""

CROSSING = 3
"""Chunks that are on the wire at once."""


@dataclass(frozen=True)
class Layout:
    """The places of a set's ranks.

    Attributes:
        sizes: ranks on each host, in the order of hosts. Ranks are numbered host by host.
        rank: this one.
    """

    sizes: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        ends = accumulate(self.sizes)
        return next(host for host, end in enumerate(ends) if self.rank < end)

    @property
    def place(self) -> int:
        """This rank's number on its host."""
        return self.rank - sum(self.sizes[: self.host])

    @property
    def owners(self) -> int:
        """The number of ranks of each host that have a slice: as many as the host with the fewest has ranks."""
        return min(self.sizes)

    def of(self, rank: int) -> tuple[int, int]:
        """A rank's host and its number there."""
        other = Layout(self.sizes, rank)
        return other.host, other.place


def layout_of(hosts: Sequence[int], rank: int) -> Layout | None:
    """The layout of ranks whose hosts are given, or None where this backend is of no use: the ranks are all on one
    host, one on each, or not numbered host by host.
    """
    order = list(dict.fromkeys(hosts))
    sizes = tuple(hosts.count(host) for host in order)
    by_host = [host for host, count in zip(order, sizes, strict=True) for _ in range(count)]
    if len(order) < 2 or max(sizes) < 2 or by_host != list(hosts):
        return None
    return Layout(sizes, rank)


@dataclass(frozen=True)
class Thresholds:
    """From how many bytes on it pays that all owners go across: of a tensor, or of all ranks' together where each has
    its own.

    Attributes:
        allreduce: for allreduce.
        others: for broadcast, allgather and reducescatter.
    """

    allreduce: int
    others: int


class HierarchicalBackend:
    """One rank's membership in a set of ranks on several hosts.

    Args:
        layout: of the set.
        local: among the ranks of this host; None if there is but one. Its reducescatter takes every reduction and may
            have this rank's block of the source as its target; so may its allgather have the target's own block as
            source.
        cross: among the ranks with this one's number on their hosts; None if it has no slice.
        open_flat: connects this rank with all others, which do the same; given a function to poll whether to give up.
        thresholds: bytes of a tensor from which it is cut into slices.
        few: the flat group, already open, if there are so few ranks that it takes small tensors.
        chunk: approximate number of bytes that are reduced in memory while others are on the wire.
    """

    name = "hierarchical"
    in_rank_order = False

    def __init__(
        self,
        layout: Layout,
        local: Backend | None,
        cross: Backend | None,
        open_flat: Callable[[Callable[[], bool]], Backend],
        thresholds: Thresholds,
        *,
        few: Backend | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._layout = layout
        self._local, self._cross = local, cross
        self._few = self._flat = few
        self._open_flat, self._aborted = open_flat, False
        self._thresholds, self._chunk = thresholds, chunk
        self._host, self._place = layout.host, layout.place
        self._parts = [backend for backend in (cross, local, few) if backend is not None]
        self._line = _Line(deque(), deque())
        self._rooms: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}
        self.blocks = any(part.blocks for part in self._parts)

    @property
    def local(self) -> Backend | None:
        """The backend among the ranks of this host; None if there is but one."""
        return self._local

    @property
    def hierarchical_threshold(self) -> int:
        return self._thresholds.allreduce

    def tune(self, hierarchical_threshold: int) -> None:
        """See ``Tunable``."""
        self._thresholds = replace(self._thresholds, allreduce=hierarchical_threshold)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        if buffer.nbytes < self._thresholds.allreduce and (few := self._few) is not None:
            return self._at_once(lambda: few.allreduce(buffer, op))
        return self._allreduce(buffer, op, lambda cross, part: cross.allreduce(part, op))

    def allreduce_encoded(self, buffer: Buffer, form: WireFormat, residual: Values | None = None) -> Work:
        """See ``Encoding``: within a host values are exact."""

        def across(cross: Backend, part: Buffer) -> Work:
            if not isinstance(cross, Encoding):
                return cross.allreduce(part, ReduceOp.SUM)
            begin = (part.address - buffer.address) // buffer.dtype.itemsize
            return cross.allreduce_encoded(
                part, form, None if residual is None else residual[begin : begin + part.count]
            )

        return self._allreduce(buffer, ReduceOp.SUM, across)

    @property
    def rounding(self) -> tuple[float, float]:
        """See ``Encoding``; nothing for a rank without a slice."""
        return self._cross.rounding if isinstance(self._cross, Encoding) else (0.0, 0.0)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        host, place = self._layout.of(root)
        if buffer.nbytes >= self._thresholds.others:
            return self._begin(self._overlapped(self._spread(chunk, host, place) for chunk in self._chunks(buffer)))
        if (few := self._few) is not None:
            return self._at_once(lambda: few.broadcast(buffer, root))
        return self._begin(self._spread_whole(buffer, host, place))

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if sum(nbytes) >= self._thresholds.others:
            return self._begin(self._gather(source, target, nbytes))
        if (few := self._few) is not None:
            return self._at_once(lambda: few.allgather(source, target, nbytes))
        return self._begin(self._gather_whole(source, target, nbytes))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        if source.nbytes >= self._thresholds.others:
            return self._begin(self._scatter(source, target, nbytes, op))
        if (few := self._few) is not None:
            return self._at_once(lambda: few.reducescatter(source, target, nbytes, op))
        return self._begin(self._scatter_whole(source, target, nbytes, op))

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        if (few := self._few) is not None:
            return self._at_once(lambda: few.alltoall(source, target, sent, received))
        return self._begin(self._exchange(source, target, sent, received))

    def scale(self, buffer: Buffer, factor: float) -> None:
        self._parts[0].scale(buffer, factor)

    def abort(self) -> None:
        self._aborted = True
        for part in self._parts:
            part.abort()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()

    def after_fork_in_child(self) -> None:
        """Let go of connections in a forked child."""
        for part in self._parts:
            forget = getattr(part, "after_fork_in_child", None)
            if forget is not None:
                forget()

    # Each operation is a generator of its steps' Works. Operations run one after another: ranks begin and wait at
    # different moments, and the steps of two operations must not be ordered differently on another rank.

    def _begin(self, steps: Steps) -> Work:
        operation = _Operation(self._line, steps)
        self._line.queue.append(operation)
        if self._line.queue[0] is operation:
            operation.begin()
        return operation

    def _at_once(self, call: Callable[[], Work]) -> Work:
        """An operation of one step, which needs no generator if nothing is before it."""
        return self._begin(_once(call)) if self._line.queue else call()

    def _exchange(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Steps:
        if self._flat is None:
            opening = _Opening(self._open_flat, lambda: self._aborted)
            yield opening
            self._flat = opening.opened
            self._parts.append(self._flat)
            if self._aborted:
                self._flat.abort()  # the abort did not see it
        yield self._flat.alltoall(source, target, sent, received)

    @property
    def _leading(self) -> Backend | None:
        """The backend among the hosts' leaders, if this rank is one."""
        return self._cross if self._place == 0 else None

    def _allreduce(self, buffer: Buffer, op: ReduceOp, across: Across) -> Work:
        """Reduce in the hosts, and by ``across`` what the ranks of each host have reduced."""
        if buffer.nbytes >= self._thresholds.allreduce:
            return self._begin(self._overlapped(self._reduce(chunk, op, across) for chunk in self._chunks(buffer)))
        return self._begin(self._reduce_whole(buffer, op, across))

    def _reduce_whole(self, buffer: Buffer, op: ReduceOp, across: Across) -> Steps:
        if self._local is not None:
            yield self._local.allreduce(buffer, op)
        if self._leading is not None:
            yield across(self._leading, buffer)
        yield from self._tell(buffer)

    def _spread_whole(self, buffer: Buffer, host: int, place: int) -> Steps:
        if self._host == host and self._local is not None:
            yield self._local.broadcast(buffer, place)
        if self._leading is not None:
            yield self._leading.broadcast(buffer, host)
        if self._host != host:
            yield from self._tell(buffer)

    def _tell(self, buffer: Buffer) -> Steps:
        """Give the ranks of this host what their leader has."""
        if self._local is not None:
            yield self._local.broadcast(buffer, 0)

    def _overlapped(self, passages: Iterable[Passage]) -> Steps:
        """Take chunks across, so that the work in memory for one overlaps with others on the wire."""
        crossing, waiting = self._line.crossing, deque[Passage]()

        def arrive() -> Steps:
            yield crossing[0]
            crossing.popleft()
            yield from waiting.popleft().after()

        for passage in passages:
            yield from passage.before()
            crossing.append(passage.across())
            waiting.append(passage)
            if len(crossing) == CROSSING:
                yield from arrive()
        while crossing:
            yield from arrive()

    def _reduce(self, chunk: Buffer, op: ReduceOp, take_across: Across) -> Passage:
        own, nbytes = self._own(chunk)

        def before() -> Steps:
            # What no other rank needs of this rank's values becomes the sum, on the wire as well: nothing is copied.
            if self._local is not None:
                yield self._local.reducescatter(chunk, own, nbytes, op)

        def across() -> Work:
            if self._cross is None or not own.nbytes:
                return Done()
            return take_across(self._cross, own)

        return Passage(before, across, lambda: self._hand_round(own, chunk, nbytes))

    def _spread(self, chunk: Buffer, host: int, place: int) -> Passage:
        own, nbytes = self._own(chunk)

        def before() -> Steps:
            if self._host == host and self._local is not None:
                yield self._local.broadcast(chunk, place)

        def across() -> Work:
            return self._cross.broadcast(own, host) if self._cross is not None and own.nbytes else Done()

        def after() -> Steps:
            if self._host != host:
                yield from self._hand_round(own, chunk, nbytes)

        return Passage(before, across, after)

    def _hand_round(self, own: Buffer, chunk: Buffer, nbytes: Sequence[int]) -> Steps:
        """Fill a chunk, of which each rank of this host has its slice in place."""
        if self._local is not None:
            yield self._local.allgather(own, chunk, nbytes)

    def _gather_here(self, source: Buffer, region: Buffer, nbytes: Sequence[int]) -> Steps:
        """Put what the ranks of this host have into their region."""
        begin = self._layout.rank - self._place
        if self._local is not None:
            yield self._local.allgather(source, region, nbytes[begin : begin + self._ranks])
        else:
            _copy(region.address, source)

    def _gather_whole(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        sizes = [region.nbytes for region in self._regions(target, nbytes)]
        own = self._room("region", 0, target, sizes[self._host])
        yield from self._gather_here(source, own, nbytes)
        if self._leading is not None:
            yield self._leading.allgather(own, target, sizes)
        yield from self._tell(target)

    def _gather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        regions = self._regions(target, nbytes)
        yield from self._gather_here(source, regions[self._host], nbytes)
        collect = self._swap if len(regions) == 2 else self._collect
        yield from self._overlapped(collect(turn, chunks) for turn, chunks in enumerate(self._chunks_of(regions)))

    def _swap(self, turn: int, chunks: Sequence[Buffer]) -> Passage:
        """The regions' chunks from one host to the other: both are received where they belong."""
        slices = [self._own(chunk) for chunk in chunks]

        def across() -> Work:
            cross = self._cross
            if cross is None:
                return Done()
            return Several([cross.broadcast(own, host) for host, (own, _) in enumerate(slices) if own.nbytes])

        other = 1 - self._host
        return Passage(_nothing, across, lambda: self._hand_round(slices[other][0], chunks[other], slices[other][1]))

    def _collect(self, turn: int, chunks: Sequence[Buffer]) -> Passage:
        """The regions' chunks from each of several hosts to all others, which all send at the same time."""
        slices = [self._own(chunk) for chunk in chunks]
        column = self._room("column", turn, chunks[0], sum(own.nbytes for own, _ in slices))

        def across() -> Work:
            if self._cross is None or not column.nbytes:
                return Done()
            return self._cross.allgather(slices[self._host][0], column, [own.nbytes for own, _ in slices])

        def after() -> Steps:
            at = 0
            for host, (chunk, (own, nbytes)) in enumerate(zip(chunks, slices, strict=True)):
                if host != self._host:
                    _copy(own.address, column.part(at, own.nbytes))
                    yield from self._hand_round(own, chunk, nbytes)
                at += own.nbytes

        return Passage(_nothing, across, after)

    def _scatter_whole(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Steps:
        sizes = [region.nbytes for region in self._regions(source, nbytes)]
        sums = self._room("column", 0, source, source.nbytes)
        own = self._room("result", 0, source, sizes[self._host])
        _copy(sums.address, source)
        if self._local is not None:
            yield self._local.allreduce(sums, op)
        if self._leading is not None:
            yield self._leading.reducescatter(sums, own, sizes, op)
        yield from self._tell(own)
        begin = sum(nbytes[self._layout.rank - self._place : self._layout.rank])
        _copy(target.address, own.part(begin, target.nbytes))

    def _scatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Steps:
        regions = self._regions(source, nbytes)
        begin = sum(nbytes[self._layout.rank - self._place : self._layout.rank])
        # Where the chunks begin of what belongs to this host, seen from this rank's block.
        starts = (chunk.address - regions[self._host].address - begin for chunk in self._cut_own(regions))
        passages = zip(self._chunks_of(regions), starts, strict=True)
        yield from self._overlapped(
            self._reduce_to_owners(turn, chunks, target, start, op) for turn, (chunks, start) in enumerate(passages)
        )

    def _reduce_to_owners(
        self, turn: int, chunks: Sequence[Buffer], target: Buffer, start: int, op: ReduceOp
    ) -> Passage:
        """The regions' chunks from all hosts, combined, to the host that a region belongs to.

        Args:
            start: where this host's chunk begins in ``target``, which may be before or behind it.
        """
        slices = [self._own(chunk) for chunk in chunks]
        sizes = [own.nbytes for own, _ in slices]
        column = self._room("column", turn, target, sum(sizes))
        result = self._room("result", turn, target, chunks[self._host].nbytes)
        own, nbytes = self._own(result)

        def before() -> Steps:
            at = 0
            for chunk, (part, blocks) in zip(chunks, slices, strict=True):
                if self._local is not None:
                    yield self._local.reducescatter(chunk, column.part(at, part.nbytes), blocks, op)
                else:
                    _copy(column.address + at, part)
                at += part.nbytes

        def across() -> Work:
            if self._cross is None or not column.nbytes:
                return Done()
            return self._cross.reducescatter(column, own, sizes, op)

        def after() -> Steps:
            yield from self._hand_round(own, result, nbytes)
            low, high = max(0, start), min(target.nbytes, start + result.nbytes)
            if low < high:
                _copy(target.address + low, result.part(low - start, high - low))

        return Passage(before, across, after)

    def _room(self, use: str, turn: int, like: Buffer, nbytes: int) -> Buffer:
        """Memory that is reused once this chunk has arrived, since fresh memory from the system is slow."""
        key = use, turn % CROSSING
        room = self._rooms.get(key)
        if room is None or room.nbytes < nbytes:
            room = self._rooms[key] = np.empty(nbytes, np.uint8)
        return Buffer(room.ctypes.data, TensorSpec(like.dtype, (nbytes // like.dtype.itemsize,)), room)

    @property
    def _ranks(self) -> int:
        """The number of ranks on this host."""
        return self._layout.sizes[self._host]

    def _regions(self, buffer: Buffer, nbytes: Sequence[int]) -> list[Buffer]:
        """Return each host's region of a buffer with one block per rank."""
        ends = list(accumulate(self._layout.sizes))
        sizes = [sum(nbytes[end - ranks : end]) for end, ranks in zip(ends, self._layout.sizes, strict=True)]
        begins = accumulate(sizes, initial=0)
        return [buffer.part(begin, size) for begin, size in zip(begins, sizes, strict=False)]

    def _chunks_of(self, regions: Sequence[Buffer]) -> Iterator[tuple[Buffer, ...]]:
        """The regions in as many chunks each, one of each at a time."""
        count = self._count(sum(region.nbytes for region in regions))
        return zip(*(self._cut(region, count) for region in regions), strict=True)

    def _cut_own(self, regions: Sequence[Buffer]) -> list[Buffer]:
        """The chunks of this host's region."""
        return self._cut(regions[self._host], self._count(sum(region.nbytes for region in regions)))

    def _chunks(self, buffer: Buffer) -> list[Buffer]:
        return self._cut(buffer, self._count(buffer.nbytes))

    def _count(self, nbytes: int) -> int:
        """Return the number of chunks in a number of bytes."""
        return max(1, round(nbytes / self._chunk))

    @staticmethod
    def _cut(buffer: Buffer, count: int) -> list[Buffer]:
        """A buffer in nearly equal pieces."""
        size = buffer.dtype.itemsize
        edges = [buffer.count * index // count * size for index in range(count + 1)]
        return [buffer.part(begin, end - begin) for begin, end in pairwise(edges)]

    def _own(self, chunk: Buffer) -> tuple[Buffer, list[int]]:
        """Return the part of a chunk that this rank takes across, which is empty for some; and the bytes of each rank
        of this host.

        Each host makes as many slices as the one with the fewest ranks has.
        """
        owners, size = self._layout.owners, chunk.dtype.itemsize
        edges = [chunk.count * place // owners * size for place in range(owners + 1)]
        nbytes = [end - begin for begin, end in pairwise(edges)] + [0] * (self._ranks - owners)
        return chunk.part(edges[min(self._place, owners)], nbytes[self._place]), nbytes


@dataclass(frozen=True)
class Passage:
    """A chunk's path: in this host, on the wire, and in this host again."""

    before: Callable[[], Steps]
    across: Callable[[], Work]
    after: Callable[[], Steps]


@dataclass
class _Line:
    """Operations that have begun, in order, of which the first is under way.

    Attributes:
        crossing: what it has on the wire.
        failure: what ended it, and so all others.
    """

    queue: deque[_Operation]
    crossing: deque[Work]
    failure: Exception | None = None


class _Operation:
    """The Work of steps that begin when all operations before them have ended."""

    def __init__(self, line: _Line, steps: Steps) -> None:
        self._line = line
        self._steps = steps
        self._current: Work | None = None
        self._ended = False

    def begin(self) -> None:
        """Take the first step; nothing is before this operation any more."""
        self._next()

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._ended:
            if self._line.failure is not None:
                return self._fail(self._line.failure, deadline)
            first = self._line.queue[0]
            try:
                if first._current is None:
                    first.begin()
                elif not first._current.completes_within(max(0.0, deadline - time.monotonic())):
                    return False
                else:
                    first._next()
            except Exception as error:
                self._line.failure = error
                if first._current is not None and first._current not in self._line.crossing:
                    self._line.crossing.append(first._current)  # it may touch memory until it raises once more
                raise
        return True

    def _fail(self, failure: Exception, deadline: float) -> bool:
        """Raise the failure once nothing is on the wire any more; until then its memory may still be written."""
        while self._line.crossing:
            try:
                if not self._line.crossing[0].completes_within(max(0.0, deadline - time.monotonic())):
                    return False
            except Exception as error:  # noqa: BLE001 - expected: it was aborted
                logger.debug("aborted: %s", error)
            self._line.crossing.popleft()
        raise failure.with_traceback(None)

    def _next(self) -> None:
        self._current = next(self._steps, None)
        if self._current is None:
            self._ended = True
            self._line.queue.popleft()


def _once(call: Callable[[], Work]) -> Steps:
    yield call()


class _Opening:
    """The Work of connecting a group, which takes a thread of its own: it waits for other ranks."""

    def __init__(self, connect: Callable[[Callable[[], bool]], Backend], cancelled: Callable[[], bool]) -> None:
        self._connect, self._cancelled = connect, cancelled
        self._found: Backend | None = None
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hvdgloo-connect", daemon=True)
        self._thread.start()

    @property
    def opened(self) -> Backend:
        """The group, once this has completed."""
        assert self._found is not None
        return self._found

    def completes_within(self, timeout: float) -> bool:
        self._thread.join(max(0.0, timeout))
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._found = self._connect(self._cancelled)
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            self._failure = error


def _nothing() -> Steps:
    yield from ()


def _copy(address: int, source: Buffer) -> None:
    ctypes.memmove(address, source.address, source.nbytes)
