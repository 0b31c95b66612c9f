"""Parts of hvdgloo.torch beyond collectives and the optimizer: SyncBatchNorm, sparse tensors, samplers, loaders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.process_sets import global_process_set  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.data import AsyncDataLoaderMixin, BaseDataLoader  # noqa: E402
from hvdgloo.errors import InvalidArgumentError, MismatchError  # noqa: E402
from hvdgloo.torch import SyncBatchNorm, mpi_ops  # noqa: E402
from hvdgloo.torch._sparse import start_sparse_allreduce  # noqa: E402
from hvdgloo.torch.elastic import ElasticSampler  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.frameworks import load  # noqa: E402
from tests.support.launching import wait_for  # noqa: E402
from tests.support.world import MakeWorld  # noqa: E402

frontend_of = load("torch").frontend


class Watching(TorchDispatchMode):
    """Recorder of the operations that torch computes on this thread.

    Attributes:
        read: operations that give a number to the host.
        wide: those that make float64 tensors as large as an activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []
        self.wide: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "native_batch_norm_backward" in name:  # CUDA's kernel asserts that it is given what a forward pass has saved
            assert all(isinstance(saved, torch.Tensor) for saved in args[5:7])
        if "_local_scalar_dense" in name or "is_nonzero" in name or "equal.default" in name:
            self.read.append(name)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float64 and tensor.numel() > 100:
                self.wide.append(name)
        return result


class Counting:
    """A frontend that notes the collectives that are called."""

    def __init__(self, frontend: Frontend[torch.Tensor]) -> None:
        self._frontend = frontend
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("allgather", "allreduce"):
            self.calls.append(name)
        return getattr(self._frontend, name)


