"""Tensors of GPUs: packed, exchanged and brought back without a thought of where they are.

These run without a GPU. Tensors of the CPU claim to be a GPU's; to the engine there is no difference, but that it may
neither read nor write them except through their plane's memory. One plane works in the device's own memory, as over
NCCL; the other stages tensors in the host's. What only a GPU shows is in tests/gpu.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._backends import cuda, gpu  # noqa: E402
from hvdgloo._backends.base import Backend, Plane  # noqa: E402
from hvdgloo._backends.cuda import DeviceMemory, Gpu, PinnedMemory, obstacle  # noqa: E402
from hvdgloo._backends.local import LocalGroup  # noqa: E402
from hvdgloo._backends.nccl import NcclBackend, Passed  # noqa: E402
from hvdgloo._backends.select import gloo_provider  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.process_sets import ProcessSet  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import BackendError, HorovodInternalError, MismatchError  # noqa: E402
from hvdgloo.rendezvous import MemoryStore  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.torch.sync_batch_norm import SyncBatchNorm  # noqa: E402
from hvdgloo.types import Buffer, ReduceOp  # noqa: E402
from tests.support.world import MakeWorld, World, closed_later  # noqa: E402

CPU = torch.device("cpu")
SIZE = 3
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, torch.float64, *HALVES, torch.int64, torch.int16, torch.uint8, torch.uint16, torch.uint64]


class Claiming(TorchAdapter):
    """Says of tensors that are not marked as the host's that they are a GPU's."""

    def on_gpu(self, tensor: Tensor) -> bool:
        return not getattr(tensor, "of_host", False)

    def fence(self, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        return (lambda: None) if any(self.on_gpu(tensor) for tensor in tensors) else None


def of_host(tensor: Tensor) -> Tensor:
    tensor.of_host = True  # type: ignore[attr-defined]
    return tensor


class Planes:
    """Opens planes of one kind, and remembers what they were opened for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.opened: list[tuple[int, int, str]] = []
        self._groups: dict[int, LocalGroup] = {}
        self._lock = threading.Lock()

    def __call__(
        self, rank: int, number: int, ranks: Sequence[int], host: Backend, example: Buffer, **more: Any
    ) -> Sequence[Plane]:
        place = ranks.index(rank)
        if self.kind == "staged":
            planes: Sequence[Plane] = cuda.open_planes(
                host,
                example,
                store=MemoryStore(),
                prefix="",
                ranks=ranks,
                rank=place,
                local_rank=rank,
                operations="auto",
                timeout=10,
                **more,
            )
        else:
            with self._lock:
                group = self._groups.setdefault(number, LocalGroup(len(ranks)))
            planes = Plane(group.backend(place), DeviceMemory(CPU)), Plane(host, PinnedMemory(CPU))
        self.opened.append((rank, number, planes[0].backend.name))
        return planes


@pytest.fixture(params=["native", "staged"])
def planes(request: pytest.FixtureRequest) -> Planes:
    return Planes(request.param)


@pytest.fixture
def world(planes: Planes) -> Iterator[MakeWorld]:
    with closed_later(lambda size=SIZE, **options: World(size, open_device=planes, **options)) as make:
        yield make


def frontend_of(context: Context) -> Frontend[Tensor]:
    return Frontend(Claiming(), lambda: context)


def rows(rank: int, count: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(count * 3).reshape(count, 3) + 10 * rank).to(dtype)


