"""Collectives of simulated GPUs over simulated NCCL: which of its operations they become, and how connecting, failing
and ending stay within their time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdgloo._backends import gpu, nccl  # noqa: E402
from hvdgloo._backends.cuda import Gpu  # noqa: E402
from hvdgloo._backends.select import Planes, gloo_provider, plane_settings  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._engine import executor  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.config import Config  # noqa: E402
from hvdgloo.errors import BackendError, HorovodInternalError, RendezvousError  # noqa: E402
from hvdgloo.rendezvous import MemoryStore  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.environment import entries, seen_by_c  # noqa: E402
from tests.support.frameworks import load  # noqa: E402
from tests.support.gpus import Simulated, on_gpu, simulated  # noqa: E402
from tests.support.gpus.worlds import planes  # noqa: E402
from tests.support.threads import Task  # noqa: E402
from tests.support.topologies import on_hosts  # noqa: E402
from tests.support.world import World  # noqa: E402

SIZE = 3


@pytest.fixture
def gpus() -> Iterator[Simulated]:
    with simulated() as made:
        yield made


frontend_of = load("torch").frontend


class Calls:
    """Recorder of calls to NCCL and to the GPUs, from now on."""

    def __init__(self, gpus: Simulated, patch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for group in gpus.nccl.groups:
            for name in ("allreduce", "_allgather_base", "allgather", "broadcast", "alltoall_base"):
                patch.setattr(group, name, self._noting(name, getattr(group, name)))
            patch.setattr(group, "_reduce_scatter_base", self._noting("reducescatter", group._reduce_scatter_base))
        for name in ("fuse", "scatter"):
            patch.setattr(gpu, name, self._noting(name, getattr(gpu, name)))

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.made.append(name)
            return function(*args)

        return noted


def test_an_even_reducescatter_is_nccl_s_own(gpus: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.uint32, torch.uint64, torch.bool]

    def body(hvd: Frontend[Any]) -> None:
        hvd.allreduce(on_gpu(torch.ones(1)), name="connects")
        hvd.barrier()
        if hvd.rank() == 0:
            calls.append(Calls(gpus, monkeypatch))
        hvd.barrier()
        for kind in kinds:
            rows = (torch.arange(6).reshape(6, 1) + 10 * hvd.rank()).to(kind)
            expected = (3 * torch.arange(6) + 30).to(kind)[2 * hvd.rank() : 2 * hvd.rank() + 2]
            assert hvd.reducescatter(on_gpu(rows), op=ReduceOp.SUM).flatten().tolist() == expected.tolist(), kind

    calls: list[Calls] = []
    with World(SIZE, open_device=planes()) as world:
        world.run(body, frontend_of)
    assert calls[0].made == ["reducescatter"] * SIZE * len(kinds)


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
def test_gradients_that_nccl_would_have_to_encode_end_the_job_with_the_remedy(gpus: Simulated) -> None:
    def body(hvd: Frontend[Any]) -> None:
        assert hvd.allreduce(on_gpu(torch.ones(300)), op=ReduceOp.SUM).tolist() == [2.0] * 300
        reason = r"w cannot cross between hosts as int8: CUDA tensors travel over NCCL here.*--gpu-operations gloo"
        with pytest.raises(HorovodInternalError, match=reason):
            hvd.allreduce(on_gpu(torch.ones(300)), name="w", compression=Compression.int8)

    with World(2, "gloo", open_device=planes(), wire_threshold=0) as world:
        world.run(body, frontend_of)


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
def test_with_that_remedy_they_are_encoded_in_host_memory(gpus: Simulated) -> None:
    def body(context: Context) -> None:
        hvd, values = frontend_of(context), torch.linspace(-1.0, 1.0, 300)
        total = torch.tensor(
            hvd.allreduce(on_gpu(values), op=ReduceOp.SUM, name="w", compression=Compression.int8).tolist()
        )
        assert 1e-4 < (total - 2 * values).norm() / (2 * values).norm() < 2e-2

    with World(2, "gloo", open_device=planes(operations="gloo"), wire_threshold=0) as world:
        world.run(body)


@pytest.mark.parametrize("kind", [torch.float32, torch.int16, torch.uint16], ids=str)
def test_an_uneven_reducescatter_and_one_of_16_bits_add_up(gpus: Simulated, kind: torch.dtype) -> None:
    def body(context: Context) -> None:
        hvd, rank = frontend_of(context), context.rank
        for count in (7, 2, 6):
            rows = (torch.arange(count).reshape(count, 1) + rank).to(kind)
            expected = (3 * torch.arange(count) + 3).to(kind).tensor_split(SIZE)[rank]
            assert hvd.reducescatter(on_gpu(rows), op=ReduceOp.SUM).flatten().tolist() == expected.tolist()

    with World(SIZE, open_device=planes()) as world:
        world.run(body)


@pytest.mark.parametrize("counts", [(2, 5, 1), (0, 3, 0), (9, 0, 1)], ids=str)
def test_an_uneven_allgather_is_a_group_of_broadcasts_and_one_kernel_unpacks_a_bucket(
    gpus: Simulated, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    def body(context: Context) -> None:
        hvd, rank = frontend_of(context), context.rank
        hvd.allreduce(on_gpu(torch.ones(1)), name="connects")
        hvd.barrier()
        if rank == 0:
            calls.append(Calls(gpus, monkeypatch))
        hvd.barrier()

        def rows(of: int, offset: float = 0.0) -> Any:
            return torch.arange(3.0 * counts[of]).reshape(-1, 3) + 100 * of + offset

        whole = torch.cat([rows(each) for each in range(SIZE)])
        assert hvd.allgather(on_gpu(rows(rank))).tolist() == whole.tolist()
        results = hvd.grouped_allgather([on_gpu(rows(rank)), on_gpu(rows(rank, 0.5))])
        assert [result.tolist() for result in results] == [whole.tolist(), (whole + 0.5).tolist()]

    calls: list[Calls] = []
    with World(SIZE, open_device=planes()) as world:
        world.run(body)
    # The first goes where it belongs; the two of the group are packed, gathered and unpacked together.
    assert sorted(calls[0].made) == sorted(["allgather", "allgather", "fuse", "scatter"] * SIZE)


def test_a_bucket_is_packed_and_unpacked_by_one_kernel_each(gpus: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(hvd: Frontend[Any]) -> None:
        hvd.allreduce(on_gpu(torch.ones(1)), name="connects")
        hvd.barrier()
        if hvd.rank() == 0:
            calls.append(Calls(gpus, monkeypatch))
        hvd.barrier()
        for index, result in enumerate(
            hvd.grouped_allreduce([on_gpu(torch.full((i + 1,), float(i))) for i in range(50)])
        ):
            assert result.tolist() == [float(index)] * (index + 1)

    calls: list[Calls] = []
    with World(SIZE, open_device=planes()) as world:
        world.run(body, frontend_of)
    assert sorted(calls[0].made) == sorted(["fuse", "allreduce", "scatter"] * SIZE)


# Connecting.

CONNECT_TIMEOUT = 1.0
MARGIN = 5.0


def fails(context: Context, message: str = "") -> float:
    """Try to exchange a GPU's tensor; how many seconds the error took."""
    begin = time.monotonic()
    with pytest.raises(HorovodInternalError, match=message):
        frontend_of(context).allreduce(on_gpu(torch.ones(2)))
    return time.monotonic() - begin


