"""The collectives' promises, on every front-end and backend.

Expectations are computed in numpy from rank and size.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._job.context import Context
from hvdgloo.errors import (
    DuplicateNameError,
    HorovodInternalError,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
)
from hvdgloo.types import DType, ReduceOp, TensorSpec
from tests.support.arrays import assert_close
from tests.support.frameworks import Framework
from tests.support.selection import extended
from tests.support.world import MakeWorld

USED_AGAIN = True  # worlds, by the tests that follow
BACKENDS = ("local", "gloo", "inline", "shm", *extended("hierarchical", "tree"))
SIZE = 3
REDUCTIONS: dict[ReduceOp, Callable[[np.ndarray], np.ndarray]] = {
    ReduceOp.AVERAGE: lambda stack: stack.mean(axis=0),
    ReduceOp.SUM: lambda stack: stack.sum(axis=0),
    ReduceOp.MIN: lambda stack: stack.min(axis=0),
    ReduceOp.MAX: lambda stack: stack.max(axis=0),
    ReduceOp.PRODUCT: lambda stack: stack.prod(axis=0),
}
NUMBERS = [dtype for dtype in DType if dtype is not DType.BOOL]
FLOATS = [dtype for dtype in DType if dtype.is_floating]


def values_of(rank: int, shape: tuple[int, ...] = (2, 5)) -> np.ndarray:
    """Small whole numbers that differ between ranks and elements: exact in every type, products included."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) + 2 * rank) % 5 + 1.0


def stacked(size: int, shape: tuple[int, ...] = (2, 5)) -> np.ndarray:
    return np.stack([values_of(rank, shape) for rank in range(size)])


def same(framework: Framework, tensor: Any, expected: Any, dtype: DType) -> None:
    assert framework.adapter.describe(tensor).dtype is dtype
    actual = framework.array(tensor)
    assert actual.shape == np.shape(expected)
    tolerance = {DType.FLOAT16: 1e-3, DType.BFLOAT16: 1e-2}.get(dtype, 1e-6)
    assert_close(actual.astype(np.float64), expected, rtol=tolerance)


# allreduce ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("op", list(REDUCTIONS), ids=lambda op: op.name.lower())
def test_allreduce_combines_elements(world: MakeWorld, framework: Framework, op: ReduceOp, dtype: DType) -> None:
    framework.tensor(0, dtype)  # skips types that the framework has not got
    expected = REDUCTIONS[op](stacked(SIZE))
    if not dtype.is_floating:
        expected = np.trunc(expected)

    def rank_body(context: Context) -> None:
        tensor = framework.tensor(values_of(context.rank), dtype)
        result = framework.frontend(context).allreduce(tensor, op=op)
        same(framework, result, expected, dtype)
        same(framework, tensor, values_of(context.rank), dtype)  # inputs are never written

    world(SIZE).run(rank_body)


def test_allreduce_averages_by_default(world: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        result = framework.frontend(context).allreduce(framework.float64([context.rank, 3.0]))
        assert_close(framework.array(result), [(SIZE - 1) / 2, 3.0])

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM], ids=lambda op: op.name.lower())
def test_allreduce_of_booleans(world: MakeWorld, framework: Framework, op: ReduceOp) -> None:
    def rank_body(context: Context) -> None:
        tensor = framework.tensor([context.rank == 0, True, False], DType.BOOL)
        result = framework.array(framework.frontend(context).allreduce(tensor, op=op))
        assert result.tolist() == [op is not ReduceOp.MIN, True, False]

    world(SIZE).run(rank_body)


