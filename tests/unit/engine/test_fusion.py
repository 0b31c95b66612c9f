"""The fusion plan: every tensor in exactly one bucket, in order, within the limit, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._engine.fusion import LONE_BYTES, Bucket, Part, plan
from hvdgloo._engine.messages import Request, Response
from hvdgloo._engine.negotiation import agree
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec

LIMIT = 64 << 20


def allreduce(name: str, *counts: int, dtype: DType = DType.UINT8, device: str = "cpu", **options: object) -> Response:
    specs = tuple(TensorSpec(dtype, (count,), device) for count in counts)
    return Response(Request(name, Collective.ALLREDUCE, specs, **options))  # type: ignore[arg-type]


def allgather(name: str, *rows: int, dtype: DType = DType.UINT8, width: int = 1) -> Response:
    spec = TensorSpec(dtype, (rows[0], width))
    return Response(Request(name, Collective.ALLGATHER, (spec,)), (rows,))


def broadcast(name: str, count: int, root: int = 0) -> Response:
    return Response(Request(name, Collective.BROADCAST, (TensorSpec(DType.UINT8, (count,)),), root=root))


def barrier(process_set: int = 0) -> Response:
    return Response(Request("barrier", Collective.BARRIER, process_set=process_set))


def operations(buckets: Sequence[Bucket]) -> list[list[int]]:
    """For each bucket the operations whose tensors it holds."""
    return [[part.operation for part in bucket.parts] for bucket in buckets]


responses = st.one_of(
    st.builds(
        lambda counts, dtype, op, factor, device, process_set: allreduce(
            "r", *counts, dtype=dtype, op=op, prescale=factor, device=device, process_set=process_set
        ),
        st.lists(st.integers(0, 40), min_size=1, max_size=4),
        st.sampled_from([DType.UINT8, DType.FLOAT32]),
        st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
        st.sampled_from([1.0, 0.5]),
        st.sampled_from(["cpu", "cuda"]),
        st.integers(0, 1),
    ),
    st.builds(
        lambda rows, dtype: allgather("g", *rows, dtype=dtype),
        st.lists(st.integers(0, 20), min_size=2, max_size=2),
        st.sampled_from([DType.UINT8, DType.FLOAT32]),
    ),
    st.builds(broadcast, st.just("b"), st.integers(0, 40)),
    st.builds(barrier, st.integers(0, 1)),
)


@given(st.lists(responses, max_size=30), st.integers(0, 200), st.booleans())
def test_laws_of_every_plan(batch: list[Response], limit: int, separate_groups: bool) -> None:
    buckets = plan(batch, limit, separate_groups=separate_groups)
    parts = [part for bucket in buckets for part in bucket.parts]
    expected = [
        Part(operation, tensor, nbytes)
        for operation, response in enumerate(batch)
        for tensor, nbytes in (enumerate(response.sizes) if response.request.tensors else [(-1, 0)])
    ]
    assert sorted(parts, key=lambda p: (p.operation, p.tensor)) == expected  # each exactly once
    for bucket in buckets:
        order = [(part.operation, part.tensor) for part in bucket.parts]
        assert order == sorted(order)
        fused = [batch[part.operation] for part in bucket.parts]
        assert {response.request.collective for response in fused} == {bucket.collective}
        if len(bucket.parts) > 1:
            assert sum(part.nbytes for part in bucket.parts) <= limit
            assert all(part.nbytes < limit for part in bucket.parts)
            assert len({batch[p.operation].kinds[p.tensor] for p in bucket.parts}) == 1
            if separate_groups:
                groups = {p.operation for p in bucket.parts if len(batch[p.operation].request.tensors) > 1}
                assert len(groups) <= 1
                assert not groups or len({p.operation for p in bucket.parts}) == 1
    # A bucket takes its place when its first tensor comes, and nothing in the same process set overtakes a barrier.
    firsts = [(bucket.parts[0].operation, bucket.parts[0].tensor) for bucket in buckets]
    assert firsts == sorted(firsts)
    for place, bucket in enumerate(buckets):
        if bucket.collective is Collective.BARRIER:
            (part,) = bucket.parts
            alike = batch[part.operation].request.process_set
            before = [p.operation for b in buckets[:place] for p in b.parts]
            after = [p.operation for b in buckets[place + 1 :] for p in b.parts]
            assert all(op < part.operation for op in before if batch[op].request.process_set == alike)
            assert all(op > part.operation for op in after if batch[op].request.process_set == alike)


@given(st.lists(responses, max_size=30), st.integers(0, 200))
def test_a_rank_plans_alike_whatever_other_sets_it_is_in(batch: list[Response], limit: int) -> None:
    mine = [index for index, response in enumerate(batch) if response.request.process_set == 1]
    alone = plan([batch[index] for index in mine], limit)
    among_others = [b for b in plan(batch, limit) if batch[b.parts[0].operation].request.process_set == 1]
    translated = [[(mine[part.operation], part.tensor) for part in bucket.parts] for bucket in alone]
    assert translated == [[(part.operation, part.tensor) for part in bucket.parts] for bucket in among_others]


def test_a_barrier_of_another_set_ends_no_bucket() -> None:
    assert operations(plan([allreduce("a", 8), barrier(1), allreduce("b", 8)], LIMIT)) == [[0, 2], [1]]


def test_small_tensors_travel_together() -> None:
    batch = [allreduce(str(i), 100) for i in range(50)]
    (bucket,) = plan(batch, LIMIT)
    assert bucket == Bucket(Collective.ALLREDUCE, tuple(Part(i, 0, 100) for i in range(50)))


def test_the_limit_is_reached_and_not_passed() -> None:
    batch = [allreduce(str(i), 30) for i in range(7)]
    assert operations(plan(batch, 90)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert operations(plan(batch, 89)) == [[0, 1], [2, 3], [4, 5], [6]]


def test_no_limit_means_no_fusion() -> None:
    batch = [allreduce("a", 1, 2), allreduce("empty", 0), allgather("g", 1, 1)]
    assert operations(plan(batch, 0)) == [[0], [0], [1], [2]]


def test_a_large_tensor_travels_alone_and_does_not_end_a_bucket() -> None:
    batch = [allreduce("a", 8), allreduce("large", LONE_BYTES), allreduce("b", 8), allreduce("less", LONE_BYTES - 1)]
    assert operations(plan(batch, LIMIT)) == [[0, 2, 3], [1]]


def test_a_tensor_beyond_a_small_limit_travels_alone() -> None:
    batch = [allreduce("a", 8), allreduce("beyond", 200), allreduce("b", 8)]
    assert operations(plan(batch, 100)) == [[0, 2], [1]]


@pytest.mark.parametrize("separate", [False, True])
def test_groups_stay_by_themselves_if_asked(separate: bool) -> None:
    batch = [allreduce("a", 8), allreduce("group", 8, 8), allreduce("b", 8), allreduce("other", 8, 8)]
    expected = [[0, 2], [1, 1], [3, 3]] if separate else [[0, 1, 1, 2, 3, 3]]
    assert operations(plan(batch, LIMIT, separate_groups=separate)) == expected


@pytest.mark.parametrize(
    "other",
    [
        allreduce("x", 8, dtype=DType.INT8),
        allreduce("x", 8, device="cuda"),
        allreduce("x", 8, op=ReduceOp.MAX),
        allreduce("x", 8, op=ReduceOp.AVERAGE),
        allreduce("x", 8, prescale=0.5),
        allreduce("x", 8, postscale=0.5),
        allreduce("x", 8, process_set=1),
        allgather("x", 4, 4),
        broadcast("x", 8),
    ],
    ids=["dtype", "device", "op", "average", "prescale", "postscale", "process set", "allgather", "broadcast"],
)
def test_what_differs_is_kept_apart(other: Response) -> None:
    assert operations(plan([allreduce("a", 8), other, allreduce("b", 8)], LIMIT)) == [[0, 2], [1]]


def test_gathers_of_different_dtypes_share_a_bucket() -> None:
    batch = [allgather("a", 1, 2), allgather("b", 3, 0, dtype=DType.FLOAT32, width=2)]
    (bucket,) = plan(batch, LIMIT)
    assert bucket.parts == (Part(0, 0, 3), Part(1, 0, 3 * 2 * 4))


def test_broadcasts_are_fused_if_they_come_from_one_rank() -> None:
    several = [broadcast("a", 8), broadcast("b", 8, root=1), broadcast("c", 8), broadcast("d", LONE_BYTES)]
    assert operations(plan(several, LIMIT)) == [[0, 2], [1], [3]]


def test_nothing_overtakes_a_barrier() -> None:
    batch = [allreduce("a", 8), barrier(), allreduce("b", 8), barrier(), barrier(), allreduce("c", 8)]
    buckets = plan(batch, LIMIT)
    assert operations(buckets) == [[0], [1], [2], [3], [4], [5]]
    assert buckets[1].parts == (Part(1, -1, 0),)


def test_empty_tensors_have_their_place() -> None:
    assert operations(plan([allreduce("a", 0), allreduce("b", 8), allgather("g", 0, 0)], LIMIT)) == [[0, 1], [2]]


@given(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(1, 200))
def test_a_gathers_plan_does_not_depend_on_a_ranks_own_rows(rows: list[list[int]], limit: int) -> None:
    """Every rank plans from the agreed Response, whose sizes are the results'."""

    def request(tensor: int, rank: int) -> Request:
        return Request(str(tensor), Collective.ALLGATHER, (TensorSpec(DType.INT16, (rows[tensor][rank], 3)),))

    agreed = [agree({r: request(t, r) for r in range(3)}, (0, 1, 2)) for t in range(len(rows))]
    assert [response.sizes for response in agreed] == [(sum(r) * 6,) for r in rows]
    totals = [
        agree({r: request(t, [2, 0, 1][r]) for r in range(3)}, (0, 1, 2)) for t in range(len(rows))
    ]  # the same rows, held by other ranks
    assert plan(agreed, limit) == plan(totals, limit)
