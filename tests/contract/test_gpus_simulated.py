"""CUDA tensors on simulated GPUs: in order whatever runs when, memory kept as long as needed, errors and no waits.

The library's code from the front-end to NCCL's process group is the real one; ``tests.support.gpus`` plays the GPUs.
Every test ends with the checker's verdict: no two accesses to one memory that nothing orders.
"""

from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")


from hvdgloo._backends import gpu  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.process_sets import ProcessSet  # noqa: E402
from hvdgloo._engine import executor  # noqa: E402
from hvdgloo._engine.handle import Handle  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo._job.observing import _Rank  # noqa: E402
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.frameworks import load  # noqa: E402
from tests.support.gpus import (  # noqa: E402
    AS_THEY_ARE,
    GpuTensor,
    HostAccessError,
    Schedule,
    Simulated,
    functions,
    on_gpu,
    simulated,
)
from tests.support.gpus.machine import POISON  # noqa: E402
from tests.support.gpus.worlds import world  # noqa: E402
from tests.support.threads import Task  # noqa: E402

SIZE = 2  # ranks, unless a test says otherwise
SCHEDULES = [("late", 0), ("any", 1)]


@pytest.fixture(params=SCHEDULES, ids=lambda param: f"{param[0]}{param[1]}")
def gpus(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    with simulated(Schedule(*request.param)) as made:
        yield made


@pytest.fixture
def late() -> Iterator[Simulated]:
    with simulated(Schedule("late")) as made:
        yield made


frontend_of = load("torch").frontend


def rows(rank: int, count: int = 2, device: int = 0) -> GpuTensor:
    return on_gpu(torch.arange(count * 3.0).reshape(count, 3) + 10 * rank, device)


def total(count: int = 2, size: int = SIZE) -> list[Any]:
    every = (torch.arange(count * 3.0).reshape(count, 3) + 10 * rank for rank in range(size))
    summed: list[Any] = sum(every).tolist()  # type: ignore[union-attr]
    return summed


class TestTheSimulation:
    """It follows CUDA's rules, or nothing else here means anything."""

    def test_it_has_every_function_of_the_module(self) -> None:
        for name, function in functions().items():
            if name not in AS_THEY_ARE:
                wanted = list(inspect.signature(function).parameters)
                assert list(inspect.signature(getattr(Simulated, name)).parameters) == ["self", *wanted]

    def test_nothing_happens_before_a_thread_waits(self, late: Simulated) -> None:
        tensor = on_gpu(torch.ones(3))
        event = gpu.record(tensor.device)
        assert not event.has_happened
        assert tensor.tolist() == [1.0] * 3
        assert event.has_happened

    def test_streams_run_apart_and_the_checker_says_so(self) -> None:
        with pytest.raises(AssertionError, match=r"add_.*on stream 1 writes, and nothing orders it after: upload"):
            self._write_on_another_stream()

    @staticmethod
    def _write_on_another_stream() -> None:
        with simulated() as made:
            tensor = on_gpu(torch.ones(3))
            with made.machine.on_stream(made.machine.new_stream(0)):
                tensor += 1

    def test_an_event_orders_them(self, late: Simulated) -> None:
        tensor = on_gpu(torch.ones(3))
        event = gpu.record(tensor.device)
        with late.machine.on_stream(late.machine.new_stream(0)):
            gpu.wait(event, tensor.device)
            tensor += 1
            assert tensor.tolist() == [2.0] * 3

    def test_what_one_thread_has_seen_another_does_not_know(self) -> None:
        with pytest.raises(AssertionError, match=r"mul.*reads, and nothing orders it after: upload"):
            self._look_on_another_thread(by_a_handle=False)
        self._look_on_another_thread(by_a_handle=True)

    @staticmethod
    def _look_on_another_thread(*, by_a_handle: bool) -> None:
        with simulated() as made:
            tensor, handle = on_gpu(torch.ones(3)), Handle("looked at")

            def look() -> None:
                gpu.settle(tensor.device)
                handle.resolve()

            thread = threading.Thread(target=look, name="looks-0")
            thread.start()
            thread.join(5)
            if by_a_handle:
                handle.wait(5)
            with made.machine.on_stream(made.machine.new_stream(0)):
                double = tensor * 2
                gpu.used_here(tensor)
                del double

    def test_freed_memory_is_used_again_at_once(self, late: Simulated) -> None:
        tensor = on_gpu(torch.ones(3))
        address = tensor.data_ptr()
        del tensor
        again = gpu.empty((3,), torch.float32, torch.device("cuda", 0))
        assert again.data_ptr() == address
        assert again.view(torch.uint8).tolist() == [POISON] * 12

    def test_memory_that_another_stream_uses_is_missed_when_it_is_freed(self) -> None:
        with pytest.raises(AssertionError, match=r"reuse of freed memory"):
            self._free_while_another_stream_reads(say_so=False)
        self._free_while_another_stream_reads(say_so=True)

    @staticmethod
    def _free_while_another_stream_reads(*, say_so: bool) -> None:
        with simulated() as made:
            tensor = on_gpu(torch.ones(3))
            event = gpu.record(tensor.device)
            with made.machine.on_stream(made.machine.new_stream(0)):
                gpu.wait(event, tensor.device)
                double = tensor * 2
                if say_so:
                    gpu.used_here(tensor)
            address = tensor.data_ptr()
            del tensor
            assert (gpu.empty((3,), torch.float32, torch.device("cuda", 0)).data_ptr() == address) != say_so
            with made.machine.on_stream(made.machine._streams[1]):
                del double

    def test_the_host_reads_no_gpu(self, late: Simulated) -> None:
        buffer = TorchAdapter().export(rows(0))
        with pytest.raises(HostAccessError):
            buffer.array()

    def test_threads_have_streams_of_their_own(self, late: Simulated) -> None:
        device = torch.device("cuda", 0)
        gpu.use_own_stream(device)
        mine = late.current(device)
        theirs = Task(lambda: late.current(device)).result()
        assert theirs == late.machine.default_stream(0)
        assert theirs != mine

    def test_gradients_are_computed_there(self, gpus: Simulated) -> None:
        weight = torch.nn.Parameter(on_gpu(torch.full((3, 2), 2.0)))
        fired = []
        weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter))
        (rows(0) @ weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]]
        assert fired == [weight]


