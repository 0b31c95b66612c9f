"""Collectives of a few KiB through the segment in straight lines, for callers that wait for each at once.

They use the slots and counters of ``SegmentCollectives``, put the same bytes in the same places, and count rounds and
steps as it does. So the two may take turns, and ranks may use either for the same operation. What they leave out is
everything that lets an operation be interrupted and resumed: for 4 bytes that costs ten times as much as the exchange
itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdgloo._backends.shm import segment as layout
from hvdgloo._backends.shm.reduction import Array, scale
from hvdgloo._backends.shm.segment import Segment
from hvdgloo._backends.shm.segment_collectives import SLOTS, SegmentCollectives
from hvdgloo._backends.shm.signals import PROGRESS, RELEASED, FutexSignals, Signals
from hvdgloo.types import DType

MOST_BYTES = 1 << 16
"""Bytes per rank up to which every rank computes a whole result for itself."""

_LONGEST_SPIN = 40e-6
_SHORTEST_SPIN = 2e-6
"""Seconds that a rank looks at a counter before it sleeps. Waking up takes 50 us or more; where the ranks are not
running at the same time, looking is a waste of the core that the other rank needs, so it is halved each time."""

Patience = Callable[[int, int, int], None]
"""Waits until a counter (which, of whom) has reached a value, or raises."""


class SmallCollectives:
    """One rank's part.

    Args:
        rounds: of the same segment, with nothing under way during a call.
        may_spin: True if each rank of the host has a core of its own.
    """

    def __init__(self, segment: Segment, signals: Signals, rounds: SegmentCollectives, *, may_spin: bool) -> None:
        self._segment, self._signals, self._rounds = segment, signals, rounds
        self._rank, self._size = segment.rank, segment.size
        # Words can be read only where numbers are in shared memory; elsewhere they arrive by system calls.
        self._words = [segment.words_of(rank) for rank in range(self._size)]
        self._direct = isinstance(signals, FutexSignals)
        self._spin = _LONGEST_SPIN if may_spin and self._direct else 0.0
        self._peers = [(self._rank + n) % self._size for n in range(1, self._size)]
        self._views: dict[tuple[int, int, np.dtype[Any], int], list[Array]] = {}

    def fits(self, nbytes: int) -> bool:
        """Tell whether ``nbytes`` per rank can be exchanged at once; the answer is the same on all ranks."""
        return nbytes <= MOST_BYTES and nbytes <= self._rounds.slot_bytes

    def allreduce(
        self, own: Array, dtype: DType, combine: np.ufunc, prescale: float, postscale: float, wait: Patience
    ) -> None:
        """Combine arrays of all ranks in the order of ranks, in place; not for half types."""
        views = self._enter(own.nbytes, own.dtype, wait)
        mine = views[self._rank]
        mine[...] = own
        if prescale != 1.0:
            scale(mine, dtype, prescale)
        self._meet(self._peers, wait)
        self._combine(views, own, combine)
        self._leave()
        if postscale != 1.0:
            scale(own, dtype, postscale)

    def reducescatter(
        self, source: Array, target: Array, dtype: DType, combine: np.ufunc, postscale: float, wait: Patience
    ) -> None:
        """Combine arrays of all ranks in the order of ranks, and give each rank a block; not for half types."""
        views = self._enter(source.nbytes, source.dtype, wait)
        views[self._rank][...] = source
        self._meet(self._peers, wait)
        low = self._rank * target.size
        self._combine([view[low : low + target.size] for view in views], target, combine)
        self._leave()
        if postscale != 1.0:
            scale(target, dtype, postscale)

    def broadcast(self, whole: Array, root: int, wait: Patience) -> None:
        """Fill the bytes of all ranks from the bytes of ``root``."""
        views = self._enter(whole.nbytes, whole.dtype, wait)
        if self._rank == root:
            views[root][...] = whole
            self._meet((), wait)
        else:
            self._meet((root,), wait)
            whole[...] = views[root]
        self._leave()

    def allgather(self, own: Array, whole: Array, wait: Patience) -> None:
        """Put the bytes of all ranks, as many from each, one after another."""
        nbytes = own.nbytes
        views = self._enter(nbytes, own.dtype, wait)
        views[self._rank][...] = own
        self._meet(self._peers, wait)
        for rank, view in enumerate(views):
            whole[rank * nbytes : (rank + 1) * nbytes] = view
        self._leave()

    def barrier(self, wait: Patience) -> None:
        """Wait until all ranks have called it."""
        self._enter(0, np.dtype(np.uint8), wait)
        self._meet(self._peers, wait)
        self._leave()

    @staticmethod
    def _combine(parts: Sequence[Array], out: Array, combine: np.ufunc) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            combine(parts[0], parts[1], out=out)
            for part in parts[2:]:
                combine(out, part, out=out)

    def _enter(self, nbytes: int, dtype: np.dtype[Any], wait: Patience) -> list[Array]:
        """Wait for a free slot.

        Returns:
            each rank's room in it.
        """
        course = self._rounds.course
        number = course.rounds
        if number >= SLOTS:
            self._reach(RELEASED, layout.RELEASED, self._peers, number - SLOTS + 1, wait)
        key = number % SLOTS, nbytes, dtype, self._rounds.capacity
        views = self._views.get(key)
        if views is None:
            at = number % SLOTS * self._rounds.slot_bytes
            views = [self._segment.data(rank, at, nbytes).view(dtype) for rank in range(self._size)]
            if len(self._views) >= 256:
                self._views.clear()
            self._views[key] = views
        return views

    def _meet(self, peers: Sequence[int], wait: Patience) -> None:
        """Announce this rank's data, and wait for some peers' data."""
        course = self._rounds.course
        course.steps += 1
        self._signals.post(PROGRESS, course.steps)
        self._reach(PROGRESS, layout.PROGRESS, peers, course.steps, wait)

    def _leave(self) -> None:
        course = self._rounds.course
        course.rounds += 1
        self._signals.post(RELEASED, course.rounds)

    def _reach(self, which: int, place: int, peers: Sequence[int], value: int, wait: Patience) -> None:
        for peer in peers:
            words = self._words[peer]
            if self._direct and words[place] >= value:
                continue
            if self._spin:
                until = time.perf_counter() + self._spin
                while words[place] < value:
                    if time.perf_counter() > until:
                        self._spin = max(_SHORTEST_SPIN, self._spin / 2)
                        break
                else:
                    self._spin = min(_LONGEST_SPIN, self._spin * 2)
                    continue
            wait(which, peer, value)
