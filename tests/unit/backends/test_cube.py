"""The cube of ranks: who exchanges which slices with whom, and the collectives over it, without a network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdgloo._backends import butterfly, kernels
from hvdgloo._backends.butterfly import Butterfly
from hvdgloo._backends.cube import Cube, Exchange
from hvdgloo.types import Buffer, DType, ReduceOp
from tests.support.lines import Lines

SIZES = st.integers(1, 140)


def cubes(size: int) -> list[Cube]:
    return [Cube(rank, size) for rank in range(size)]


@settings(deadline=None)
@given(SIZES)
def test_corners_hold_one_or_two_consecutive_ranks(size: int) -> None:
    every = cubes(size)
    corners = every[0].corners
    assert corners <= size < 2 * corners
    firsts = [every[0].first_rank(corner) for corner in range(corners + 1)]
    assert firsts[0] == 0
    assert firsts[-1] == size
    assert {end - begin for begin, end in pairwise(firsts)} <= {1, 2}
    for cube in every:
        assert firsts[cube.corner] <= cube.rank < firsts[cube.corner + 1]
        assert cube.speaker is None or every[cube.speaker].ward == cube.rank
        assert cube.ward is None or every[cube.ward].speaker == cube.rank
        assert (cube.speaker is None) == (cube.rank == firsts[cube.corner])


@settings(deadline=None)
@given(SIZES)
def test_both_sides_of_an_exchange_mean_the_same_at_the_same_time(size: int) -> None:
    """So that none waits for another that waits for something else: ranks cannot wait for each other in a circle."""
    every = cubes(size)
    for cube in every:
        for step, exchange in enumerate(cube.halvings):
            theirs = every[exchange.peer].halvings[step]
            assert theirs == Exchange(cube.rank, exchange.theirs, exchange.mine)
            assert theirs.leads is not exchange.leads


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40))
def test_every_value_is_added_once_and_every_sum_told_once(size: int) -> None:
    every = cubes(size)
    speaking = [cube for cube in every if cube.speaker is None]
    corners = range(every[0].corners)
    sums = {cube.rank: {corner: Counter([cube.rank]) for corner in corners} for cube in every}
    for cube in every:
        if cube.speaker is not None:
            for corner in corners:
                sums[cube.speaker][corner] += sums[cube.rank][corner]
    for step in range(len(speaking[0].halvings)):
        before = {rank: {corner: +heard for corner, heard in slices.items()} for rank, slices in sums.items()}
        for cube in speaking:
            exchange = cube.halvings[step]
            for corner in range(*exchange.mine):
                sums[cube.rank][corner] += before[exchange.peer][corner]
    for cube in speaking:
        assert sums[cube.rank][cube.corner] == Counter(range(size))
    has = {cube.rank: [cube.corner] for cube in speaking}
    for step in reversed(range(len(speaking[0].halvings))):
        before_it = {rank: list(slices) for rank, slices in has.items()}
        for cube in speaking:
            exchange = cube.halvings[step]
            assert sorted(before_it[cube.rank]) == list(range(*exchange.mine))
            has[cube.rank] += before_it[exchange.peer]
    assert all(sorted(slices) == list(corners) for slices in has.values())


@settings(deadline=None)
@given(SIZES, st.data())
def test_a_broadcast_comes_to_every_corner_once_from_one_that_has_it(size: int, data: st.DataObject) -> None:
    every = cubes(size)
    root = data.draw(st.integers(0, every[0].corners - 1))
    speaking = [cube for cube in every if cube.speaker is None]
    has = {cube.rank: list(range(cube.corners)) if cube.corner == root else [] for cube in speaking}
    for step in range(len(speaking[0].halvings)):
        for cube in speaking:
            exchange = cube.halvings[step]
            sends = cube.passes_on(exchange, root)
            if sends:
                assert set(range(*exchange.theirs)) <= set(has[cube.rank])
                assert not has[exchange.peer]
                assert every[exchange.peer].passes_on(every[exchange.peer].halvings[step], root) is False
                has[exchange.peer] = list(range(*exchange.theirs))
    for cube in speaking:
        assert cube.corner in has[cube.rank]


@given(st.integers(6, 5000), st.data())
def test_a_rank_has_few_neighbours_and_is_theirs(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    cube = Cube(rank, size)
    neighbours = cube.neighbours
    assert len(neighbours) + 1 <= math.log2(size) + 3  # a listener is a socket, too
    assert rank not in neighbours
    assert {(rank + 1) % size, (rank - 1) % size} <= set(neighbours)
    assert all(rank in Cube(peer, size).neighbours for peer in neighbours)


def test_a_rank_alone_has_no_neighbours() -> None:
    assert Cube(0, 1).neighbours == []
    assert Cube(0, 1).halvings == ()


@pytest.mark.parametrize(("size", "steps"), [(2, 2), (8, 6), (9, 8), (128, 14), (1000, 20)])
def test_how_many_steps_an_allreduce_takes(size: int, steps: int) -> None:
    assert Cube(0, size).steps == steps


class Threads:
    """Ranks as threads, with a line in each direction between any two."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lines = Lines(size)

    def run(self, body: Callable[[int, Butterfly], None]) -> None:
        with ThreadPoolExecutor(self.size) as pool:
            cubes = [Butterfly(Cube(rank, self.size), self._lines.wire(rank)) for rank in range(self.size)]
            for ended in [pool.submit(body, rank, cube) for rank, cube in enumerate(cubes)]:
                ended.result(timeout=20)
        assert self._lines.are_empty


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(butterfly, "PIECE", 64)
    monkeypatch.setattr(butterfly, "SMALL", 100)