@pytest.mark.parametrize("operations", ["nccl", "gloo"])
def test_every_collective_in_every_order(gpus: Simulated, operations: str) -> None:
    def body(context: Context) -> None:
        hvd, rank = frontend_of(context), context.rank
        tensor = rows(rank)
        summed = hvd.allreduce(tensor, op=ReduceOp.SUM)
        assert isinstance(summed, GpuTensor)
        summed += 1  # on this thread's stream, right after another thread's stream has written it
        assert (summed - 1).tolist() == total()
        many = [on_gpu(torch.full((n + 1,), float(n))) for n in range(12)]
        for n, result in enumerate(hvd.grouped_allreduce(many, op=ReduceOp.SUM)):
            assert result.tolist() == [2.0 * n] * (n + 1)
        whole = [*rows(0).tolist(), *rows(1).tolist()]
        assert hvd.allgather(tensor).tolist() == whole
        assert hvd.allgather(tensor[: rank + 1]).tolist() == [whole[0], *whole[2:]]
        assert hvd.broadcast(tensor, root_rank=1).tolist() == rows(1).tolist()
        assert hvd.alltoall(tensor, splits=[1, 1])[0].tolist() == [whole[rank], whole[2 + rank]]
        assert hvd.reducescatter(tensor, op=ReduceOp.SUM).tolist() == total()[rank : rank + 1]
        assert hvd.allreduce_(tensor.t(), op=ReduceOp.MAX).t().tolist() == rows(1).tolist()
        assert tensor.tolist() == rows(1).tolist()

    with world(gpus, operations=operations) as made:
        made.run(body)