@pytest.mark.parametrize("stuck", [{1}, {0, 1, 2}], ids=["one rank", "all ranks"])
def test_connecting_that_never_returns_has_a_deadline(gpus: Simulated, stuck: set[int]) -> None:
    gpus.nccl.faults.connects_never |= stuck
    with World(SIZE, open_device=planes(CONNECT_TIMEOUT)) as world:
        took = world.run(
            lambda context: fails(context, "could not connect its NCCL group on cuda:.*not connected within")
        )
        begin = time.monotonic()
    assert max(took) < CONNECT_TIMEOUT + MARGIN
    assert time.monotonic() - begin < MARGIN


def test_a_rank_whose_nccl_fails_while_connecting_frees_the_others(gpus: Simulated) -> None:
    gpus.nccl.faults.connects_badly.add(1)
    with World(SIZE, open_device=planes(60.0)) as world:
        took = world.run(lambda context: fails(context, "unhandled system error"))
    assert max(took) < MARGIN


@pytest.mark.parametrize("abort_blocks", [False, True], ids=["", "and abort blocks"])
def test_a_rank_that_dies_while_nccl_connects_frees_the_others(gpus: Simulated, abort_blocks: bool) -> None:
    """It never comes; the others sit in NCCL, whose abort may not return either."""
    gpus.nccl.faults.connects_never |= {0, 2}
    if abort_blocks:
        gpus.nccl.faults.abort_blocks |= {0, 2}
    died = threading.Event()

    def body(context: Context) -> float:
        if context.rank == 1:
            assert died.wait(10)
            lose(context)
            return 0.0
        if context.rank == 0:
            threading.Timer(0.3, died.set).start()
        return fails(context, "rank 1")

    world = World(SIZE, open_device=planes(60.0))
    assert max(world.run(body)) < MARGIN
    world.close()


