"""Ctrl-C in an optimizer's or a trainer's step: a program that catches it and goes on trains as if it had not come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.mxnet import _optimizer
from hvdgloo.mxnet._optimizer import DistributedTrainer, wrap
from tests.support.frameworks import load
from tests.support.interrupting import Line, at_each_line, interrupted_at
from tests.support.selection import extended
from tests.support.threads import Task
from tests.support.world import MakeWorld

SHAPES = [(3,), (2, 2), (1,)]
STEPS = 4

frontend_of = load("mxnet").frontend


class WithOptimizer:
    """One rank's weights, updated as the Module API does it."""

    def __init__(self, context: Context, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
        optimizer = wrap(frontend_of(context), mx.optimizer.SGD(learning_rate=0.1), GradientOptions(groups=groups))
        self.rank = context.rank
        self.weights = [mx.nd.ones(shape) for shape in SHAPES]
        self.updater = mx.optimizer.get_updater(optimizer)
        self.sync = optimizer._sync

    def prepare(self, step: int) -> None:
        self.given = [mx.nd.full(shape, self.rank + step + 1.0) for shape in SHAPES]

    def finish(self) -> None:
        self.updater(list(range(len(SHAPES))), self.given, self.weights)


class WithTrainer:
    """One rank's parameters and their trainer."""

    def __init__(self, context: Context, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
        monkeypatch.setattr(_optimizer, "FRONTEND", frontend_of(context))
        self.rank = context.rank
        self.parameters = [mx.gluon.Parameter(f"weight_{i}", shape=shape) for i, shape in enumerate(SHAPES)]
        for parameter in self.parameters:
            parameter.initialize(mx.init.One())
        self.trainer = DistributedTrainer(self.parameters, "sgd", {"learning_rate": 0.1}, num_groups=groups)
        self.sync = self.trainer._sync

    @property
    def weights(self) -> list[Any]:
        return [parameter.data() for parameter in self.parameters]

    def prepare(self, step: int) -> None:
        with mx.autograd.record():
            loss = sum((weight * (self.rank + step + 1.0)).sum() for weight in self.weights)
        loss.backward()

    def finish(self) -> None:
        self.trainer.step(1, ignore_stale_grad=True)


@pytest.mark.parametrize("stride", [61, *extended(11)])
@pytest.mark.parametrize("kind", [WithOptimizer, WithTrainer])
@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["the first step", "the second step", "a later step"])
def test_a_step_that_is_repeated_after_ctrl_c_reduces_once(
    ranks: MakeWorld, monkeypatch: pytest.MonkeyPatch, which: int, groups: int, kind: type[Any], stride: int
) -> None:
    two = ranks(2, stall_warning_time=1.0, stall_shutdown_time=2.0)
    expected = 1.0 - 0.1 * sum(step + 1.5 for step in range(STEPS))

    def trial(line: Line) -> None:
        ours, theirs = (kind(context, monkeypatch, groups) for context in two.contexts)
        interrupted = False

        def train(training: Any) -> None:
            nonlocal interrupted
            for step in range(STEPS):
                training.prepare(step)
                if training is theirs or step != which:
                    training.finish()
                    continue
                before = training.weights[0].asnumpy()
                interrupted = interrupted_at(line, training.finish)
                is_made = not training.sync.step and (training.weights[0].asnumpy() != before).any()
                if interrupted and not is_made:  # or it came after the step
                    training.finish()

        other = thread.submit(train, theirs)
        try:
            train(ours)
        except Exception as error:
            raise AssertionError(f"interrupted at {line}") from error
        other.result(20)
        for training in (ours, theirs):
            for weight in training.weights:
                np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-5, err_msg=f"interrupted at {line}")

    with ThreadPoolExecutor(1) as thread:  # MXNet's autograd leaks 5 MB for each thread that has used it
        at_each_line(trial, stride)


@pytest.mark.parametrize("stride", [31, *extended(5)])
def test_gradients_of_other_weights_may_follow_an_interrupted_step(ranks: MakeWorld, stride: int) -> None:
    """They are not taken for the ones that are under way."""
    two = ranks(2, stall_warning_time=1.0, stall_shutdown_time=2.0)

    def trial(line: Line) -> None:
        syncs = [
            wrap(frontend_of(c), mx.optimizer.SGD(learning_rate=0.1), GradientOptions())._sync for c in two.contexts
        ]
        weight = mx.nd.ones((2,))

        def reduced(rank: int, keys: str, value: float) -> list[float]:
            gradients = {key: mx.nd.full((2,), value) for key in keys}
            syncs[rank].reduce(gradients, lambda: [weight])
            syncs[rank].step.clear()
            return [float(gradient.asnumpy()[0]) for gradient in gradients.values()]

        theirs: list[list[float]] = []
        calls = (("ab", 1.0), ("b", 2.0), ("ab", 3.0))
        other = Task(lambda: theirs.extend(reduced(1, *call) for call in calls))
        made: list[list[float]] = []
        interrupted_at(line, lambda: made.append(reduced(0, "ab", 3.0)))
        if not made:
            reduced(0, "ab", 3.0)
        assert reduced(0, "b", 4.0) == [3.0]
        assert reduced(0, "ab", 5.0) == [4.0, 4.0]
        other.result(20)
        assert theirs == [[2.0, 2.0], [3.0], [4.0, 4.0]], f"interrupted at {line}"

    at_each_line(trial, stride)
