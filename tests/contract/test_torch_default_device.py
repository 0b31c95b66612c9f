"""A program's default device and default type say what it trains on, and nothing about what hvdgloo works with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.torch import SyncBatchNorm  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import wrap  # noqa: E402
from hvdgloo.torch._frontend import TorchFrontend  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch._state import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from hvdgloo.torch.compression import Compression  # noqa: E402
from hvdgloo.torch.elastic import TorchState  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.small_model import alike, loss_of, make_model, part_of, values  # noqa: E402
from tests.support.world import World  # noqa: E402

COLUMNS = torch.arange(6.0).reshape(3, 2).t()  # not contiguous


def frontend_of(context: Context) -> TorchFrontend:
    return TorchFrontend(TorchAdapter(), lambda: context)


def in_place(f: TorchFrontend) -> Tensor:
    tensor = COLUMNS.clone(memory_format=torch.preserve_format)
    f.allreduce_(tensor)
    return tensor


def sparse(f: TorchFrontend) -> Tensor:
    return f.sparse_allreduce_async(COLUMNS.to_sparse(), "sparse", ReduceOp.SUM)().to_dense()


CALLS: dict[str, Callable[[TorchFrontend], Any]] = {
    "in place": in_place,
    "allreduce": lambda f: f.allreduce(COLUMNS),
    "adasum": lambda f: f.allreduce(COLUMNS, op=ReduceOp.ADASUM),
    "float16": lambda f: f.allreduce(COLUMNS, compression=Compression.fp16),
    "grouped": lambda f: f.grouped_allreduce([COLUMNS, COLUMNS * 2]),
    "allgather": lambda f: f.allgather(COLUMNS),
    "alltoall": lambda f: f.alltoall(COLUMNS, splits=torch.tensor([1, 1], device="cpu")),
    "reducescatter": lambda f: f.reducescatter(COLUMNS),
    "broadcast": lambda f: f.broadcast(COLUMNS, 1),
    "sparse": sparse,
    "object": lambda f: f.broadcast_object({"a": 1}, 1),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_a_collective_gives_what_it_gives_without_a_default_device(name: str) -> None:
    def rank_body(f: TorchFrontend) -> list[Any]:
        plain = CALLS[name](f)
        with torch.device("meta"):
            return [plain, CALLS[name](f)]

    with World(2, "local") as world:
        for plain, with_default in world.run(rank_body, frontend_of):
            torch.testing.assert_close(with_default, plain)


TRAININGS: dict[str, Any] = {
    "sgd": {},
    "adasum": {"op": ReduceOp.ADASUM},
    "powersgd": {"compression": lambda: Compression.powersgd(1, min_saving=1.0)},
    "bfloat16": {"compression": lambda: Compression.bf16},
}


def trained(context: Context, options: dict[str, Any]) -> list[np.ndarray]:
    """Six steps, two of which have a closure that returns a number, after everything has been broadcast."""
    f = frontend_of(context)
    with torch.device("cpu"):
        model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    made = {name: value() if callable(value) else value for name, value in options.items()}
    distributed = wrap(f, optimizer, model.named_parameters(), None, ReductionOptions(**made))
    broadcast_parameters(f, model.state_dict(), 1)
    broadcast_optimizer_state(f, distributed, 1)

    def closure() -> float:
        distributed.zero_grad()
        loss = loss_of(model, part_of(context))
        loss.backward()
        return float(loss.detach())

    for step in range(6):
        if step < 2:
            distributed.step(closure)
        else:
            closure()
            distributed.step()
    return values(model)


@pytest.mark.parametrize("name", list(TRAININGS))
def test_training_does_not_depend_on_the_default_device(name: str) -> None:
    def with_default(context: Context) -> list[np.ndarray]:
        with torch.device("meta"):
            return trained(context, TRAININGS[name])

    with World(2, "local") as world:
        expected = world.run(lambda context: trained(context, TRAININGS[name]))
    with World(2, "local") as world:
        for result, plain in zip(world.run(with_default), expected, strict=True):
            alike(result, plain, rtol=1e-12)


_one_at_a_time = threading.Lock()


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    with _one_at_a_time:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def test_batch_normalisation_does_not_depend_on_defaults() -> None:
    batch = torch.arange(24.0).reshape(6, 4).bfloat16()

    def normalised(context: Context) -> Tensor:
        with torch.device("cpu"):
            layer = SyncBatchNorm(4).to(torch.float32)
        layer.frontend = frontend_of(context)
        x = batch.clone().requires_grad_()
        output: Tensor = layer(x)
        output.float().pow(2).sum().backward()
        assert x.grad is not None
        return torch.stack([output.detach(), x.grad])

    with World(2, "local") as world:
        expected = world.run(normalised)[0]

        def rank_body(context: Context) -> Tensor:
            with torch.device("meta"):
                return normalised(context)

        with default_type(torch.float64):
            found = world.run(rank_body)
        for each in found:
            assert torch.equal(each, expected)


def test_an_elastic_state_does_not_depend_on_the_default_device() -> None:
    model = make_model()
    before = values(model)
    with torch.device("meta"):
        state = TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state.commit()
        with torch.no_grad():
            next(model.parameters()).zero_()
        state.restore()
    alike(values(model), before, rtol=0)


def test_a_model_without_memory_is_refused_before_anything_is_sent() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 3)

    def rank_body(context: Context) -> None:
        f = frontend_of(context)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(
            ValueError, match=r"^weight: a meta tensor has no values; .* model\.to_empty\(device='cpu'\)"
        ):
            wrap(f, optimizer, model.named_parameters(), None, ReductionOptions())
        with pytest.raises(ValueError, match=r"^bias: a meta tensor"):
            broadcast_parameters(f, model.state_dict(), 0)
        with pytest.raises(ValueError, match=r"^a meta tensor"):
            f.allreduce(model.weight)
        assert context.metrics().operations == 0

    with World(2, "local") as world:
        world.run(rank_body)