@pytest.mark.parametrize("operations", ["auto", "nccl"])
def test_a_rank_that_is_alone_needs_no_communicator(gpus: Simulated, operations: str) -> None:
    def body(context: Context) -> list[str]:
        hvd = frontend_of(context)
        for kind in (torch.float32, torch.int16, torch.bool):
            tensor = rows(0).to(kind)
            values = tensor.tolist()
            for op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX, ReduceOp.ADASUM):
                if kind is torch.float32 or op in (ReduceOp.SUM, ReduceOp.MAX):
                    assert hvd.allreduce(tensor, op=op).tolist() == values
            assert hvd.allgather(tensor).tolist() == values
            assert hvd.broadcast(tensor, root_rank=0).tolist() == values
            assert hvd.alltoall(tensor, splits=[1])[0].tolist() == values[:1]
            if kind is not torch.bool:
                assert hvd.reducescatter(tensor, op=ReduceOp.SUM).tolist() == values
        scaled = hvd.allreduce(rows(0), op=ReduceOp.SUM, prescale_factor=3.0, postscale_factor=2.0)
        assert scaled.tolist() == (6.0 * rows(0)).tolist()
        many = [on_gpu(torch.full((n + 1,), float(n))) for n in range(12)]
        for n, result in enumerate(hvd.grouped_allreduce(many)):
            assert result.tolist() == [float(n)] * (n + 1)
        pair = hvd.grouped_allgather([rows(0), on_gpu(torch.ones(1))])
        assert [each.tolist() for each in pair] == [rows(0).tolist(), [1.0]]
        return [plane.name for _, plane in enumerate(context.engine._groups[0].backends)]

    with world(gpus, 1, operations) as made:
        (names,) = made.run(body)
    assert names[1] == ("alone" if operations == "auto" else "nccl")
    assert bool(gpus.nccl.groups) == (operations == "nccl")


@pytest.mark.parametrize("operations", ["nccl", "gloo"])
def test_observers_learn_each_ranks_gpu_and_why_its_tensors_travel_as_they_do(gpus: Simulated, operations: str) -> None:
    def body(context: Context) -> tuple[int, int, list[tuple[str, str, str]]]:
        subject = _Rank(context.config, context.engine, 0.0)
        before = subject.gpu()
        frontend_of(context).allreduce(rows(context.rank), op=ReduceOp.SUM)
        return before, subject.gpu(), [(plane.name, plane.device, plane.why) for plane in subject.planes()]

    with world(gpus, operations=operations) as made:
        for before, index, planes in made.run(body):
            assert (before, index) == (-1, 0)  # each rank's own, which it sees as its first
            assert [device for _, device, _ in planes] == ["cpu", "cuda"]
            name, _, why = planes[1]
            assert (name == "nccl") is (operations == "nccl")
            assert why


def test_a_collective_comes_after_the_stream_that_made_its_tensor(gpus: Simulated) -> None:
    def body(hvd: Frontend[Any]) -> None:
        side = gpus.machine.new_stream(0)
        with gpus.machine.on_stream(side):
            tensor = rows(hvd.rank())
            handle = hvd.allreduce_async_(tensor, op=ReduceOp.SUM)
            assert hvd.synchronize(handle).tolist() == total()

    with world(gpus) as made:
        made.run(body, frontend_of)


def test_memory_of_what_is_not_waited_for_is_kept(gpus: Simulated) -> None:
    """The program lets go of a tensor right after handing it over; its memory is the next that it gets."""

    def body(hvd: Frontend[Any]) -> None:
        handles = []
        for _ in range(4):
            handles.append(hvd.allreduce_async(rows(hvd.rank()), op=ReduceOp.SUM))
            gpu.empty((2, 3), torch.float32, torch.device("cuda", 0)).fill_(7)
        assert [hvd.synchronize(handle).tolist() for handle in handles] == [total()] * 4

    with world(gpus) as made:
        made.run(body, frontend_of)


@pytest.mark.parametrize("completion", ["host", "stream"])
def test_results_that_the_engine_has_allocated_outlive_their_last_use(late: Simulated, completion: str) -> None:
    """Their memory belongs to the engine's stream, which does not know what the program's still reads."""

    def body(hvd: Frontend[Any]) -> None:
        sums = []
        for number in range(3):
            gathered = hvd.allgather(rows(hvd.rank()))
            sums.append(gathered + number)
            del gathered
        whole = torch.cat([torch.tensor(rows(rank).tolist()) for rank in range(SIZE)])
        assert [each.tolist() for each in sums] == [(whole + number).tolist() for number in range(3)]

    with world(late, gpu_completion=completion) as made:
        made.run(body, frontend_of)


