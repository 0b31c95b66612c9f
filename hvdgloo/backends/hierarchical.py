"""Several ranks on each of several hosts: reduced in the host first, so that each byte crosses a wire once.

An allreduce is a reduce-scatter among the ranks of a host, which leaves each with a slice; an allreduce of each slice
across the hosts, by all its owners at once, so that several connections share the wire; and an allgather in the host.
Each host then sends 2(h-1)/h times the tensor's size, whatever the number of its ranks. A flat ring in the order of
hosts sends 2(p-1)/p times as much for p ranks. Tensors go in chunks, so that one chunk is reduced in memory while
another is on the wire. (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005, has the costs of the flat algorithms.)

This backend is made of others: one among the ranks of this host, one across hosts among the owners of one slice, and a
flat one among all for what is too small to be worth three steps.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvdgloo.backends.base import Backend, Done, Work
from hvdgloo.types import Buffer, ReduceOp, TensorSpec

Steps: TypeAlias = Iterator[Work]

CHUNK = 4 << 20
"""Bytes that are reduced in memory while others are on the wire."""

CROSSING = 2
"""Chunks that are on the wire at once."""


@dataclass(frozen=True)
class Layout:
    """Where a set's ranks are.

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
        """How many ranks of each host have a slice: as many as the host with the fewest has ranks."""
        return min(self.sizes)

    @property
    def is_even(self) -> bool:
        """True if all hosts have the same number of ranks."""
        return len(set(self.sizes)) == 1

    def of(self, rank: int) -> tuple[int, int]:
        """A rank's host and its number there."""
        other = Layout(self.sizes, rank)
        return other.host, other.place


def layout_of(hosts: Sequence[int], rank: int) -> Layout | None:
    """The layout of ranks whose hosts are given, or None if this backend is no use: the ranks are all on one host, one
    on each, or not numbered host by host.
    """
    order = list(dict.fromkeys(hosts))
    sizes = tuple(hosts.count(host) for host in order)
    by_host = [host for host, count in zip(order, sizes, strict=True) for _ in range(count)]
    if len(order) < 2 or max(sizes) < 2 or by_host != list(hosts):
        return None
    return Layout(sizes, rank)


