"""The threads that serve requests: created when they are needed, and as many as there are long polls."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class ThreadPool:
    """Threads that run jobs, created when all others are busy, up to ``limit``. Daemons, joined by ``stop``."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads without a job, minus jobs without a thread

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` on some thread; it must not raise."""
        with self._lock:
            self._free -= 1
            if self._free < 0 and len(self._threads) < self.limit:
                thread = threading.Thread(target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                self._free += 1
                thread.start()
        self._jobs.put(job)

    def stop(self, timeout: float) -> None:
        """Let threads finish what they are doing, waiting at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._free += 1
