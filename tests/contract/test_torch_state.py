"""broadcast_parameters and broadcast_optimizer_state: all ranks go on from one rank's state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import InvalidArgumentError  # noqa: E402
from hvdgloo.torch._distributed_optimizer import wrap  # noqa: E402
from hvdgloo.torch._parameters import ReductionOptions  # noqa: E402
from hvdgloo.torch._state import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from tests.support.frameworks import load  # noqa: E402
from tests.support.world import MakeWorld  # noqa: E402

USED_AGAIN = True  # worlds, by the tests that follow
SIZE = 3

frontend_of = load("torch").frontend


def filled_model(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize(
    "params_of",
    [
        lambda m: m.state_dict(),
        lambda m: list(m.state_dict().items()),
        lambda m: list(m.state_dict().values()),
        lambda m: dict(reversed(m.state_dict().items())),
    ],
    ids=["state dict", "pairs", "tensors", "another order"],
)
def test_parameters_become_the_roots(world: MakeWorld, root: int, params_of: Callable[[Any], Any]) -> None:
    def rank_body(context: Context) -> None:
        model = filled_model(context.rank + 1)
        broadcast_parameters(frontend_of(context), params_of(model), root)
        for name, tensor in model.state_dict().items():
            assert (tensor == root + 1).all(), name
        # Parameters stay leaves that a gradient can flow to.
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())

    world(SIZE).run(rank_body)


def test_parameters_themselves_can_be_sent(world: MakeWorld) -> None:
    """Leaves that require a gradient may not be written in place under autograd, but state may."""

    def rank_body(context: Context) -> None:
        model = filled_model(context.rank + 1)
        broadcast_parameters(frontend_of(context), list(model.named_parameters()), 1)
        assert all((p == 2).all() and p.requires_grad for p in model.parameters())

    world(SIZE).run(rank_body)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (iter([]), "list"),
        ((t for t in [torch.ones(1)]), "generator"),
        (torch.ones(2), "Tensor"),
        (None, "NoneType"),
        ({"a": 3}, "'a' is a int"),
        ([("a", torch.ones(1), 3)], "tuple"),
        ([(1, torch.ones(1))], "1 is a Tensor"),
    ],
)
def test_what_is_no_dict_or_list_of_tensors_is_refused(world: MakeWorld, params: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        broadcast_parameters(frontend_of(world(1).contexts[0]), params, 0)


def test_a_buffer_that_cannot_be_written_is_named(world: MakeWorld) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^mask: elements of the tensor share memory"):
        broadcast_parameters(frontend_of(world(1).contexts[0]), {"mask": torch.ones(1).expand(3)}, 0)


OPTIMIZERS: dict[str, Callable[[Any, float], Any]] = {
    "sgd": lambda p, x: torch.optim.SGD(p, lr=0.1 * x, momentum=0.5),
    "adam": lambda p, x: torch.optim.Adam(p, lr=0.1 * x, betas=(0.5, 0.1 * x), amsgrad=True),
    "adam with a tensor as rate": lambda p, x: torch.optim.Adam(p, lr=torch.tensor(0.1 * x)),
    "adagrad": lambda p, x: torch.optim.Adagrad(p, lr=0.1 * x),
    "rprop": lambda p, x: torch.optim.Rprop(p, lr=0.1 * x),
    "asgd": lambda p, x: torch.optim.ASGD(p, lr=0.1 * x),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("others_have_state", [False, True], ids=["others are new", "others have state"])
def test_optimizer_state_becomes_the_roots(
    world: MakeWorld, name: str, distributed: bool, others_have_state: bool
) -> None:
    """Only rank 1 has read a checkpoint, say."""

    def rank_body(context: Context) -> dict[str, Any]:
        model = filled_model(1.0)
        optimizer = OPTIMIZERS[name](model.parameters(), 1.0 + context.rank)
        if context.rank == 1 or others_have_state:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + context.rank)
            for _ in range(1 + context.rank):
                optimizer.step()
        if distributed:
            optimizer = wrap(frontend_of(context), optimizer, None, None, ReductionOptions())
        before = [p.detach().clone() for p in model.parameters()]
        broadcast_optimizer_state(frontend_of(context), optimizer, 1)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        # It works on: state is where its parameters are, in types that the optimizer takes.
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return state

    states = world(SIZE).run(rank_body)
    assert states[1]["state"]
    for state in states:
        torch.testing.assert_close(state["state"], states[1]["state"], rtol=0, atol=0)
        for group, expected in zip(state["param_groups"], states[1]["param_groups"], strict=True):
            assert group.keys() == expected.keys()
            assert all(group[key] == expected[key] for key in group), group


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_missing_state_is_as_after_a_step_with_gradients_of_zero(world: MakeWorld, distributed: bool) -> None:
    """Weight decay must not act for the sake of having a state."""

    def make(model: Any, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=0.1)

    reference = filled_model(1.0)
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepped = make(reference, 0.3)
    stepped.step()
    expected = stepped.state_dict()["state"]

    def rank_body(context: Context) -> None:
        model = filled_model(1.0)
        optimizer = make(model, 0.1 * (1 + context.rank))
        steps: list[Any] = []
        optimizer.register_step_pre_hook(lambda *given: steps.append(given))
        if distributed:
            optimizer = wrap(frontend_of(context), optimizer, None, None, ReductionOptions())
        first, *others = model.parameters()
        first.grad = torch.full_like(first, 5.0)
        broadcast_optimizer_state(frontend_of(context), optimizer, 2)
        torch.testing.assert_close(optimizer.state_dict()["state"], expected, rtol=0, atol=0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
        assert all((p == 1).all() for p in model.parameters())
        assert (first.grad == 5).all()
        assert all(p.grad is not None and not p.grad.any() for p in others)
        assert steps == []
        optimizer.step()
        assert len(steps) == 1

    world(SIZE).run(rank_body)


def test_only_missing_entries_of_the_state_are_initialised(world: MakeWorld) -> None:
    def rank_body(context: Context) -> None:
        model = filled_model(1.0)
        first, *others = model.parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        first.grad = torch.ones_like(first)
        optimizer.step()
        broadcast_optimizer_state(frontend_of(context), optimizer, 0)
        assert (optimizer.state[first]["momentum_buffer"] == 1).all()
        assert all(not optimizer.state[p]["momentum_buffer"].any() for p in others)

    world(2).run(rank_body)


def test_an_optimizer_that_cannot_make_such_a_step_goes_without(world: MakeWorld) -> None:
    class Demanding(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] = 7.0
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter += 1
                    self.state[parameter]["half done"] = 1
            return closure()

    def rank_body(context: Context) -> None:
        model = filled_model(1.0)
        optimizer = Demanding(model.parameters(), lr=0.1 * (1 + context.rank))
        broadcast_optimizer_state(frontend_of(context), optimizer, 1)
        assert optimizer.state_dict()["state"] == {}
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
        assert all((p == 1).all() for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())

    world(2).run(rank_body)


def test_lbfgs_is_refused(world: MakeWorld) -> None:
    frontend = frontend_of(world(1).contexts[0])
    with pytest.raises(InvalidArgumentError, match="LBFGS"):
        broadcast_optimizer_state(frontend, torch.optim.LBFGS(filled_model(1).parameters()), 0)
    with pytest.raises(InvalidArgumentError, match="not dict"):
        broadcast_optimizer_state(frontend, {}, 0)  # type: ignore[arg-type]