def times(tensor: Tensor, factor: int) -> list[Any]:
    """A multiple's elements; torch does not compute with most unsigned types."""
    multiple: list[Any] = (factor * tensor.double()).to(tensor.dtype).tolist()
    return multiple


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_numbers_are_scaled_on_a_device(dtype: torch.dtype) -> None:
    largest = torch.iinfo(dtype).max
    values = [0, 1, 48, 49, 50, largest // 2, largest // 2 + 1, largest - 1, largest]
    for factor, expected in ((1 / 49, [value // 49 for value in values]), (0.75, [0, 0, 36, 36, 37])):
        tensor = torch.tensor(values[: len(expected)], dtype=dtype)
        backend = object.__new__(NcclBackend)
        backend.scale(TorchAdapter().export(tensor, writable=True), factor)
        assert tensor.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_average_is_a_quotient_to_the_last_bit(world: MakeWorld, planes: Planes, dtype: torch.dtype) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(3)).to(dtype)

    def body(context: Context) -> None:
        own = torch.zeros_like(values) if context.rank == 1 else values
        averages = frontend_of(context).allreduce(own)
        assert averages.tolist() == (2 * values / SIZE).tolist()

    world().run(body)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(world: MakeWorld, planes: Planes, dtype: torch.dtype) -> None:
    def body(hvd: Frontend[Any]) -> None:
        tensor = rows(hvd.rank(), dtype=dtype)
        result = hvd.allreduce(tensor, op=ReduceOp.SUM)
        assert result.tolist() == times(rows(1, dtype=dtype), 3)
        assert tensor.tolist() == rows(hvd.rank(), dtype=dtype).tolist()
        assert hvd.allreduce_(tensor, op=ReduceOp.MAX) is tensor
        assert tensor.tolist() == rows(2, dtype=dtype).tolist()

    world().run(body, frontend_of)
    assert sorted(planes.opened) == [(rank, 0, "local") for rank in range(SIZE)]  # once, not for every tensor


def test_groups_of_host_and_device_tensors(world: MakeWorld) -> None:
    def body(hvd: Frontend[Any]) -> None:
        tensors = [
            rows(hvd.rank()),
            of_host(rows(hvd.rank())),
            torch.tensor([hvd.rank() == 1, False]),
            torch.tensor(float(hvd.rank())),
            rows(hvd.rank(), 40, torch.float16).t(),
            of_host(torch.zeros(0)),
        ]
        results = hvd.grouped_allreduce(tensors, op=ReduceOp.SUM, prescale_factor=1.0)
        assert results[0].tolist() == results[1].tolist() == (3 * rows(1)).tolist()
        assert results[2].tolist() == [True, False]
        assert results[3].item() == 3.0
        assert results[4].tolist() == (3 * rows(1, 40, torch.float16)).t().tolist()
        assert results[5].shape == (0,)
        hvd.grouped_allreduce_(tensors, op=ReduceOp.MIN)
        assert tensors[4].tolist() == rows(0, 40, torch.float16).t().tolist()

    world().run(body, frontend_of)


def test_factors(world: MakeWorld) -> None:
    def body(hvd: Frontend[Any]) -> None:
        result = hvd.allreduce(rows(hvd.rank()), op=ReduceOp.SUM, prescale_factor=0.5, postscale_factor=4.0)
        assert result.tolist() == (6 * rows(1)).tolist()
        assert hvd.allreduce(torch.tensor([5, -5])).tolist() == [5, -5]
        kept = rows(hvd.rank(), 4)
        part = hvd.reducescatter(kept, op=ReduceOp.SUM, prescale_factor=2.0)
        assert part.tolist() == (6 * rows(1, 4)).tensor_split(SIZE)[hvd.rank()].tolist()
        assert kept.tolist() == rows(hvd.rank(), 4).tolist()

    world().run(body, frontend_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16], ids=str)
def test_what_moves_rows(world: MakeWorld, dtype: torch.dtype) -> None:
    counts = [2, 0, 3]

    def body(context: Context) -> None:
        hvd, rank = frontend_of(context), context.rank
        whole = torch.cat([rows(r, n, dtype) for r, n in enumerate(counts)])
        assert hvd.allgather(rows(rank, counts[rank], dtype)).tolist() == whole.tolist()
        many = hvd.grouped_allgather([rows(rank, counts[rank], dtype), of_host(rows(rank)), torch.ones(1, rank)[:, :0]])
        assert many[0].tolist() == whole.tolist()
        assert many[1].tolist() == torch.cat([rows(r) for r in range(SIZE)]).tolist()
        assert many[2].shape == (3, 0)
        assert hvd.broadcast(rows(rank, 2, dtype).t(), root_rank=1).tolist() == rows(1, 2, dtype).t().tolist()
        in_place = rows(rank, 2, dtype)
        hvd.broadcast_(in_place, root_rank=2)
        assert in_place.tolist() == rows(2, 2, dtype).tolist()
        received, numbers = hvd.alltoall(rows(rank, 6, dtype), splits=[rank, 1, 2])
        parts = [rows(r, 6, dtype).split([r, 1, 2, 3 - r])[rank] for r in range(SIZE)]
        assert received.tolist() == torch.cat(parts).tolist()
        assert numbers.tolist() == [len(part) for part in parts]

    world().run(body)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.int64], ids=str)