class HierarchicalBackend:
    """One rank's membership in a set of ranks on several hosts.

    Args:
        layout: of the set.
        local: among the ranks of this host.
        cross: among the ranks with this one's number on their hosts; None if it has no slice.
        flat: among all.
        least: bytes of a tensor from which the hierarchy is used.
        chunk: bytes that are reduced in memory while others are on the wire.
    """

    name = "hierarchical"

    def __init__(
        self, layout: Layout, local: Backend, cross: Backend | None, flat: Backend, *, least: int, chunk: int
    ) -> None:
        self._layout = layout
        self._local, self._cross, self._flat = local, cross, flat
        self._least, self._chunk = max(1, least), chunk
        self._host, self._place = layout.host, layout.place
        self._parts = [backend for backend in (local, cross, flat) if backend is not None]
        self._queue: deque[_Operation] = deque()
        self.blocks = any(part.blocks for part in self._parts)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        if buffer.nbytes < self._least or op is not ReduceOp.SUM:
            return self._flat_work(lambda: self._flat.allreduce(buffer, op))
        return self._begin(self._reduce(buffer))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        if buffer.nbytes < self._least:
            return self._flat_work(lambda: self._flat.broadcast(buffer, root))
        return self._begin(self._spread(buffer, *self._layout.of(root)))

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if sum(nbytes) < self._least or not self._layout.is_even:
            return self._flat_work(lambda: self._flat.allgather(source, target, nbytes))
        return self._begin(self._gather(source, target, nbytes))

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        # Each byte crosses a wire at most once as it is.
        return self._flat_work(lambda: self._flat.alltoall(source, target, sent, received))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        if source.nbytes < self._least or not self._layout.is_even:
            return self._flat_work(lambda: self._flat.reducescatter(source, target, nbytes, op))
        return self._begin(self._reduce_and_scatter(source, target, nbytes))

    def scale(self, buffer: Buffer, factor: float) -> None:
        self._flat.scale(buffer, factor)

    def abort(self) -> None:
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

    # Each operation is a generator of its steps' Works. They are done one after another: ranks begin and wait at
    # different moments, and the steps of two operations must not come in another order on another rank.

    def _begin(self, steps: Steps) -> Work:
        operation = _Operation(self._queue, steps)
        self._queue.append(operation)
        if self._queue[0] is operation:
            operation.begin()
        return operation

    def _flat_work(self, call: Callable[[], Work]) -> Work:
        if not self._queue:
            return call()
        return self._begin(_once(call))

    def _reduce(self, buffer: Buffer) -> Steps:
        crossing: deque[tuple[Work, Buffer, Buffer, list[int]]] = deque()
        width = self._slices(min(buffer.count, self._chunk // buffer.dtype.itemsize or 1))[self._place]
        scratch = np.empty((CROSSING + 1, width * buffer.dtype.itemsize), np.uint8)
        for turn, chunk in enumerate(self._chunks(buffer)):
            nbytes = [count * buffer.dtype.itemsize for count in self._slices(chunk.count)]
            own = _view(scratch[turn % (CROSSING + 1)], chunk.spec, nbytes[self._place])
            yield self._local.reducescatter(chunk, own, nbytes, ReduceOp.SUM)
            crossing.append((self._across(own), chunk, own, nbytes))
            if len(crossing) == CROSSING:
                yield from self._collect(*crossing.popleft())
        for crossed in crossing:
            yield from self._collect(*crossed)

    def _across(self, own: Buffer) -> Work:
        if self._cross is None or not own.nbytes:
            return Done()
        return self._cross.allreduce(own, ReduceOp.SUM)

    def _collect(self, crossed: Work, chunk: Buffer, own: Buffer, nbytes: Sequence[int]) -> Steps:
        yield crossed
        yield self._local.allgather(own, chunk, nbytes)

    def _spread(self, buffer: Buffer, host: int, place: int) -> Steps:
        crossing: deque[tuple[Work, Buffer, Buffer, list[int]]] = deque()
        for chunk in self._chunks(buffer):
            nbytes = [count * buffer.dtype.itemsize for count in self._slices(chunk.count)]
            begin = sum(nbytes[: self._place])
            own = chunk.part(begin, nbytes[self._place])
            if self._host == host:
                yield self._local.broadcast(chunk, place)
            work = self._cross.broadcast(own, host) if self._cross is not None and own.nbytes else Done()
            crossing.append((work, chunk, own, nbytes))
            if len(crossing) == CROSSING:
                yield from self._hand_round(host, *crossing.popleft())
        for crossed in crossing:
            yield from self._hand_round(host, *crossed)

    def _hand_round(self, host: int, crossed: Work, chunk: Buffer, own: Buffer, nbytes: Sequence[int]) -> Steps:
        yield crossed
        if self._host != host:
            # An allgather's source must be apart from its target.
            apart = Buffer.of_array(own.array().view(np.uint8).copy())
            yield self._local.allgather(apart, chunk, nbytes)

    def _gather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        places, hosts = self._layout.owners, len(self._layout.sizes)
        columns = [[nbytes[host * places + place] for host in range(hosts)] for place in range(places)]
        column = Buffer.of_array(np.empty(sum(columns[self._place]), np.uint8))
        assert self._cross is not None
        yield self._cross.allgather(source, column, columns[self._place])
        whole = Buffer.of_array(np.empty(sum(nbytes), np.uint8))
        yield self._local.allgather(column, whole, [sum(each) for each in columns])
        # Column by column, one for each place, to rank by rank.
        begins = list(accumulate(nbytes, initial=0))
        at = whole.address
        for place in range(places):
            for host in range(hosts):
                ctypes.memmove(target.address + begins[host * places + place], at, columns[place][host])
                at += columns[place][host]

    def _reduce_and_scatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        places, hosts = self._layout.owners, len(self._layout.sizes)
        columns = [[nbytes[host * places + place] for host in range(hosts)] for place in range(places)]
        ordered = _view(np.empty(source.nbytes, np.uint8), source.spec, source.nbytes)
        begins = list(accumulate(nbytes, initial=0))
        at = ordered.address
        for place in range(places):
            for host in range(hosts):
                ctypes.memmove(at, source.address + begins[host * places + place], columns[place][host])
                at += columns[place][host]
        own = sum(columns[self._place])
        column = _view(np.empty(own, np.uint8), source.spec, own)
        yield self._local.reducescatter(ordered, column, [sum(each) for each in columns], ReduceOp.SUM)
        assert self._cross is not None
        yield self._cross.reducescatter(column, target, columns[self._place], ReduceOp.SUM)

    def _chunks(self, buffer: Buffer) -> Iterator[Buffer]:
        """The buffer in pieces."""
        step = self._chunk // buffer.dtype.itemsize or 1
        for begin in range(0, buffer.count, step):
            count = min(step, buffer.count - begin)
            yield buffer.part(begin * buffer.dtype.itemsize, count * buffer.dtype.itemsize)

    def _slices(self, count: int) -> list[int]:
        """How many of ``count`` elements each rank of this host takes across."""
        owners, ranks = self._layout.owners, self._layout.sizes[self._host]
        return [count // owners + (place < count % owners) if place < owners else 0 for place in range(ranks)]


class _Operation:
    """The Work of steps that begin when all operations before them have ended."""

    def __init__(self, queue: deque[_Operation], steps: Steps) -> None:
        self._queue = queue
        self._steps = steps
        self._current: Work | None = None
        self._ended = False

    def begin(self) -> None:
        """Take the first step; nothing is before this operation any more."""
        self._next()

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._ended:
            first = self._queue[0]
            if first._current is None:
                first.begin()
            elif not first._current.completes_within(max(0.0, deadline - time.monotonic())):
                return False
            else:
                first._next()
        return True

    def _next(self) -> None:
        self._current = next(self._steps, None)
        if self._current is None:
            self._ended = True
            self._queue.popleft()


def _once(call: Callable[[], Work]) -> Steps:
    yield call()


def _view(memory: npt.NDArray[np.uint8], like: TensorSpec, nbytes: int) -> Buffer:
    """The first bytes of memory, as elements of a dtype."""
    return Buffer(memory.ctypes.data, TensorSpec(like.dtype, (nbytes // like.dtype.itemsize,)), memory)
