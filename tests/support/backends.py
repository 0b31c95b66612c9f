"""Data planes without an engine: a backend for each rank of a set, used on threads of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import numpy as np

from hvdgloo._backends.base import Backend, Work
from hvdgloo.types import Buffer, ReduceOp

B = TypeVar("B", bound=Backend)
T = TypeVar("T")


class Ranks(Generic[B]):
    """Backends of one set, and what they do at once.

    Args:
        connect: makes a rank's backend; it is called for all ranks at once.
    """

    def __init__(self, size: int, connect: Callable[[int], B]) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self.backends = self.run(connect)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call a function for all ranks at once, on threads of their own."""
        return list(self._pool.map(function, range(self.size), timeout=45))

    def close(self) -> None:
        for backend in self.backends:
            backend.close()
        self._pool.shutdown()


def finish(work: Work, timeout: float = 30.0) -> None:
    """Wait until a work is done, in short waits as the engine's."""
    deadline = time.monotonic() + timeout
    while not work.completes_within(0.2):
        assert time.monotonic() < deadline


def check_broadcast(backend: Backend, rank: int, root: int, count: int) -> None:
    told = np.full(count, rank + 1.0)
    finish(backend.broadcast(Buffer.of_array(told), root))
    assert (told == root + 1).all()


def check_rows(backend: Backend, rank: int, rows: Sequence[int]) -> None:
    """Gather all ranks' rows, and scatter the sum of what all have then."""
    nbytes = [8 * count for count in rows]
    whole = np.concatenate([np.arange(count) + 1000.0 * of for of, count in enumerate(rows)])
    block = np.split(whole, np.cumsum(rows)[:-1])[rank]
    gathered, part = np.zeros(whole.size), np.zeros(rows[rank])
    finish(backend.allgather(Buffer.of_array(block.copy()), Buffer.of_array(gathered), nbytes))
    np.testing.assert_array_equal(gathered, whole)
    finish(backend.reducescatter(Buffer.of_array(gathered), Buffer.of_array(part), nbytes, ReduceOp.SUM))
    np.testing.assert_array_equal(part, len(rows) * block)


def check_alltoall(backend: Backend, rank: int, size: int) -> None:
    """Send a number of its own to each rank."""
    eights = [8] * size
    sent, received = np.arange(size) + 100 * rank, np.zeros(size, np.int64)
    finish(backend.alltoall(Buffer.of_array(sent), Buffer.of_array(received), eights, eights))
    assert received.tolist() == [100 * source + rank for source in range(size)]
