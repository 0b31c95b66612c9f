"""The threads for requests that the front's own thread may not serve: large, encrypted, or not part of a start.

Where connections are encrypted, there are as many threads as long polls, of which only a few work at a time. A thousand
workers that ask at the same moment, or whose long polls end at the same moment, would make a thousand threads compete
for the interpreter, which costs several times their actual work. So a thread with work waits for its turn; before a
thread waits for something outside, it gives its turn to another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvdgloo.rendezvous._store import Latch

logger = logging.getLogger(__name__)

AT_WORK = 2


class _Free(Latch):
    """A thread without a job, which waits for one, or for the end."""

    __slots__ = ("job",)

    def __init__(self) -> None:
        super().__init__()
        self.job: Callable[[], None] | None = None


class ThreadPool:
    """Threads that run jobs, created when all others wait. Daemons, joined by ``stop``.

    Attributes:
        limit: largest number of threads; lowered if the system refuses further ones.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._free: list[_Free] = []
        self._turns: deque[Latch] = deque()  # of threads that have waited and are to go on
        self._at_work = 0
        self._stopped = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` on some thread; it must not raise."""
        with self._lock:
            self._jobs.append(job)
            self._fill()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Give up the thread's turn while a job may wait for something outside; wait for the next turn on leaving."""
        with self._lock:
            self._at_work -= 1
            self._fill()
        try:
            yield
        finally:
            turn = Latch()
            with self._lock:
                self._turns.append(turn)
                self._fill()
            turn.wait(threading.TIMEOUT_MAX)

    def stop(self, timeout: float) -> None:
        """Let threads finish what they are doing, waiting at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._stopped = True
            threads, free, self._free = list(self._threads), self._free, []
        for one in free:
            one.release()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _fill(self) -> None:
        """Give a turn to as many threads as allowed, in the order of their waits. Called with the lock held."""
        while self._at_work < AT_WORK and (self._turns or self._jobs):
            if self._turns:
                self._turns.popleft().release()
            elif self._free:
                free = self._free.pop()
                free.job = self._jobs.popleft()
                free.release()
            elif len(self._threads) >= self.limit or not self._create():
                return
            self._at_work += 1

    def _create(self) -> bool:
        """Create a thread for the next job; return False if the system refuses it. Called with the lock held."""
        name = f"{self.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, args=(self._jobs[0],), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.limit = max(1, len(self._threads))
            logger.error(
                "the system allows this process no more than %d threads, and every worker that waits for others needs "
                "one: raise the limit on processes (ulimit -u, or pids.max of the container)",
                len(self._threads),
            )
            return False
        self._jobs.popleft()
        self._threads.append(thread)
        return True

    def _work(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            job()
            with self._lock:
                if self._jobs and not self._turns:
                    job = self._jobs.popleft()
                    continue
                self._at_work -= 1
                self._fill()
                if self._stopped:
                    return
                free = _Free()
                self._free.append(free)
            free.wait(threading.TIMEOUT_MAX)
            job = free.job