def test_a_collective_that_needs_other_connections_has_a_deadline(gpus: Simulated) -> None:
    """From version 2.22 on, NCCL connects ranks when it first needs to."""

    def body(hvd: Frontend[Any]) -> float:
        assert hvd.allreduce(on_gpu(torch.ones(2)), op=ReduceOp.SUM).tolist() == [3.0, 3.0]
        hvd.barrier()
        gpus.nccl.faults.begins_never["alltoall"] = {0, 1, 2}
        begin = time.monotonic()
        with pytest.raises(HorovodInternalError, match="NCCL did not begin alltoall_base within 1 s"):
            hvd.alltoall(on_gpu(torch.ones(SIZE)))
        return time.monotonic() - begin

    with World(SIZE, open_device=planes(CONNECT_TIMEOUT)) as world:
        took = world.run(body, frontend_of)
    assert max(took) < CONNECT_TIMEOUT + MARGIN


@pytest.mark.parametrize("kind", ["alltoall", "broadcast"])
def test_a_rank_that_dies_while_a_collective_connects_frees_the_others_at_once(gpus: Simulated, kind: str) -> None:
    """Even if NCCL does not end what it was about when it is told to. What was packed for it keeps its memory."""
    gpus.nccl.faults.abort_blocks |= {0, 2}
    died = threading.Event()

    def body(context: Context) -> float:
        hvd = frontend_of(context)
        hvd.allreduce(on_gpu(torch.ones(2)), name="connects")
        hvd.barrier()
        if context.rank == 1:
            gpus.nccl.faults.begins_never[kind] = {0, 2}
        hvd.barrier()
        tensor = on_gpu(torch.ones(SIZE))
        operation = getattr(hvd, f"{kind}_async")
        handle = operation(tensor, 0) if kind == "broadcast" else operation(tensor)
        if context.rank == 1:
            assert died.wait(10)
            lose(context)
            return 0.0
        if context.rank == 0:
            threading.Timer(0.3, died.set).start()
        begin = time.monotonic()
        with pytest.raises(HorovodInternalError, match="rank 1"):
            hvd.synchronize(handle)
        return time.monotonic() - begin

    world = World(SIZE, open_device=planes(60.0))
    assert max(world.run(body)) < executor._STUCK_SECONDS
    world.close()
    gpus.nccl.faults.over.set()
    del world
    gc.collect()
    gpus.machine.check()


# Ending.


def lose(context: Context) -> None:
    """End a rank as the system does it: its connections are closed, and nothing is said."""
    context.engine._control.close()


