"""Collectives that read the peers' tensors in place, by process_vm_readv(2).

Every rank shows the addresses of its tensors, then reads from the others what it needs. It never writes into another's
memory: a rank that fails takes its tensors back while others may still be at work. It says so before it does
(``Signals.abort``), and who has read looks afterwards whether the memory was still what it was (``check_peers``); only
then does it tell that it has done, and only when all have done does an operation complete.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.reduction import Array, Reducer, Reduction, divided, scale
from hvdgloo._backends.shm.segment import TABLE_ENTRIES, Segment
from hvdgloo._backends.shm.segment_collectives import Course, Steps
from hvdgloo._backends.shm.signals import PROGRESS, Signals
from hvdgloo._backends.shm.system import Run
from hvdgloo._backends.shm.tensors import Tensors, cut
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer

CHUNK = 1 << 20
"""Bytes that are reduced at a time: temporaries stay in the cache, and a system call's own cost does not count."""

_STRETCH = 4 << 20
"""Bytes that are copied at a time."""

MOST_RANKS = TABLE_ENTRIES - 1
"""An alltoall shows an address and an offset for each rank."""


class InPlace:
    """Work on tensors that every rank has shown to the others, wherever they are."""

    def __init__(self, segment: Segment, signals: Signals, reducer: Reducer, course: Course) -> None:
        self._rank, self._size = segment.rank, segment.size
        self._segment, self._signals, self._reducer, self._course = segment, signals, reducer, course
        self._peers = [(self._rank + n) % self._size for n in range(1, self._size)]

    def _in_slices(self, nbytes: int, fold: Callable[[int, int], None], take: Callable[[int, int, int], None]) -> Steps:
        """Reduce a payload that all have shown.

        Args:
            fold: reduces a stretch of this rank's slice.
            take: gets from a peer a stretch that it has reduced.
        """
        base = self._course.steps - 1
        edges = cut(nbytes, self._size)
        chunks = -(-max(end - begin for begin, end in pairwise(edges)) // CHUNK)
        taken = dict.fromkeys(self._peers, 0)

        def place(rank: int, k: int) -> tuple[int, int]:
            return min(edges[rank] + k * CHUNK, edges[rank + 1]), min(edges[rank] + (k + 1) * CHUNK, edges[rank + 1])

        def take_upto(peer: int, upto: int) -> None:
            low, high = place(peer, taken[peer])[0], place(peer, upto - 1)[1]
            taken[peer] = upto
            take(peer, low, high)

        for k in range(chunks):
            low, high = place(self._rank, k)
            if low < high:
                fold(low, high)
            self._signals.post(PROGRESS, base + 2 + k)
            yield None
            for peer in self._peers:
                upto = taken[peer]
                while upto <= k and self._signals.reached(PROGRESS, peer, base + 2 + upto):
                    upto += 1
                if upto > taken[peer]:
                    take_upto(peer, upto)
        for peer in self._peers:
            while taken[peer] < chunks:
                yield PROGRESS, peer, base + 2 + taken[peer]
                take_upto(peer, taken[peer] + 1)
        yield from self._end(base + 2 + chunks)

    def _show(self, numbers: list[int]) -> Steps:
        """Show the others where this rank's tensors are, and wait until all have done so: one step."""
        self._segment.show(numbers)
        self._course.steps += 1
        self._signals.post(PROGRESS, self._course.steps)
        for peer in self._peers:
            yield PROGRESS, peer, self._course.steps

    def _end(self, step: int) -> Steps:
        """The last step: everything was read; wait until no rank reads this rank's memory, or table, any more."""
        self._signals.check_peers()
        self._course.steps = step
        self._signals.post(PROGRESS, step)
        for peer in self._peers:
            yield PROGRESS, peer, step


class Direct(InPlace):
    """One rank's part.

    Args:
        pids: of all ranks of the set.
    """

    def __init__(
        self, segment: Segment, signals: Signals, reducer: Reducer, course: Course, pids: Sequence[int]
    ) -> None:
        super().__init__(segment, signals, reducer, course)
        self._pids = pids

    def allreduce(self, source: Tensors, target: Tensors, reduction: Reduction) -> Steps:
        """Combine all ranks' ``source`` into every rank's ``target``, which may be the same.

        Each rank reduces its slice, chunk after chunk, and between two of its own takes what others have finished, as
        long as that is in the cache.
        """
        count = source.count
        yield from self._show([*source.addresses, *target.addresses])
        tables = {peer: self._segment.shown(peer, 2 * count) for peer in self._peers}

        def fold(low: int, high: int) -> None:
            self._fold(source, source, target, (low, high), low, tables, reduction)

        def take(peer: int, low: int, high: int) -> None:
            self._read(peer, target.runs(low, high), target.runs(low, high, tables[peer][count:]), high - low)

        yield from self._in_slices(source.nbytes, fold, take)

    def _fold(
        self,
        theirs: Tensors,
        source: Tensors,
        target: Tensors,
        stretch: tuple[int, int],
        at: int,
        tables: dict[int, list[int]],
        reduction: Reduction,
    ) -> None:
        """Reduce a stretch of ``source`` into ``target`` at offset ``at``."""
        low, high = stretch
        own, out = source.arrays(low, high), target.arrays(at, at + high - low)

        def fetch(rank: int) -> Sequence[Array]:
            scratch = self._reducer.scratch(0 if rank == 0 else 1, high - low)
            self._read(rank, [(scratch.ctypes.data, high - low)], theirs.runs(low, high, tables[rank]), high - low)
            elements = scratch.view(reduction.dtype.numpy_dtype)
            if reduction.prescale != 1.0:
                scale(elements, reduction.dtype, reduction.prescale)
            return divided(elements, own)

        self._reducer.fold(fetch, own, out, reduction)

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], reduction: Reduction) -> Steps:
        """Combine all ranks' ``source``; each gets its block of the result."""
        yield from self._show([source.address])
        tables = {peer: self._segment.shown(peer, 1) for peer in self._peers}
        begin = sum(nbytes[: self._rank])
        end = begin + nbytes[self._rank]
        whole, result = Tensors([source]), Tensors([target])
        for low in range(begin, end, CHUNK):
            stretch = low, min(low + CHUNK, end)
            self._fold(whole, whole, result, stretch, low - begin, tables, reduction)
            yield None
        yield from self._end(self._course.steps + 1)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        """Put all ranks' ``source`` one after another into every rank's ``target``."""
        begins = list(accumulate(nbytes, initial=0))
        yield from self._show([source.address])
        place = target.address + begins[self._rank]
        if source.address != place:
            yield from self._copy(self._rank, place, source.address, nbytes[self._rank])
        for peer in self._peers:
            (address,) = self._segment.shown(peer, 1)
            yield from self._copy(peer, target.address + begins[peer], address, nbytes[peer])
        yield from self._end(self._course.steps + 1)

    def broadcast(self, buffer: Buffer, root: int) -> Steps:
        """Fill every rank's buffer from the buffer of ``root``."""
        yield from self._show([buffer.address])
        if self._rank != root:
            (address,) = self._segment.shown(root, 1)
            yield from self._copy(root, buffer.address, address, buffer.nbytes)
        yield from self._end(self._course.steps + 1)

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Steps:
        """Send every rank a block."""
        starts, begins = list(accumulate(sent, initial=0)), list(accumulate(received, initial=0))
        yield from self._show([source.address, *starts[: self._size]])
        own = self._rank
        yield from self._copy(own, target.address + begins[own], source.address + starts[own], sent[own])
        for peer in self._peers:
            address, *theirs = self._segment.shown(peer, 1 + self._size)
            yield from self._copy(peer, target.address + begins[peer], address + theirs[own], received[peer])
        yield from self._end(self._course.steps + 1)

    def _copy(self, rank: int, to: int, address: int, nbytes: int) -> Steps:
        """Copy from a rank's memory, this one's included (which is mere copying)."""
        for at in range(0, nbytes, _STRETCH):
            length = min(_STRETCH, nbytes - at)
            if rank == self._rank:
                system.copy_memory(to + at, address + at, length)
            else:
                self._read(rank, [(to + at, length)], [(address + at, length)], length)
            yield None

    def _read(self, peer: int, local: Sequence[Run], remote: Sequence[Run], nbytes: int) -> None:
        try:
            done = system.read_memory(self._pids[peer], local, remote)
        except OSError as error:
            gone = error.errno == errno.ESRCH
            what = "it has ended" if gone else error.strerror
            raise BackendError(f"the memory of rank {peer} of the set could not be read: {what}") from error
        if done != nbytes:
            raise BackendError(f"the memory of rank {peer} of the set can no longer be read")
