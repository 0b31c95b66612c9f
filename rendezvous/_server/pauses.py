"""Requests that wait for other clients, as generators whose caller decides how to wait.

A thread of the pool waits itself. The front's thread, which must never wait, puts the generator aside and resumes it
when its pause is over. So the long polls of a thousand workers need neither a thousand threads nor a hand-over between
threads for each of them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from hvdgloo.rendezvous._store import Latch

T = TypeVar("T")

_TIMERS_OF_THE_PAST = 64  # of pauses that are over; more are thrown away

HangUpWatch = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Makes a context to be entered during a wait on this thread; its argument is called if the client hangs up."""


@dataclass(frozen=True, eq=False)
class Pause:
    """A request's wait for an event; the generator is then sent whether the event happened.

    Attributes:
        latch: released by the event.
        seconds: longest time to wait.
        hang_up: to be called if the client disconnects meanwhile; it releases the latch.
    """

    latch: Latch
    seconds: float
    hang_up: Callable[[], None]


Steps = Generator[Pause, bool, T]
"""A request that is being answered: yields each Pause, is sent whether its latch was released, and returns a T."""


def waited(steps: Steps[T], watch: HangUpWatch) -> T:
    """Run a request with all its pauses on this thread, and return its result.

    Args:
        steps: the request; its exceptions are passed on.
        watch: watches the client during the pauses.
    """
    try:
        pause = next(steps)
        while True:
            with watch(pause.hang_up):
                released = pause.latch.wait(pause.seconds)
            pause = steps.send(released)
    except StopIteration as end:
        answer: T = end.value
        return answer


class Waiters:
    """Requests that wait until they are released, by a name.

    Each of them releases the next one when it continues: a thousand threads that continue at once would compete for the
    interpreter.

    Args:
        lock: held by the caller of each method, but not while a wait goes on.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiting: dict[str, list[Latch]] = {}
        self._released: deque[Latch] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, name: str, timeout: float) -> Steps[None]:
        """Return a wait of at most ``timeout`` seconds, which has begun."""
        latch = Latch()
        self._waiting.setdefault(name, []).append(latch)
        return self._wait(name, latch, timeout)

    def release(self, name: str | None = None) -> None:
        """Release the requests that wait under this name; without a name, all of them."""
        for each in list(self._waiting) if name is None else [name]:
            self._released += self._waiting.pop(each, ())
        self._release_next()

    def _wait(self, name: str, latch: Latch, timeout: float) -> Steps[None]:
        try:
            yield Pause(latch, timeout, latch.release)
        finally:
            with self._lock:
                waiting = self._waiting.get(name, [])
                if latch in waiting:
                    waiting.remove(latch)
                    if not waiting:
                        del self._waiting[name]
                self._release_next()

    def _release_next(self) -> None:
        if self._released:
            self._released.popleft().release()


class PausedRequests(Generic[T]):
    """Requests that were put aside, until their pauses are over: an event happened, or the time has passed.

    Args:
        on_event: called when an event happened, on any thread, which may hold locks.
    """

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        self._waiting: set[Pause] = set()
        self._released: deque[tuple[T, Pause]] = deque()
        self._timers: list[tuple[float, int, T, Pause]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def deadline(self) -> float | None:
        """The time at which ``over`` has something to yield; None if only an event can tell."""
        if self._released:
            return 0.0
        return self._timers[0][0] if self._timers else None

    def put(self, request: T, pause: Pause) -> None:
        """Put a request aside."""
        self._waiting.add(pause)
        heapq.heappush(self._timers, (time.monotonic() + pause.seconds, next(self._order), request, pause))
        pause.latch.then(lambda: self._release(request, pause))

    def _release(self, request: T, pause: Pause) -> None:
        self._released.append((request, pause))
        self._on_event()

    def over(self) -> Iterator[tuple[T, bool]]:
        """Yield the requests whose pauses are over, each with True if its event happened. More may be put aside
        meanwhile."""
        while self._released:
            request, pause = self._released.popleft()
            if pause in self._waiting:  # or its time has passed before
                self._waiting.remove(pause)
                yield request, True
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, request, pause = heapq.heappop(self._timers)
            if pause in self._waiting:
                self._waiting.remove(pause)
                yield request, False
        if len(self._timers) > 2 * len(self._waiting) + _TIMERS_OF_THE_PAST:
            self._timers = [timer for timer in self._timers if timer[3] in self._waiting]
            heapq.heapify(self._timers)