def test_reducescatter(world: MakeWorld, dtype: torch.dtype) -> None:
    def body(context: Context) -> None:
        hvd, rank = frontend_of(context), context.rank
        for count in (7, 2):
            expected = (3 * rows(1, count, dtype)).tensor_split(SIZE)[rank]
            assert hvd.reducescatter(rows(rank, count, dtype), op=ReduceOp.SUM).tolist() == expected.tolist()
        parts = hvd.grouped_reducescatter([rows(rank, 4, dtype), rows(rank, 4, dtype).t()], op=ReduceOp.AVERAGE)
        assert parts[0].tolist() == rows(1, 4, dtype).tensor_split(SIZE)[rank].tolist()
        assert parts[1].tolist() == rows(1, 4, dtype).t().tensor_split(SIZE)[rank].tolist()

    world().run(body)


def test_adasum_goes_by_the_host(world: MakeWorld) -> None:
    def body(hvd: Frontend[Any]) -> None:
        parallel, orthogonal = torch.full((4,), 2.0), torch.zeros(SIZE)
        orthogonal[hvd.rank()] = 1.0
        results = hvd.grouped_allreduce([parallel, orthogonal], op=ReduceOp.ADASUM)
        np.testing.assert_allclose(results[0], parallel)
        np.testing.assert_allclose(results[1], np.ones(SIZE))
        np.testing.assert_allclose(hvd.allreduce(parallel, op=ReduceOp.ADASUM), parallel)

    world().run(body, frontend_of)


def test_a_rank_that_has_joined_takes_part_from_host_memory(world: MakeWorld) -> None:
    def body(hvd: Frontend[Any]) -> None:
        if hvd.rank() != 1:
            pair = [rows(hvd.rank()), torch.ones(5)]
            results = hvd.grouped_allreduce(pair, op=ReduceOp.SUM)
            assert results[0].tolist() == (rows(0) + rows(2)).tolist()
            assert results[1].tolist() == [2.0] * 5
            assert hvd.allreduce(rows(hvd.rank()) + 1, op=ReduceOp.MIN).tolist() == (rows(0) + 1).tolist()
        hvd.join()

    world().run(body, frontend_of)


def test_process_sets_have_planes_of_their_own(world: MakeWorld, planes: Planes) -> None:
    def body(hvd: Frontend[Any]) -> None:
        some = hvd.add_process_set(ProcessSet([0, 2]))
        if some.included():
            assert (
                hvd.allreduce(rows(hvd.rank()), op=ReduceOp.SUM, process_set=some).tolist()
                == (rows(0) + rows(2)).tolist()
            )
        hvd.remove_process_set(some)
        again = hvd.add_process_set(ProcessSet([1, 2]))
        if again.included():
            hvd.allreduce(rows(hvd.rank()), process_set=again)

    world().run(body, frontend_of)
    assert [entry[:2] for entry in sorted(planes.opened)] == [(0, 1), (1, 2), (2, 1), (2, 2)]