def test_sets_on_two_gpus_of_one_process_wait_each_on_its_own(gpus: Simulated) -> None:
    """3.8: the current GPU of the data thread is none of these."""

    def body(hvd: Frontend[Any]) -> None:
        sets = [hvd.add_process_set(ProcessSet(ranks)) for ranks in ([0, 1], [0, 2])]
        ours = {number: each for number, each in enumerate(sets) if each.included()}
        tensors = {number: rows(min(hvd.rank(), 1), device=1 + number) for number in ours}
        handles = {}
        for number, tensor in tensors.items():
            tensor += number
            handles[number] = hvd.allreduce_async_(tensor, op=ReduceOp.SUM, process_set=ours[number])
        for number, handle in handles.items():
            result = hvd.synchronize(handle)
            assert result.device.index == 1 + number
            assert (result - 2 * number).tolist() == total()

    with world(gpus, 3) as made:
        made.run(body, frontend_of)


def test_a_capture_is_refused_in_a_sentence(late: Simulated) -> None:
    """3.9"""

    def body(hvd: Frontend[Any]) -> None:
        tensor = rows(hvd.rank())
        late.capturing.add(late.current(tensor.device))
        with pytest.raises(InvalidArgumentError, match=r"cannot be captured into a CUDA graph"):
            hvd.allreduce(tensor, name="captured")
        late.capturing.discard(late.current(tensor.device))
        assert hvd.allreduce(tensor, op=ReduceOp.SUM).tolist() == total()

    with world(late) as made:
        made.run(body, frontend_of)


def test_a_program_captures_while_a_collective_is_under_way(late: Simulated) -> None:
    """The data thread looks for events all the time, which CUDA forbids while others capture unless it says that it
    knows what it does."""

    def body(hvd: Frontend[Any]) -> None:
        tensor = rows(hvd.rank())
        stream = late.machine.new_stream(tensor.device.index)
        handle = hvd.allreduce_async(tensor, op=ReduceOp.SUM)
        late.capturing.add(stream)
        assert hvd.synchronize(handle) is not None
        late.capturing.discard(stream)

    with world(late) as made:
        made.run(body, frontend_of)


def test_what_the_program_has_queued_delays_no_connection(late: Simulated) -> None:
    """NCCL's first collective runs on a stream of its own, and so is not behind a long kernel of the program."""

    def body(context: Context) -> None:
        device = torch.device("cuda", 0)
        stuck = late.machine.default_stream(device.index)
        over = threading.Event()
        late.machine.launch(stuck, "a long kernel", lambda: None, ready=over.is_set)
        side = late.machine.new_stream(device.index)
        with late.machine.on_stream(side):
            tensor = rows(context.rank)
            try:
                assert frontend_of(context).allreduce(tensor, op=ReduceOp.SUM) is not None
            finally:
                over.set()

    with world(late, connect_timeout=3.0) as made:
        made.run(body)


def released(memory: list[weakref.ref[Any]]) -> bool:
    """Tell whether it has no owner any more."""
    gc.collect()
    return all(each() is None for each in memory)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


LARGE = 1 << 16  # elements of a bucket that is not worth fusing with others