def values(rank: int, count: int, dtype: DType) -> np.ndarray:
    small = ((np.arange(count) * 7 + rank) % 5 - 1).astype(np.float32)
    if kernels.is_half(dtype):
        return kernels.narrow(small, dtype)
    return small.astype(np.int64).astype(dtype.numpy_dtype)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_every_type_and_operation(dtype: DType, op: ReduceOp) -> None:
    """Of 5 ranks, two are a pair. Counts: fewer than corners, whole, in slices of one piece, and of several."""
    ranks = Threads(5)
    for count in (1, 12, 150, 1003):
        arrays = [values(rank, count, dtype) for rank in range(5)]
        expected = kernels.reduce(arrays, dtype, op)
        given = [array.copy() for array in arrays]
        ranks.run(lambda rank, cube, given=given: cube.allreduce(Buffer.of_array(given[rank], dtype), op))
        for array in given:
            np.testing.assert_array_equal(array, expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating], ids=str)
def test_nan_wins(dtype: DType, op: ReduceOp) -> None:
    for count in (9, 400):
        arrays = []
        for rank in range(6):
            floats = (np.arange(count) % 11 - rank).astype(np.float32)
            floats[rank::7] = np.nan
            arrays.append(kernels.narrow(floats, dtype) if kernels.is_half(dtype) else floats.astype(dtype.numpy_dtype))
        expected = np.isnan(_floats(kernels.reduce(arrays, dtype, op), dtype))
        assert 0 < expected.sum() < count
        Threads(6).run(lambda rank, cube, arrays=arrays: cube.allreduce(Buffer.of_array(arrays[rank], dtype), op))
        for array in arrays:
            np.testing.assert_array_equal(np.isnan(_floats(array, dtype)), expected)


def _floats(array: np.ndarray, dtype: DType) -> np.ndarray:
    return kernels.widen(array, dtype) if kernels.is_half(dtype) else array


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", range(2, 10))
def test_all_collectives_among_any_number_of_ranks(size: int) -> None:
    ranks = Threads(size)
    for counts in ([7] * size, [(3 * rank) % 5 for rank in range(size)], [40 * (rank == 1) for rank in range(size)]):
        nbytes = [8 * count for count in counts]
        whole = np.concatenate([np.arange(count) + 100.0 * rank for rank, count in enumerate(counts)])
        blocks = np.split(whole, np.cumsum(counts)[:-1])

        def body(
            rank: int, cube: Butterfly, nbytes: Sequence[int] = nbytes, whole: Any = whole, blocks: Any = blocks
        ) -> None:
            gathered = np.empty(whole.size)
            cube.allgather(Buffer.of_array(blocks[rank].copy()), Buffer.of_array(gathered), nbytes)
            np.testing.assert_array_equal(gathered, whole)
            source, part = whole * (rank + 1), np.empty(blocks[rank].size)
            before = source.copy()
            cube.reducescatter(Buffer.of_array(source), Buffer.of_array(part), nbytes, ReduceOp.SUM)
            np.testing.assert_array_equal(part, blocks[rank] * (size * (size + 1) // 2))
            np.testing.assert_array_equal(source, before)
            for count in (1, 12, 13, 200):
                for root in range(size):
                    told = np.full(count, 10.0 * rank)
                    cube.broadcast(Buffer.of_array(told), root)
                    np.testing.assert_array_equal(told, np.full(count, 10.0 * root))
                summed = np.arange(count) + float(rank)
                cube.allreduce(Buffer.of_array(summed), ReduceOp.SUM)
                np.testing.assert_array_equal(summed, np.arange(count) * float(size) + sum(range(size)))

        ranks.run(body)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("count", [20, 1000], ids=["whole", "in slices"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
def test_sums_are_the_same_bits_on_all_ranks_and_in_every_run(size: int, count: int, dtype: DType) -> None:
    floats = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(size)]
    arrays = [kernels.narrow(each, dtype) if kernels.is_half(dtype) else each for each in floats]
    results = set()
    for _ in range(3):
        given = [array.copy() for array in arrays]
        Threads(size).run(
            lambda rank, cube, given=given: cube.allreduce(Buffer.of_array(given[rank], dtype), ReduceOp.SUM)
        )
        results.update(array.tobytes() for array in given)
    assert len(results) == 1
    np.testing.assert_allclose(
        _floats(given[0], dtype), sum(floats), rtol=1e-4, atol=0.1 if dtype is DType.BFLOAT16 else 1e-5
    )