def test_a_device_on_one_rank_and_none_on_another_is_an_error_everywhere(world: MakeWorld) -> None:
    def body(hvd: Frontend[Any]) -> None:
        tensor = rows(0) if hvd.rank() else of_host(rows(0))
        with pytest.raises(MismatchError, match=r"device type.*cpu.*cuda"):
            hvd.allreduce(tensor, name="there and here")
        assert hvd.allreduce(rows(0), op=ReduceOp.MAX).tolist() == rows(0).tolist()

    world().run(body, frontend_of)


def test_without_planes_there_is_an_error_and_no_wait() -> None:
    def body(context: Context) -> None:
        with pytest.raises(HorovodInternalError, match="no way here to exchange tensors of a cuda device"):
            frontend_of(context).allreduce(rows(0))

    with World(2) as alone:
        alone.run(body)


def test_training_equals_one_process_s(world: MakeWorld) -> None:
    random = np.random.default_rng(3)
    inputs, targets = (torch.from_numpy(random.standard_normal((12, n))) for n in (6, 2))
    weights = [torch.from_numpy(random.standard_normal(shape)) for shape in [(5, 6), (5,), (2, 5), (2,)]]

    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights, strict=True):
                parameter.copy_(value)
        return model

    def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, part: slice) -> list[np.ndarray]:
        for _ in range(4):
            optimizer.zero_grad()
            ((model(inputs[part]) - targets[part]) ** 2).mean().backward()
            optimizer.step()
        return [parameter.detach().numpy() for parameter in model.parameters()]

    plain = make()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), slice(None))

    def body(context: Context) -> None:
        model = make()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        distributed = wrap(Frontend(Claiming(), lambda: context), optimizer, None, None, ReductionOptions())
        share = slice(4 * context.rank, 4 * context.rank + 4)
        for ours, theirs in zip(train(model, distributed, share), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)

    world().run(body)


def test_nothing_that_fails_is_left_waiting(planes: Planes) -> None:
    class Breaking:
        def __init__(self, backend: Backend) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            if name == "allreduce":
                raise BackendError("the GPU fell off the bus")
            return getattr(self._backend, name)

    def broken(rank: int, *arguments: Any, **more: Any) -> Sequence[Plane]:
        opened = planes(rank, *arguments, **more)
        if rank != 1:
            return opened
        return [Plane(Breaking(plane.backend), plane.memory) for plane in opened]  # type: ignore[arg-type]

    def body(context: Context) -> None:
        with pytest.raises(HorovodInternalError, match="fell off the bus"):
            frontend_of(context).allreduce(rows(0))

    with World(SIZE, open_device=broken) as made:
        made.run(body)


def test_an_event_that_a_gpu_has_failed_before_is_an_error_of_cuda_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(event: object) -> bool:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(gpu, "record", lambda device: None)
    monkeypatch.setattr(gpu, "has_happened", failed)
    with pytest.raises(BackendError, match=r"^CUDA: an illegal address$"):
        Passed(CPU).completes_within(5)


def test_what_was_aborted_ends_when_its_event_has_happened_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = [False, False, True]
    monkeypatch.setattr(gpu, "record", lambda device: None)
    monkeypatch.setattr(gpu, "has_happened", lambda event: happened.pop(0))
    aborted = Passed(CPU, lambda: True)
    assert not aborted.completes_within(0)  # kernels behind the aborted one still use its memory
    with pytest.raises(BackendError, match=r"^the operation was aborted$"):
        aborted.completes_within(5)