@pytest.mark.parametrize(("dtype", "count"), [*((dtype, 2000 * SIZE) for dtype in FLOATS), (DType.FLOAT32, 400_000)])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=lambda op: op.name.lower())
def test_what_is_no_number_on_one_rank_is_none_in_the_extremes(
    world: MakeWorld, framework: Framework, op: ReduceOp, dtype: DType, count: int
) -> None:
    """Programs look for overflows in this way. Each rank has NaN somewhere, in each part of a long tensor."""
    framework.tensor(0, dtype)
    signs = np.where(np.arange(count) % 4 < 2, -1.0, 1.0)  # of numbers and of NaN
    expected = REDUCTIONS[op](np.stack([signs * (rank + 1) for rank in range(SIZE)]))
    expected[: SIZE * 100 : 100] = expected[-SIZE * 100 :: 100] = np.nan

    def rank_body(context: Context) -> None:
        values = signs * (context.rank + 1)
        for start in (0, count - SIZE * 100):
            values[start + context.rank * 100] = np.copysign(np.nan, (-1.0) ** context.rank)
        result = framework.frontend(context).allreduce(framework.tensor(values, dtype), op=op)
        same(framework, result, expected, dtype)

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("dtype", [*FLOATS, DType.INT32], ids=str)
def test_factors_apply_before_and_after(world: MakeWorld, framework: Framework, dtype: DType) -> None:
    framework.tensor(0, dtype)
    expected = np.trunc(stacked(SIZE) * 0.5) if dtype is DType.INT32 else stacked(SIZE) * 0.5
    expected = expected.sum(axis=0) * 4.0

    def rank_body(context: Context) -> None:
        tensor = framework.tensor(values_of(context.rank), dtype)
        frontend = framework.frontend(context)
        result = frontend.allreduce(tensor, op=ReduceOp.SUM, prescale_factor=0.5, postscale_factor=4.0)
        same(framework, result, expected, dtype)

    world(SIZE).run(rank_body)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (70_001,)], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_every_shape(world: MakeWorld, framework: Framework, shape: tuple[int, ...], in_place: bool) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        tensor = framework.float64(values_of(frontend.rank(), shape))
        tensor = framework.writable(tensor) if in_place else tensor
        result = (frontend.allreduce_ if in_place else frontend.allreduce)(tensor, op=ReduceOp.SUM)
        assert (result is tensor) == in_place
        same(framework, result, stacked(SIZE, shape).sum(axis=0), DType.FLOAT64)

    world(SIZE).run(rank_body, framework.frontend)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda t: t.T,
    "every other row": lambda t: t[::2],
    "a column": lambda t: t[:, 1],
    "an offset": lambda t: t[1:],
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_tensors_need_not_be_contiguous(world: MakeWorld, framework: Framework, view: str, in_place: bool) -> None:
    take = VIEWS[view]
    if not framework.has_views:
        pytest.skip(f"{framework.name} has no views: what is taken from a tensor is a tensor of its own")

    def rank_body(frontend: Frontend[Any]) -> None:
        whole = framework.float64(values_of(frontend.rank(), (4, 6)))
        part = take(whole)
        result = (frontend.allreduce_ if in_place else frontend.allreduce)(part, op=ReduceOp.SUM)
        expected = take(stacked(SIZE, (4, 6)).sum(axis=0))
        same(framework, result, expected, DType.FLOAT64)
        kept = values_of(frontend.rank(), (4, 6))
        if in_place:
            take(kept)[...] = expected
        same(framework, whole, kept, DType.FLOAT64)

    world(SIZE).run(rank_body, framework.frontend)


def test_handles_of_asynchronous_calls(world: MakeWorld, framework: Framework) -> None:
    everyone_polled = threading.Barrier(SIZE)

    def rank_body(frontend: Frontend[Any]) -> None:
        new = frontend.allreduce_async(framework.float64([1.0]), op=ReduceOp.SUM)
        tensor = framework.writable(framework.float64([2.0]))
        call = frontend.allreduce_async_ if framework.writes else frontend.allreduce_async
        in_place = call(tensor, op=ReduceOp.SUM)
        assert isinstance(new, int)
        assert new != in_place
        assert framework.array(frontend.synchronize(new)).tolist() == [SIZE]
        result = frontend.synchronize(in_place)
        assert (result is tensor) == framework.writes
        assert framework.array(result).tolist() == [2 * SIZE]

        late = frontend.allreduce_async(framework.float64([3.0]), name="late") if frontend.rank() else None
        if late is not None:
            assert not frontend.poll(late)
        everyone_polled.wait(10)
        if late is None:
            late = frontend.allreduce_async(framework.float64([3.0]), name="late")
        assert framework.array(frontend.synchronize(late)).tolist() == [3.0]

        assert frontend.synchronize(late) is None
        assert frontend.synchronize(4711) is None
        for finished in (late, 4711):
            with pytest.raises(ValueError, match="no pending operation"):
                frontend.poll(finished)

    world(SIZE).run(rank_body, framework.frontend)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_groups_mix_shapes_and_types(
    world: MakeWorld, framework: Framework, in_place: bool, asynchronous: bool
) -> None:
    members = [((2, 3), DType.FLOAT32), ((), DType.INT64), ((0, 4), DType.FLOAT64), ((7,), DType.FLOAT32)]
    members += [((3,), DType.INT64), ((2, 2), DType.FLOAT64), ((5,), DType.FLOAT16), ((1,), DType.FLOAT16)]

    def rank_body(frontend: Frontend[Any]) -> None:
        tensors = [framework.tensor(values_of(frontend.rank(), shape), dtype) for shape, dtype in members]
        tensors = [framework.writable(tensor) for tensor in tensors] if in_place else tensors
        call = getattr(frontend, "grouped_allreduce" + "_async" * asynchronous + "_" * in_place)
        results = call(tensors, op=ReduceOp.MAX, name="group")
        if asynchronous:
            results = frontend.synchronize(results)
        assert isinstance(results, list)
        for (shape, dtype), tensor, result in zip(members, tensors, results, strict=True):
            assert (result is tensor) == in_place
            same(framework, result, stacked(SIZE, shape).max(axis=0), dtype)

    world(SIZE).run(rank_body, framework.frontend)


