"""The engine's promises, on every backend. Expectations are computed in numpy from rank and size."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels
from hvdgloo._backends.kernels import narrow_bfloat16, widen_bfloat16
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Request
from hvdgloo._job.context import Context
from hvdgloo.errors import (
    DuplicateNameError,
    HorovodInternalError,
    InvalidArgumentError,
    JobShutdownError,
    MismatchError,
    WaitTimeoutError,
)
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec
from tests.support.arrays import assert_close, assert_same
from tests.support.selection import extended
from tests.support.threads import at_once
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
BACKENDS = ("local", "gloo", "inline", "shm", *extended("shm-pipes", "hierarchical", "tree"))
SIZE = 3
ARITHMETIC = [dtype for dtype in DType if dtype is not DType.BOOL]


def to_memory(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BFLOAT16:
        return narrow_bfloat16(np.ascontiguousarray(values, np.float32))
    return np.ascontiguousarray(values).astype(dtype.numpy_dtype)


def from_memory(array: np.ndarray, dtype: DType) -> np.ndarray:
    return widen_bfloat16(array) if dtype is DType.BFLOAT16 else array


def allreduce(ctx: Context, name: str, *arrays: np.ndarray, dtype: DType | None = None, **options: Any) -> Handle:
    """Submit an allreduce into fresh outputs."""
    buffers = [Buffer.of_array(array, dtype) for array in arrays]
    outputs = [Buffer.of_array(np.full_like(array, 99), dtype) for array in arrays]
    specs = tuple(buffer.spec for buffer in buffers)
    return ctx.engine.submit(Request(name, Collective.ALLREDUCE, specs, **options), buffers, outputs)


def result(handle: Handle, index: int = 0) -> np.ndarray:
    buffer = handle.wait(10)[index]
    return buffer.array().reshape(buffer.shape)


def allgather(ctx: Context, name: str, *arrays: np.ndarray) -> Handle:
    buffers = [Buffer.of_array(array) for array in arrays]

    def allocate(index: int, spec: TensorSpec) -> Buffer:
        return Buffer.of_array(np.empty(spec.shape, spec.dtype.numpy_dtype), spec.dtype)

    request = Request(name, Collective.ALLGATHER, tuple(buffer.spec for buffer in buffers))
    return ctx.engine.submit(request, buffers, allocate=allocate)


def broadcast(ctx: Context, name: str, array: np.ndarray, root: int, dtype: DType | None = None) -> Handle:
    buffer, output = Buffer.of_array(array, dtype), Buffer.of_array(np.zeros_like(array), dtype)
    return ctx.engine.submit(Request(name, Collective.BROADCAST, (buffer.spec,), root=root), [buffer], [output])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_allreduce_combines_elements(world: MakeWorld, size: int, op: ReduceOp) -> None:
    inputs = [np.random.default_rng(rank).normal(size=(4, 5)) for rank in range(size)]
    stacked = np.stack(inputs)
    expected = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.AVERAGE: stacked.mean(0),
        ReduceOp.MIN: stacked.min(0),
        ReduceOp.MAX: stacked.max(0),
        ReduceOp.PRODUCT: stacked.prod(0),
    }[op]

    def rank(ctx: Context) -> None:
        before = inputs[ctx.rank].copy()
        assert_close(result(allreduce(ctx, "x", inputs[ctx.rank], op=op)), expected, rtol=1e-12)
        assert_same(inputs[ctx.rank], before)  # inputs are never written

    world(size).run(rank)


@pytest.mark.parametrize("dtype", ARITHMETIC)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_allreduce_takes_every_dtype(world: MakeWorld, dtype: DType, op: ReduceOp) -> None:
    def rank(ctx: Context) -> None:
        values = np.array([1, 2, 3]) + ctx.rank
        expected = np.array([1, 2, 3]) * SIZE + 3 if op is ReduceOp.SUM else np.array([3, 4, 5])
        out = result(allreduce(ctx, "x", to_memory(values, dtype), dtype=dtype, op=op))
        assert_same(from_memory(out, dtype), expected)

    world(SIZE).run(rank)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.numpy_dtype.kind == "u"])
@pytest.mark.parametrize(
    ("op", "combine"), [(ReduceOp.SUM, np.add), (ReduceOp.MIN, np.minimum), (ReduceOp.MAX, np.maximum)]
)
def test_unsigned_numbers_are_not_taken_for_negative_ones(
    world: MakeWorld, op: ReduceOp, combine: np.ufunc, dtype: DType
) -> None:
    def rank(ctx: Context) -> None:
        for count in (2, 200):  # Gloo has ways of its own for both
            kind = dtype.numpy_dtype.type
            arrays = [np.tile(np.array([1 + r, ~kind(5 * r)], kind), count // 2) for r in range(SIZE)]
            out = result(allreduce(ctx, f"x{count}", arrays[ctx.rank], op=op))
            assert_same(out, combine.reduce(arrays, dtype=kind))
            average = result(allreduce(ctx, f"average{count}", arrays[0], op=ReduceOp.MAX, postscale=0.25))
            assert_same(average, arrays[0] // 4)

    world(SIZE).run(rank)


@pytest.mark.parametrize("dtype", [DType.UINT16, DType.BFLOAT16])
def test_a_bfloat16_is_no_uint16(world: MakeWorld, dtype: DType) -> None:
    """Their bits look alike, their sums do not; and ranks that mix them are told so (pain 29)."""

    def rank(ctx: Context) -> None:
        two = to_memory(np.array([2.0]), dtype)
        assert from_memory(result(allreduce(ctx, "x", two, dtype=dtype)), dtype).tolist() == [2.0 * SIZE]
        mixed = DType.UINT16 if ctx.rank else dtype
        handle = allreduce(ctx, "mixed", to_memory(np.array([2.0]), mixed), dtype=mixed)
        if dtype is DType.UINT16:
            assert result(handle).tolist() == [2 * SIZE]
        else:
            with pytest.raises(MismatchError, match="bfloat16 on rank 0; uint16 on ranks 1, 2"):
                handle.wait(10)
        with pytest.raises(ValueError, match="void16"):
            Buffer.of_array(narrow_bfloat16(np.ones(1, np.float32)))

    world(SIZE).run(rank)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [False, True, True]),
        (ReduceOp.MAX, [False, True, True]),
        (ReduceOp.MIN, [False, False, True]),
        (ReduceOp.PRODUCT, [False, False, True]),
    ],
)
def test_allreduce_of_bool_is_any_or_all(world: MakeWorld, op: ReduceOp, expected: list[bool]) -> None:
    def rank(ctx: Context) -> None:
        out = result(allreduce(ctx, "x", np.array([False, ctx.rank == 1, True]), op=op))
        assert out.tolist() == expected

    world(SIZE).run(rank)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16, DType.INT32, DType.INT64])
def test_average_of_integers_truncates_toward_zero(world: MakeWorld, dtype: DType) -> None:
    def rank(ctx: Context) -> None:
        values = np.array([ctx.rank + 1, -(ctx.rank + 1), 7])  # sums 3, -3, 14 on two ranks
        out = result(allreduce(ctx, "x", to_memory(values, dtype), dtype=dtype, op=ReduceOp.AVERAGE))
        assert out.tolist() == [1, -1, 7]

    world(2).run(rank)


@pytest.mark.parametrize("count", [7, 70_000])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_an_average_is_a_quotient_to_the_last_bit(world: MakeWorld, dtype: DType, count: int) -> None:
    """Two of three ranks have the same, and the third has zeros, so the sum is exact."""
    values = to_memory(np.random.default_rng(3).standard_normal(count), dtype)
    wide = kernels.widen(values, dtype) if kernels.is_half(dtype) else values
    quotients = 2 * wide / wide.dtype.type(3)
    expected = kernels.narrow(quotients, dtype) if kernels.is_half(dtype) else quotients

    def rank(ctx: Context) -> None:
        own = np.zeros_like(values) if ctx.rank == 1 else values
        averages = allreduce(ctx, "x", own, dtype=dtype, op=ReduceOp.AVERAGE)
        assert result(averages).tobytes() == expected.tobytes()

    world(3).run(rank)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.INT32])
def test_scale_factors_apply_before_and_after(world: MakeWorld, dtype: DType) -> None:
    def rank(ctx: Context) -> None:
        values = to_memory(np.array([2.0, 4.0]), dtype)
        out = result(allreduce(ctx, "x", values, dtype=dtype, op=ReduceOp.SUM, prescale=0.5, postscale=3.0))
        assert_same(from_memory(out, dtype), [2 * 0.5 * SIZE * 3, 4 * 0.5 * SIZE * 3])

    world(SIZE).run(rank)


def test_allreduce_in_place(world: MakeWorld) -> None:
    def rank(ctx: Context) -> None:
        array = np.full(5, float(ctx.rank))
        buffer = Buffer.of_array(array)
        ctx.engine.submit(Request("x", Collective.ALLREDUCE, (buffer.spec,)), [buffer], [buffer]).wait(10)
        assert array.tolist() == [3.0] * 5

    world(SIZE).run(rank)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 4)])
def test_odd_shapes(world: MakeWorld, shape: tuple[int, ...]) -> None:
    def rank(ctx: Context) -> None:
        out = result(allreduce(ctx, "r", np.ones(shape, np.float32)))
        assert_same(out, np.full(shape, SIZE, np.float32))
        out = result(broadcast(ctx, "b", np.full(shape, float(ctx.rank)), 1))
        assert_same(out, np.ones(shape))

    world(SIZE).run(rank)


def test_a_group_is_one_operation_of_many_tensors(world: MakeWorld) -> None:
    def rank(ctx: Context) -> None:
        arrays = [np.full(n, ctx.rank + n, dtype) for n, dtype in ((1, "f4"), (5, "f8"), (0, "f4"), (3, "f4"))]
        handle = allreduce(ctx, "group", *arrays)
        for index, array in enumerate(arrays):
            assert_same(result(handle, index), np.full_like(array, SIZE * array.size + 3))

    world(SIZE).run(rank)


@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 0, 2), (0, 0, 0), (0, 50, 0), (4, 4, 5)])
def test_allgather_concatenates_unequal_rows(world: MakeWorld, rows: tuple[int, ...]) -> None:
    blocks = [np.full((n, 2), rank, np.int16) for rank, n in enumerate(rows)]

    def rank(ctx: Context) -> None:
        out = result(allgather(ctx, "x", blocks[ctx.rank]))
        assert_same(out, np.concatenate(blocks))

    world(SIZE).run(rank)


def test_allgathers_are_fused_and_taken_apart_again(world: MakeWorld) -> None:
    def block(rank: int, index: int) -> np.ndarray:
        return np.full((rank + index % 3, 2), 100 * rank + index, [np.float32, np.uint8, np.int64][index % 3])

    def rank(ctx: Context) -> None:
        handles = [allgather(ctx, f"x{i}", block(ctx.rank, i)) for i in range(12)]
        for i, handle in enumerate(handles):
            assert_same(result(handle), np.concatenate([block(r, i) for r in range(SIZE)]))

    world(SIZE).run(rank)


@pytest.mark.parametrize("root", range(SIZE))
@pytest.mark.parametrize("dtype", list(DType))
def test_broadcast_from_every_root(world: MakeWorld, root: int, dtype: DType) -> None:
    def rank(ctx: Context) -> None:
        out = result(broadcast(ctx, "x", np.full(4, ctx.rank, dtype.numpy_dtype), root, dtype))
        assert_same(out, np.full(4, root, dtype.numpy_dtype))

    world(SIZE).run(rank)


def test_barrier_waits_for_everyone(world: MakeWorld) -> None:
    late = threading.Event()

    def rank(ctx: Context) -> None:
        if ctx.rank == 1:
            late.wait(10)
        handle = ctx.engine.submit(Request("b", Collective.BARRIER))
        if ctx.rank == 0:
            with pytest.raises(WaitTimeoutError):
                handle.wait(0.05)
            late.set()
        handle.wait(10)

    world(SIZE).run(rank)


def test_any_order_of_submission(world: MakeWorld) -> None:
    names = [f"t{i}" for i in range(20)]

    def rank(ctx: Context) -> None:
        order = np.random.default_rng(ctx.rank).permutation(len(names))
        handles = {i: allreduce(ctx, names[i], np.full(i + 1, float(i))) for i in order}
        for i, handle in handles.items():
            assert_same(result(handle), np.full(i + 1, float(i * SIZE)))

    world(SIZE).run(rank)


@pytest.mark.parametrize("capacity", [0, 1, 7, 1024])
def test_names_come_again_with_same_and_other_shapes(world: MakeWorld, capacity: int) -> None:
    def rank(ctx: Context) -> None:
        for step in range(6):
            handles = [allreduce(ctx, f"t{i}", np.ones(1 + i + (step == 3) * ctx.size)) for i in range(10)]
            for handle in handles:
                assert (result(handle) == SIZE).all()

    world(SIZE, cache_capacity=capacity).run(rank)


@pytest.mark.parametrize("threshold", [0, 64, 1 << 20])
def test_results_do_not_depend_on_fusion(world: MakeWorld, threshold: int) -> None:
    def rank(ctx: Context) -> None:
        handles = [allreduce(ctx, f"t{i}", np.arange(i, dtype=np.float32) + ctx.rank) for i in range(30)]
        for i, handle in enumerate(handles):
            assert_same(result(handle), np.arange(i, dtype=np.float32) * SIZE + 3)

    world(SIZE, fusion_threshold=threshold).run(rank)


MISMATCHES: dict[str, tuple[Callable[[Context], Handle], str]] = {
    "dtype": (lambda ctx: allreduce(ctx, "x", np.ones(2, [np.float32, np.float64][ctx.rank == 1])), "dtype"),
    "shape": (lambda ctx: allreduce(ctx, "x", np.ones(2 + (ctx.rank == 2))), "shape"),
    "op": (lambda ctx: allreduce(ctx, "x", np.ones(2), op=ReduceOp(1 + 2 * (ctx.rank == 2))), "reduce operation"),
    "prescale": (lambda ctx: allreduce(ctx, "x", np.ones(2), prescale=1.0 + ctx.rank), "prescale"),
    "postscale": (lambda ctx: allreduce(ctx, "x", np.ones(2), postscale=1.0 + ctx.rank), "postscale"),
    "root": (lambda ctx: broadcast(ctx, "x", np.ones(2), ctx.rank), "root"),
    "collective": (
        lambda ctx: allreduce(ctx, "x", np.ones(2)) if ctx.rank else broadcast(ctx, "x", np.ones(2), 0),
        "operation",
    ),
    "dimensions": (lambda ctx: allgather(ctx, "x", np.ones((2,) * (1 + ctx.rank))), "number of dimensions"),
    "columns": (lambda ctx: allgather(ctx, "x", np.ones((2, 1 + ctx.rank))), "shape"),
    "count": (lambda ctx: allreduce(ctx, "x", *[np.ones(1)] * (1 + ctx.rank)), "number of tensors"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatch_fails_on_every_rank_and_the_job_goes_on(world: MakeWorld, case: str) -> None:
    submit, what = MISMATCHES[case]

    def rank(ctx: Context) -> str:
        with pytest.raises(MismatchError, match=what) as caught:
            submit(ctx).wait(10)
        assert isinstance(caught.value, HorovodInternalError)
        assert result(allreduce(ctx, "x", np.ones(1))) == SIZE  # even under the same name
        return str(caught.value)

    texts = world(SIZE).run(rank)
    assert len(set(texts)) == 1
    assert "rank" in texts[0]


def test_a_duplicate_name_is_refused_at_once(world: MakeWorld) -> None:
    submitted = threading.Barrier(SIZE)

    def rank(ctx: Context) -> None:
        first = allreduce(ctx, "x", np.ones(1)) if ctx.rank == 0 else None
        if first is not None:
            with pytest.raises(DuplicateNameError) as caught:
                allreduce(ctx, "x", np.ones(1))
            assert caught.value.name == "x"
        submitted.wait(10)
        handle = first or allreduce(ctx, "x", np.ones(1))
        assert result(handle) == SIZE

    world(SIZE).run(rank)


INVALID: dict[str, Callable[[Context], Handle]] = {
    "average of bool": lambda ctx: allreduce(ctx, "x", np.array([True]), op=ReduceOp.AVERAGE),
    "scaled bool": lambda ctx: allreduce(ctx, "x", np.array([True]), prescale=2.0),
    "root too large": lambda ctx: broadcast(ctx, "x", np.ones(1), SIZE),
    "negative root": lambda ctx: broadcast(ctx, "x", np.ones(1), -1),
    "scalar allgather": lambda ctx: allgather(ctx, "x", np.array(1.0)),
    "unknown process set": lambda ctx: allreduce(ctx, "x", np.ones(1), process_set=7),
}


@pytest.mark.parametrize("case", INVALID)
def test_nonsense_is_refused_at_once(world: MakeWorld, case: str) -> None:
    def rank(ctx: Context) -> None:
        with pytest.raises(InvalidArgumentError):
            INVALID[case](ctx)
        assert result(allreduce(ctx, "x", np.ones(1))) == SIZE

    world(SIZE).run(rank)


def test_many_threads_submit_at_once(world: MakeWorld) -> None:
    def rank(ctx: Context) -> None:
        def body(thread: int) -> None:
            for step in range(20):
                assert result(allreduce(ctx, f"{thread}.{step}", np.full(3, 1.0))).tolist() == [SIZE] * 3

        at_once(*(partial(body, thread) for thread in range(4)))

    world(SIZE).run(rank)


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_shutdown_on_one_rank_ends_collectives_on_all(world: MakeWorld, leaver: int) -> None:
    submitted = threading.Barrier(SIZE)

    def rank(ctx: Context) -> None:
        assert result(allreduce(ctx, "before", np.ones(1))) == SIZE
        if ctx.rank == leaver:
            submitted.wait(10)
            ctx.close()
            with pytest.raises(JobShutdownError):
                allreduce(ctx, "after", np.ones(1))
            return
        pending = allreduce(ctx, "pending", np.ones(1))
        submitted.wait(10)
        with pytest.raises(JobShutdownError, match="shutdown") as caught:
            pending.wait(10)
        assert caught.value.rank == leaver
        with pytest.raises(JobShutdownError):
            allreduce(ctx, "after", np.ones(1))

    world(SIZE).run(rank)


def test_what_was_ordered_before_a_shutdown_completes(world: MakeWorld) -> None:
    def rank(ctx: Context) -> None:
        handles = [allreduce(ctx, f"t{i}", np.ones(100_000)) for i in range(20)]
        if ctx.rank == 1:
            for handle in handles:
                handle.wait(10)
            ctx.close()
        for handle in handles:
            assert (result(handle) == SIZE).all()

    world(SIZE).run(rank)


# Nothing is on a data plane yet; so one of each kind is enough, beside what travels with the agreement and by a tree.
@pytest.mark.parametrize("backend", ["gloo", "shm", "inline", "tree"], indirect=True)
def test_a_late_rank_is_waited_for_beyond_the_operation_timeout(world: MakeWorld) -> None:
    late = threading.Event()

    def rank(ctx: Context) -> None:
        if ctx.rank == 1:
            late.wait(10)
        handle = allreduce(ctx, "x", np.ones(1))
        if ctx.rank == 0:
            with pytest.raises(WaitTimeoutError):
                handle.wait(3.0)  # two operation timeouts, in which rank 1 answers pings
            late.set()
        assert result(handle) == SIZE

    world(SIZE, operation_timeout=1.4).run(rank)
