"""The copies that a commit of a torch program makes: of all that has changed, however it was written, and nothing
else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hvdgloo.torch.elastic import _copies as copies_module  # noqa: E402
from hvdgloo.torch.elastic.state import (  # noqa: E402
    ModelStateHandler,
    OptimizerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

Written = list[int]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """Return the number of tensors that each transfer has written, from now on; transfers of nothing do not count."""
    numbers: Written = []
    transfer = copies_module.transfer

    def counted(pairs: Any) -> None:
        if pairs:
            numbers.append(len(pairs))
        transfer(pairs)

    monkeypatch.setattr(copies_module, "transfer", counted)
    return numbers


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 40, bias=False), nn.Conv2d(3, 4, 3))


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "by way of .data": lambda p: ByData(p),
    "tensor as learning rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
}


class ByData(torch.optim.Optimizer):
    """Writes as many optimizers of libraries do: torch does not count it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter].setdefault("count", 0)
                self.state[parameter]["count"] = count + 1
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_any_optimizer_steps_on_is_copied(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    state = TorchState(model, optimizer, batch=0)
    for batch in range(4):
        stepped(optimizer)
        state.batch = batch
        state.save()
        expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        stepped(optimizer)
        assert not same(model.state_dict(), expected[0])
        state.restore()
        assert same(model.state_dict(), expected[0])
        assert same(optimizer.state_dict(), expected[1])
        assert state.batch == batch


@pytest.mark.parametrize("kind", ["fused sgd", "fused adam", "by way of .data"])
def test_what_neither_a_count_nor_a_sample_shows_is_copied_after_a_step(kind: str) -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer = OPTIMIZERS[kind](model.parameters())
    state = TorchState(model, optimizer)
    for _ in range(2):
        model.weight.grad = torch.zeros(100, 100)
        model.weight.grad[0, 1] = 1.0
        optimizer.step()
        state.save()
        expected = model.weight.detach().clone()
        model.weight.grad = torch.ones(100, 100)
        optimizer.step()
        state.restore()
        assert torch.equal(model.weight, expected)


def test_nothing_is_copied_where_nothing_has_changed(written: Written) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(optimizer)
    state = TorchState(model, optimizer, batch=0)
    written.clear()
    for _ in range(3):
        state.save()
        state.restore()
    assert written == []


def test_a_restore_after_a_failed_step_copies_nothing(written: Written) -> None:
    """Parameters change only when all gradients have arrived."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer)
    stepped(optimizer)
    state.save()
    model[0](torch.ones(1, 20)).sum().backward()
    written.clear()
    state.restore()
    assert written == []
    assert all(parameter.grad is None for parameter in model.parameters()), "they are part of the failed step"


def test_only_what_has_changed_is_copied(written: Written) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = TorchState(model, optimizer)
    written.clear()
    stepped(optimizer)
    state.save()
    with torch.no_grad():
        model[1].weight.mul_(2)
    state.save()
    assert written == [2, 1]


def test_statistics_of_batch_normalisation_are_always_copied() -> None:
    """torch does not count what is written into them."""
    model = nn.BatchNorm1d(3)
    state = TorchState(model)
    model(torch.randn(5, 3))
    state.save()
    expected = copy.deepcopy(model.state_dict())
    model(torch.randn(5, 3))
    state.restore()
    assert same(model.state_dict(), expected)


@pytest.mark.parametrize("where", [slice(None), slice(0, 1)])
def test_what_is_written_past_torchs_count_shows_in_a_sample(where: slice) -> None:
    """A moving average of weights, for example, which is often written by way of ``.data``."""
    average = net()
    state = TorchState(average=average)
    average[1].weight.data[where] += 1
    state.save()
    expected = copy.deepcopy(average.state_dict())
    average[1].weight.data[where] += 1
    state.restore()
    assert same(average.state_dict(), expected)


def test_values_that_are_no_numbers_are_equal_to_themselves(written: Written) -> None:
    model = nn.Linear(3, 3)
    nn.init.constant_(model.weight, float("nan"))
    state = TorchState(model)
    written.clear()
    state.save()
    assert written == []


def test_memory_is_kept_from_save_to_save() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = ModelStateHandler(model)
    places = []
    for _ in range(6):
        stepped(optimizer)
        handler.save()
        places.append(tuple(each.kept.data_ptr() for each in handler._copies.saved.copies))
    assert places[2:4] == places[4:6]
    assert not set(places[4]) & set(places[5])


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt, ValueError])
def test_a_save_that_is_interrupted_is_never_restored_from(
    monkeypatch: pytest.MonkeyPatch, interrupted: type[BaseException]
) -> None:
    model, other = net(), net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    stepped(optimizer)
    state = TorchState(model, optimizer, other=other, batch=1)
    for _ in range(2):  # with memory for both
        stepped(optimizer)
        state.save()
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict(), other.state_dict()))
    serial = state._progress.serial
    for breaks_at in range(3):
        stepped(optimizer)
        state.batch = 2
        left = [breaks_at]
        transfer = copies_module.transfer

        def breaking(pairs: Any, left: list[int] = left, transfer: Any = transfer) -> None:
            if not left[0]:
                transfer(pairs[: len(pairs) // 2])
                raise interrupted
            left[0] -= 1
            transfer(pairs)

        with monkeypatch.context() as patch:
            patch.setattr(copies_module, "transfer", breaking)
            with pytest.raises(interrupted):
                state.save()
        assert state._progress.serial == serial
        state.restore()
        assert same((model.state_dict(), optimizer.state_dict(), other.state_dict()), expected)
        assert state.batch == 1


def test_state_that_an_optimizer_got_since_is_gone_after_a_restore() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    stepped(optimizer)
    state.restore()
    assert optimizer.state_dict()["state"] == {}
    assert same(model.state_dict(), before)
    stepped(optimizer)
    assert not same(model.state_dict(), before)


def test_hyperparameters_come_back() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(optimizer)
    state = TorchState(model, optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_parameters_that_were_replaced_are_restored_all_the_same() -> None:
    model = net()
    state = TorchState(model)
    expected = copy.deepcopy(model.state_dict())
    model[0].weight = nn.Parameter(torch.zeros(30, 20))
    model[1].weight.data = torch.zeros(40, 30)
    state.restore()
    assert same(model.state_dict(), expected)


def test_memory_that_is_shared_or_has_gaps_is_restored() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6, bias=False)
            self.b = nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("part", torch.arange(12.0).reshape(3, 4)[:, ::2])
            self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).t())
            self.register_buffer("sparse", torch.eye(3).to_sparse())
            self.images = nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)

    model = Tied()
    state = TorchState(model)
    expected = copy.deepcopy({name: value.to_dense() for name, value in model.state_dict().items()})
    with torch.no_grad():
        for value in (*model.parameters(), model.part, model.turned):
            value.add_(1)
        model.sparse = torch.zeros(3, 3).to_sparse()
    state.restore()
    assert same({name: value.to_dense() for name, value in model.state_dict().items()}, expected)
    assert model.images.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_module_of_sparse_tensors_is_restored() -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    state = TorchState(model)
    model.sparse = torch.zeros(3, 3).to_sparse()
    state.restore()
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


def test_modules_with_a_state_dict_of_their_own() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.steps = 0

        def state_dict(self) -> Any:  # type: ignore[override]
            return {"halved": self.weight.detach() / 2, "steps": self.steps}

        def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
            with torch.no_grad():
                self.weight.copy_(state["halved"] * 2)
            self.steps = state["steps"]

    model = Own()
    model.steps = 3
    state = TorchState(model)
    with torch.no_grad():
        model.weight.zero_()
    model.steps = 4
    state.restore()
    assert (model.weight == 1).all()
    assert model.steps == 3


def test_an_optimizer_that_loads_in_a_way_of_its_own_is_asked_to() -> None:
    loaded = []

    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            loaded.append(state_dict)
            super().load_state_dict(state_dict)

    model = net()
    handler = OptimizerStateHandler(Own(model.parameters(), lr=0.1))
    handler.restore()
    assert len(loaded) == 1
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state))
    OptimizerStateHandler(hooked).restore()
    assert len(loaded) == 2


def test_schedules_and_other_values_with_a_state_dict() -> None:
    """Horovod sends the object itself, whose optimizer is then another one."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = TorchState(model, optimizer, schedule=schedule)
    stepped(optimizer)
    schedule.step()
    state.save()
    stepped(optimizer)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    state.restore()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert state.schedule is schedule
    assert schedule.optimizer is optimizer
    assert schedule.last_epoch == 1


def test_another_value_takes_the_place_of_one_at_once() -> None:
    state = TorchState(net(), batch=0)
    model = net()
    expected = copy.deepcopy(model.state_dict())
    state.model = model
    with torch.no_grad():
        model[0].weight.zero_()
    state.restore()
    assert state.model is model
    assert same(model.state_dict(), expected)


def test_plain_attributes_are_copied_deeply() -> None:
    """Horovod keeps references: what is appended after a commit stays after ``restore()``."""
    rates = [1.0]
    state = TorchState(model=None, optimizer=None, rates=rates, best={"loss": torch.tensor(3.0)})
    state.rates.append(2.0)
    state.best["loss"] += 1
    state.restore()
    assert state.rates == [1.0]
    assert state.best == {"loss": torch.tensor(3.0)}
    assert state.model is None
    loss = (torch.ones(2, requires_grad=True) * 3).sum()
    state.best = {"loss": loss}  # in the midst of a graph
    state.save()
    state.restore()
    assert state.best["loss"].item() == 6.0
    state.best = {"gate": (i for i in range(3))}
    with pytest.raises(ValueError, match="attribute 'best' is a dict, which can be neither copied nor pickled"):
        state.save()


def test_handlers_can_be_registered() -> None:
    class Handler(StateHandler):
        log: list[str] = []

        def save(self) -> None:
            self.log.append("save")

        def restore(self) -> None:
            self.log.append("restore")

    class Special:
        pass

    before = get_handler_registry()
    set_handler_registry([(Special, Handler), *before])
    try:
        state = TorchState(special=Special())
    finally:
        set_handler_registry(before)
    state.save()
    state.restore()
    assert isinstance(state._handlers["special"], Handler)
    assert Handler.log == ["save", "save", "restore"]
    assert "special" not in TorchState(special=Special())._handlers


def test_a_handler_that_saves_in_a_way_of_its_own_does() -> None:
    class Own(ModelStateHandler):
        log: list[str] = []

        def save(self) -> None:
            self.log.append("save")
            super().save()

    before = get_handler_registry()
    set_handler_registry([(nn.Module, Own), *before])
    try:
        state = TorchState(net())
        state.save()
    finally:
        set_handler_registry(before)
    assert Own.log == ["save"] * 3


def test_a_state_does_not_keep_optimizers_alive() -> None:
    import gc
    import weakref

    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    stepped(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_states_with_numbers_of_many_types() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.complex128):
                self.register_parameter(
                    "of_" + str(dtype).rpartition(".")[2], nn.Parameter(torch.ones(70).to(dtype), requires_grad=False)
                )

    model = Many()
    state = TorchState(model)
    expected = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state.restore()
    assert same(model.state_dict(), expected)
    assert pickle.loads(pickle.dumps(state._saved_state)) == {"optimizer": None}