def test_an_empty_group_sends_nothing(world: MakeWorld, framework: Framework) -> None:
    frontend = framework.frontend(world(2).contexts[0])  # the other rank does not take part
    assert frontend.grouped_allreduce([]) == []
    assert frontend.grouped_allreduce_(()) == []
    assert frontend.synchronize(frontend.grouped_allreduce_async([])) == []


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.INT64], ids=str)
def test_fp16_compression_sends_half_and_returns_the_type(world: MakeWorld, framework: Framework, dtype: DType) -> None:
    third = 1 / 3 if dtype.is_floating else 3
    as_sent = float(np.float16(third)) if dtype.is_floating else third

    def rank_body(frontend: Frontend[Any]) -> None:
        for call in (
            lambda t: frontend.allreduce(t, compression=framework.compression.fp16),
            lambda t: frontend.grouped_allreduce([t], compression=framework.compression.fp16)[0],
        ):
            result = call(framework.tensor([third], dtype))
            assert framework.adapter.describe(result).dtype is dtype
            assert framework.array(result).astype(float)[0] == pytest.approx(as_sent, rel=1e-6)

    world(2).run(rank_body, framework.frontend)


@pytest.mark.parametrize("compressor", ["fp16", "bf16"])
def test_compressors_pass_through_what_they_do_not_compress(framework: Framework, compressor: str) -> None:
    """Also what no collective takes: a program may compress first, and send something else."""
    chosen = getattr(framework.compression, compressor, None)
    if chosen is None:
        pytest.skip("not a compressor of this front-end")
    tensors = [framework.tensor([1], dtype) for dtype in (DType.INT32, DType.UINT8, DType.BOOL, DType.FLOAT16)]
    if framework.name != "mxnet":  # which has no complex numbers
        real = framework.tensor([1.0], DType.FLOAT32)
        tensors.append(framework.complex_of(real))
    for tensor in tensors:
        sent, context = chosen.compress(tensor)
        assert sent is tensor
        assert chosen.decompress(sent, context) is tensor


# allgather, broadcast, barrier ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("rows", [(2, 0, 3), (0, 0, 0), (1, 1, 1)], ids=str)
def test_allgather_concatenates_rows(
    world: MakeWorld, framework: Framework, rows: tuple[int, ...], dtype: DType
) -> None:
    framework.tensor(0, dtype)
    parts = [values_of(rank, (count, 2)) % 2 for rank, count in enumerate(rows)]

    def rank_body(frontend: Frontend[Any]) -> None:
        tensor = framework.tensor(parts[frontend.rank()], dtype)
        same(framework, frontend.allgather(tensor), np.concatenate(parts), dtype)
        handle = frontend.allgather_async(tensor, name="again")
        same(framework, frontend.synchronize(handle), np.concatenate(parts), dtype)

    world(SIZE).run(rank_body, framework.frontend)


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("root", range(SIZE))
def test_broadcast_sends_the_roots_values(world: MakeWorld, framework: Framework, root: int, dtype: DType) -> None:
    framework.tensor(0, dtype)
    expected = values_of(root, (3, 2)) % 2

    def rank_body(frontend: Frontend[Any]) -> None:
        own = values_of(frontend.rank(), (3, 2)) % 2
        tensor = framework.tensor(own, dtype)
        same(framework, frontend.broadcast(tensor, root), expected, dtype)
        same(framework, frontend.synchronize(frontend.broadcast_async(tensor, root)), expected, dtype)
        same(framework, tensor, own, dtype)
        if not framework.writes:
            return
        tensor = framework.writable(tensor)
        assert frontend.broadcast_(tensor, root) is tensor
        same(framework, tensor, expected, dtype)
        if not framework.has_views:
            return
        column = framework.tensor(own, dtype)[:, 1]
        assert frontend.synchronize(frontend.broadcast_async_(column, root)) is column
        same(framework, column, expected[:, 1], dtype)

    world(SIZE).run(rank_body, framework.frontend)


