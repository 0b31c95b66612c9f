"""Commits of a torch program that are copied while the next backward pass runs: right, or dropped with a warning."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hvdgloo.torch.elastic import _behind as behind  # noqa: E402
from hvdgloo.torch.elastic.state import TorchState  # noqa: E402
from tests.support.gpus import GpuTensor, Schedule, on_gpu, simulated  # noqa: E402
from tests.support.threads import Task  # noqa: E402


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies wait for it."""
    opened, transfer = threading.Event(), behind.transfer

    def waiting(pairs: Any) -> None:
        assert opened.wait(50)
        transfer(pairs)

    monkeypatch.setattr(behind, "transfer", waiting)
    yield opened
    opened.set()


def trainee(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    backward(model)
    optimizer.step()
    return model, optimizer, TorchState(model, optimizer, overlap=True, batch=0, **options)


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(8, 20)).pow(2).sum().backward()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([*model.state_dict().values(), *(s["momentum_buffer"] for s in optimizer.state.values())])


def equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_waits_until_the_commit_before_is_copied(gate: threading.Event) -> None:
    model, optimizer, state = trainee()
    backward(model)
    optimizer.step()
    expected = contents(model, optimizer)
    state.batch = 1
    state.save()
    state.batch = 2
    backward(model)  # which writes the statistics
    step = Task(optimizer.step)
    step.thread.join(0.2)
    assert step.thread.is_alive()
    gate.set()
    step.result()
    assert not equal(contents(model, optimizer), expected)
    state.restore()
    assert equal(contents(model, optimizer), expected)
    assert state.batch == 1


def test_a_restore_and_the_next_save_wait_for_the_copies() -> None:
    model, optimizer, state = trainee()
    for batch in range(5):
        expected = contents(model, optimizer)
        state.batch = batch
        state.save()
        if batch % 2:
            state.save()
        state.batch = -1
        backward(model)
        if batch == 3:
            state.restore()
            assert state.batch == batch
            backward(model)
        optimizer.step()
        state.restore()
        assert equal(contents(model, optimizer), expected)
        assert state.batch == batch
        backward(model)
        optimizer.step()


@pytest.mark.parametrize("counted", [True, False])
def test_a_commit_into_which_something_was_written_is_dropped(
    gate: threading.Event, caplog: pytest.LogCaptureFixture, counted: bool
) -> None:
    model, optimizer, state = trainee()
    expected, serial = contents(model, optimizer), state._progress.serial
    with torch.no_grad():
        model[0].weight.add_(1)
    state.batch = 1
    state.save()
    assert state._progress.serial == serial + 1
    if counted:
        with torch.no_grad():
            model[0].weight.mul_(2)
    else:
        model[0].weight.data.mul_(2)
    gate.set()
    backward(model)
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert "so that commit is dropped" in caplog.text
    assert state._progress.serial == serial
    state.batch = 2
    state.save()
    assert state._behind is None, "the next one is copied at once"
    newer = contents(model, optimizer)
    state.restore()
    assert state.batch == 2
    assert equal(contents(model, optimizer), newer)
    assert not equal(newer, expected)
    backward(model)
    optimizer.step()
    state.save()
    assert state._behind is not None


def test_after_a_dropped_commit_the_one_before_is_restored(gate: threading.Event) -> None:
    model, optimizer, state = trainee()
    expected = contents(model, optimizer)
    with torch.no_grad():
        model[2].weight.add_(1)
    state.batch = 1
    state.save()
    with torch.no_grad():
        model[2].weight.add_(1)
    gate.set()
    state.restore()
    assert state.batch == 0
    assert equal(contents(model, optimizer), expected)


def test_an_error_of_the_copies_is_raised_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, state = trainee()
    backward(model)
    optimizer.step()

    def failing(pairs: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(behind, "transfer", failing)
    state.save()
    backward(model)
    with pytest.raises(MemoryError):
        optimizer.step()


def test_overlap_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlaps() -> bool:
        model = nn.Linear(2, 2)
        state = TorchState(model)
        with torch.no_grad():
            model.weight.add_(1)
        state.save()
        return state._behind is not None

    assert not overlaps()
    monkeypatch.setenv("HVDGLOO_ELASTIC_OVERLAP", "1")
    assert overlaps()


@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("schedule", [("late", 0), ("any", 1), ("any", 2)], ids=str)
def test_commits_of_what_is_on_a_gpu(schedule: tuple[str, int], overlap: bool) -> None:
    """No thread waits for the GPU in a commit, and the step comes after the copy."""
    with simulated(Schedule(*schedule)) as gpus:
        model = nn.Linear(6, 5)
        model.weight = nn.Parameter(on_gpu(torch.randn(5, 6)))
        model.bias = nn.Parameter(on_gpu(torch.randn(5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        inputs = on_gpu(torch.randn(3, 6))

        def step() -> None:
            optimizer.zero_grad()
            (inputs @ model.weight.t() + model.bias).pow(2).sum().backward()
            optimizer.step()

        def held() -> list[Any]:
            tensors: list[Any] = [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]
            return [tensor.detach().tolist() for tensor in tensors]

        step()
        state = TorchState(model, optimizer, overlap=overlap, batch=0)
        for batch in range(3):
            step()
            waits = gpus.machine.waits
            state.batch = batch
            state.save()
            step()
            assert gpus.machine.waits == waits
            step()
        state.restore()
        after = held()
        state.save()
        assert state.batch == 2
        for _ in range(2):
            step()
            assert held() != after
            state.restore()
            assert held() == after
        step()
        state.save()
        weight = model.weight
        model.weight = nn.Parameter(on_gpu(torch.zeros(5, 6)))  # now the module itself reads what was saved
        state.restore()
        assert model.weight.detach().tolist() == weight.detach().tolist()
        kept = [each.kept for each in state._handlers["model"]._copies.saved.copies]
        assert all(isinstance(tensor, GpuTensor) != overlap for tensor in kept)
        assert gpus.machine.races == []
