"""Who made whom wait: which rank was the last to come, how often, and how long the first one had waited.

The coordinator's thread only notes who came; whoever reads, or the program that ends its steps, adds it up. What is
kept is a distribution, and the last rounds; never a list that grows.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdgloo._observe import samples

RECENT = 1000
"""Rounds that ``samples.Lateness.recent`` is about, at most."""

SHORTEST = 1e-4
BUCKETS = 20
"""The first bucket is for waits of less than ``SHORTEST`` seconds, each further one reaches twice as far, and the last
one is for all that are longer."""

_FOLD_FROM = 1024


class LatenessBook:
    """Rank 0's account of it. A round is an operation, until the first step ends; from then on it is a step, in which
    the operation counts for which others waited longest, and all begins anew. Any thread may call."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[int, float] | None] = deque()  # None ends a step
        self._lock = threading.Lock()
        self._by_step = False
        self._worst: tuple[int, float] | None = None
        self._forget()

    def _forget(self) -> None:
        self._rounds = 0
        self._waits = [0] * BUCKETS
        self._totals: dict[int, tuple[int, float]] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def came_last(self, rank: int, seconds: float) -> None:
        """With this rank an operation's ranks were complete; the first of them had waited for so long."""
        arrivals = self._arrivals
        arrivals.append((rank, seconds))
        if len(arrivals) >= _FOLD_FROM:
            self._fold()

    def end_round(self) -> None:
        """A step of rank 0 has ended."""
        arrivals = self._arrivals
        arrivals.append(None)
        if len(arrivals) >= _FOLD_FROM:
            self._fold()

    def totals(self) -> samples.Lateness:
        """All so far."""
        from hvdgloo._observe.samples import Late, Lateness  # not before somebody looks

        self._fold()
        with self._lock:
            recent: dict[int, tuple[int, float]] = {}
            for rank, seconds in self._recent:
                count, summed = recent.get(rank, (0, 0.0))
                recent[rank] = count + 1, summed + seconds
            ranks = [Late(rank, *self._totals[rank], *recent.get(rank, (0, 0.0))) for rank in sorted(self._totals)]
            return Lateness(self._rounds, len(self._recent), tuple(self._waits), tuple(ranks))

    def _fold(self) -> None:
        with self._lock:
            while True:
                try:
                    arrival = self._arrivals.popleft()
                except IndexError:
                    return
                if arrival is None:
                    self._end_step()
                elif not self._by_step:
                    self._count(*arrival)
                elif self._worst is None or arrival[1] > self._worst[1]:
                    self._worst = arrival

    def _end_step(self) -> None:
        if not self._by_step:
            # What came so far was the beginning: parameters were broadcast, and nobody knows where this step began.
            self._by_step = True
            self._forget()
        if self._worst is not None:
            self._count(*self._worst)
            self._worst = None

    def _count(self, rank: int, seconds: float) -> None:
        self._rounds += 1
        self._waits[bucket_of(seconds)] += 1
        count, summed = self._totals.get(rank, (0, 0.0))
        self._totals[rank] = count + 1, summed + seconds
        self._recent.append((rank, seconds))


def bucket_of(seconds: float) -> int:
    """The index of the bucket that a wait belongs to."""
    return min(max(0, math.frexp(seconds / SHORTEST)[1]), BUCKETS - 1)
