"""Models whose gradients torch.distributed reduces already: refused, instead of trained wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import InvalidArgumentError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from tests.support.world import World  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


@pytest.fixture
def group() -> Iterator[None]:
    """torch.distributed's default group, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distribute(context: Context, model: nn.Module) -> DistributedTorchOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frontend = Frontend(TorchAdapter(), lambda: context)
    return wrap(frontend, optimizer, model.named_parameters(), None, ReductionOptions())


def sharded_by_fsdp(model: nn.Module) -> nn.Module:
    """As FullyShardedDataParallel holds a model; it cannot be made without an accelerator."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    made: nn.Module = object.__new__(FullyShardedDataParallel)
    nn.Module.__init__(made)
    nn.Module.__setattr__(made, "_fsdp_wrapped_module", model)
    return made


class Ours(DistributedDataParallel):
    """A library's class, as torchft's is."""


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("other", [DistributedDataParallel, Ours, sharded_by_fsdp], ids=lambda other: other.__name__)
def test_a_model_that_reduces_its_gradients_is_refused_when_its_optimizer_is_wrapped(other: Callable[..., Any]) -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    wrapped = [other(model) for model in models]

    def rank_body(context: Context) -> None:
        with pytest.raises(InvalidArgumentError, match=r"^weight: .* reduces this parameter's gradient as well"):
            distribute(context, models[context.rank])

    with World(2, "local") as world:
        world.run(rank_body)
    del wrapped


@pytest.mark.usefixtures("group")
def test_a_model_that_is_wrapped_after_its_optimizer_is_refused_in_the_first_step() -> None:
    def rank_body(context: Context) -> None:
        model = nn.Linear(2, 2)
        optimizer = distribute(context, model)
        wrapped = DistributedDataParallel(model)
        wrapped(torch.ones(1, 2)).sum().backward()
        with pytest.raises(InvalidArgumentError, match="leave out DistributedDataParallel, or train with it and"):
            optimizer.step()

    with World(2, "local") as world:
        world.run(rank_body)


@pytest.mark.usefixtures("group")
def test_other_models_and_lone_processes_are_not_refused() -> None:
    wrapped = DistributedDataParallel(nn.Linear(2, 2))

    def rank_body(context: Context) -> None:
        model = nn.Linear(2, 2)
        optimizer = distribute(context, model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with World(2, "local") as world:
        world.run(rank_body)
    with World(1, "local") as world:  # there is no other rank to reduce with
        world.run(lambda context: distribute(context, wrapped))


@pytest.mark.usefixtures("group")
def test_a_model_whose_wrapper_was_dropped_is_not_refused() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    for model in models:
        DistributedDataParallel(model)

    with World(2, "local") as world:
        world.run(lambda context: distribute(context, models[context.rank]))