class TestSyncBatchNorm:
    @pytest.mark.parametrize("shape", [(9, 3), (9, 3, 4), (9, 3, 2, 5)], ids=str)
    @pytest.mark.parametrize("sizes", [(3, 3, 3), (1, 8), (9, 0)], ids=str)
    @pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
    def test_it_is_batch_norm_over_the_whole_batch(
        self, world: MakeWorld, shape: tuple[int, ...], sizes: tuple[int, ...], options: dict[str, Any]
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(shape, generator=generator) * 3 + 1000  # where a difference of squares would lose digits
        weights = torch.randn(shape, generator=generator)
        plain = torch.nn.BatchNorm1d(3, **options) if len(shape) < 4 else torch.nn.BatchNorm2d(3, **options)
        if plain.affine:
            with torch.no_grad():
                plain.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        expected_input = whole.double().requires_grad_()
        plain = plain.double()
        for _ in range(2):
            expected = plain(expected_input)
        (expected * weights).sum().backward()
        parts = torch.split(whole, sizes), torch.split(weights, sizes)

        def rank_body(context: Context) -> Any:
            layer = SyncBatchNorm(3, **options)
            layer.frontend = frontend_of(context)
            if layer.affine:
                with torch.no_grad():
                    layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
            own = parts[0][context.rank].clone().requires_grad_()
            for _ in range(2):
                output = layer(own)
            (output * parts[1][context.rank]).sum().backward()
            return output.detach(), own.grad, layer

        results = world(len(sizes)).run(rank_body)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(torch.cat([r[0] for r in results]), expected.detach().float(), **close)
        assert expected_input.grad is not None
        torch.testing.assert_close(torch.cat([r[1] for r in results]), expected_input.grad.float(), **close)
        for _, _, layer in results:
            torch.testing.assert_close(layer.running_mean, plain.running_mean.float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(layer.running_var, plain.running_var.float(), rtol=1e-4, atol=1e-5)
            assert int(layer.num_batches_tracked) == 2
        if plain.affine:
            summed = sum(layer.weight.grad for _, _, layer in results)
            torch.testing.assert_close(summed, plain.weight.grad.float(), **close)

    def test_to_1e_5_in_double(self, world: MakeWorld) -> None:
        whole = torch.randn(8, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        plain = torch.nn.BatchNorm1d(2).double()
        reference = whole.clone().requires_grad_()
        plain(reference).square().sum().backward()

        def rank_body(context: Context) -> Any:
            layer = SyncBatchNorm(2).double()
            layer.frontend = frontend_of(context)
            own = whole[context.rank * 4 : context.rank * 4 + 4].clone().requires_grad_()
            layer(own).square().sum().backward()
            return own.grad

        assert reference.grad is not None
        torch.testing.assert_close(torch.cat(world(2).run(rank_body)), reference.grad, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", [(4, 4), (5, 2)], ids=str)
    def test_activations_keep_their_type_and_format_and_the_host_waits_for_the_collectives_alone(
        self, world: MakeWorld, dtype: torch.dtype, sizes: tuple[int, ...]
    ) -> None:
        """On a GPU each number that the host reads empties its queue, and float64 is tens of times slower."""

        def rank_body(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
            layer = SyncBatchNorm(3, momentum=None)
            layer.frontend = Counting(frontend_of(context))  # type: ignore[assignment]
            x = torch.randn((sizes[context.rank], 3, 16, 16), generator=torch.Generator().manual_seed(context.rank))
            x = (2 * x + 1).to(dtype).to(memory_format=torch.channels_last).requires_grad_()
            with Watching() as seen:
                output = layer(x)
                assert layer.frontend.calls == ["allgather"]
                output.square().sum().backward()
            assert layer.frontend.calls == ["allgather", "allreduce"]
            assert seen.read == []
            assert seen.wide == []
            assert x.grad is not None
            for tensor in (output, x.grad):
                assert tensor.dtype is dtype
                assert tensor.is_contiguous(memory_format=torch.channels_last)
            return output.detach(), x.grad

        results = world(2).run(rank_body)
        parts = [torch.randn((n, 3, 16, 16), generator=torch.Generator().manual_seed(r)) for r, n in enumerate(sizes)]
        whole = torch.cat([(2 * part + 1).to(dtype) for part in parts]).double().requires_grad_()
        expected = torch.nn.BatchNorm2d(3).double()(whole)
        expected.square().sum().backward()
        assert whole.grad is not None
        close = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 64 * torch.finfo(dtype).eps}
        torch.testing.assert_close(torch.cat([r[0] for r in results]).double(), expected.detach(), **close)
        torch.testing.assert_close(torch.cat([r[1] for r in results]).double(), whole.grad, **close)

    def test_its_gradient_cannot_be_differentiated(self, world: MakeWorld) -> None:
        def rank_body(context: Context) -> None:
            layer = SyncBatchNorm(2)
            layer.frontend = frontend_of(context)
            x = torch.randn(3, 2, requires_grad=True)
            (gradient,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.sum().backward()

        world(2).run(rank_body)

    def test_evaluation_is_local(self, world: MakeWorld) -> None:
        def rank_body(context: Context) -> None:
            layer = SyncBatchNorm(2).eval()
            layer.frontend = frontend_of(context)
            if context.rank == 0:  # no other rank calls it
                torch.testing.assert_close(layer(torch.ones(3, 2)), torch.ones(3, 2), rtol=1e-4, atol=1e-4)

        world(2).run(rank_body)

    def test_bad_inputs(self, world: MakeWorld) -> None:
        def rank_body(context: Context) -> None:
            layer = SyncBatchNorm(2)
            layer.frontend = frontend_of(context)
            with pytest.raises(ValueError, match="at least two dimensions"):
                layer(torch.ones(2))
            with pytest.raises(ValueError, match="1 values per channel"):
                layer(torch.ones(1 - context.rank, 2))

        world(2).run(rank_body)


class TestSparse:
    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE], ids=lambda op: op.name.lower())
    def test_entries_at_one_place_add_up(self, world: MakeWorld, op: ReduceOp) -> None:
        def rank_body(context: Context) -> None:
            rows = torch.tensor([[0, context.rank, 0]])  # one place twice
            values = torch.full((3, 2), float(context.rank + 1))
            tensor = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
            result = start_sparse_allreduce(frontend_of(context), tensor, "x", op, global_process_set)()
            dense = torch.zeros(4, 2)
            for rank in range(3):
                dense[0] += 2 * (rank + 1)
                dense[rank] += rank + 1
            assert result.is_coalesced()
            torch.testing.assert_close(result.to_dense(), dense / (3 if op is ReduceOp.AVERAGE else 1))

        world(3).run(rank_body)

    def test_wrong_calls(self, world: MakeWorld) -> None:
        def rank_body(frontend: Frontend[Any]) -> None:
            sparse = torch.eye(2).to_sparse()
            with pytest.raises(InvalidArgumentError, match="sparse_coo"):
                start_sparse_allreduce(frontend, torch.eye(2), None, ReduceOp.SUM, global_process_set)
            with pytest.raises(InvalidArgumentError, match="must be Average or Sum"):
                start_sparse_allreduce(frontend, sparse, None, ReduceOp.MAX, global_process_set)
            wrong = torch.ones(2, 1, 1).to_sparse() if frontend.rank() else sparse
            with pytest.raises(MismatchError, match="shape"):
                start_sparse_allreduce(frontend, wrong, None, ReduceOp.SUM, global_process_set)()

        world(2).run(rank_body, frontend_of)


class TestSampler:
    def test_ranks_share_a_shuffled_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
        monkeypatch.setattr(mpi_ops, "size", lambda: 3)
        shares = []
        for rank in range(3):
            monkeypatch.setattr(mpi_ops, "rank", lambda rank=rank: rank)
            sampler = ElasticSampler(range(10), seed=4)
            assert len(sampler) == 4
            shares.append(list(sampler))
        flat = [index for share in shares for index in share]
        assert len(flat) == 12
        assert set(flat) == set(range(10))  # two of them twice, to pad
        sampler.set_epoch(1)
        assert list(sampler) != shares[2]

    def test_an_epoch_goes_on_where_it_stopped_on_another_number_of_ranks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
        monkeypatch.setattr(mpi_ops, "rank", lambda: 0)
        monkeypatch.setattr(mpi_ops, "size", lambda: 2)
        sampler = ElasticSampler(range(12), shuffle=False)
        seen = list(sampler)[:4]
        sampler.record_batch(0, 4)
        state = sampler.state_dict()
        assert state == {"epoch": 0, "processed_num": 8}
        monkeypatch.setattr(mpi_ops, "size", lambda: 1)
        other = ElasticSampler(range(12), shuffle=False)
        other.load_state_dict(state)
        assert seen == [0, 2, 4, 6]
        assert list(other) == [8, 9, 10, 11]
        other.set_epoch(1)
        assert list(other) == list(range(12))

    def test_more_ranks_than_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi_ops, "is_initialized", lambda: True)
        monkeypatch.setattr(mpi_ops, "size", lambda: 5)
        monkeypatch.setattr(mpi_ops, "rank", lambda: 4)
        assert list(ElasticSampler(range(2), shuffle=False)) == [0]
        assert list(ElasticSampler(range(0))) == []


class Numbers(BaseDataLoader):
    """Batches 0, 1, ..., of which the one numbered ``bad`` cannot be loaded."""

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count = count
        self.bad = bad
        self.loaded = 0
        self.some = threading.Event()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        for number in range(self.count):
            if number == self.bad:
                raise OSError("a bad sector")
            self.loaded += 1
            if self.loaded == 3:
                self.some.set()
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


class TestAsyncLoader:
    def test_it_works_ahead_and_ends(self) -> None:
        loader = AsyncNumbers(5, async_loader_queue_size=2)
        batches = iter(loader)
        assert next(batches) == 0
        assert loader.some.wait(10)  # the third was not asked for yet
        assert list(batches) == [10, 20, 30, 40]
        assert list(loader) == [0, 10, 20, 30, 40]
        assert threading.active_count() == 1 or "hvdgloo-data-loader" not in {t.name for t in threading.enumerate()}

    def test_leaving_early_ends_the_thread(self) -> None:
        loader = AsyncNumbers(1000, async_loader_queue_size=2)
        for batch in loader:
            if batch == 30:
                break
        loader.close_async_loader()
        assert "hvdgloo-data-loader" not in {thread.name for thread in threading.enumerate()}

    def test_a_batch_that_never_comes_does_not_keep_the_loop_from_ending(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        disk = threading.Event()

        class Stuck(BaseDataLoader):
            def _iterate(self) -> Iterator[int]:
                yield 1
                disk.wait()
                yield 2

        class AsyncStuck(AsyncDataLoaderMixin, Stuck):
            pass

        try:
            assert next(iter(AsyncStuck(async_loader_end_timeout=0.1))) == 1
            assert "AsyncStuck is still loading a batch after 0.1 s" in caplog.text
        finally:
            disk.set()
        wait_for(lambda: "hvdgloo-data-loader" not in {thread.name for thread in threading.enumerate()})

    def test_an_error_in_the_thread_is_raised_in_the_loop(self) -> None:
        loader = AsyncNumbers(5, bad=2)
        seen = []
        with pytest.raises(OSError, match="bad sector"):
            seen.extend(iter(loader))
        assert loader.loaded == 2

    def test_without_a_queue_it_is_the_plain_loader(self) -> None:
        assert list(AsyncNumbers(3, async_loader_queue_size=0)) == [0, 10, 20]
        assert list(Numbers(3)) == [0, 10, 20]
        with pytest.raises(NotImplementedError, match="_iterate"):
            next(iter(BaseDataLoader()))