def test_no_rank_passes_a_barrier_alone(world: MakeWorld, framework: Framework) -> None:
    arrived = [False] * SIZE
    may_arrive = threading.Event()

    def rank_body(context: Context) -> None:
        if context.rank == SIZE - 1:
            assert may_arrive.wait(10)
        arrived[context.rank] = True
        if sum(arrived) == SIZE - 1:
            may_arrive.set()
        framework.frontend(context).barrier()
        assert all(arrived)

    world(SIZE).run(rank_body)


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_match_calls_in_any_order(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        order = [(frontend.rank() + i) % 4 for i in range(4)]
        handles = {
            i: frontend.allreduce_async(framework.float64([10.0 * i + frontend.rank()]), name=f"x{i}", op=ReduceOp.MAX)
            for i in order
        }
        for i in reversed(order):
            assert framework.array(frontend.synchronize(handles[i])).tolist() == [10 * i + SIZE - 1]

    world(SIZE).run(rank_body, framework.frontend)


def test_automatic_names_count_per_operation(world: MakeWorld, framework: Framework) -> None:
    """A rank that interleaves operations differently still matches: each kind has a counter of its own."""

    def rank_body(frontend: Frontend[Any]) -> None:
        calls = [
            lambda: frontend.allreduce_async(framework.float64([1.0]), op=ReduceOp.SUM),
            lambda: frontend.allgather_async(framework.float64([2.0])),
            lambda: frontend.broadcast_async(framework.float64([float(frontend.rank())]), 1),
            lambda: frontend.grouped_allreduce_async([framework.float64([4.0])], op=ReduceOp.SUM),
        ]
        order = [(frontend.rank() + i) % 4 for i in range(4)]
        handles = {i: calls[i]() for i in order}
        results = {i: frontend.synchronize(handle) for i, handle in handles.items()}
        assert framework.array(results[0]).tolist() == [SIZE]
        assert framework.array(results[1]).tolist() == [2.0] * SIZE
        assert framework.array(results[2]).tolist() == [1.0]
        assert framework.array(results[3][0]).tolist() == [4.0 * SIZE]

    world(SIZE).run(rank_body, framework.frontend)


def test_full_names(world: MakeWorld, framework: Framework) -> None:
    context = world(2, fresh=True).contexts[0]  # the other rank never comes, so everything stays in flight
    frontend = framework.frontend(context)
    tensor = framework.float64([1.0])

    def name_of(call: Callable[[], Any]) -> str:
        call()
        with pytest.raises(DuplicateNameError) as caught:
            call()
        return caught.value.name

    assert name_of(lambda: frontend.allreduce_async(tensor, name="x")) == "allreduce.x"
    assert name_of(lambda: frontend.grouped_allreduce_async([tensor], name="x")) == "grouped_allreduce.x"
    assert name_of(lambda: frontend.allgather_async(tensor, name="x")) == "allgather.x"
    assert name_of(lambda: frontend.broadcast_async(tensor, 0, name="x")) == "broadcast.x"
    frontend.allreduce_async(tensor)
    other = framework.frontend(context)
    other.allreduce_async(tensor)  # two front-ends of one Context share the counters, so this is no duplicate
    with pytest.raises(DuplicateNameError) as caught:
        other.allreduce_async(tensor, name="noname.2")
    assert caught.value.name == "allreduce.noname.2"


# Errors ---------------------------------------------------------------------------------------------------------------


def scalar_like(frontend: Frontend[Any], tensor: Any) -> Any:
    """Return a tensor without dimensions."""
    if type(tensor).__module__.startswith("jax"):
        return tensor.sum()  # a result's memory is no array yet
    return frontend.adapter.allocate(TensorSpec(DType.FLOAT64, ()), tensor)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f, t: f.allreduce(t, average=True, op=ReduceOp.SUM), "exclude each other"),
        (lambda f, t: f.allreduce(t, op=17), "must be one of Average"),
        (lambda f, t: f.allreduce(t, prescale_factor="two"), "are numbers"),
        (lambda f, t: f.allreduce_async([1.0, 2.0]), "not list"),
        (lambda f, t: f.allreduce_async(None), "not NoneType"),
        (lambda f, t: f.grouped_allreduce(t), "list or tuple of tensors"),
        (lambda f, t: f.grouped_allreduce([t, {3}]), "not set"),
        (lambda f, t: f.broadcast(t, "0"), "root_rank is a global rank"),
        (lambda f, t: f.broadcast(t, 2), "2"),
        (lambda f, t: f.broadcast(t, -1), "-1"),
        (lambda f, t: f.allgather(scalar_like(f, t)), "dimension"),
        (lambda f, t: f.allreduce(t, process_set=ProcessSet([0])), "not registered"),
        (lambda f, t: f.allreduce(t, process_set=[0, 1]), "must be a ProcessSet"),
    ],
)
def test_a_wrong_call_is_a_value_error_here_alone(
    world: MakeWorld, framework: Framework, call: Callable[[Frontend[Any], Any], Any], text: str
) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        if frontend.rank() == 0:
            with pytest.raises(InvalidArgumentError, match=text) as caught:
                call(frontend, framework.float64([1.0]))
            assert isinstance(caught.value, ValueError)
        # The other rank does not wait for it, and both go on.
        assert framework.array(frontend.allreduce(framework.float64([1.0]), op=ReduceOp.SUM, name="after")) == [2.0]

    world(2).run(rank_body, framework.frontend)


