"""Limits for tensors of a GPU: a host must neither read their memory, nor replace it by memory of its own.

These tensors are of a class that is neither the CPU's nor CUDA's: the engine gets at them only through a plane that
stages them, and anything else that looks at their memory gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import BackendError, InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._state import broadcast_optimizer_state  # noqa: E402
from hvdgloo.types import TensorSpec  # noqa: E402
from tests.support.gpus.worlds import planes  # noqa: E402
from tests.support.world import World  # noqa: E402

SIZE = 3


class Remote(Tensor):
    """A tensor that the host may not look at; what is computed from it is one, too."""

    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy")

    def cpu(self, *how: Any, **more: Any) -> Tensor:
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()


def remote(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Remote)


class RemoteAdapter(TorchAdapter):
    """An adapter for both kinds of tensors."""

    def on_gpu(self, tensor: Tensor) -> bool:
        return isinstance(tensor, Remote) or isinstance(getattr(tensor, "data", None), Remote)

    def allocate(self, spec: TensorSpec, like: Tensor) -> Tensor:
        made = super().allocate(spec, like)
        return remote(made) if spec.device == "cuda" and self.on_gpu(like) else made

    def deliver(self, result: Tensor, target: Tensor, *, in_place: bool) -> Tensor:
        delivered = super().deliver(result, target, in_place=in_place)
        return remote(delivered) if self.on_gpu(target) and not in_place else delivered

    def fence(self, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        return (lambda: None) if any(self.on_gpu(tensor) for tensor in tensors) else None


@pytest.fixture
def world() -> Iterator[World]:
    with World(SIZE, open_device=planes(operations="gloo")) as made:
        yield made


def frontend_of(context: Context) -> Frontend[Tensor]:
    return Frontend(RemoteAdapter(), lambda: context)


def test_the_host_cannot_read_a_device_s_memory() -> None:
    tensor = remote(torch.ones(2))
    buffer = RemoteAdapter().export(tensor)
    assert buffer.device == "cuda"
    with pytest.raises(BackendError, match="the host cannot read the memory of a cuda device"):
        buffer.array()


def model_of(rank: int) -> nn.Module:
    model = nn.Linear(3, 2)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(remote(torch.full(parameter.shape, float(rank)))))
    return model


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),  # its steps are the host's
    "a rate on the device": lambda parameters: torch.optim.Adam(
        parameters, lr=remote(torch.tensor(0.1)), foreach=False
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("others_have_state", [False, True], ids=["others are new", "others have state"])
def test_optimizer_state_on_devices_becomes_the_roots(world: World, name: str, others_have_state: bool) -> None:
    def body(context: Context) -> dict[str, Any]:
        optimizer = OPTIMIZERS[name](model_of(context.rank).parameters())
        if context.rank == 1 or others_have_state:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, 1.0 + context.rank)
            optimizer.step()
        broadcast_optimizer_state(frontend_of(context), optimizer, 1)
        state: dict[str, Any] = optimizer.state_dict()
        for entries in state["state"].values():
            for key, value in entries.items():
                assert isinstance(value, Remote) == (key != "step"), key
        return state

    first, *others = world.run(body)
    assert first["state"]
    for other in others:
        for number, entries in first["state"].items():
            for key, value in entries.items():
                assert value.tolist() == other["state"][number][key].tolist(), key


def test_the_gradient_of_an_alltoall_between_devices(world: World) -> None:
    def body(context: Context) -> None:
        x = remote(torch.arange(6.0)).requires_grad_()
        received, counts = frontend_of(context).alltoall(x, splits=[1, 2, context.rank])
        assert isinstance(received, Remote)
        assert counts.tolist() == [[1, 1, 1], [2, 2, 2], [0, 1, 2]][context.rank]
        ((context.rank + 1.0) * received).sum().backward()
        expected = [1.0, 2.0, 2.0, *[3.0] * context.rank, *[0.0] * (3 - context.rank)]
        assert x.grad is not None
        assert x.grad.tolist() == expected

    world.run(body)


def test_splits_on_a_device_are_read_on_the_host(world: World) -> None:
    def body(hvd: Frontend[Any]) -> None:
        splits = remote(torch.tensor([1, 0, 2]))
        received, counts = hvd.alltoall(remote(torch.full((3,), float(hvd.rank()))), splits=splits)
        assert received.tolist() == [[0.0, 1.0, 2.0], [], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]][hvd.rank()]
        assert not isinstance(counts, Remote)
        assert counts.dtype is torch.int32
        handle = hvd.alltoall_async(remote(torch.ones(3)), splits=splits)
        assert hvd.synchronize(handle)[1].tolist() == [[1] * 3, [0] * 3, [2] * 3][hvd.rank()]
        for wrong in (remote(torch.ones(3)), remote(torch.ones(3, dtype=torch.bfloat16)), splits[None]):
            with pytest.raises(InvalidArgumentError, match="splits are integers in one dimension"):
                hvd.alltoall(remote(torch.ones(3)), splits=wrong)

    world.run(body, frontend_of)
