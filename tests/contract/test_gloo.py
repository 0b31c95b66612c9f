"""What holds of Gloo alone: small tensors go from all to all at once, larger ones in Gloo's own ring; results are the
same. Backends in threads, no engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest

from hvdgloo.backends import kernels
from hvdgloo.backends.base import Work
from hvdgloo.errors import BackendError
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, DType, ReduceOp

pytest.importorskip("torch", reason="Gloo comes with torch")

from hvdgloo.backends.gloo import AT_ONCE_BYTES, AT_ONCE_FROM, GlooBackend

T = TypeVar("T")
SIZE = 3
COUNTS = [AT_ONCE_FROM // 8 - 1, AT_ONCE_FROM // 8, 1000, AT_ONCE_BYTES // 8 // SIZE, AT_ONCE_BYTES // 8 // SIZE + 1]


class Ranks:
    """Backends of one set, and what they do at once."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(SIZE)
        store = MemoryStore()
        self.backends = self.run(lambda rank: GlooBackend(store, "test/", rank, SIZE, "127.0.0.1", 10))

    def run(self, function: Callable[[int], T]) -> list[T]:
        return list(self._pool.map(function, range(SIZE), timeout=15))

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def finish(work: Work) -> None:
    deadline = time.monotonic() + 10
    while not work.completes_within(0.2):
        assert time.monotonic() < deadline


def values(rank: int, count: int, dtype: DType) -> np.ndarray:
    small = ((np.arange(count) + rank) % 3).astype(np.float32)
    return kernels.narrow(small, dtype) if kernels.is_half(dtype) else small.astype(dtype.numpy_dtype)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_type_and_operation(ranks: Ranks, dtype: DType, op: ReduceOp) -> None:
    def rank(place: int) -> None:
        for count in (1, 70, 1000):
            array = values(place, count, dtype)
            finish(ranks.backends[place].allreduce(Buffer.of_array(array, dtype), op))
            expected = kernels.reduce([values(r, count, dtype) for r in range(SIZE)], dtype, op)
            np.testing.assert_array_equal(array, expected)

    ranks.run(rank)


@pytest.mark.parametrize("count", COUNTS)
def test_on_both_sides_of_the_limits(ranks: Ranks, count: int) -> None:
    def rank(place: int) -> None:
        array = values(place, count, DType.FLOAT64)
        finish(ranks.backends[place].allreduce(Buffer.of_array(array), ReduceOp.SUM))
        np.testing.assert_array_equal(array, sum(values(r, count, DType.FLOAT64) for r in range(SIZE)))

    ranks.run(rank)


@pytest.mark.parametrize("counts", [(100, 100, 100), (0, 1, 900), (5, 0, 0), (30_000, 1, 0)], ids=str)
def test_gathered_rows_may_be_of_any_number(ranks: Ranks, counts: tuple[int, ...]) -> None:
    def rank(place: int) -> None:
        own, whole = values(place, counts[place], DType.FLOAT64), np.zeros(sum(counts))
        nbytes = [8 * count for count in counts]
        finish(ranks.backends[place].allgather(Buffer.of_array(own), Buffer.of_array(whole), nbytes))
        np.testing.assert_array_equal(whole, np.concatenate([values(r, counts[r], DType.FLOAT64) for r in range(SIZE)]))

    ranks.run(rank)


def test_small_sums_are_the_same_bits_on_all_ranks_in_order_of_ranks(ranks: Ranks) -> None:
    arrays = [np.random.default_rng(rank).normal(size=500).astype(np.float32) for rank in range(SIZE)]
    expected = (arrays[0] + arrays[1]) + arrays[2]
    ranks.run(lambda place: finish(ranks.backends[place].allreduce(Buffer.of_array(arrays[place]), ReduceOp.SUM)))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_a_late_rank_is_waited_for_and_an_abort_ends_the_wait() -> None:
    ranks = Ranks()
    array = np.ones(100)
    work = ranks.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    assert not work.completes_within(0.05)
    others = [ranks.backends[rank].allreduce(Buffer.of_array(np.ones(100)), ReduceOp.SUM) for rank in (1, 2)]
    for each in (work, *others):
        finish(each)
    assert array.tolist() == [3.0] * 100
    work = ranks.backends[0].allreduce(Buffer.of_array(array), ReduceOp.SUM)
    assert not work.completes_within(0.05)
    ranks.backends[0].abort()
    with pytest.raises(BackendError):
        finish(work)
    for backend in ranks.backends[1:]:
        backend.abort()
    ranks.close()
