"""The form in which values cross between hosts: who asks for it, what stays exact, and ranks that disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.base import Plane
from hvdgloo._backends.local import LocalGroup
from hvdgloo._backends.memory import HostMemory
from hvdgloo._backends.select import gloo_provider
from hvdgloo._collectives.compression import NoneCompressor
from hvdgloo._engine.messages import Request
from hvdgloo._engine.transfer import _reduce
from hvdgloo._job.context import Context
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import BackendError, MismatchError
from hvdgloo.numpy._compression import Compression
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec, WireFormat
from tests.support.frameworks import Framework, load
from tests.support.world import MakeWorld

pytestmark = pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")

COUNT = 3000
RANKS = {"gloo": 2, "hierarchical": 4}
"""Each on a host of its own; and two on each of two hosts."""
BACKENDS = tuple(RANKS)


@pytest.fixture
def make(backend: str, world: MakeWorld) -> MakeWorld:
    """Makes a world of ranks on two hosts."""
    return lambda **settings: world(RANKS[backend], **{"wire_threshold": 0, **settings})


class Own(NoneCompressor):
    """A program's own compressor, which doubles and halves."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return 2 * tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return tensor / 2


def vector(rank: int, dtype: Any = np.float32, count: int = COUNT) -> Any:
    return (np.random.default_rng(rank).standard_normal(count) * 100).astype(dtype)


def total(size: int, dtype: Any = np.float32) -> Any:
    return np.sum([vector(rank, dtype).astype(np.float64) for rank in range(size)], 0)


frontend_of = load("numpy").frontend


def error(result: Any, exact: Any) -> float:
    return float(np.linalg.norm(result.astype(np.float64) - exact) / np.linalg.norm(exact))


def is_exact(result: Any, exact: Any) -> bool:
    return error(result, exact) < 1e-6


def reduced(context: Context, gradient: Any, **options: Any) -> Any:
    """Return the sum of ranks' gradients."""
    reducer = GradientReducer(frontend_of(context), op=ReduceOp.SUM, **options)
    reducer.ready("w", gradient)
    return reducer.wait()["w"]


@pytest.mark.parametrize(("form", "least", "most"), [("bf16", 1e-4, 6e-3), ("int8", 1e-3, 2e-2), ("int4", 2e-2, 0.3)])
def test_the_setting_is_for_gradients_and_for_nothing_else(
    make: MakeWorld, form: str, least: float, most: float
) -> None:
    def rank_body(context: Context) -> bytes:
        frontend, exact = frontend_of(context), total(context.size)
        gradient = reduced(context, vector(context.rank))
        assert least < error(gradient, exact) < most
        assert is_exact(frontend.allreduce(vector(context.rank), op=ReduceOp.SUM, name="own"), exact)
        assert is_exact(frontend.allreduce_(vector(context.rank), op=ReduceOp.SUM), exact)
        assert (frontend.broadcast(vector(context.rank), 1) == vector(1)).all()
        assert (frontend.allgather(vector(context.rank))[:COUNT] == vector(0)).all()
        return bytes(gradient.tobytes())

    assert len(set(make(wire=form).run(rank_body))) == 1


