"""Lateness: which rank was the last to submit, how often, and how long the first one had waited.

The coordinator's thread only notes the last rank of each operation; the reader, or the program when it ends a step,
adds them up. Only a distribution and the last rounds are kept, so memory is bounded.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdgloo._observe import samples

RECENT = 1000
"""Most rounds that ``samples.Lateness.recent`` counts."""

SHORTEST = 1e-4
BUCKETS = 20
"""Number of buckets: the first is for waits of less than ``SHORTEST`` seconds, each further one reaches twice as far,
and the last one holds all longer waits."""

_FOLD_FROM = 1024


class LatenessBook:
    """Rank 0's record of which ranks came last. Any thread may call.

    A round is an operation, until the first step ends. Then counting starts again: a round is now a step, in which only
    the operation counts that others waited for longest.
    """

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
        """Note that this rank was the last to submit an operation, for which the first had waited ``seconds``."""
        arrivals = self._arrivals
        arrivals.append((rank, seconds))
        if len(arrivals) >= _FOLD_FROM:
            self._fold()

    def end_round(self) -> None:
        """End the round: rank 0 finished a step."""
        arrivals = self._arrivals
        arrivals.append(None)
        if len(arrivals) >= _FOLD_FROM:
            self._fold()

    def totals(self) -> samples.Lateness:
        """Return the totals so far."""
        from hvdgloo._observe.samples import Late, Lateness  # only for jobs that are observed

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
            # Operations so far belong to the start (parameters were broadcast) or to a step whose start is unknown.
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
    """Return the index of the bucket that a wait belongs to."""
    return min(max(0, math.frexp(seconds / SHORTEST)[1]), BUCKETS - 1)
