"""Allreduces of tensors that are in the segment already: nothing is packed, copied in, or read through the kernel.

Each rank knows this of its own tensor only. So all show where theirs is, and if one is elsewhere, all take another
route, in which no rank gets far before all have seen that. A handle resolves when every rank has made its
last step, so no rank's tensor is touched by its owner while a peer still reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hvdgloo._backends.shm.arena import Arena
from hvdgloo._backends.shm.reduction import Array, Reducer, Reduction, scale
from hvdgloo._backends.shm.segment import PLACE, Segment
from hvdgloo._backends.shm.segment_collectives import Course, Steps
from hvdgloo._backends.shm.signals import PROGRESS, Signals
from hvdgloo._backends.shm.tensors import Tensors, cut

CHUNK = 1 << 20
"""Bytes that are reduced at a time: temporaries stay in the cache."""

_ELSEWHERE = (1 << 64) - 1

RESIDENT_FROM = 1 << 20
"""Bytes of a tensor from which it is worth a step to find out where it is."""


class ZeroCopy:
    """One rank's part."""

    def __init__(self, segment: Segment, signals: Signals, reducer: Reducer, course: Course, arena: Arena) -> None:
        self._rank, self._size = segment.rank, segment.size
        self._segment, self._signals, self._reducer, self._course = segment, signals, reducer, course
        self._peers = [(self._rank + n) % self._size for n in range(1, self._size)]
        self._arena = arena

    def allreduce(self, tensor: Tensors, reduction: Reduction, otherwise: Steps) -> Steps:
        """Combine all ranks' ``tensor`` in place, or take the steps of ``otherwise``.

        Args:
            tensor: a single one; of no tensors where this rank's result belongs elsewhere.
        """
        own = self._arena.offset_of(tensor.addresses[0], tensor.nbytes) if tensor.count else None
        # Not in the table, which the other route may change before a slow rank has looked.
        self._segment.set_word(PLACE, _ELSEWHERE if own is None else own)
        self._course.steps += 1
        self._signals.post(PROGRESS, self._course.steps)
        if own is None:
            yield from otherwise  # whatever the others find: so this rank need not wait for them here
            return
        for peer in self._peers:
            yield PROGRESS, peer, self._course.steps
        offsets = [self._segment.word(rank, PLACE) for rank in range(self._size)]
        if _ELSEWHERE in offsets:
            yield from otherwise
            return

        def theirs(rank: int, low: int, high: int) -> Array:
            return self._arena.view(rank, offsets[rank] + low, high - low)

        def fold(low: int, high: int) -> None:
            def fetch(rank: int) -> Sequence[Array]:
                piece = theirs(rank, low, high).view(reduction.dtype.numpy_dtype)
                if reduction.prescale == 1.0:
                    return [piece]
                scratch = self._reducer.scratch(0 if rank == 0 else 1, high - low).view(piece.dtype)
                np.copyto(scratch, piece)
                scale(scratch, reduction.dtype, reduction.prescale)
                return [scratch]

            elements = tensor.arrays(low, high)
            self._reducer.fold(fetch, elements, elements, reduction)

        def take(peer: int, low: int, high: int) -> None:
            tensor.copy_from(theirs(peer, low, high), low, high)

        yield from self._in_slices(tensor.nbytes, fold, take)

    def _in_slices(self, nbytes: int, fold: Callable[[int, int], None], take: Callable[[int, int, int], None]) -> Steps:
        """Reduce a tensor, each rank its slice.

        Between two chunks of its own a rank takes those that others have finished, as long as they are in the cache.

        Args:
            nbytes: of the tensor.
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

    def _end(self, step: int) -> Steps:
        """The last step: everything was read; wait until no rank reads this rank's memory any more."""
        self._signals.check_peers()
        self._course.steps = step
        self._signals.post(PROGRESS, step)
        for peer in self._peers:
            yield PROGRESS, peer, step
