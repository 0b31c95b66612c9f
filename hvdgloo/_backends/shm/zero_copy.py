"""Allreduces of tensors that are in the segment already: nothing is packed, copied in, or read through the kernel.

Each rank knows this of its own tensor only. So all show where theirs is, and if one is elsewhere, all take another
route, in which no rank gets far before all have seen that. A handle resolves when every rank has made its
last step, so no rank's tensor is touched by its owner while a peer still reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdgloo._backends.shm.arena import Arena
from hvdgloo._backends.shm.direct import InPlace
from hvdgloo._backends.shm.reduction import Array, Reducer, Reduction, scale
from hvdgloo._backends.shm.segment import PLACE, Segment
from hvdgloo._backends.shm.segment_collectives import Course, Steps
from hvdgloo._backends.shm.signals import PROGRESS, Signals
from hvdgloo._backends.shm.tensors import Tensors

_ELSEWHERE = (1 << 64) - 1

RESIDENT_FROM = 1 << 20
"""Bytes of a tensor from which it is worth a step to find out where it is."""


class ZeroCopy(InPlace):
    """One rank's part."""

    def __init__(self, segment: Segment, signals: Signals, reducer: Reducer, course: Course, arena: Arena) -> None:
        super().__init__(segment, signals, reducer, course)
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