def test_average_of_booleans_is_refused(world: MakeWorld, framework: Framework) -> None:
    frontend = framework.frontend(world(1).contexts[0])
    with pytest.raises(InvalidArgumentError, match="bool"):
        frontend.allreduce(framework.tensor([True], DType.BOOL))


def test_complex_numbers_are_refused_by_name(world: MakeWorld, framework: Framework) -> None:
    if framework.name == "mxnet":
        pytest.skip("MXNet has no complex numbers")
    frontend = framework.frontend(world(1).contexts[0])
    array = np.array([1 + 2j])
    make = {
        "torch": lambda: __import__("torch").from_numpy(array),
        "tensorflow": lambda: __import__("tensorflow").constant(array),
        "jax": lambda: importlib.import_module("jax.numpy").asarray(array),
    }
    tensor = make.get(framework.name, lambda: array)()
    for call in (frontend.allreduce, frontend.allgather, lambda t: frontend.broadcast(t, 0)):
        with pytest.raises(ValueError, match="complex128") as caught:
            call(tensor)
    _, _, advice = str(caught.value).partition("their real and imaginary parts can: ")
    names = {"array": tensor, "tensor": tensor, "x": tensor, "numpy": np}
    names |= {name: importlib.import_module(name) for name in ("torch", "tensorflow", "jax") if name == framework.name}
    pairs = eval(advice, names | {"tf": names.get("tensorflow")})
    assert sorted(framework.array(frontend.allreduce(pairs)).ravel().tolist()) == [1.0, 2.0]


def test_strings_are_refused_as_strings(world: MakeWorld, framework: Framework) -> None:
    if framework.name in ("jax", "mxnet", "torch"):
        pytest.skip(f"{framework.name} has no strings")
    frontend = framework.frontend(world(1).contexts[0])
    arrays: list[Any] = [np.array(["a", "b"]), np.array([b"sixteen bytes ..."]), np.array(["a", "b"], object)]
    if framework.name == "tensorflow":
        arrays.append(importlib.import_module("tensorflow").constant(["a"]))
    for array in arrays:
        with pytest.raises(ValueError, match=r"s of strings cannot be sent; broadcast_object\(\)"):
            frontend.allreduce(array)
    with pytest.raises(ValueError, match="of type object cannot be sent"):
        frontend.allreduce(np.array([None, "a"], object))


