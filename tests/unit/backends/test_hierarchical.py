"""Reduced in the host first: the same results as a flat exchange, and each byte across a wire once (pain 29)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels
from hvdgloo._backends.base import Work
from hvdgloo._backends.hierarchical import HierarchicalBackend, Layout, Thresholds, layout_of
from hvdgloo._backends.local import LocalBackend, LocalGroup
from hvdgloo.errors import BackendError, ConnectError
from hvdgloo.types import Buffer, DType, ReduceOp
from tests.support.backends import finish

LAYOUTS = [(2, 2), (2, 1), (3, 1, 2), (1, 3), (2, 2, 2)]
CHUNK = 48
ALWAYS, NEVER = Thresholds(1, 1), Thresholds(1 << 60, 1 << 60)


class Counting:
    """A backend that notes what a rank hands to it: the operation, its bytes, and where they begin.

    Args:
        notes: where; several backends may share it.
    """

    def __init__(self, name: str, backend: LocalBackend, notes: list[tuple[str, int, int]]) -> None:
        self._name = name
        self._backend = backend
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if name not in ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall"):
            return method

        def call(buffer: Buffer, *arguments: Any) -> Work:
            self._notes.append((f"{self._name} {name}", buffer.nbytes, buffer.address))
            work: Work = method(buffer, *arguments)
            return work

        return call


class Ranks:
    """All ranks of a set, a thread for each."""

    def __init__(
        self, sizes: tuple[int, ...], thresholds: Thresholds = ALWAYS, chunk: int = CHUNK, *, few: bool = False
    ) -> None:
        self.sizes, self.size, self.owners = sizes, sum(sizes), min(sizes)
        flat = LocalGroup(self.size)
        local = [LocalGroup(count) for count in sizes]
        cross = [LocalGroup(len(sizes)) for _ in range(self.owners)]
        self.backends: list[HierarchicalBackend] = []
        self.notes: list[list[tuple[str, int, int]]] = []
        for rank in range(self.size):
            layout, notes = Layout(sizes, rank), []
            here = Counting("local", local[layout.host].backend(layout.place), notes)
            across = None
            if layout.place < self.owners:
                across = Counting("cross", cross[layout.place].backend(layout.host), notes)
            backend = HierarchicalBackend(
                layout,
                here if sizes[layout.host] > 1 else None,  # type: ignore[arg-type]
                across,  # type: ignore[arg-type]
                partial(self._open_flat, flat, rank, notes),
                thresholds,
                few=Counting("few", flat.backend(rank), notes) if few else None,  # type: ignore[arg-type]
                chunk=chunk,
            )
            self.backends.append(backend)
            self.notes.append(notes)

    @staticmethod
    def _open_flat(group: LocalGroup, rank: int, notes: list[tuple[str, int, int]], cancelled: Any) -> Any:
        assert not cancelled()
        notes.append(("flat opened", 0, 0))
        return Counting("flat", group.backend(rank), notes)

    def noted(self, rank: int, name: str) -> list[str]:
        """The operations that a rank has handed to one of its backends."""
        return [what for what, _, _ in self.notes[rank] if what.startswith(name)]

    def crossed(self, rank: int) -> int:
        """Bytes that a rank has handed to be taken across."""
        return sum(nbytes for what, nbytes, _ in self.notes[rank] if what.startswith("cross"))

    def run(self, body: Callable[[int, HierarchicalBackend], None]) -> None:
        failures: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                body(rank, self.backends[rank])
            except BaseException as error:
                failures.append(error)
                self.backends[rank].abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def values(rank: int, count: int, dtype: DType) -> np.ndarray:
    small = (np.arange(count) + rank) % 3
    if dtype is DType.BFLOAT16:
        return kernels.narrow_bfloat16(small.astype(np.float32))
    return small.astype(dtype.numpy_dtype)


@pytest.fixture(params=[ALWAYS, NEVER], ids=["in slices", "whole"])
def thresholds(request: pytest.FixtureRequest) -> Thresholds:
    """Everything is cut into slices for all owners, or nothing is."""
    assert isinstance(request.param, Thresholds)
    return request.param


@pytest.fixture(params=LAYOUTS, ids=str)
def ranks(request: pytest.FixtureRequest, thresholds: Thresholds) -> Ranks:
    return Ranks(request.param, thresholds)


@pytest.mark.parametrize("dtype", list(DType), ids=str)
def test_allreduce(ranks: Ranks, dtype: DType) -> None:
    def body(rank: int, backend: HierarchicalBackend) -> None:
        for count in (1, 5, 100):
            array = values(rank, count, dtype)
            expected = kernels.reduce([values(r, count, dtype) for r in range(ranks.size)], dtype, ReduceOp.SUM)
            finish(backend.allreduce(Buffer.of_array(array, dtype), ReduceOp.SUM))
            assert array.tolist() == expected.tolist(), count

    ranks.run(body)
    assert not any(ranks.noted(rank, "flat") for rank in range(ranks.size))


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.name)
def test_other_reductions(ranks: Ranks, op: ReduceOp) -> None:
    def body(rank: int, backend: HierarchicalBackend) -> None:
        array = values(rank, 9, DType.INT32)
        expected = kernels.reduce([values(r, 9, DType.INT32) for r in range(ranks.size)], DType.INT32, op)
        finish(backend.allreduce(Buffer.of_array(array), op))
        assert array.tolist() == expected.tolist()

    ranks.run(body)
    assert not any(ranks.noted(rank, "flat") for rank in range(ranks.size))


def test_broadcast_from_everyone(ranks: Ranks) -> None:
    def body(rank: int, backend: HierarchicalBackend) -> None:
        for root in range(ranks.size):
            array = np.arange(77) + 1000 * rank
            finish(backend.broadcast(Buffer.of_array(array), root))
            assert array.tolist() == (np.arange(77) + 1000 * root).tolist()

    ranks.run(body)


@pytest.mark.parametrize("counts", [lambda rank: 7, lambda rank: (rank * 5) % 4, lambda rank: 9 * (rank == 1)])
def test_what_moves_rows(ranks: Ranks, counts: Callable[[int], int]) -> None:
    nbytes = [8 * counts(rank) for rank in range(ranks.size)]
    whole = np.concatenate([np.arange(counts(rank)) + 100 * rank for rank in range(ranks.size)])

    def body(rank: int, backend: HierarchicalBackend) -> None:
        own = np.arange(counts(rank)) + 100 * rank
        gathered = np.empty(sum(nbytes) // 8, np.int64)
        finish(backend.allgather(Buffer.of_array(own), Buffer.of_array(gathered), nbytes))
        assert gathered.tolist() == whole.tolist()
        given = whole * (rank + 1)
        before = given.copy()
        part = np.empty(counts(rank), np.int64)
        finish(backend.reducescatter(Buffer.of_array(given), Buffer.of_array(part), nbytes, ReduceOp.SUM))
        assert part.tolist() == (own * (ranks.size * (ranks.size + 1) // 2)).tolist()
        assert given.tolist() == before.tolist()
        sent = np.arange(ranks.size) + 10 * rank
        received = np.empty(ranks.size, np.int64)
        eights = [8] * ranks.size
        finish(backend.alltoall(Buffer.of_array(sent), Buffer.of_array(received), eights, eights))
        assert received.tolist() == [10 * source + rank for source in range(ranks.size)]

    ranks.run(body)


def test_operations_are_executed_in_the_order_in_which_they_began_wherever_they_are_waited_for(ranks: Ranks) -> None:
    def body(rank: int, backend: HierarchicalBackend) -> None:
        for turn in range(4):
            first, second = np.full(40, rank + 1), np.full(30, 2.0 * rank)
            works = [backend.allreduce(Buffer.of_array(first), ReduceOp.SUM)]
            if (rank + turn) % 2:
                finish(works[0])
            works.append(backend.allreduce(Buffer.of_array(second), ReduceOp.SUM))
            works.append(backend.broadcast(Buffer.of_array(third := np.full(20, rank)), 0))
            for work in works if (rank + turn) % 3 else reversed(works):
                finish(work)
            total = sum(range(ranks.size))
            assert first.tolist() == [total + ranks.size] * 40
            assert second.tolist() == [2.0 * total] * 30
            assert third.tolist() == [0] * 20

    ranks.run(body)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_each_takes_its_share_across_and_no_more(sizes: tuple[int, ...]) -> None:
    """A slice of a tensor; of regions, both hosts' where there are two, else its own host's."""
    ranks = Ranks(sizes, chunk=3000)
    count, each = 1000, 200
    whole = 8 * each * ranks.size

    def share(rank: int, operation: str) -> float:
        if Layout(ranks.sizes, rank).place >= ranks.owners:
            return 0
        if operation == "allgather" and len(ranks.sizes) > 2:
            return 8 * each * ranks.sizes[Layout(ranks.sizes, rank).host] / ranks.owners
        return (whole if operation in ("allgather", "reducescatter") else 8 * count) / ranks.owners

    def body(rank: int, backend: HierarchicalBackend) -> None:
        array, rows, part = np.zeros(count), np.zeros(each * ranks.size), np.zeros(each)
        blocks = [8 * each] * ranks.size
        for operation, call in {
            "allreduce": lambda: backend.allreduce(Buffer.of_array(array), ReduceOp.SUM),
            "broadcast": lambda: backend.broadcast(Buffer.of_array(array), ranks.size - 1),
            "allgather": lambda: backend.allgather(Buffer.of_array(part), Buffer.of_array(rows), blocks),
            "reducescatter": lambda: backend.reducescatter(
                Buffer.of_array(rows), Buffer.of_array(part), blocks, ReduceOp.SUM
            ),
        }.items():
            before = ranks.crossed(rank)
            finish(call())
            taken, expected = ranks.crossed(rank) - before, share(rank, operation)
            assert abs(taken - expected) <= 0.05 * expected + 1, operation

    ranks.run(body)


def test_what_is_reduced_crosses_where_it_lies(ranks: Ranks) -> None:
    arrays = [np.full(60, float(rank)) for rank in range(ranks.size)]
    ranks.run(lambda rank, backend: finish(backend.allreduce(Buffer.of_array(arrays[rank]), ReduceOp.SUM)))
    for array, notes in zip(arrays, ranks.notes, strict=True):
        begin = array.ctypes.data
        assert notes
        assert all(begin <= address <= address + nbytes <= begin + array.nbytes for _, nbytes, address in notes)


def test_one_chunk_is_in_memory_while_others_are_on_the_wire() -> None:
    ranks = Ranks((2, 2))
    arrays = [np.zeros(5 * CHUNK // 8) for _ in range(4)]
    ranks.run(lambda rank, backend: finish(backend.allreduce(Buffer.of_array(arrays[rank]), ReduceOp.SUM)))
    away, back = ["local reducescatter", "cross allreduce"], ["local allgather"]
    for rank in range(4):
        steps = [what for what, _, _ in ranks.notes[rank]]
        assert steps == 3 * away + back + away + back + away + 3 * back


@pytest.mark.parametrize("limits", [Thresholds(100, 1000), Thresholds(1000, 100)], ids=["allreduce", "others"])
def test_of_small_tensors_only_the_hosts_leaders_go_across(limits: Thresholds) -> None:
    ranks = Ranks((2, 3), limits, chunk=3000)

    def body(rank: int, backend: HierarchicalBackend) -> None:
        for count in (10, 15):  # 80 and 120 bytes, of all ranks together
            array = np.full(count, rank)
            finish(backend.allreduce(Buffer.of_array(array), ReduceOp.SUM))
            assert array.tolist() == [10] * count
            finish(backend.broadcast(Buffer.of_array(array), 4))
            part, blocks = np.zeros(count // 5, np.int64), [8 * count // 5] * 5
            finish(backend.reducescatter(Buffer.of_array(array), Buffer.of_array(part), blocks, ReduceOp.SUM))
            assert part.tolist() == [50] * (count // 5)
            finish(backend.allgather(Buffer.of_array(part), Buffer.of_array(array), blocks))
            assert array.tolist() == [50] * count

    ranks.run(body)
    every = ["cross allreduce", "cross broadcast", "cross reducescatter", "cross allgather"]
    swapped = ["cross broadcast", "cross broadcast"]  # the regions of two hosts
    sliced = every[:1] if limits.allreduce == 100 else ["cross broadcast", "cross reducescatter", *swapped]
    followed = every[1:] if limits.allreduce == 100 else every[:1]
    for leader in (0, 2):
        noted = ranks.noted(leader, "cross")
        assert noted[:4] == every
        assert sorted(noted[4:]) == sorted(sliced + followed)
    for other in (1, 3):
        assert ranks.noted(other, "cross") == sliced
    assert ranks.noted(4, "cross") == []  # it has no slice
    assert not any(ranks.noted(rank, "flat") for rank in range(5))


def test_few_ranks_send_what_is_small_to_each_other_at_once() -> None:
    ranks = Ranks((2, 2), Thresholds(100, 1000), few=True)

    def body(rank: int, backend: HierarchicalBackend) -> None:
        for count in (12, 16):  # 96 and 128 bytes, of all ranks together
            array, rows = np.full(count, rank), np.zeros(count, np.int64)
            works = [backend.allreduce(Buffer.of_array(array), ReduceOp.SUM)]
            part, blocks = np.zeros(count // 4, np.int64), [count * 2] * 4
            works.append(backend.reducescatter(Buffer.of_array(array), Buffer.of_array(part), blocks, ReduceOp.SUM))
            works.append(backend.allgather(Buffer.of_array(part), Buffer.of_array(rows), blocks))
            works.append(backend.broadcast(Buffer.of_array(array), 3))
            sent, received, eights = np.arange(4) + 10 * rank, np.zeros(4, np.int64), [8] * 4
            works.append(backend.alltoall(Buffer.of_array(sent), Buffer.of_array(received), eights, eights))
            for work in reversed(works):
                finish(work)
            assert array.tolist() == [6] * count
            assert rows.tolist() == [24] * count
            assert received.tolist() == [10 * source + rank for source in range(4)]

    ranks.run(body)
    after = ["few reducescatter", "few allgather", "few broadcast", "few alltoall"]
    for rank in range(4):
        assert ranks.noted(rank, "few") == ["few allreduce", *after, *after]
        assert ranks.noted(rank, "cross")
        assert not ranks.noted(rank, "flat")


def test_the_flat_group_is_opened_by_the_first_alltoall_and_only_once() -> None:
    ranks = Ranks((2, 1))

    def body(rank: int, backend: HierarchicalBackend) -> None:
        sent, eights = np.arange(3) + 10 * rank, [8] * 3
        received = [np.empty(3, np.int64) for _ in range(2)]
        assert not ranks.noted(rank, "flat")
        works = [backend.alltoall(Buffer.of_array(sent), Buffer.of_array(each), eights, eights) for each in received]
        for work in reversed(works):
            finish(work)
        assert all(each.tolist() == [rank, 10 + rank, 20 + rank] for each in received)

    ranks.run(body)
    for rank in range(3):
        assert ranks.noted(rank, "flat") == ["flat opened", "flat alltoall", "flat alltoall"]


def test_a_flat_group_that_cannot_be_opened_is_a_failure_of_the_alltoall() -> None:
    def refuse(cancelled: Callable[[], bool]) -> Any:
        raise ConnectError("no rank answers")

    wire: Any = _Wire()
    backend = HierarchicalBackend(Layout((1, 1), 0), None, wire, refuse, ALWAYS)
    two = Buffer.of_array(np.zeros(2, np.int64))
    work = backend.alltoall(two, Buffer.of_array(np.zeros(2, np.int64)), [8, 8], [8, 8])
    with pytest.raises(ConnectError, match="no rank answers"):
        finish(work)


def test_an_abort_gives_up_opening_the_flat_group() -> None:
    began = threading.Event()

    def open_flat(cancelled: Callable[[], bool]) -> Any:
        began.set()
        deadline = time.monotonic() + 10
        while not cancelled() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        raise ConnectError("given up" if cancelled() else "late")

    wire: Any = _Wire()
    backend = HierarchicalBackend(Layout((1, 1), 0), None, wire, open_flat, ALWAYS)
    two = Buffer.of_array(np.zeros(2, np.int64))
    work = backend.alltoall(two, Buffer.of_array(np.zeros(2, np.int64)), [8, 8], [8, 8])
    assert began.wait(5)
    assert not work.completes_within(0)
    backend.abort()
    with pytest.raises(ConnectError, match="given up"):
        finish(work)


@pytest.mark.parametrize(
    ("hosts", "rank", "expected"),
    [
        ([0, 0, 1, 1], 2, Layout((2, 2), 2)),
        ([5, 5, 3], 0, Layout((2, 1), 0)),
        ([0, 0, 0], 1, None),
        ([0, 1, 2], 1, None),
        ([0, 1, 0, 1], 1, None),
    ],
    ids=["even", "uneven", "one host", "one rank each", "not host by host"],
)
def test_where_it_is_of_use(hosts: Sequence[int], rank: int, expected: Layout | None) -> None:
    assert layout_of(hosts, rank) == expected
    if expected is not None:
        assert [expected.of(each) for each in range(expected.size)] == [
            (host, place) for host, count in enumerate(expected.sizes) for place in range(count)
        ]


class _Wire:
    """A cross group whose operations end when told, the first of them with an error."""

    name, blocks, in_rank_order = "wire", False, False

    def __init__(self) -> None:
        self.ended = False
        self.works: list[_Crossing] = []

    def abort(self) -> None:
        self.ended = True

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        self.works.append(_Crossing(self, fails=not self.works))
        return self.works[-1]


class _Crossing:
    def __init__(self, wire: _Wire, *, fails: bool) -> None:
        self._wire, self._fails, self._told = wire, fails, False

    def lasts(self) -> None:
        """It has failed, and has not ended yet."""
        self._told = True

    def completes_within(self, timeout: float) -> bool:
        if self._told and not self._wire.ended:
            return False
        if self._fails:
            raise BackendError("the peer is gone")
        return self._wire.ended


def _unused(cancelled: Callable[[], bool]) -> Any:
    raise AssertionError("a flat group was not asked for")


def test_a_failure_of_a_small_tensor_is_final_when_its_memory_is_no_longer_touched() -> None:
    """A backend raises as soon as it knows that an operation has failed, and once more when that has ended."""
    wire: Any = _Wire()
    backend = HierarchicalBackend(Layout((1, 1), 0), None, wire, _unused, NEVER)
    work = backend.allreduce(Buffer.of_array(np.ones(12, np.float32)), ReduceOp.SUM)
    with pytest.raises(BackendError, match="the peer is gone"):
        work.completes_within(0)
    assert len(wire.works) == 1
    wire.works[0].lasts()
    assert not work.completes_within(0)
    wire.ended = True
    with pytest.raises(BackendError, match="the peer is gone"):
        work.completes_within(0)


def test_a_failure_is_final_when_nothing_is_on_the_wire_any_more() -> None:
    wire: Any = _Wire()
    backend = HierarchicalBackend(Layout((1, 1), 0), None, wire, _unused, ALWAYS, chunk=8)
    first = backend.allreduce(Buffer.of_array(np.ones(12, np.float32)), ReduceOp.SUM)
    second = backend.allreduce(Buffer.of_array(np.ones(12, np.float32)), ReduceOp.SUM)
    with pytest.raises(BackendError, match="the peer is gone"):
        first.completes_within(0)
    begun = len(wire.works)
    assert begun > 1
    for work in (first, second):
        assert not work.completes_within(0)  # chunks are still on their way into the memory
    wire.ended = True
    for work in (first, second):
        for _ in range(2):
            with pytest.raises(BackendError, match="the peer is gone"):
                work.completes_within(0)
    assert len(wire.works) == begun  # nothing was begun after the failure
