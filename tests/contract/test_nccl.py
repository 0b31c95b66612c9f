"""Collectives of simulated GPUs over simulated NCCL: which of its operations they become, and how connecting, failing
and ending stay within their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdgloo._backends import cuda, gpu  # noqa: E402
from hvdgloo._backends.base import Backend, Plane  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.rendezvous import MemoryStore  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.types import Buffer, ReduceOp  # noqa: E402
from tests.support.gpus import Simulated, on_gpu, simulated  # noqa: E402
from tests.support.world import World  # noqa: E402

SIZE = 3


@pytest.fixture
def gpus() -> Iterator[Simulated]:
    with simulated() as made:
        yield made


def planes(timeout: float = 10.0) -> Callable[..., Sequence[Plane]]:
    """What opens the planes of a world's ranks."""
    store = MemoryStore()

    def open_device(
        rank: int, number: int, ranks: Sequence[int], host: Backend, example: Buffer, **more: Any
    ) -> Sequence[Plane]:
        return cuda.open_planes(
            host,
            example,
            store=store,
            prefix=f"{number}/",
            ranks=ranks,
            rank=ranks.index(rank),
            local_rank=rank,
            operations="auto",
            timeout=timeout,
            **more,
        )

    return open_device


def frontend_of(context: Context) -> Frontend[Any]:
    return Frontend(TorchAdapter(), lambda: context)


class Calls:
    """What is asked of NCCL and of the GPUs, from now on."""

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

    def body(context: Context) -> None:
        hvd = frontend_of(context)
        hvd.allreduce(on_gpu(torch.ones(1)), name="connects")
        hvd.barrier()
        if context.rank == 0:
            calls.append(Calls(gpus, monkeypatch))
        hvd.barrier()
        for kind in kinds:
            rows = (torch.arange(6).reshape(6, 1) + 10 * context.rank).to(kind)
            expected = (3 * torch.arange(6) + 30).to(kind)[2 * context.rank : 2 * context.rank + 2]
            assert hvd.reducescatter(on_gpu(rows), op=ReduceOp.SUM).flatten().tolist() == expected.tolist(), kind

    calls: list[Calls] = []
    with World(SIZE, open_device=planes()) as world:
        world.run(body)
    assert calls[0].made == ["reducescatter"] * SIZE * len(kinds)


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
    def body(context: Context) -> None:
        hvd = frontend_of(context)
        hvd.allreduce(on_gpu(torch.ones(1)), name="connects")
        hvd.barrier()
        if context.rank == 0:
            calls.append(Calls(gpus, monkeypatch))
        hvd.barrier()
        for index, result in enumerate(
            hvd.grouped_allreduce([on_gpu(torch.full((i + 1,), float(i))) for i in range(50)])
        ):
            assert result.tolist() == [float(index)] * (index + 1)

    calls: list[Calls] = []
    with World(SIZE, open_device=planes()) as world:
        world.run(body)
    assert sorted(calls[0].made) == sorted(["fuse", "allreduce", "scatter"] * SIZE)
