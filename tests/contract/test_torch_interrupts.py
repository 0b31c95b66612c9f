"""Ctrl-C in an optimizer's step: a program that catches it and goes on trains as if it had not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import GradientsInFlightError  # noqa: E402
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer  # noqa: E402
from hvdgloo.torch._powersgd import PowerSGD  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.contract.test_torch_optimizer import distribute  # noqa: E402
from tests.support.interrupting import Line, at_each_line, interrupted_at  # noqa: E402
from tests.support.selection import extended  # noqa: E402
from tests.support.small_model import loss_of, make_model, part_of  # noqa: E402
from tests.support.threads import Task  # noqa: E402
from tests.support.world import MakeWorld, World  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = ("local",)


class Embedded(nn.Module):
    """One sparse gradient, and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.head = nn.Linear(2, 1)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(8.0).reshape(4, 2))
            self.head.weight.fill_(0.5)
            self.head.bias.zero_()


def dense(context: Context, model: nn.Module) -> Tensor:
    return loss_of(model, part_of(context))


def sparse(context: Context, model: nn.Module) -> Tensor:
    return model.head(model.table(torch.tensor([context.rank, 2]))).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Context, nn.Module], Tensor], dict[str, Any]]] = {
    "dense": (make_model, dense, {}),
    "grouped": (make_model, dense, {"groups": 2}),
    "sparse": (Embedded, sparse, {}),
    "adasum": (make_model, dense, {"op": ReduceOp.ADASUM}),
    "powersgd": (make_model, dense, {"compression": PowerSGD}),
}


class Training:
    """Two ranks that train, rank 0 on the main thread.

    Args:
        case: which of ``CASES``.
    """

    def __init__(self, two: World, case: str) -> None:
        make, self.loss, self.options = CASES[case]
        self.contexts = two.contexts
        self.models = [make() for _ in self.contexts]
        self.optimizers: list[DistributedTorchOptimizer] = []
        for context, model in zip(self.contexts, self.models, strict=True):
            options = dict(self.options)
            if options.get("compression") is PowerSGD:
                options["compression"] = PowerSGD(rank=8, min_saving=0.0)  # exact
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            self.optimizers.append(distribute(context, plain, **options))

    def step(self, rank: int, finish: Callable[[DistributedTorchOptimizer], Any]) -> None:
        self.loss(self.contexts[rank], self.models[rank]).backward()
        finish(self.optimizers[rank])
        self.optimizers[rank].zero_grad()

    def run(self, finishes: list[Callable[[DistributedTorchOptimizer], Any]]) -> list[Tensor]:
        """Train for as many steps as rank 0 is told how to finish; the parameters that both ranks end with."""

        def other() -> None:
            for _ in finishes:
                self.step(1, lambda optimizer: optimizer.step())

        thread = Task(other)
        for finish in finishes:
            self.step(0, finish)
        thread.result(20)
        ours, theirs = [[parameter.detach() for parameter in model.parameters()] for model in self.models]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        return ours


def plainly(optimizer: DistributedTorchOptimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize("stride", [31, *extended(7)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", [0, 1], ids=["the first step", "a later step"])
def test_a_step_that_is_repeated_after_ctrl_c_reduces_once(
    world: MakeWorld, case: str, which: int, stride: int
) -> None:
    two = world(2, stall_warning_time=1.0, stall_shutdown_time=2.0)
    count = which + 2  # the interrupted step, those before it, and one after it
    expected = Training(two, case).run([plainly] * count)

    def trial(line: Line) -> None:
        interrupted = False

        def finish(optimizer: DistributedTorchOptimizer) -> None:
            nonlocal interrupted
            made: list[bool] = []
            hook = optimizer.register_step_post_hook(lambda *_: made.append(True))
            interrupted = interrupted_at(line, optimizer.step)
            hook.remove()
            if interrupted and not (made and optimizer._hvd._stepped is None):  # or it came after the step
                optimizer.step()

        steps = [plainly] * count
        steps[which] = finish
        try:
            actual = Training(two, case).run(steps)
        except Exception as error:
            raise AssertionError(f"interrupted at {line}") from error
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=f"interrupted at {line}")

    at_each_line(trial, stride)


@pytest.mark.parametrize("stride", [47, *extended(7)])
@pytest.mark.parametrize("which", [0, 1], ids=["the first step", "a later step"])
def test_gradients_that_are_dropped_after_ctrl_c_do_not_go_into_the_next_step(
    world: MakeWorld, which: int, stride: int
) -> None:
    """Weights stay as they are, so each step's gradient is the same unless something of another is in it."""
    two = world(2, stall_warning_time=1.0, stall_shutdown_time=2.0)

    def trial(line: Line) -> None:
        training = Training(two, "dense")
        for optimizer in training.optimizers:
            optimizer.param_groups[0]["lr"] = 0.0
        interrupted = False
        gradients: list[list[Tensor]] = []

        def finish(optimizer: DistributedTorchOptimizer) -> None:
            optimizer.synchronize()
            gradients.append([p.grad.clone() for p in training.models[0].parameters() if p.grad is not None])
            with optimizer.skip_synchronize():
                optimizer.step()

        def drop(optimizer: DistributedTorchOptimizer) -> None:
            nonlocal interrupted
            interrupted = interrupted_at(line, optimizer.synchronize)
            try:
                optimizer.zero_grad()
            except GradientsInFlightError:  # it came before synchronize() had begun
                optimizer.synchronize()
                optimizer.zero_grad()

        steps = [finish] * (which + 3)
        steps[which] = drop
        training.run(steps)
        for each in gradients[1:]:
            for a, b in zip(each, gradients[0], strict=True):
                torch.testing.assert_close(a, b, msg=f"interrupted at {line}")

    at_each_line(trial, stride)
