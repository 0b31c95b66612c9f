"""Training as programs do it: every optimizer of torch, and the features that touch gradients, equal to one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._state import broadcast_optimizer_state  # noqa: E402
from tests.contract.test_torch_optimizer import STEPS, distribute  # noqa: E402
from tests.support.small_model import INPUTS, TARGETS, alike, loss_of, make_model, part_of, values  # noqa: E402
from tests.support.world import World  # noqa: E402

SPECIAL = {"LBFGS": {"lr": 0.2, "max_iter": 3}}
EVERY = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    if name != "SparseAdam"  # for sparse gradients alone; see below
)


def make(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "Muon":  # for matrices alone
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **SPECIAL.get(name, {}))
    return optimizer


def train_steps(model: nn.Module, optimizer: Any, part: slice, steps: int = STEPS) -> list[np.ndarray]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return values(model)


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_trains_as_in_one_process(name: str) -> None:
    model = make_model()
    expected = train_steps(model, make(name, model.parameters()), slice(None))

    def rank_body(context: Context) -> list[np.ndarray]:
        own = make_model()
        return train_steps(own, distribute(context, make(name, own.parameters())), part_of(context))

    with World(2, "local") as world:
        for result in world.run(rank_body):
            alike(result, expected)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "LBFGS"])
@pytest.mark.parametrize("steps", [0, 2], ids=["no state yet", "with state"])
def test_every_optimizers_state_is_broadcast(name: str, steps: int) -> None:
    def rank_body(context: Context) -> Any:
        model = make_model()
        optimizer = make(name, model.parameters())
        if context.rank == 1:
            train_steps(model, optimizer, slice(None), steps)
        broadcast_optimizer_state(Frontend(TorchAdapter(), lambda: context), optimizer, 1)
        return optimizer.state_dict()

    with World(2, "local") as world:
        first, second = world.run(rank_body)
    # Loading casts states of some optimizers to the parameters' type, as torch does it.
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0, check_dtype=False)
    assert bool(first["state"]) is bool(second["state"])


def test_sparse_adam_trains_as_in_one_process() -> None:
    words = torch.tensor([0, 1, 1, 2, 5, 6, 0, 6])

    def train(optimizer: Any, table: nn.Embedding, part: slice) -> list[np.ndarray]:
        for _ in range(STEPS):
            optimizer.zero_grad()
            table(words[part]).square().mean().backward()
            optimizer.step()
        return values(table)

    def make_table() -> nn.Embedding:
        table = nn.Embedding(7, 2, sparse=True).double()
        with torch.no_grad():
            table.weight.copy_(torch.arange(14.0).view(7, 2) + 1)
        return table

    table = make_table()
    expected = train(torch.optim.SparseAdam(table.parameters(), lr=0.1), table, slice(None))

    def rank_body(context: Context) -> list[np.ndarray]:
        own = make_table()
        optimizer = distribute(context, torch.optim.SparseAdam(own.parameters(), lr=0.1))
        return train(optimizer, own, slice(4 * context.rank, 4 * context.rank + 4))

    with World(2, "local") as world:
        for result in world.run(rank_body):
            alike(result, expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_ranks_to_1e_6(size: int) -> None:
    model = make_model()
    expected = train_steps(model, torch.optim.Adam(model.parameters(), lr=0.05), slice(None), 8)

    def rank_body(context: Context) -> list[np.ndarray]:
        own = make_model()
        optimizer = distribute(context, torch.optim.Adam(own.parameters(), lr=0.05), own.named_parameters())
        return train_steps(own, optimizer, part_of(context), 8)

    with World(size, "local") as world:
        for result in world.run(rank_body):
            alike(result, expected, rtol=1e-6)


def both(step: Callable[[Any, slice], list[np.ndarray]], steps: int = 3) -> None:
    """``step(distribute, part)`` gives the same for one process and for two."""

    def plain(optimizer: Any, *_: Any, **__: Any) -> Any:
        return optimizer

    expected = step(plain, slice(None))

    def rank_body(context: Context) -> list[np.ndarray]:
        def wrap(optimizer: Any, *more: Any, **options: Any) -> Any:
            return distribute(context, optimizer, *more, **options)

        return step(wrap, part_of(context))

    with World(2, "local") as world:
        for result in world.run(rank_body):
            alike(result, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    def step(wrap: Any, part: slice) -> list[np.ndarray]:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], INPUTS[part].clone().requires_grad_(), use_reentrant=reentrant)
            ((model[2](hidden) - TARGETS[part]) ** 2).mean().backward()
            optimizer.step()
        return values(model)

    both(step)


def test_a_compiled_model() -> None:
    def step(wrap: Any, part: slice) -> list[np.ndarray]:
        model = make_model()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            ((compiled(INPUTS[part]) - TARGETS[part]) ** 2).mean().backward()
            optimizer.step()
        return values(model)

    both(step)


def test_two_optimizers_that_take_turns() -> None:
    """A generator and a discriminator: each one's backward pass also computes gradients of the other's parameters."""

    def step(wrap: Any, part: slice) -> list[np.ndarray]:
        generator, critic = make_model(), nn.Linear(3, 1).double()
        with torch.no_grad():
            critic.weight.copy_(torch.tensor([[0.5, -1.0, 0.25]]))
            critic.bias.zero_()
        first = wrap(torch.optim.SGD(critic.parameters(), lr=0.1), critic.named_parameters())
        second = wrap(torch.optim.SGD(generator.parameters(), lr=0.1), generator.named_parameters())
        for _ in range(3):
            first.zero_grad()
            fake = generator(INPUTS[part]).detach()
            ((critic(TARGETS[part]) - 1) ** 2 + critic(fake) ** 2).mean().backward()
            first.step()
            second.zero_grad()
            critic.requires_grad_(False)
            ((critic(generator(INPUTS[part])) - 1) ** 2).mean().backward()
            critic.requires_grad_(True)
            second.step()
        return values(generator) + values(critic)

    both(step)


def test_a_critic_whose_gradients_are_computed_once_too_often() -> None:
    """The usual loop: two passes for the critic, and a third that the generator's own causes and that is not wanted."""

    def step(wrap: Any, part: slice) -> list[np.ndarray]:
        generator, critic = make_model(), nn.Linear(3, 1).double()
        with torch.no_grad():
            critic.weight.copy_(torch.tensor([[0.5, -1.0, 0.25]]))
            critic.bias.zero_()
        first = wrap(torch.optim.SGD(critic.parameters(), lr=0.1), backward_passes_per_step=2)
        second = wrap(torch.optim.SGD(generator.parameters(), lr=0.1))
        for _ in range(3):
            first.zero_grad()
            (critic(TARGETS[part]) - 1).square().mean().backward()
            critic(generator(INPUTS[part]).detach()).square().mean().backward()
            first.step()
            second.zero_grad()
            (critic(generator(INPUTS[part])) - 1).square().mean().backward()
            second.step()
        return values(generator) + values(critic)

    both(step)