class TestCompletion:
    """5.14"""

    @pytest.mark.parametrize("completion", ["host", "stream"])
    def test_buckets_start_without_waiting_for_earlier_ones(self, late: Simulated, completion: str) -> None:
        started = threading.Barrier(SIZE)

        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0))  # the group is connected
            tensors = [on_gpu(torch.full((LARGE,), float(n + hvd.rank()))) for n in range(6)]
            before = late.nccl.submitted
            started.wait(10)
            late.machine.schedule.is_paused = True
            handles = [hvd.allreduce_async_(tensor, op=ReduceOp.SUM) for tensor in tensors]
            until(lambda: late.nccl.submitted == before + 6 * SIZE)
            until(lambda: hvd.poll(handles[-1]) == (completion == "stream"))
            late.machine.schedule.is_paused = False
            for n, handle in enumerate(handles):
                assert hvd.synchronize(handle)[:2].tolist() == [2.0 * n + 1] * 2

        with world(late, gpu_completion=completion, fusion_threshold=4 * LARGE) as made:
            made.run(body, frontend_of)

    def test_small_ones_wait_and_are_fused(self, late: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(executor, "_FUSING_SECONDS", 60.0)  # however slow this machine is
        meeting = threading.Barrier(SIZE)

        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0))
            meeting.wait(10)
            before = late.nccl.submitted
            late.machine.schedule.is_paused = True
            meeting.wait(10)
            handles = [hvd.allreduce_async(rows(hvd.rank()), op=ReduceOp.SUM) for _ in range(40)]
            meeting.wait(10)
            late.machine.schedule.is_paused = False
            assert [hvd.synchronize(handle).tolist() for handle in handles] == [total()] * 40
            meeting.wait(10)
            assert late.nccl.submitted < before + 10 * SIZE

        with world(late) as made:
            made.run(body, frontend_of)

    def test_small_ones_wait_for_a_moment_only(self, late: Simulated) -> None:
        meeting = threading.Barrier(SIZE)

        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0))
            meeting.wait(10)
            before = late.nccl.submitted
            late.machine.schedule.is_paused = True
            meeting.wait(10)
            for number in range(1, 6):
                hvd.allreduce_async(rows(hvd.rank()), op=ReduceOp.SUM)
                until(lambda number=number: late.nccl.submitted >= before + number * SIZE)  # type: ignore[misc]
            meeting.wait(10)
            late.machine.schedule.is_paused = False

        with world(late) as made:
            made.run(body, frontend_of)

    @pytest.mark.parametrize("count", [1, 5])
    def test_a_collective_of_the_host_waits_for_no_gpu(self, late: Simulated, count: int) -> None:
        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0), name="first")
            together.wait(10)
            late.machine.schedule.is_paused = True
            handle = hvd.allreduce_async(on_gpu(torch.ones(LARGE)), name="long")
            others = [hvd.allreduce_async(torch.ones(1 << 20), name=f"host {i}", op=ReduceOp.SUM) for i in range(count)]
            for other in others:
                assert float(hvd.synchronize(other)[0]) == SIZE
            assert not hvd.poll(handle)
            together.wait(10)
            late.machine.schedule.is_paused = False
            hvd.synchronize(handle)

        together = threading.Barrier(SIZE)
        with world(late, operation_timeout=10) as made:
            made.run(body, frontend_of)

    def test_what_follows_is_queued_behind_a_result(self, gpus: Simulated) -> None:
        """Nothing is waited for on the host, in any step; each step's kernels come after its collective."""

        def body(hvd: Frontend[Any]) -> None:
            weight, gradient = on_gpu(torch.zeros(LARGE)), on_gpu(torch.zeros(LARGE))
            hvd.allreduce(gradient)
            waits = gpus.machine.waits
            for step in range(5):
                gradient.copy_(weight + hvd.rank() + step)
                hvd.allreduce_(gradient, op=ReduceOp.SUM, name="gradient")
                weight += gradient
            fresh = [hvd.allreduce(weight, name="fresh") for _ in range(3)]
            assert gpus.machine.waits == waits
            expected = 0
            for step in range(5):
                expected += 2 * expected + 2 * step + 1
            assert weight[:2].tolist() == [expected] * 2
            assert [result[:1].tolist() for result in fresh] == [[expected]] * 3

        with world(gpus, gpu_completion="stream") as made:
            made.run(body, frontend_of)

    def test_a_lost_peer_is_noticed_by_a_later_operation(self, late: Simulated) -> None:
        def body(context: Context) -> None:
            hvd = frontend_of(context)
            hvd.allreduce(rows(0), name="first")
            tensor = on_gpu(torch.ones(LARGE))
            late.nccl.faults.lost.add(1)
            hvd.allreduce_(tensor, name="lost")  # returns; the GPU waits for rank 1
            until(lambda: context.engine.error is not None)
            with pytest.raises(HorovodInternalError, match="has not completed within its time"):
                hvd.allreduce_(tensor, name="next")

        with world(late, gpu_completion="stream", operation_timeout=0.5) as made:
            made.run(body)


