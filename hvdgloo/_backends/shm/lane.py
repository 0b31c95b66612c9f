"""The places in the segment where ranks offer small tensors to each other, each when it likes.

A rank writes its data, and then a word that says what they are. A place is whole for a word when all ranks have put
that word there. Who waits for this looks for a moment, and then sleeps on its own bell: a rank that puts its word
somewhere rings for those that listen. A rank says that it listens before it looks for the last time, and one that
has put its word looks for listeners afterwards, so one of the two sees the other.

Only where numbers are in shared memory (``FutexSignals``): the words must not be seen before the data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdgloo._backends import kernels
from hvdgloo._backends.shm import segment as layout
from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.reduction import Array, scale
from hvdgloo._backends.shm.segment import PLACE_BYTES, PLACES, Segment, array_at
from hvdgloo.types import Buffer, DType, ReduceOp

_LONGEST_LOOK, _SHORTEST_LOOK = 50e-6, 2e-6
"""Seconds that a rank looks at the others' words before it sleeps: halved each time that it saw nothing, and back to
the longest when the others turn out to have posted within that."""

_MOST_VIEWS = 256


class Lane:
    """One rank's part; see ``base.Lane``.

    Args:
        may_spin: True if each rank has a core of its own.
    """

    most_bytes = PLACE_BYTES

    def __init__(self, segment: Segment, *, may_spin: bool) -> None:
        self._segment, self._rank, self._size = segment, segment.rank, segment.size
        self._words = [segment.words_of(rank) for rank in range(self._size)]
        self._own = self._words[self._rank]
        self._peers = [self._words[(self._rank + n) % self._size] for n in range(1, self._size)]
        self._bells = [(words, segment.word_address(rank, layout.BELL)) for rank, words in enumerate(self._words)]
        self._others = [bell for rank, bell in enumerate(self._bells) if rank != self._rank]
        self._look = _LONGEST_LOOK if may_spin else 0.0
        self._slept = False  # since the last look, which saw nothing
        self._opened: bool | None = None
        self._views: dict[tuple[int, int, DType], list[Array]] = {}
        self._fence = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def open(self) -> bool:
        """See ``base.Lane``."""
        if self._opened is None:
            self._opened = self._segment.back(self._segment.place(self._rank, 0), PLACES * PLACE_BYTES)
        return self._opened

    def post(self, place: int, word: int, source: Buffer | None, prescale: float, now: float) -> None:
        """See ``base.Lane``."""
        if source is not None:
            mine = self._views_of(place, source)[self._rank]
            mine[...] = array_at(source.address, source.nbytes).view(mine.dtype)
            if prescale != 1.0:
                scale(mine, source.dtype, prescale)
        own = self._own
        own[layout.TIMES_OFFERED + place] = int(now * 1e6)
        own[layout.WORDS_OFFERED + place] = word
        self._order()
        for words, bell in self._others:
            if words[layout.LISTENING]:
                _ring(words, bell)

    def is_whole(self, place: int, word: int) -> bool:
        """See ``base.Lane``."""
        at = layout.WORDS_OFFERED + place
        for words in self._words:  # noqa: SIM110 - any() takes three times as long
            if words[at] != word:
                return False
        return True

    def watch(self, place: int, word: int) -> bool:
        """See ``base.Lane``."""
        at, until = layout.WORDS_OFFERED + place, 0.0
        for words in self._peers:
            if words[at] == word:
                continue
            if not self._look:
                return False
            until = until or time.perf_counter() + self._look
            while words[at] != word:
                if time.perf_counter() > until:
                    self._look = max(_SHORTEST_LOOK, self._look / 2)
                    self._slept = True
                    return False
        return True

    def sleep(self, place: int, word: int, seconds: float, stop: Callable[[], bool] | None = None) -> None:
        """See ``base.Lane``."""
        own = self._own
        own[layout.LISTENING] = 1
        self._order()
        try:
            # Read first: a bell that rings from here on has another number, so that the kernel does not go to sleep.
            heard = own[layout.BELL]
            if not self.is_whole(place, word) and not (stop is not None and stop()):
                system.futex_wait(self._bells[self._rank][1], heard & 0xFFFFFFFF, seconds)
        finally:
            own[layout.LISTENING] = 0

    def adapt(self, place: int) -> None:
        """See ``base.Lane``."""
        if self._slept:
            self._slept = False
            at = layout.TIMES_OFFERED + place
            if max(words[at] for words in self._peers) < self._own[at] + _LONGEST_LOOK * 1e6:
                self._look = _LONGEST_LOOK

    def combine(self, place: int, target: Buffer, op: ReduceOp, postscale: float) -> None:
        """See ``base.Lane``."""
        parts = self._views_of(place, target)
        out = array_at(target.address, target.nbytes).view(parts[0].dtype)
        function = kernels.ufunc(target.dtype, op)
        with np.errstate(over="ignore", invalid="ignore"):
            function(parts[0], parts[1], out=out)
            for part in parts[2:]:
                function(out, part, out=out)
        if postscale != 1.0:
            scale(out, target.dtype, postscale)

    def copy(self, place: int, ranks: Sequence[int], target: Buffer) -> None:
        """See ``base.Lane``."""
        nbytes = target.nbytes // len(ranks)
        for position, rank in enumerate(ranks):
            start = self._segment.place(rank, place)
            array_at(target.address + position * nbytes, nbytes)[:] = self._segment.bytes[start : start + nbytes]

    def arrivals(self, place: int) -> tuple[int, float]:
        """See ``base.Lane``."""
        times = [words[layout.TIMES_OFFERED + place] for words in self._words]
        last = max(times)
        return times.index(last), (last - min(times)) * 1e-6

    def ring(self) -> None:
        """See ``base.Lane``."""
        with self._closing:
            if not self._closed:
                _ring(*self._bells[self._rank])

    def close(self) -> None:
        """Let go of the memory, which is about to be unmapped; no thread may be here but those that ring."""
        with self._closing:
            self._closed = True
            self._words, self._peers, self._bells, self._others = [], [], [], []
            self._views.clear()

    def _views_of(self, place: int, like: Buffer) -> list[Array]:
        """Each rank's data in a place, as elements like a tensor's."""
        key = place, like.nbytes, like.dtype
        views = self._views.get(key)
        if views is None:
            kind: np.dtype[Any] = like.dtype.numpy_dtype
            nbytes, segment = like.nbytes, self._segment
            starts = [segment.place(rank, place) for rank in range(self._size)]
            views = [segment.bytes[at : at + nbytes].view(kind) for at in starts]
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views

    def _order(self) -> None:
        """Make earlier writes visible to others before any later read; see ``FutexSignals``."""
        self._fence.acquire()
        self._fence.release()


def _ring(words: memoryview[int], address: int) -> None:
    """Wake the rank whose bell it is. Of two that ring at once, one may overwrite the other's number: who has heard
    that number has also seen what the other had written before."""
    words[layout.BELL] = words[layout.BELL] + 1 & 0xFFFFFFFF
    system.futex_wake(address)
