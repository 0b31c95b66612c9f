"""The server's threads: few are at work at a time, and a client that waits keeps no other from it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from hvdgloo.rendezvous._server import thread_pool
from hvdgloo.rendezvous._server.thread_pool import AT_WORK, ThreadPool

JOBS = 40


class Jobs:
    """Jobs that wait for the test, and how many of them were at work at most."""

    def __init__(self, pool: ThreadPool) -> None:
        self.pool = pool
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        self.most = 0
        self._lock = threading.Lock()
        self._at_work = 0

    def __call__(self) -> None:
        self._work()
        with self.pool.waiting():
            self.waiting.release()
            assert self.gate.wait(20)
        self._work()
        self.done.release()

    def _work(self) -> None:
        with self._lock:
            self._at_work += 1
            self.most = max(self.most, self._at_work)
        threading.Event().wait(0.001)  # time for others to come in, if they may
        with self._lock:
            self._at_work -= 1


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool("pool", 2 * JOBS)
    yield made
    made.stop(10)
    assert not made.alive


def came(semaphore: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=20)


def test_all_wait_at_once_and_few_work_at_once(pool: ThreadPool) -> None:
    jobs = Jobs(pool)
    for _ in range(JOBS):
        pool.submit(jobs)
    came(jobs.waiting, JOBS)
    jobs.gate.set()
    came(jobs.done, JOBS)
    assert jobs.most <= AT_WORK


def test_threads_are_used_again(pool: ThreadPool) -> None:
    done = threading.Semaphore(0)
    for _ in range(JOBS):
        pool.submit(done.release)
        came(done, 1)
    assert pool.alive <= AT_WORK


def test_no_more_threads_than_its_limit(pool: ThreadPool) -> None:
    pool.limit = 3
    jobs = Jobs(pool)
    for _ in range(JOBS):
        pool.submit(jobs)
    came(jobs.waiting, 3)
    assert not jobs.waiting.acquire(timeout=0.05)
    jobs.gate.set()
    came(jobs.done, JOBS)
    assert pool.alive == 3


def test_a_system_that_refuses_threads(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs(pool)
    for _ in range(3):
        pool.submit(jobs)
    came(jobs.waiting, 3)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with caplog.at_level(logging.ERROR, thread_pool.__name__):
        pool.submit(jobs)
    assert pool.limit == 3
    assert "no more than 3 threads" in caplog.text
    jobs.gate.set()
    came(jobs.done, 4)