class TestWhichWay:
    def test_nccl_where_each_rank_has_a_gpu_of_its_own(self) -> None:
        assert obstacle([Gpu("a", 22105), Gpu("b", 22105)], [0, 1]) == ""
        assert obstacle([Gpu("a", 22105)], [5]) == ""

    @pytest.mark.parametrize(
        ("gpus", "reason"),
        [
            ([Gpu("a", 22105), Gpu("b", 22105), Gpu("a", 22105)], "ranks 3 and 7 use the same GPU"),
            (
                [Gpu("a", 22105), Gpu("b", 22304), Gpu("c", 22105)],
                "rank 3 has version 22105 of NCCL and rank 4 22304",
            ),
            ([Gpu("a", 22105), Gpu("b", 22105), Gpu("c")], "the torch of rank 7 was built without NCCL"),
            ([Gpu("a", 22105), Gpu(), Gpu("c", 22105)], "rank 4 has no GPU"),
        ],
        ids=["shared", "versions", "no NCCL", "no GPU"],
    )
    def test_else_by_the_host_for_a_reason(self, gpus: list[Gpu], reason: str) -> None:
        assert reason in obstacle(gpus, [3, 4, 7])

    def open(self, operations: str) -> Sequence[Plane]:
        tensor = torch.zeros(1)
        return cuda.open_planes(
            LocalGroup(1).backend(0),
            Buffer(tensor.data_ptr(), Claiming().describe(tensor), tensor),
            store=MemoryStore(),
            prefix="",
            ranks=[4],
            rank=0,
            local_rank=0,
            operations=operations,
            timeout=5,
        )

    def test_nccl_that_was_asked_for_and_is_not_there(self) -> None:
        with pytest.raises(BackendError, match=r"=nccl, but the torch of rank 4 was built without NCCL\. Give"):
            self.open("nccl")

    def test_the_host_that_was_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        best, staged = self.open("gloo")
        assert best is staged
        assert not caplog.records

    def test_automatic_says_what_it_costs(self, caplog: pytest.LogCaptureFixture) -> None:
        self.open("auto")
        assert "sent through host memory, not over NCCL: the torch of rank 4 was built without" in caplog.text


def test_sync_batch_norm_equals_the_whole_batch_s(world: MakeWorld) -> None:
    batch = torch.from_numpy(np.random.default_rng(5).standard_normal((6, 2, 3)))
    expected = nn.BatchNorm1d(2).double()(batch).detach()

    def body(context: Context) -> None:
        norm = SyncBatchNorm(2).double()
        norm.frontend = frontend_of(context)
        part = slice(2 * context.rank, 2 * context.rank + 2)
        np.testing.assert_allclose(norm(batch[part]).detach(), expected[part], rtol=1e-6, atol=1e-9)

    world().run(body)


@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
def test_what_goes_over_gloo_through_host_memory_is_encoded_as_a_host_s_tensors_are() -> None:
    def body(context: Context) -> bytes:
        frontend = Frontend(Claiming(), lambda: context)
        tensors = [torch.randn(3000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        given = tensors[context.rank].clone()
        total = frontend.allreduce(given, op=ReduceOp.SUM, name="w", compression=Compression.int8)
        assert 1e-3 < (total - sum(tensors)).norm() / sum(tensors).norm() < 2e-2
        assert torch.equal(given, tensors[context.rank])
        on_host = frontend.allreduce(of_host(given), op=ReduceOp.SUM, name="h", compression=Compression.int8)
        assert torch.equal(total, on_host)
        return bytes(total.numpy().tobytes())

    made = World(2, "gloo", open_device=Planes("staged"), wire_threshold=0)
    try:
        assert len(set(made.run(body))) == 1
    finally:
        made.close()


def test_a_plane_of_gpus_that_cannot_encode_ends_the_job_with_its_reason() -> None:
    group = LocalGroup(2)

    def open_device(rank: int, number: int, ranks: Sequence[int], host: Backend, *_: Any, **__: Any) -> Sequence[Plane]:
        plane = Plane(group.backend(rank), DeviceMemory(CPU), "NCCL sends them as they are")
        return plane, Plane(host, PinnedMemory(CPU))

    def body(context: Context) -> None:
        frontend = Frontend(Claiming(), lambda: context)
        assert frontend.allreduce(torch.ones(300), op=ReduceOp.SUM).tolist() == [2.0] * 300
        with pytest.raises(HorovodInternalError, match=r"w cannot cross between hosts as int8: NCCL sends them as"):
            frontend.allreduce(torch.ones(300), name="w", compression=Compression.int8)

    made = World(2, open_device=open_device, wire_threshold=0)
    try:
        made.run(body)
    finally:
        made.close()
