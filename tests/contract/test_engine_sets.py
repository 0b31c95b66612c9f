"""Process sets, joins, and the collectives that take several calls, as the engine promises them on every backend."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.kernels import narrow_bfloat16, widen_bfloat16
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Request
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec
from tests.support.arrays import adasum, assert_close
from tests.support.selection import extended
from tests.support.threads import at_once
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
BACKENDS = ("local", "gloo", "inline", "shm", *extended("hierarchical", "tree"))
SIZE = 3


def change_set(ctx: Context, name: str, ranks: tuple[int, ...], *, remove: bool = False) -> int:
    collective = Collective.REMOVE_PROCESS_SET if remove else Collective.ADD_PROCESS_SET
    handle = ctx.engine.submit(Request(name, collective, ranks=ranks))
    handle.wait(10)
    return handle.value


def allreduce(ctx: Context, name: str, array: np.ndarray, dtype: DType | None = None, **options: Any) -> Handle:
    buffer = Buffer.of_array(array, dtype)
    output = Buffer.of_array(np.full_like(array, 99), dtype)
    return ctx.engine.submit(Request(name, Collective.ALLREDUCE, (buffer.spec,), **options), [buffer], [output])


def result(handle: Handle, index: int = 0) -> np.ndarray:
    buffer = handle.wait(10)[index]
    return buffer.array().reshape(buffer.shape)


def allocate(index: int, spec: TensorSpec) -> Buffer:
    return Buffer.of_array(np.empty(spec.shape, spec.dtype.numpy_dtype), spec.dtype)


def alltoall(ctx: Context, name: str, array: np.ndarray, splits: list[int], **options: Any) -> Handle:
    buffer = Buffer.of_array(array)
    request = Request(name, Collective.ALLTOALL, (buffer.spec,), **options)
    return ctx.engine.submit(request, [buffer], splits=splits, allocate=allocate)


def reducescatter(ctx: Context, name: str, array: np.ndarray, size: int, index: int, **options: Any) -> Handle:
    rows = len(array) // size + (index < len(array) % size)
    buffer, output = Buffer.of_array(array), Buffer.of_array(np.empty((rows, *array.shape[1:]), array.dtype))
    request = Request(name, Collective.REDUCESCATTER, (buffer.spec,), **options)
    return ctx.engine.submit(request, [buffer], [output])


class TestSets:
    def test_a_set_reduces_among_its_members_alone(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            number = change_set(ctx, "add", (0, 2))
            assert number == 1
            assert ctx.engine.process_sets == {0: (0, 1, 2), 1: (0, 2)}
            everyone = allreduce(ctx, "x", np.ones(2))
            if ctx.rank != 1:
                some = allreduce(ctx, "x", np.full(2, ctx.rank + 1.0), process_set=1, op=ReduceOp.AVERAGE)
                assert result(some).tolist() == [2.0, 2.0]
            assert result(everyone).tolist() == [3.0, 3.0]

        world(SIZE).run(rank)

    def test_who_is_not_a_member_is_refused_at_once(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            number = change_set(ctx, "add", (0, 1))
            if ctx.rank == 2:
                with pytest.raises(InvalidArgumentError, match=r"rank 2 is not in process set 1, whose ranks are"):
                    allreduce(ctx, "x", np.ones(1), process_set=number)
            with pytest.raises(InvalidArgumentError, match="there is no process set 7"):
                allreduce(ctx, "x", np.ones(1), process_set=7)

        world(SIZE).run(rank)

    def test_a_root_is_a_global_rank_in_every_set(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            number = change_set(ctx, "add", (1, 2))
            if ctx.rank == 0:
                return
            buffer = Buffer.of_array(np.full(2, float(ctx.rank)))
            request = Request("b", Collective.BROADCAST, (buffer.spec,), root=2, process_set=number)
            assert result(ctx.engine.submit(request, [buffer], [buffer])).tolist() == [2.0, 2.0]
            wrong = Request("b", Collective.BROADCAST, (buffer.spec,), root=0, process_set=number)
            with pytest.raises(InvalidArgumentError, match="root rank 0 does not exist in process set 1; ranks are 1"):
                ctx.engine.submit(wrong, [buffer], [buffer])

        world(SIZE).run(rank)

    def test_ranks_that_disagree_about_a_set_all_learn_it(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            with pytest.raises(
                MismatchError, match=r"ranks of the process set: \(0, 1\) on ranks 0, 1; \(0, 2\) on rank"
            ):
                change_set(ctx, "add", (0, 2) if ctx.rank == 2 else (0, 1))
            assert change_set(ctx, "again", (0, 1)) == 1
            with pytest.raises(MismatchError, match="there is a process set of ranks 0, 1 already"):
                change_set(ctx, "twice", (0, 1))

        world(SIZE).run(rank)

    def test_a_removed_sets_number_comes_again_and_its_pending_operations_end(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            first, second = change_set(ctx, "a", (0, 1)), change_set(ctx, "b", (1, 2))
            assert (first, second) == (1, 2)
            pending = allreduce(ctx, "never", np.ones(1), process_set=1) if ctx.rank == 0 else None
            assert change_set(ctx, "c", (0, 1), remove=True) == 1
            if pending is not None:
                with pytest.raises(InvalidArgumentError, match="was removed before all members"):
                    pending.wait(10)
            assert change_set(ctx, "d", (0, 2)) == 1
            assert ctx.engine.process_sets == {0: (0, 1, 2), 1: (0, 2), 2: (1, 2)}
            if ctx.rank != 1:
                assert result(allreduce(ctx, "never", np.ones(1), process_set=1)).tolist() == [2.0]
            with pytest.raises(MismatchError, match="no process set of ranks 0, 1 that could be removed"):
                change_set(ctx, "e", (0, 1), remove=True)

        world(SIZE).run(rank)

    def test_overlapping_sets_from_several_threads_do_not_deadlock(self, world: MakeWorld) -> None:
        pairs = ((0, 1), (1, 2), (0, 2))

        def rank(ctx: Context) -> None:
            numbers = {pair: change_set(ctx, f"set {pair}", pair) for pair in pairs}

            def body(pair: tuple[int, int]) -> None:
                for step in range(25):
                    # Of all sizes: inline, fused, alone.
                    for count in (1, 1000, 40_000):
                        handle = allreduce(ctx, f"t{count}", np.full(count, float(step)), process_set=numbers[pair])
                        assert result(handle)[-1] == 2.0 * step

            at_once(*(partial(body, pair) for pair in pairs if ctx.rank in pair))

        world(SIZE).run(rank)

    def test_every_collective_in_a_set(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            number = change_set(ctx, "add", (0, 2))
            if ctx.rank == 1:
                return
            index = ctx.rank // 2
            rows = np.arange(4.0).reshape(4, 1) + 10 * index
            received = alltoall(ctx, "a2a", rows, [1, 3], process_set=number)
            expected = [[0.0], [10.0]] if index == 0 else [[1.0], [2.0], [3.0], [11.0], [12.0], [13.0]]
            assert result(received).tolist() == expected
            assert result(received, 1).tolist() == ([1, 1] if index == 0 else [3, 3])
            scattered = reducescatter(ctx, "rs", rows, 2, index, process_set=number)
            assert result(scattered).ravel().tolist() == ([10.0, 12.0] if index == 0 else [14.0, 16.0])
            buffer = Buffer.of_array(rows[: 1 + index])
            request = Request("ag", Collective.ALLGATHER, (buffer.spec,), process_set=number)
            assert result(ctx.engine.submit(request, [buffer], allocate=allocate)).ravel().tolist() == [0.0, 10.0, 11.0]
            ctx.engine.submit(Request("barrier", Collective.BARRIER, process_set=number)).wait(10)

        world(SIZE).run(rank)


class TestJoin:
    @pytest.mark.parametrize("count", [3, 5000])
    @pytest.mark.parametrize(
        ("op", "expected"),
        [
            (ReduceOp.SUM, 5.0),
            (ReduceOp.AVERAGE, 5 / 3),
            (ReduceOp.MIN, 2.0),
            (ReduceOp.MAX, 3.0),
            (ReduceOp.PRODUCT, 6.0),
        ],
    )
    def test_who_has_joined_changes_nothing(self, world: MakeWorld, count: int, op: ReduceOp, expected: float) -> None:
        def rank(ctx: Context) -> int:
            if ctx.rank > 0:
                for _ in range(3):
                    output = result(allreduce(ctx, "x", np.full(count, ctx.rank + 1.0), op=op))
                    assert_close(output, expected)
                ctx.engine.submit(Request("barrier", Collective.BARRIER)).wait(10)
            joined = ctx.engine.submit(Request("join", Collective.JOIN))
            joined.wait(10)
            assert result(allreduce(ctx, "after", np.ones(1))).tolist() == [3.0]
            return joined.value

        assert len(set(world(SIZE).run(rank))) == 1

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
    @pytest.mark.parametrize("dtype", list(DType))
    def test_neutral_elements_of_every_dtype(self, world: MakeWorld, dtype: DType, op: ReduceOp) -> None:
        if dtype is DType.BFLOAT16:
            values = narrow_bfloat16(np.array([-1, 2, 3], np.float32))
        else:
            values = np.array([0, 1, 1] if dtype is DType.BOOL else [1, 2, 3], dtype.numpy_dtype)

        def rank(ctx: Context) -> None:
            if ctx.rank == 0:
                assert np.array_equal(result(allreduce(ctx, "x", values.copy(), dtype, op=op)), values)
            ctx.engine.submit(Request("join", Collective.JOIN)).wait(10)

        world(2).run(rank)

    @pytest.mark.parametrize("last", [0, 1])
    def test_what_was_submitted_before_the_join_goes_on(self, world: MakeWorld, last: int) -> None:
        joined = threading.Event()

        def rank(ctx: Context) -> None:
            own = allreduce(ctx, "own", np.full(5000, 2.0)) if ctx.rank == 1 else None
            if ctx.rank == last:
                assert joined.wait(10)
            handle = ctx.engine.submit(Request("join", Collective.JOIN))
            if ctx.rank != last:
                joined.set()
            handle.wait(10)
            if own is not None:
                assert result(own)[-1] == 2.0

        world(2).run(rank)

    def test_join_names_the_last_rank(self, world: MakeWorld) -> None:
        turn = threading.Barrier(SIZE)

        def rank(ctx: Context) -> int:
            handle = None
            for joining in (2, 0, 1):
                turn.wait(10)
                if ctx.rank == joining:
                    handle = ctx.engine.submit(Request("join", Collective.JOIN))
                turn.wait(10)
                if ctx.rank == 1 and joining != 1:  # an operation of all others: the join before it has arrived
                    result(allreduce(ctx, f"after {joining}", np.ones(1)))
                elif ctx.rank == 0 and joining == 2:
                    result(allreduce(ctx, "after 2", np.ones(1)))
            assert handle is not None
            handle.wait(10)
            return handle.value

        assert world(SIZE).run(rank) == [1, 1, 1]

    def test_other_collectives_fail_while_a_rank_has_joined(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            if ctx.rank != 2:
                with pytest.raises(MismatchError, match=r"rank 2 called join\(\), which only allreduce and"):
                    alltoall(ctx, "a", np.ones((3, 1)), [1, 1, 1]).wait(10)
            ctx.engine.submit(Request("join", Collective.JOIN)).wait(10)

        world(SIZE).run(rank)


class TestAlltoall:
    def test_uneven_and_zero_splits(self, world: MakeWorld) -> None:
        table = [[0, 2, 1], [3, 0, 0], [0, 0, 0]]

        def rank(ctx: Context) -> None:
            for _ in range(3):
                rows = np.arange(2.0 * sum(table[ctx.rank])).reshape(-1, 2) + 100 * ctx.rank
                handle = alltoall(ctx, "a", rows, table[ctx.rank])
                pieces = []
                for source in range(SIZE):
                    theirs = np.arange(2.0 * sum(table[source])).reshape(-1, 2) + 100 * source
                    begin = sum(table[source][: ctx.rank])
                    pieces.append(theirs[begin : begin + table[source][ctx.rank]])
                assert np.array_equal(result(handle), np.concatenate(pieces))
                assert result(handle, 1).tolist() == [table[source][ctx.rank] for source in range(SIZE)]

        world(SIZE).run(rank)

    def test_it_goes_between_others(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            before = [allreduce(ctx, f"b{i}", np.ones(100_000)) for i in range(4)]
            handle = alltoall(ctx, "a", np.full((SIZE, 1), float(ctx.rank)), [1] * SIZE)
            after = [allreduce(ctx, f"a{i}", np.ones(100_000)) for i in range(4)]
            assert result(handle).ravel().tolist() == [0.0, 1.0, 2.0]
            assert all(result(h)[0] == SIZE for h in before + after)

        world(SIZE).run(rank)


class TestReducescatter:
    @pytest.mark.parametrize("rows", [0, 1, 3, 7])
    @pytest.mark.parametrize("dtype", [np.float64, np.int16, np.float16])
    def test_rows_are_divided_the_first_ranks_getting_one_more(
        self, world: MakeWorld, rows: int, dtype: type[np.generic]
    ) -> None:
        def rank(ctx: Context) -> None:
            array = (np.arange(rows * 2).reshape(rows, 2) + ctx.rank).astype(dtype)
            kept = array.copy()
            handle = reducescatter(ctx, "rs", array, SIZE, ctx.rank, prescale=2.0)
            total = (np.arange(rows * 2).reshape(rows, 2) * SIZE + 3) * 2
            assert np.array_equal(result(handle), np.array_split(total.astype(dtype), SIZE)[ctx.rank])
            assert np.array_equal(array, kept)

        world(SIZE).run(rank)


class TestAdasum:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("count", [1, 7, 140_003])
    def test_it_is_the_definition_for_any_number_of_ranks(self, world: MakeWorld, size: int, count: int) -> None:
        inputs = [np.random.default_rng(rank).normal(size=count) for rank in range(size)]
        expected = adasum(inputs)

        def rank(ctx: Context) -> None:
            output = result(allreduce(ctx, "x", inputs[ctx.rank].copy(), op=ReduceOp.ADASUM))
            assert_close(output, expected, rtol=1e-10, atol=1e-12)

        world(size).run(rank)

    def test_each_tensor_by_itself_though_they_are_fused(self, world: MakeWorld) -> None:
        inputs = [[np.random.default_rng((rank, i)).normal(size=5 + i) for i in range(4)] for rank in range(SIZE)]

        def rank(ctx: Context) -> None:
            buffers = [Buffer.of_array(array) for array in inputs[ctx.rank]]
            outputs = [Buffer.of_array(np.empty_like(array)) for array in inputs[ctx.rank]]
            specs = tuple(buffer.spec for buffer in buffers)
            request = Request("g", Collective.ALLREDUCE, specs, op=ReduceOp.ADASUM)
            handle = ctx.engine.submit(request, buffers, outputs)
            for i in range(4):
                assert_close(result(handle, i), adasum([inputs[r][i] for r in range(SIZE)]))

        world(SIZE).run(rank)

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_orthogonal_gradients_add_and_parallel_ones_average(self, world: MakeWorld, size: int) -> None:
        def rank(ctx: Context) -> None:
            axis = np.zeros(8)
            axis[ctx.rank] = 2.0
            added = result(allreduce(ctx, "orthogonal", axis, op=ReduceOp.ADASUM))
            assert_close(added, [2.0] * size + [0.0] * (8 - size))
            same = np.arange(8.0)
            assert_close(result(allreduce(ctx, "parallel", same, op=ReduceOp.ADASUM)), same)
            zeros = result(allreduce(ctx, "zero", np.zeros(3), op=ReduceOp.ADASUM))
            assert zeros.tolist() == [0.0, 0.0, 0.0]

        world(size).run(rank)

    @pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])
    def test_small_types(self, world: MakeWorld, dtype: DType) -> None:
        inputs = [np.random.default_rng(rank).normal(size=300).astype(np.float32) for rank in range(SIZE)]
        expected = adasum([array.astype(np.float64) for array in inputs])

        def rank(ctx: Context) -> None:
            bfloat16 = dtype is DType.BFLOAT16
            array = narrow_bfloat16(inputs[ctx.rank]) if bfloat16 else inputs[ctx.rank].astype(dtype.numpy_dtype)
            output = result(allreduce(ctx, "x", array, dtype, op=ReduceOp.ADASUM))
            output = widen_bfloat16(output) if bfloat16 else output
            tolerance = {DType.FLOAT32: 1e-6, DType.FLOAT16: 5e-3, DType.BFLOAT16: 4e-2}[dtype]
            assert_close(output, expected, rtol=tolerance, atol=tolerance)

        world(SIZE).run(rank)

    def test_integers_have_no_angles(self, world: MakeWorld) -> None:
        def rank(ctx: Context) -> None:
            with pytest.raises(InvalidArgumentError, match="Adasum is defined for floating-point tensors, not int64"):
                allreduce(ctx, "x", np.ones(2, np.int64), op=ReduceOp.ADASUM)

        world(2).run(rank)
