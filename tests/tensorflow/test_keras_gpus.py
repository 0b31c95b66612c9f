"""Keras on torch with simulated GPUs: gradients travel from GPU to GPU, in order, and the host waits once a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.keras import _on_torch as on_torch  # noqa: E402
from hvdgloo.keras._distributed_optimizer import KerasOptions  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.torch._frontend import TorchFrontend  # noqa: E402
from tests.support.gpus import GpuTensor, Schedule, Simulated, on_gpu, simulated  # noqa: E402
from tests.support.gpus.worlds import world  # noqa: E402

SIZE = 2


@pytest.fixture(params=[("late", 0), ("any", 1)], ids=lambda param: f"{param[0]}{param[1]}")
def gpus(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    with simulated(Schedule(*request.param)) as made:
        yield made


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each rank's thread has a context of its own, to be put here."""
    here = threading.local()
    monkeypatch.setattr(on_torch, "FRONTEND", TorchFrontend(TorchAdapter(), lambda: here.context))
    monkeypatch.setattr(on_torch, "_owners", {})
    return here


def variable(value: Any) -> Any:
    parameter = torch.nn.Parameter(on_gpu(value))
    return SimpleNamespace(value=parameter, shape=tuple(value.shape), dtype="float32")


@pytest.mark.parametrize("operations", ["nccl", "gloo"])
def test_a_step_reduces_gradients_where_they_are(gpus: Simulated, ranks: Any, operations: str) -> None:
    def body(context: Context) -> None:
        ranks.context = context
        variables = [variable(torch.full((n + 2, 3), float(n + 1))) for n in range(6)]
        sync = on_torch.TorchSync(KerasOptions())
        sync.track(variables, changes=False)
        inputs = on_gpu(torch.full((3,), context.rank + 1.0))
        for _ in range(3):
            for each in variables:
                each.value.grad = None
            sum(((each.value @ inputs).sum() for each in variables), start=on_gpu(torch.zeros(()))).backward()
            gradients = [each.value.grad for each in variables]
            results = sync.reduce(sync.complete(gradients, variables), variables)
            sync.arrived.clear()
            assert all(isinstance(result, GpuTensor) for result in results)
            # The mean of 1 and 2; what a rank computed itself is not changed.
            assert [float(result.sum()) for result in results] == [1.5 * 3 * (n + 2) for n in range(6)]
            assert float(gradients[0].sum()) == (context.rank + 1.0) * 6

    with world(gpus, SIZE, operations) as made:
        made.run(body)


def test_whether_to_step_is_agreed_on_where_it_was_found_out(gpus: Simulated, ranks: Any) -> None:
    def body(context: Context) -> None:
        ranks.context = context
        sync = on_torch.TorchSync(KerasOptions())
        sync.track([variable(torch.ones(3))], changes=True)
        for holds, expected in ((True, True), (context.rank == 0, False)):
            answer = sync.agree(on_gpu(torch.tensor(holds)))
            assert isinstance(answer, GpuTensor)
            assert bool(answer) is expected

    with world(gpus, SIZE) as made:
        made.run(body)