class TestAborted:
    """3.7: memory is released when its event has happened, else never."""

    @staticmethod
    def lose_a_rank(gpus: Simulated, completion: str) -> list[weakref.ref[Any]]:
        memory = []

        def body(context: Context) -> None:
            hvd = frontend_of(context)
            hvd.allreduce(rows(0), name="first")
            gpus.nccl.faults.lost.add(1)
            tensor = on_gpu(torch.ones(LARGE))
            memory.append(weakref.ref(tensor.storage_))
            handle = hvd.allreduce_async_(tensor, name="lost")
            until(lambda: context.engine.error is not None)
            with pytest.raises(HorovodInternalError):
                hvd.allreduce(tensor, name="next")
            if completion == "host":
                with pytest.raises(HorovodInternalError):
                    hvd.synchronize(handle)
            # By then NCCL has been told to give up: what is released has ended after that.
            until(lambda: all(group.is_aborted for group in gpus.nccl.groups))

        with world(gpus, gpu_completion=completion, operation_timeout=1.0) as made:
            made.run(body)
        return memory

    @pytest.mark.parametrize("completion", ["host", "stream"])
    def test_memory_is_kept_while_a_gpu_may_still_use_it(self, late: Simulated, completion: str) -> None:
        late.nccl.faults.hangs_after_abort.update(range(SIZE))
        memory = self.lose_a_rank(late, completion)
        with world(late):  # a later job changes nothing about that
            gc.collect()
            assert all(each() is not None for each in memory)
        late.nccl.faults.hangs_after_abort.clear()
        late.machine.finish()
        with world(late):  # but notices when they have ended
            until(lambda: released(memory))

    def test_a_gpu_that_needs_a_second_to_end_what_was_aborted_leaves_nothing_behind(self, late: Simulated) -> None:
        late.nccl.faults.hangs_after_abort.update(range(SIZE))

        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0), name="first")
            late.nccl.faults.lost.add(1)
            handle = hvd.allreduce_async_(on_gpu(torch.ones(LARGE)), name="lost")
            until(lambda: all(group.is_aborted for group in late.nccl.groups))
            if hvd.rank() == 0:
                threading.Timer(1.0, late.nccl.faults.hangs_after_abort.clear).start()
            with pytest.raises(HorovodInternalError):
                hvd.synchronize(handle)

        with world(late, operation_timeout=1.0) as made:
            made.run(body, frontend_of)
        assert not executor._kept
        assert all(group.is_shut_down for group in late.nccl.groups)

    def test_nothing_is_released_before_what_follows_an_aborted_collective_has_ended(self, late: Simulated) -> None:
        """Averaging and unpacking are queued behind it, and still write what the program owns."""
        left: list[str] = []

        def body(hvd: Frontend[Any]) -> None:
            hvd.allreduce(rows(0), name="first")
            tensors = [on_gpu(torch.ones(LARGE)) for _ in range(2)]

            def released() -> None:
                left.extend(each.what for s in late.machine._streams for each in s.queue if "reuse" not in each.what)

            for tensor in tensors:
                weakref.finalize(tensor.storage_, released).atexit = False
            late.nccl.faults.lost.add(1)
            handle = hvd.grouped_allreduce_async_(tensors, name="lost")
            del tensor, tensors
            with pytest.raises(HorovodInternalError):
                hvd.synchronize(handle)

        with world(late, operation_timeout=1.0) as made:
            made.run(body, frontend_of)
        assert left == []

    @pytest.mark.parametrize("completion", ["host", "stream"])
    def test_memory_is_released_where_the_gpu_has_ended(self, late: Simulated, completion: str) -> None:
        memory = self.lose_a_rank(late, completion)
        until(lambda: released(memory))