def test_nothing_is_broadcast_if_a_part_of_it_cannot_be(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        weight = framework.writable(framework.float64([frontend.rank() + 1.0]))
        with pytest.raises(ValueError, match=r"^phases: expected "):
            frontend.broadcast_all([("weight", weight), ("phases", "not a tensor")], 1, in_place=framework.writes)
        assert framework.array(weight).tolist() == [frontend.rank() + 1.0]
        (result,) = frontend.broadcast_all([("weight", weight)], 1, in_place=framework.writes)
        assert framework.array(result).tolist() == [2.0]

    world(2).run(rank_body, framework.frontend)


@pytest.mark.parametrize("average", [True, False])
def test_average_alone_is_deprecated(world: MakeWorld, framework: Framework, average: bool) -> None:
    frontend = framework.frontend(world(1).contexts[0])
    tensor = framework.float64([1.0])
    with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as record:
        frontend.allreduce(tensor, average=average)
    assert record[0].filename == __file__


def test_a_disagreement_is_an_error_on_every_rank_and_the_job_goes_on(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        handle = frontend.allreduce_async(framework.float64([0.0] * (1 + frontend.rank())), name="x")
        with pytest.raises(HorovodInternalError, match="x") as caught:
            frontend.synchronize(handle)
        assert isinstance(caught.value, MismatchError)
        assert frontend.synchronize(handle) is None
        assert framework.array(frontend.allreduce(framework.float64([4.0]), name="x")).tolist() == [4.0]

    world(SIZE).run(rank_body, framework.frontend)


def test_ranks_that_disagree_about_the_kind_of_collective(world: MakeWorld, framework: Framework) -> None:
    def rank_body(frontend: Frontend[Any]) -> None:
        tensor = framework.float64([1.0, 2.0])
        kinds: list[Callable[[], Any]] = [
            lambda: frontend.allgather(tensor, name="x"),
            lambda: frontend.broadcast(tensor, 0, name="x"),
            lambda: frontend.grouped_allreduce([tensor], name="x"),
        ]
        for _ in range(2):  # the second time, the operations are known
            with pytest.raises(MismatchError, match="x: ranks disagree about the kind of collective: allgather on"):
                kinds[frontend.rank()]()
            with pytest.raises(MismatchError, match="kind of collective: allgather on rank 0; broadcast on ranks 1, 2"):
                kinds[min(frontend.rank(), 1)]()
            for kind in kinds:  # the job goes on, and one name may stand for one operation of each kind
                kind()
            handles = [frontend.allgather_async(tensor, name="x"), frontend.broadcast_async(tensor, 0, name="x")]
            for handle in handles:
                frontend.synchronize(handle)
            # Different tensors, one kind: another mismatch.
            with pytest.raises(MismatchError, match="dtype"):
                frontend.allgather(framework.tensor([1], DType.INT32 if frontend.rank() else DType.INT64), name="x")

    world(SIZE).run(rank_body, framework.frontend)


def test_without_a_context(framework: Framework) -> None:
    def absent() -> Context:
        raise NotInitializedError

    frontend = Frontend(framework.adapter, absent)
    for call in (frontend.rank, frontend.size, frontend.barrier, lambda: frontend.allreduce(framework.float64([1.0]))):
        with pytest.raises(ValueError, match=r"use hvd.init\(\)") as caught:
            call()
        assert isinstance(caught.value, HorovodInternalError)
    assert frontend.synchronize(1) is None
    with pytest.raises(ValueError, match="no pending operation"):
        frontend.poll(1)


def test_after_shutdown(world: MakeWorld, framework: Framework) -> None:
    two = world(2)
    frontend = framework.frontend(two.contexts[0])
    handle = frontend.allreduce_async(framework.float64([1.0]))
    two.close()
    with pytest.raises(HorovodInternalError):
        frontend.synchronize(handle)
    with pytest.raises(HorovodInternalError):
        frontend.allreduce(framework.float64([1.0]))
    # A new Context counts handles and names from 1 again.
    assert handle == 1
    fresh = framework.frontend(world(1).contexts[0])
    assert fresh.allreduce_async(framework.float64([1.0])) == 1


def test_who_and_where(world: MakeWorld, framework: Framework) -> None:
    def rank_body(f: Frontend[Any]) -> tuple[int, ...]:
        assert f.is_homogeneous()
        return f.rank(), f.size(), f.local_rank(), f.local_size(), f.cross_rank(), f.cross_size()

    assert world(SIZE).run(rank_body, framework.frontend) == [(rank, SIZE, rank, SIZE, 0, 1) for rank in range(SIZE)]