def wait_for_the_end(world: World) -> None:
    deadline = time.monotonic() + MARGIN
    while any(context.engine.error is None for context in world.contexts[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["abort_blocks", "shutdown_blocks"])
def test_a_group_that_does_not_end_delays_shutdown_by_five_seconds_at_most(
    gpus: Simulated, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(nccl, "_CLOSE_SECONDS", 0.5)
    getattr(gpus.nccl.faults, way).update({0, 1, 2})
    world = World(SIZE, open_device=planes())
    world.run(lambda context: frontend_of(context).allreduce(on_gpu(torch.ones(2))))
    begin = time.monotonic()
    if way == "abort_blocks":
        lose(world.contexts[0])
        wait_for_the_end(world)
    world.close()
    assert time.monotonic() - begin < MARGIN


def test_a_group_is_destroyed_aside_and_no_thread_is_left(gpus: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor may block; and a thread that returns from C++ while the interpreter ends aborts the process."""
    destroyed_on: list[str] = []
    make = gpu.nccl_group

    def destroyed() -> None:
        time.sleep(0.2)  # as ncclCommDestroy takes its time
        destroyed_on.append(threading.current_thread().name)

    class Held:
        """A group that the backend alone holds; the simulation keeps its own."""

        def __init__(self, *args: Any) -> None:
            self._group = make(*args)
            weakref.finalize(self, destroyed)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._group, name)

    monkeypatch.setattr(gpu, "nccl_group", Held)
    world = World(SIZE, open_device=planes())
    world.run(lambda context: frontend_of(context).allreduce(on_gpu(torch.ones(2))))
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("NCCL")}
    assert len(names) == 2 * SIZE
    world.close()
    assert not names & {thread.name for thread in threading.enumerate()}
    assert len(destroyed_on) == SIZE
    assert set(destroyed_on) < names


def test_one_plane_that_cannot_be_ended_keeps_no_other_from_it(
    gpus: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nccl_abort", "nccl_close"):
        monkeypatch.setattr(gpu, name, _broken)  # as with a torch that lacks them
    world = World(SIZE, open_device=planes())
    world.run(lambda context: frontend_of(context).allreduce(on_gpu(torch.ones(2))))
    ended: list[str] = []
    for context in world.contexts:
        host, device = context.engine._groups[0].backends
        assert device.name == "nccl"
        for name in ("abort", "close"):
            monkeypatch.setattr(host, name, _broken)
            monkeypatch.setattr(device, name, _noting(ended, name, getattr(device, name)))
    lose(world.contexts[0])
    wait_for_the_end(world)
    world.close()
    assert ended.count("abort") >= SIZE - 1
    assert ended.count("close") == SIZE


def _broken(*_: object) -> None:
    raise AttributeError("'ProcessGroupNCCL' object has no attribute 'abort'")


def _noting(where: list[str], what: str, function: Callable[[], None]) -> Callable[[], None]:
    def noted() -> None:
        where.append(what)
        function()

    return noted


def test_handles_resolve_even_if_the_data_thread_is_stuck_in_nccl(
    gpus: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_STUCK_SECONDS", 0.5)
    world = World(SIZE, open_device=planes())
    frontends = [frontend_of(context) for context in world.contexts]
    world.run(lambda context: frontends[context.rank].allreduce(on_gpu(torch.ones(2)), name="x"))
    leave = threading.Event()
    inside = threading.Barrier(SIZE + 1)

    def stuck(*_: object) -> None:
        inside.wait(10)
        leave.wait(30)
        raise RuntimeError("NCCL has let go")

    for group in gpus.nccl.groups:
        monkeypatch.setattr(group, "allreduce", stuck)

    def body(context: Context) -> float:
        handle = frontends[context.rank].allreduce_async_(on_gpu(torch.ones(2)), name="x")
        if context.rank == 1:
            inside.wait(10)
            lose(context)
            return 0.0
        with pytest.raises(HorovodInternalError, match="rank 1"):
            frontends[context.rank].synchronize(handle)
        return time.monotonic()

    try:
        begin = time.monotonic()
        ended = world.run(body)
        assert max(ended) - begin < MARGIN
        begin = time.monotonic()
        world.close()
        assert time.monotonic() - begin < MARGIN + 1.0
    finally:
        leave.set()


# Failing.


def test_nccl_s_own_error_reaches_the_user_within_a_second(gpus: Simulated) -> None:
    def body(hvd: Frontend[Any]) -> float:
        hvd.allreduce(on_gpu(torch.ones(2)), name="x")
        hvd.barrier()
        gpus.nccl.faults.lost.add(0)  # no collective ends any more
        handle = hvd.allreduce_async_(on_gpu(torch.ones(2)), name="x")
        gpus.nccl.faults.errors[1] = "NCCL WARN Call to ibv_modify_qp failed"
        begin = time.monotonic()
        with pytest.raises(HorovodInternalError, match=r"NCCL allreduce.*ibv_modify_qp failed"):
            hvd.synchronize(handle)
        return time.monotonic() - begin

    with World(SIZE, open_device=planes()) as world:
        took = world.run(body, frontend_of)
    assert max(took) < 1.0


def test_an_aborted_operation_uses_its_memory_until_its_gpu_has_ended_it(gpus: Simulated) -> None:
    """Adasum's phases have no mark behind them that would tell."""

    def body(context: Context) -> None:
        frontend_of(context).allreduce(on_gpu(torch.ones(2)), name="connects")
        frontend_of(context).barrier()
        gpus.nccl.faults.lost.add(0)  # no collective ends any more
        device = context.engine._groups[0].backends[1]
        assert device.name == "nccl"
        work = device.allreduce(TorchAdapter().export(on_gpu(torch.ones(2)), writable=True), ReduceOp.SUM)
        device.abort()
        assert not work.completes_within(0.1)
        together.wait(10)
        gpus.nccl.faults.hangs_after_abort.clear()
        with pytest.raises(BackendError, match="the operation was aborted"):
            work.completes_within(10)

    together = threading.Barrier(SIZE)
    gpus.nccl.faults.hangs_after_abort.update(range(SIZE))
    with World(SIZE, open_device=planes()) as world:
        world.run(body)


def test_the_deadline_counts_from_when_the_data_are_ready(gpus: Simulated) -> None:
    """The program has given its GPU much to do before, which is no failure of the network's."""

    def body(hvd: Frontend[Any]) -> None:
        hvd.allreduce(on_gpu(torch.ones(2)), name="x")
        hvd.barrier()
        tensor = on_gpu(torch.ones(2))
        busy = threading.Event()
        gpus.machine.launch(gpus.current(tensor.device), "a long kernel", lambda: None, ready=busy.is_set)
        handle = hvd.allreduce_async_(tensor, name="x")
        (pending,) = (entry for entry, _ in hvd._bound[1].pending.values())  # type: ignore[index]
        with pytest.raises(TimeoutError):  # after two of the operation's deadlines
            pending.wait(2.0)
        busy.set()
        assert hvd.synchronize(handle).tolist() == [1.0, 1.0]

    with World(SIZE, open_device=planes(), operation_timeout=0.8) as world:
        world.run(body, frontend_of)


# Joining.


def test_a_joined_rank_s_control_thread_touches_no_gpu(gpus: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: set[str] = set()
    for name in ("record", "wait", "settle", "empty", "pinned", "on", "copy", "fuse", "scatter", "scale", "nccl_group"):
        function = getattr(gpu, name)

        def noting(*args: Any, function: Callable[..., Any] = function) -> Any:
            touched.add(threading.current_thread().name)
            return function(*args)

        monkeypatch.setattr(gpu, name, noting)

    def body(hvd: Frontend[Any]) -> None:
        if hvd.rank():
            for _ in range(3):
                assert hvd.allreduce(on_gpu(torch.ones(3)), op=ReduceOp.SUM, name="late").tolist() == [2.0] * 3
        hvd.join()

    with World(SIZE, "gloo", open_device=planes()) as world:  # whose operations may be begun on any thread
        world.run(body, frontend_of)
    assert "hvdgloo-data-0" in touched
    assert not [name for name in touched if "control" in name or name == "rank-0"]


# What torch has and reads.


class _Options:
    """torch's options; the nested ones are a communicator's."""

    _timeout = None

    def __init__(self) -> None:
        self.config = SimpleNamespace(blocking=-1)


def test_an_old_torch_is_refused_in_one_sentence(gpus: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "outdated_torch", lambda: "2.5.1" if gpus.machine.rank == 1 else "")

    def body(context: Context) -> None:
        with pytest.raises(
            BackendError, match=r"torch 2\.6 or newer, and rank 1 has torch 2\.5\.1: upgrade it, or set HVD"
        ):
            frontend_of(context).allreduce(on_gpu(torch.ones(2)))

    with World(SIZE, open_device=planes()) as world:
        world.run(body)


def test_a_torch_is_too_old_if_it_cannot_end_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def _abort(self) -> None:
            """As it was called."""

    class New:
        def abort(self) -> None:
            """Since 2.6."""

        def shutdown(self) -> None:
            """Since 2.6."""

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Old, raising=False)
    assert gpu.outdated_torch() == torch.__version__
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", New)
    assert gpu.outdated_torch() == ""


HOSTILE = {
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "1",
    "TORCH_NCCL_PROPAGATE_ERROR": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_NAN_CHECK": "1",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "60000",
}
"""Variables that let torch's watchdog, or a thread that watches it, end the process, or sleep while the group is to
end."""


@pytest.mark.parametrize("is_set", [True, False], ids=["set by the user", "unset"])
def test_no_environment_lets_torch_end_the_process_through_our_group(
    monkeypatch: pytest.MonkeyPatch, is_set: bool
) -> None:
    seen: dict[str, str | None] = {}

    class Group:
        Options = _Options

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            seen.update({name: seen_by_c(name) for name in HOSTILE})
            seen["level"] = torch.distributed.get_debug_level().name
            # Whatever TORCH_NCCL_USE_COMM_NONBLOCKING says, and whatever streams the program gets.
            assert (options.config.blocking, options.is_high_priority_stream) == (1, True)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    for name, value in HOSTILE.items():
        if is_set:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    mine = {name: seen_by_c(name) for name in HOSTILE}
    before = torch.distributed.get_debug_level()
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)  # what TORCH_DISTRIBUTED_DEBUG has done
    try:
        gpu.nccl_group(None, 0, 1)
        assert torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL
    finally:
        torch.distributed.set_debug_level(before)
    assert seen == {**dict.fromkeys(HOSTILE, "0"), "level": "OFF"}
    assert {name: seen_by_c(name) for name in HOSTILE} == mine  # a user's own groups keep what the user has set


def test_a_gpu_is_one_where_nccl_takes_it_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"GPU 0": "0000:17:00.0", "slice 1 of it": "0000:17:00.0", "another": "0000:65:00.0"}
    monkeypatch.setattr(gpu, "_bus", places.__getitem__)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    here = {name: gpu.identity(name) for name in places}  # type: ignore[arg-type]
    assert here["GPU 0"] == here["slice 1 of it"] != here["another"]
    monkeypatch.setenv("NCCL_HOSTID", "pretend-1" * 100)
    assert gpu.identity("GPU 0") not in here.values()  # type: ignore[arg-type]
    assert len(json.dumps(asdict(Gpu(gpu.identity("GPU 0"), 22809, "2.5.1+cu124")))) < 256  # type: ignore[arg-type]


def test_connecting_neither_adds_nor_removes_variables_which_other_threads_may_be_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []

    class Group:
        Options = _Options

        def __init__(self, *_: object) -> None:
            assert seen_by_c("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
            counts.append(len(entries()))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(gpu, "nccl_version", lambda: 22809)
    for name in HOSTILE:
        monkeypatch.delenv(name, raising=False)
    config = Config()
    Planes(config, plane_settings(config), on_hosts(1), 0, MemoryStore(), "", "127.0.0.1")
    counts.append(len(entries()))
    Task(lambda: gpu.nccl_group(None, 0, 1)).result()
    assert counts[0] == counts[1]
    assert len(counts) == 2


def test_torch_s_c_code_uses_the_store_as_its_own() -> None:
    store = nccl.NcclStore(MemoryStore(), "group/", 5.0)
    seen = torch.distributed.PrefixStore("x", store)
    seen.set("a", "1")
    seen.set("b", "2")
    assert seen.get("a") == b"1"
    assert seen.multi_get(["a", "b"]) == [b"1", b"2"]
    seen.wait(["a", "b"])
    assert seen.clone().get("b") == b"2"


def test_the_store_s_own_error_is_what_a_failed_connection_says(
    gpus: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(MemoryStore):
        def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
            raise RendezvousError("the server has gone")

    class Group:
        def __init__(self, store: Any) -> None:
            self._store = torch.distributed.PrefixStore("0", store)

        def allreduce(self, tensors: object) -> None:
            try:
                self._store.get("id")
            except Exception as error:  # as ProcessGroupNCCL does
                raise RuntimeError("[1] is setting up NCCL communicator and retrieving ncclUniqueId") from error

        def abort(self) -> None:
            """Nothing is under way."""

    monkeypatch.setattr(gpu, "nccl_group", lambda store, rank, size: Group(store))
    with pytest.raises(RendezvousError, match=r"^the server has gone$"):
        nccl.NcclBackend(Refusing(), "group/", 1, 2, torch.device("cuda", 0), 5.0)


class TestTorchCuda:
    """Requirements on torch's own module, which has no GPU here."""

    class Stream:
        def __init__(self, device: object = None, priority: int = 0) -> None:
            self.priority = priority
            self.waited_for: list[object] = []

        def wait_stream(self, other: object) -> None:
            self.waited_for.append(other)

    def test_a_stream_does_not_wait_for_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here, other = self.Stream(), self.Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
        for stream in (here, other):
            gpu.wait_for(stream, torch.device("cuda", 0))
        assert here.waited_for == [other]

    def test_our_stream_is_not_among_those_that_programs_get(self, monkeypatch: pytest.MonkeyPatch) -> None:
        default, chosen = self.Stream(), []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
        monkeypatch.setattr(torch.cuda, "Stream", self.Stream)
        monkeypatch.setattr(torch.cuda, "set_stream", chosen.append)
        gpu.use_own_stream(torch.device("cuda", 0))
        assert [stream.priority for stream in chosen] == [-1]

    def test_the_current_gpu_is_switched_only_if_another_is_meant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        switched = []

        @contextlib.contextmanager
        def switch(device: object) -> Iterator[None]:
            switched.append(device)
            yield

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", switch)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert all(gpu.is_capturing(torch.device("cuda", index)) for index in (0, 1))
        assert switched == [torch.device("cuda", 1)]

    @pytest.mark.parametrize("result", [0, 1])
    def test_captures_of_others_do_not_concern_a_thread(
        self, result: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        modes = []

        class Library:
            def __init__(self, name: str) -> None:
                assert name == "libcuda.so.1"

            def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
                modes.append(mode._obj.value)
                return result

        monkeypatch.setattr(gpu, "platform", lambda: "cuda")
        monkeypatch.setattr(ctypes, "CDLL", Library)
        gpu.ignore_captures()
        assert modes == [1]
        assert ("cannot be captured" in caplog.text) == bool(result)


class _Outcome:
    def __init__(self, value: int | None) -> None:
        self._value = value

    def done(self) -> bool:
        return self._value is not None

    def value(self) -> int | None:
        return self._value


class _Work:
    """As torch's: a result that its watchdog notes, and an exception that is there once the result was looked at."""

    def __init__(self, result: int | None, error: Exception | None) -> None:
        self._result, self._error, self._looked = result, error, False

    def get_future_result(self) -> _Outcome:
        return _Outcome(self._result)

    def is_completed(self) -> bool:
        self._looked = True
        return self._result is not None

    def exception(self) -> Exception | None:
        return self._error if self._looked else None


def test_what_torch_notes_of_a_failure() -> None:
    error = RuntimeError(
        "NCCL error in: NCCLUtils.cpp:74, remote process exited or there was a network error\nLast error"
    )
    assert gpu.nccl_failure(_Work(None, None)) == ""
    assert gpu.nccl_failure(_Work(0, None)) == ""
    assert gpu.nccl_failure(_Work(2, error)).endswith("remote process exited or there was a network error")
    assert gpu.nccl_failure(_Work(2, None)) == "NCCL has failed"