def test_what_must_be_exact_is(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        for dtype in (np.float64, np.int32, np.int64):
            assert is_exact(reduced(context, vector(context.rank, dtype)), total(context.size, dtype)), dtype
        vectors = [vector(rank) for rank in range(context.size)]
        for op, combine in ((ReduceOp.MIN, np.min), (ReduceOp.MAX, np.max)):
            reducer = GradientReducer(frontend_of(context), op=op)
            reducer.ready("w", vector(context.rank))
            assert (reducer.wait()["w"] == combine(vectors, 0)).all()

    make(wire="int8").run(rank_body)


def test_adasum_is_as_exact_as_without_it(make: MakeWorld) -> None:
    def rank_body(context: Context) -> bytes:
        reducer = GradientReducer(frontend_of(context), op=ReduceOp.ADASUM)
        reducer.ready("w", vector(context.rank))
        return bytes(reducer.wait()["w"].tobytes())

    assert make(wire="int8").run(rank_body) == make().run(rank_body)


def test_small_gradients_are_exact(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        assert is_exact(reduced(context, vector(context.rank)), total(context.size))
        large = reduced(context, np.tile(vector(context.rank), 2))
        assert not is_exact(large, np.tile(total(context.size), 2))

    make(wire="int8", wire_threshold=4 * COUNT + 1).run(rank_body)


@pytest.mark.parametrize("backend", ["shm"])
def test_on_one_host_nothing_crosses_and_everything_is_exact(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        assert is_exact(reduced(context, vector(context.rank)), total(context.size))
        mine = frontend_of(context).allreduce(vector(context.rank), op=ReduceOp.SUM, compression=Compression.int8)
        assert is_exact(mine, total(context.size))

    world(2, wire="int8", wire_threshold=0).run(rank_body)


def test_a_compressor_asks_for_it_in_any_allreduce_of_any_framework(make: MakeWorld, framework: Framework) -> None:
    def rank_body(context: Context) -> None:
        frontend, compression, exact = framework.frontend(context), framework.compression, total(context.size)
        for compressor, least, most in ((compression.int8, 1e-3, 2e-2), (compression.int4, 2e-2, 0.3)):
            tensor = framework.tensor(vector(context.rank), DType.FLOAT32)
            one = frontend.allreduce(tensor, op=ReduceOp.SUM, compression=compressor)
            assert least < error(framework.array(one), exact) < most
            several = [tensor, framework.tensor(vector(context.rank), DType.FLOAT64)]
            group = frontend.grouped_allreduce(several, op=ReduceOp.SUM, compression=compressor)
            assert least < error(framework.array(group[0]), exact) < most
            # float64 stays exact beside it
            assert is_exact(framework.array(group[1]), total(context.size, np.float64))
            assert (framework.array(tensor) == vector(context.rank)).all()

    make().run(rank_body)


def test_a_compressor_overrides_the_setting(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        assert error(reduced(context, vector(context.rank), compression=Compression.int8), total(context.size)) < 2e-2

    make(wire="int4").run(rank_body)


def test_half_types_are_encoded_too(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        gradient = reduced(context, (vector(context.rank) / 100).astype(np.float16))
        assert gradient.dtype == np.float16
        assert 1e-3 < error(gradient, total(context.size) / 100) < 2e-2

    make(wire="int8").run(rank_body)


def test_tensors_of_different_forms_do_not_share_a_buffer(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        frontend, exact = frontend_of(context), total(context.size)
        compressors = {WireFormat.BF16: NoneCompressor, WireFormat.FULL: Own}
        compressors |= {WireFormat.INT8: Compression.int8, WireFormat.INT4: Compression.int4}
        reducers = {
            form: GradientReducer(frontend, op=ReduceOp.SUM, compression=compressor)
            for form, compressor in compressors.items()
        }
        for _ in range(3):
            for each, reducer in reducers.items():
                reducer.ready(f"w.{each}", vector(context.rank))
            errors = {each: error(reducer.wait()[f"w.{each}"], exact) for each, reducer in reducers.items()}
            assert errors[WireFormat.FULL] < 1e-6
            assert 1e-4 < errors[WireFormat.BF16] < errors[WireFormat.INT8] < errors[WireFormat.INT4] < 0.3

    make(wire="bf16").run(rank_body)


def test_what_a_program_s_own_compressor_yields_is_exact(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        assert is_exact(reduced(context, vector(context.rank), compression=Own), total(context.size))
        assert is_exact(reduced(context, vector(context.rank), crossing=Own), total(context.size))
        assert not is_exact(reduced(context, vector(context.rank)), total(context.size))

    make(wire="int8").run(rank_body)


@pytest.mark.parametrize(("form", "share", "most"), [("int8", 0.2539, 0.02), ("int4", 0.1406, 0.3), ("full", 1.0, 0.0)])
def test_what_crossed_is_counted_beside_what_was_reduced(
    make: MakeWorld, backend: str, form: str, share: float, most: float
) -> None:
    count = 1 << 14

    def rank_body(context: Context) -> None:
        before = context.metrics()
        reduced(context, vector(context.rank, count=count))
        change = (context.metrics() - before).planes[backend]
        assert change.bytes == 4 * count
        assert change.wire_bytes == pytest.approx(4 * count * share, rel=1e-3)
        assert bool(most) == (change.wire_error > 0)
        assert change.wire_error <= most

    make(wire=form).run(rank_body)


def test_ranks_that_disagree_get_an_error_that_names_both(make: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        compressor = Compression.none if context.rank == 0 else Compression.int8
        with pytest.raises(MismatchError, match=r"wire format: full on rank 0; int8 on rank"):
            frontend_of(context).allreduce(vector(context.rank), name="w", compression=compressor)

    make().run(rank_body)


def test_a_plane_that_cannot_encode_refuses_with_its_reason() -> None:
    request = Request("allreduce.w", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (3,)),), wire=WireFormat.INT8)
    plane = Plane(LocalGroup(1).backend(0), HostMemory(), "NCCL sends them as they are")
    with pytest.raises(BackendError, match=r"allreduce\.w cannot cross between hosts as int8: NCCL sends"):
        _reduce(plane, Buffer.of_array(np.zeros(3, np.float32)), request)
