"""The data thread over a backend that records what it is asked for."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hvdgloo._backends import kernels
from hvdgloo._engine import executor
from hvdgloo._engine.executor import QUICK_BYTES, Executor
from hvdgloo._engine.fusion import LONE_BYTES
from hvdgloo._engine.messages import Request, Response, Tune
from hvdgloo._engine.planes import DEPTH, Group
from hvdgloo._engine.submission import PersistentRequest, Submission
from hvdgloo.errors import BackendError, PeerLostError
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec

SIZE = 3
RANK = 1
LIMIT = 8 * LONE_BYTES


def memory(buffer: Buffer) -> bytes:
    return ctypes.string_at(buffer.address, buffer.nbytes)


class FakeWork:
    """Ends when it is waited for; ``gate``, ``error`` and ``effect`` say how."""

    def __init__(self, backend: FakeBackend, number: int, effect: Callable[[], None]) -> None:
        self._backend = backend
        self._number = number
        self._effect = effect
        self._waited = False

    def completes_within(self, timeout: float) -> bool:
        gate = self._backend.gates.get(self._number)
        if timeout < 0.1 and gate is not None:  # the control thread does not wait for long
            self._backend.log.append(("slow", self._number))
            return False
        if not self._waited:
            self._waited = True
            self._backend.log.append(("wait", self._number))
        if gate is not None:
            self._backend.waiting.set()
            if not gate.wait(timeout):
                return False
        error = self._backend.errors.get(self._number)
        if error is not None:
            raise error
        self._effect()
        self._backend.log.append(("end", self._number))
        return True


@dataclass
class FakeBackend:
    """Plays a set of ranks that all hold what this one does."""

    name: str = "fake"
    blocks: bool = False
    log: list[tuple[str, Any]] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    gates: dict[int, threading.Event] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    waiting: threading.Event = field(default_factory=threading.Event)
    number: int = -1

    def _begin(self, what: str, buffer: Buffer, effect: Callable[[], None]) -> FakeWork:
        self.number += 1
        self.log.append((what, self.number))
        self.buffers.append(buffer)
        self.seen.append(memory(buffer))
        return FakeWork(self, self.number, effect)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> FakeWork:
        def effect() -> None:
            array = buffer.array()
            array[:] = kernels.reduce([array] * SIZE, buffer.dtype, op)

        return self._begin(f"allreduce {op.name}", buffer, effect)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> FakeWork:
        assert source.nbytes == nbytes[RANK]
        assert target.nbytes == sum(nbytes)
        own = memory(source)

        def effect() -> None:
            # Other ranks' bytes are their number; a rank's block is as long as its share of each tensor.
            pieces = [own if rank == RANK else bytes([rank]) * count for rank, count in enumerate(nbytes)]
            ctypes.memmove(target.address, b"".join(pieces), sum(nbytes))

        return self._begin(f"allgather {list(nbytes)}", source, effect)

    def broadcast(self, buffer: Buffer, root: int) -> FakeWork:
        return self._begin(f"broadcast {root}", buffer, lambda: None)

    def scale(self, buffer: Buffer, factor: float) -> None:
        self.log.append(("scale", factor))
        kernels.scale(buffer, factor)

    def abort(self) -> None:
        self.log.append(("abort", None))

    def close(self) -> None:
        self.log.append(("close", None))

    def abandon(self) -> None:
        self.log.append(("abandon", None))

    def calls(self, *kinds: str) -> list[tuple[str, Any]]:
        return [entry for entry in self.log if entry[0].split()[0] in kinds]


class Bench:
    """An Executor with all that it needs."""

    def __init__(self, *, fusion_threshold: int = LIMIT, operation_timeout: float = 10.0, **options: Any) -> None:
        self.backend = FakeBackend()
        self.room = 0
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        self.executor = Executor(
            "hvdgloo-data-test",
            {0: Group(self.backend, tuple(range(SIZE)), RANK), 5: Group(self.backend, (1, 4, 6), 0)},
            self.open_group,
            fusion_threshold=fusion_threshold,
            separate_groups=False,
            operation_timeout=operation_timeout,
            **options,
        )
        self.executor.set_callbacks(on_room=self._on_room, on_failure=self._on_failure)

    def open_group(self, number: int, ranks: tuple[int, ...]) -> Group | None:
        return Group(self.backend, ranks, ranks.index(RANK)) if RANK in ranks else None

    def _on_room(self) -> None:
        self.room += 1

    def _on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def close(self) -> None:
        for gate in self.backend.gates.values():
            gate.set()
        if self.executor._thread.ident is not None:
            self.executor.abort(PeerLostError("the test is over"))
            assert self.executor.join(10)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**options: Any) -> Bench:
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for made in benches:
        made.close()


Pair = tuple[Response, Submission]


def allreduce(name: str, *arrays: np.ndarray, in_place: bool = False, **options: Any) -> Pair:
    inputs = [Buffer.of_array(array) for array in arrays]
    outputs = inputs if in_place else [Buffer.of_array(np.full_like(array, 77)) for array in arrays]
    ready = options.pop("ready", None)
    request = Request(name, Collective.ALLREDUCE, tuple(b.spec for b in inputs), **options)
    return Response(request), Submission(PersistentRequest(request), inputs, outputs, None, ready)


def allgather(name: str, rows: Sequence[int], array: np.ndarray) -> Pair:
    assert rows[RANK] == len(array)
    request = Request(name, Collective.ALLGATHER, (Buffer.of_array(array).spec,))
    # The agreed request has the first rank's shape.
    agreed = Request(name, Collective.ALLGATHER, (TensorSpec(DType(array.dtype.name), (rows[0], *array.shape[1:])),))

    def allocate(index: int, spec: TensorSpec) -> Buffer:
        return Buffer.of_array(np.full(spec.shape, 99, spec.dtype.numpy_dtype))

    buffer = Buffer.of_array(array)
    return Response(agreed, (tuple(rows),)), Submission(PersistentRequest(request), [buffer], [buffer], allocate, None)


def broadcast(name: str, array: np.ndarray, root: int, process_set: int = 0) -> Pair:
    buffer, output = Buffer.of_array(array), Buffer.of_array(np.full_like(array, 77))
    request = Request(name, Collective.BROADCAST, (buffer.spec,), root=root, process_set=process_set)
    return Response(request), Submission(PersistentRequest(request), [buffer], [output])


def barrier(name: str) -> Pair:
    request = Request(name, Collective.BARRIER)
    return Response(request), Submission(PersistentRequest(request), (), ())


def results(pair: Pair) -> list[list[Any]]:
    return [buffer.array().tolist() for buffer in pair[1].handle.wait(10)]


def large(value: int) -> np.ndarray:
    return np.full(LONE_BYTES // 4, value, np.int32)


class TestPacking:
    @pytest.fixture(autouse=True, params=["control thread", "data thread"])
    def where(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Small buckets are executed on either thread, with the same results."""
        if request.param == "data thread":
            monkeypatch.setattr(executor, "QUICK_BYTES", -1)

    def test_small_tensors_are_one_call_and_find_their_outputs(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        first, second = np.arange(3, dtype=np.int32), np.arange(10, 15, dtype=np.int32)
        batch = [allreduce("a", first), allreduce("b", second, np.array([7], np.int32))]
        b.executor.execute(batch)
        b.executor.start()
        assert results(batch[0]) == [[0, 3, 6]]
        assert results(batch[1]) == [[30, 33, 36, 39, 42], [21]]
        assert b.backend.calls("allreduce") == [("allreduce SUM", 0)]
        assert b.backend.seen == [np.array([0, 1, 2, 10, 11, 12, 13, 14, 7], np.int32).tobytes()]
        assert first.tolist() == [0, 1, 2]  # inputs are not written

    def test_a_large_tensor_is_reduced_in_its_own_output(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        pair = allreduce("large", large(2))
        b.executor.execute([pair])
        b.executor.start()
        (output,) = pair[1].handle.wait(10)
        assert b.backend.buffers[0].address == output.address
        assert (output.array() == 6).all()
        assert (pair[1].inputs[0].array() == 2).all()

    def test_in_place_nothing_is_copied(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        array = np.array([1, 2], np.int32)
        pair = allreduce("x", array, in_place=True)
        b.executor.execute([pair])
        b.executor.start()
        pair[1].handle.wait(10)
        assert b.backend.buffers[0].address == array.ctypes.data
        assert array.tolist() == [3, 6]

    @pytest.mark.parametrize("count", [1, 3])
    def test_scales_are_applied_around_the_sum(self, bench: Callable[..., Bench], count: int) -> None:
        b = bench()
        batch = [
            allreduce(str(i), np.array([2.0, i]), op=ReduceOp.AVERAGE, prescale=0.5, postscale=4.0)
            for i in range(count)
        ]
        b.executor.execute(batch)
        b.executor.start()
        for i, pair in enumerate(batch):
            assert results(pair) == [[4.0, 2.0 * i]]
        order = [entry for entry in b.backend.log if entry[0] in ("scale", "allreduce SUM", "end")]
        assert order == [("scale", 0.5), ("allreduce SUM", 0), ("end", 0), ("scale", 4.0 / SIZE)]

    def test_factors_of_one_cost_nothing(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        pair = allreduce("x", np.ones(2), op=ReduceOp.MAX)
        b.executor.execute([pair])
        b.executor.start()
        pair[1].handle.wait(10)
        assert b.backend.calls("scale") == []
        assert b.backend.calls("allreduce") == [("allreduce MAX", 0)]

    def test_gathers_of_several_tensors_are_one_call(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        batch = [
            allgather("a", [1, 2, 0], np.array([[10, 11], [12, 13]], np.uint8)),
            allgather("b", [2, 1, 1], np.array([258], np.int16)),
        ]
        b.executor.execute(batch)
        b.executor.start()
        (a,), (c,) = batch[0][1].handle.wait(10), batch[1][1].handle.wait(10)
        assert (a.shape, a.array().tolist()) == ((3, 2), [0, 0, 10, 11, 12, 13])
        assert (c.shape, c.array().tolist()) == ((4,), [0, 0, 258, 0x0202])
        assert b.backend.calls("allgather") == [("allgather [6, 6, 2]", 0)]

    def test_one_gather_goes_straight_into_its_result(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        array = np.array([5, 6], np.uint8)
        pair = allgather("a", [1, 2, 3], array)
        b.executor.execute([pair])
        b.executor.start()
        assert results(pair) == [[0, 5, 6, 2, 2, 2]]
        assert b.backend.buffers[0].address == array.ctypes.data

    def test_a_broadcasts_root_is_a_rank_within_its_set(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        pair = broadcast("x", np.array([1, 2]), root=6, process_set=5)
        b.executor.execute([pair])
        b.executor.start()
        assert results(pair) == [[1, 2]]
        assert b.backend.calls("broadcast") == [("broadcast 2", 0)]

    def test_nothing_to_move_is_no_call(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        batch = [
            allreduce("r", np.empty(0)),
            allgather("g", [0, 0, 0], np.empty((0, 2))),
            broadcast("b", np.empty(0), 0),
            barrier("w"),
        ]
        b.executor.execute(batch)
        b.executor.start()
        assert [results(pair) for pair in batch] == [[[]], [[]], [[]], []]
        assert b.backend.calls("allreduce", "allgather", "broadcast") == []

    def test_a_group_resolves_when_its_last_bucket_has(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.gates[1] = threading.Event()
        group = allreduce("group", np.array([1], np.int32), large(1))
        b.executor.execute([group])
        b.executor.start()
        assert b.backend.waiting.wait(10)
        assert b.backend.calls("end") == [("end", 0)]
        assert not group[1].handle.done()
        b.backend.gates[1].set()
        assert results(group)[0] == [3]

    def test_fences_come_before_the_memory_is_read(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        arrays = [np.zeros(2, np.int32), np.zeros(2, np.int32)]
        calls: list[int] = []

        def fence(index: int) -> Callable[[], None]:
            def ready() -> None:
                calls.append(index)
                arrays[index][:] = index + 1

            return ready

        batch = [allreduce(str(i), arrays[i], ready=fence(i)) for i in range(2)]
        b.executor.execute(batch)
        b.executor.start()
        assert [results(pair) for pair in batch] == [[[3, 3]], [[6, 6]]]
        assert sorted(calls) == [0, 1]


class TestQuick:
    """Small buckets on the control thread; here the test's own thread plays it."""

    def test_a_small_bucket_needs_no_data_thread(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        batch = [allreduce("a", np.array([1, 2], np.int32)), allreduce("b", np.array([3], np.int32))]
        b.executor.execute(batch)  # the data thread was not even started
        assert [op.handle.done() for _, op in batch] == [True, True]
        assert [results(pair) for pair in batch] == [[[3, 6]], [[9]]]
        assert (b.executor.backlog, b.room) == (0, 1)

    @pytest.mark.parametrize("under_way", [False, True], ids=["", "while a GPU is at work"])
    def test_a_waiting_caller_does_what_the_data_thread_has_not_begun(
        self, bench: Callable[..., Bench], under_way: bool
    ) -> None:
        """But while that waits for either a GPU or the queue, no other thread takes from the queue."""
        b = bench()
        pair = allreduce("x", np.array([1], np.int32))
        b.executor.execute([pair], may_wait=False)
        if under_way:
            b.executor._under_way.append(object())  # type: ignore[arg-type]
        b.executor.execute_queued()
        assert pair[1].handle.done() is not under_way
        b.executor._under_way.clear()
        b.executor.start()
        assert [results(each) for each in [pair] if each[1].handle.wait(10)] == [[[3]]]

    @pytest.mark.parametrize("what", ["large", "fence", "two buckets", "busy"])
    def test_everything_else_does(self, bench: Callable[..., Bench], what: str) -> None:
        b = bench()
        small = np.array([1], np.int32)
        batch = {
            "large": [allreduce("x", np.zeros(QUICK_BYTES // 4 + 1, np.int32))],
            "fence": [allreduce("x", small, ready=lambda: None)],
            "two buckets": [allreduce("x", small), allreduce("y", np.ones(1))],
            "busy": [allreduce("x", small)],
        }[what]
        if what == "busy":
            b.executor.execute([allreduce("before", large(1))])
        b.executor.execute(batch)
        assert b.backend.log == []
        b.executor.start()
        for _, op in batch:
            op.handle.wait(10)
        assert [number for _, number in b.backend.calls("end")] == list(range(b.backend.number + 1))

    def test_the_data_thread_takes_over_what_is_slow(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.gates[0] = threading.Event()
        slow, next_one = allreduce("slow", np.array([1], np.int32)), allreduce("next", np.array([2], np.int32))
        b.executor.execute([slow])
        assert b.backend.log == [("allreduce SUM", 0), ("slow", 0)]
        assert b.executor.backlog == 1
        b.executor.execute([next_one])
        b.executor.start()
        assert b.backend.waiting.wait(10)
        assert not slow[1].handle.done()
        b.backend.gates[0].set()
        assert [results(slow), results(next_one)] == [[[3]], [[6]]]
        assert b.backend.calls("end") == [("end", 0), ("end", 1)]
        assert b.executor.backlog == 0

    def test_a_failure_is_the_data_threads_to_report(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.errors[0] = BackendError("reset")
        pair = allreduce("a", np.array([1], np.int32))
        b.executor.execute([pair])
        assert b.failures == []
        b.executor.start()
        assert b.failed.wait(10)
        assert [str(error) for error in b.failures] == ["reset"]
        assert not pair[1].handle.done()
        b.executor.abort(PeerLostError("lost"))
        with pytest.raises(PeerLostError):
            pair[1].handle.wait(10)


class TestOverlap:
    def test_a_few_buckets_are_under_way_at_once_and_end_in_order(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        batch = [allreduce(str(i), large(i)) for i in range(DEPTH + 3)]
        b.executor.execute(batch)
        assert b.executor.backlog == DEPTH + 3
        b.executor.start()
        for pair in batch:
            pair[1].handle.wait(10)
        under_way = most = 0
        for what, _ in b.backend.calls("allreduce", "end"):
            under_way += 1 if what.startswith("allreduce") else -1
            most = max(most, under_way)
        assert most == DEPTH
        assert [number for _, number in b.backend.calls("end")] == list(range(DEPTH + 3))

    def test_fused_buckets_under_way_have_memory_of_their_own(self, bench: Callable[..., Bench]) -> None:
        b = bench(fusion_threshold=64)
        batch = [allreduce(str(i), np.full(4, i, np.int32)) for i in range(40)]
        b.executor.execute(batch)
        b.executor.start()
        for i, pair in enumerate(batch):
            assert results(pair) == [[3 * i] * 4]
        addresses = [buffer.address for buffer in b.backend.buffers]
        assert len(addresses) == 10
        for i in range(len(addresses) - DEPTH):
            assert len(set(addresses[i : i + DEPTH])) == DEPTH

    def test_room_is_announced_after_each_bucket(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        drained = threading.Event()
        b.executor.execute([allreduce("a", large(1)), barrier("b"), allreduce("c", large(1))])
        b.executor.when_drained(drained.set)
        b.executor.start()
        assert drained.wait(10)
        assert b.room == 3
        assert b.executor.backlog == 0

    def test_drained_means_that_everything_before_has_ended(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.gates[0] = threading.Event()
        pair = allreduce("a", large(1))
        done: list[bool] = []
        drained = threading.Event()

        def callback() -> None:
            done.append(pair[1].handle.done())
            drained.set()

        b.executor.execute([pair])
        b.executor.when_drained(callback)
        b.executor.start()
        assert b.backend.waiting.wait(10)
        assert done == []
        b.backend.gates[0].set()
        assert drained.wait(10)
        assert done == [True]

    def test_an_operation_that_ends_while_its_batch_is_still_being_queued(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        inner = b.executor._queue
        pairs = [barrier("a"), barrier("b")]

        class Eager:
            """A queue whose put returns only when the data thread has served the item."""

            def put(self, item: Any) -> None:
                before = b.executor._completed
                inner.put(item)
                if isinstance(item, tuple):
                    for _ in range(10_000):
                        if b.executor._completed > before or b.failed.wait(0.001):
                            return

            def get(self, block: bool = True) -> Any:
                return inner.get(block)

        b.executor._queue = Eager()  # type: ignore[assignment]
        b.executor.start()
        b.executor.execute(pairs)
        for pair in pairs:
            pair[1].handle.wait(10)
        assert b.failures == []

    def test_a_call_may_take_the_operation_timeout_and_its_transfer_time(self, bench: Callable[..., Bench]) -> None:
        b = bench(operation_timeout=0.3)
        b.backend.gates[0] = threading.Event()
        nbytes = 1 << 18
        since = time.monotonic()
        b.executor.execute([allreduce("x", np.zeros(nbytes, np.uint8))])
        b.executor.start()
        assert b.failed.wait(10)
        assert time.monotonic() - since >= 0.3 + nbytes / (1 << 20)
        assert "allreduce of x has not completed" in str(b.failures[0])


class TestFailure:
    def test_handles_and_memory_are_kept_until_the_backend_is_aborted(self, bench: Callable[..., Bench]) -> None:
        """A backend may still write after its wait has failed."""
        b = bench(fusion_threshold=64)
        b.backend.errors[0] = BackendError("connection reset")
        batch = [allreduce(str(i), np.full(4, i, np.int32)) for i in range(8)]
        memories = [weakref.ref(buffer.owner) for _, op in batch for buffer in op.inputs]
        handles = [op.handle for _, op in batch]
        b.executor.execute(batch)
        del batch
        b.executor.start()
        assert b.failed.wait(10)
        gc.collect()
        assert [str(error) for error in b.failures] == ["connection reset"]
        assert not any(handle.done() for handle in handles)
        assert all(reference() is not None for reference in memories)
        verdict = PeerLostError("rank 2 was lost", rank=2)
        b.executor.abort(verdict)
        for handle in handles:
            with pytest.raises(PeerLostError) as caught:
                handle.wait(10)
            assert caught.value is verdict
        assert b.executor.join(10)

    def test_what_else_was_under_way_is_waited_for_after_the_abort(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.errors[0] = BackendError("reset")
        b.backend.gates[1] = threading.Event()
        batch = [allreduce(str(i), large(i)) for i in range(2)]
        b.executor.execute(batch)
        b.executor.start()
        assert b.failed.wait(10)
        b.executor.abort(PeerLostError("lost"))
        assert b.backend.waiting.wait(10)
        assert not any(op.handle.done() for _, op in batch)
        b.backend.gates[1].set()
        for _, op in batch:
            with pytest.raises(PeerLostError):
                op.handle.wait(10)
        assert b.backend.log.index(("abort", None)) < b.backend.log.index(("wait", 1))

    def test_an_operation_of_which_the_backend_never_lets_go_is_remembered(self, bench: Callable[..., Bench]) -> None:
        """Or its process group would be released, whose destructor waits for it."""
        b = bench(operation_timeout=0.1)
        b.backend.gates[0] = threading.Event()
        (_, operation) = pair = allreduce("x", np.ones(4, np.int32))
        b.executor.execute([pair], may_wait=False)
        b.executor.start()
        assert b.failed.wait(10)
        b.executor.abort(PeerLostError("lost"))
        with pytest.raises(PeerLostError):
            operation.handle.wait(10)
        assert b.executor.join(10)
        assert b.executor.is_stuck

    def test_the_first_verdict_counts(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.errors[0] = BackendError("reset")
        pair = allreduce("a", large(1))
        b.executor.execute([pair])
        b.executor.start()
        assert b.failed.wait(10)
        first = PeerLostError("first")
        b.executor.abort(first)
        b.executor.abort(PeerLostError("second"))
        with pytest.raises(PeerLostError) as caught:
            pair[1].handle.wait(10)
        assert caught.value is first

    def test_an_abort_ends_what_is_queued_and_reports_no_failure_of_its_own(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        b.backend.gates[0] = threading.Event()
        b.backend.errors[0] = BackendError("aborted")
        batch = [allreduce(str(i), large(i)) for i in range(DEPTH + 2)]
        b.executor.execute(batch)
        b.executor.start()
        assert b.backend.waiting.wait(10)
        b.executor.abort(PeerLostError("lost"))
        b.backend.gates[0].set()
        for _, op in batch:
            with pytest.raises(PeerLostError):
                op.handle.wait(10)
        assert b.failures == []
        assert b.executor.join(10)

    def test_a_fence_that_raises_fails_the_job_and_not_the_thread_alone(self, bench: Callable[..., Bench]) -> None:
        b = bench()

        def fence() -> None:
            raise RuntimeError("CUDA error")

        pair = allreduce("a", np.ones(2), ready=fence)
        b.executor.execute([pair])
        b.executor.start()
        assert b.failed.wait(10)
        assert str(b.failures[0]) == "CUDA error"

    def test_a_gather_without_allocation_is_a_failure_too(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        response, op = allgather("g", [1, 1, 1], np.ones(1))
        op.allocate = None
        b.executor.execute([(response, op)])
        b.executor.start()
        assert b.failed.wait(10)
        assert isinstance(b.failures[0], BackendError)
        assert "without a way to allocate" in str(b.failures[0])

    def test_a_short_operation_timeout_is_no_limit_for_the_verdict(self, bench: Callable[..., Bench]) -> None:
        """Else who was lost is not said, and memory is looked after before anything was aborted."""
        b = bench(operation_timeout=0.05)
        b.backend.errors[0] = BackendError("reset")
        pair = allreduce("a", large(1))
        b.executor.execute([pair])
        b.executor.start()
        assert b.failed.wait(10)
        assert not b.executor.join(0.3)
        b.executor.abort(PeerLostError("rank 2 was lost"))
        with pytest.raises(PeerLostError):
            pair[1].handle.wait(10)

    def test_without_any_verdict_handles_fail_after_a_time(self, bench: Callable[..., Bench]) -> None:
        b = bench(verdict_timeout=0.1)
        b.backend.errors[0] = BackendError("reset")
        pair = allreduce("a", large(1))
        b.executor.execute([pair])
        b.executor.start()
        with pytest.raises(Exception, match="the engine ended before this operation did"):
            pair[1].handle.wait(10)

    def test_stop_lets_what_is_queued_complete(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        pairs = [allreduce(str(i), large(i)) for i in range(DEPTH + 1)]
        b.executor.execute(pairs)
        b.executor.stop()
        b.executor.start()
        assert b.executor.join(10)
        assert all(op.handle.done() and op.handle.error is None for _, op in pairs)

    def test_a_thread_that_never_started_is_joined_at_once(self, bench: Callable[..., Bench]) -> None:
        assert bench().executor.join(0)


class TestTuning:
    """Settings that change while buckets are under way and queued."""

    @staticmethod
    def tunable(b: Bench) -> None:
        b.backend.hierarchical_threshold = 0  # type: ignore[attr-defined]
        b.backend.tune = lambda threshold: b.backend.log.append(("tune", threshold))  # type: ignore[attr-defined]

    def test_fusion_changes_with_the_next_batch(self, bench: Callable[..., Bench]) -> None:
        b = bench(fusion_threshold=LIMIT)
        arrays = [np.ones(1000, np.int32) for _ in range(4)]
        batches = [[allreduce(f"{turn}.{i}", a) for i, a in enumerate(arrays)] for turn in range(3)]
        b.executor.execute(batches[0])
        b.executor.tune(Tune(8000, 0.0, 0, 0))
        b.executor.execute(batches[1])
        b.executor.tune(Tune(LIMIT, 0.0, 0, 0))
        b.executor.execute(batches[2])
        b.executor.start()
        for pair in batches[2]:
            assert results(pair) == [[3] * 1000]
        assert [len(seen) for seen in b.backend.seen] == [16000, 8000, 8000, 16000]

    def test_plans_that_were_kept_are_made_again(self, bench: Callable[..., Bench]) -> None:
        b = bench(fusion_threshold=LIMIT)
        b.executor.start()
        for limit, count in ((LIMIT, 1), (4000, 2)):
            b.executor.tune(Tune(limit, 0.0, 0, 0))
            batch = [allreduce(name, np.ones(1000, np.int32)) for name in "ab"]
            numbered = [(Response(response.request, signature=i), own) for i, (response, own) in enumerate(batch)]
            before = len(b.backend.seen)
            b.executor.execute(numbered)
            assert [results(pair) for pair in batch] == [[[3] * 1000]] * 2
            assert len(b.backend.seen) - before == count

    def test_a_plane_changes_between_what_was_ordered_before_and_after(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        self.tunable(b)
        b.backend.gates[0] = threading.Event()
        first, second = allreduce("a", np.ones(2)), allreduce("b", np.ones(2))
        b.executor.start()
        b.executor.execute([first])
        b.executor.tune(Tune(LIMIT, 0.0, 4096, 0))
        b.executor.execute([second])  # the thread that orders must not execute it before the plane has changed
        assert b.backend.calls("tune") == []
        assert b.executor.backlog == 3
        b.backend.gates[0].set()
        assert results(second) == [[3.0, 3.0]]
        order = [entry for entry in b.backend.log if entry[0] in ("allreduce SUM", "end", "tune")]
        tuned = [("tune", 4096)] * 2  # the planes of two process sets
        assert order == [("allreduce SUM", 0), ("end", 0), *tuned, ("allreduce SUM", 1), ("end", 1)]
        assert b.executor.backlog == 0

    def test_a_set_that_is_added_later_has_the_same_settings(self, bench: Callable[..., Bench]) -> None:
        b = bench()
        self.tunable(b)
        b.executor.start()
        b.executor.tune(Tune(LIMIT, 0.0, 4096, 0))
        request = Request("add", Collective.ADD_PROCESS_SET, ranks=(0, 1))
        pair = Response(request, value=9), Submission(PersistentRequest(request), (), ())
        b.executor.execute([pair])
        pair[1].handle.wait(10)
        assert b.backend.calls("tune") == [("tune", 4096)] * 3