def test_clipping_between_synchronize_and_step() -> None:
    def step(wrap: Any, part: slice) -> list[np.ndarray]:
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5))
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, part).backward()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
        return values(model)

    both(step)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_autocast_with_a_scaler(dtype: torch.dtype, fused: bool) -> None:
    """Gradients of low precision are near one process's; a rank with infinite ones makes all skip that step."""

    def train(wrap: Callable[[Any], Any], part: slice, overflows: bool) -> tuple[list[np.ndarray], float]:
        model = make_model().float()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for index in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                output = model(INPUTS[part].float())
            loss = (output.float() - TARGETS[part].float()).square().mean()
            scaler.scale(loss * (float("inf") if index == 1 and overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return values(model), scaler.get_scale()

    expected, scale = train(lambda optimizer: optimizer, slice(None), True)

    def rank_body(context: Context) -> Any:
        return train(lambda optimizer: distribute(context, optimizer), part_of(context), context.rank == 1)

    with World(2, "local") as world:
        (first, *scales), (second, other) = world.run(rank_body)
    assert [*scales, other] == [scale, scale] == [512.0, 512.0]
    alike(first, second, rtol=0)
    for actual, value in zip(first, expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=0.02)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_on_some_ranks(to_none: bool) -> None:
    """Its gradient counts as zeros, and no rank waits."""

    def rank_body(context: Context) -> list[np.ndarray]:
        model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)}).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = distribute(context, torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            branch = model["a"] if (step + context.rank) % 2 else model["b"]
            branch(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return values(model)

    with World(2, "local") as world:
        for result in world.run(rank_body):
            for parameter in result:
                np.testing.assert_allclose(parameter, 1.0 - 3 * 0.5)
