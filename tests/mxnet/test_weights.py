"""Ranks that start from different weights are told so, and no others."""

from __future__ import annotations

import re
from typing import Any

import mxnet as mx
import pytest

from hvdgloo._job.context import Context
from hvdgloo._training.options import GradientOptions
from hvdgloo.mxnet import _optimizer
from hvdgloo.mxnet._optimizer import DistributedTrainer, wrap
from tests.support.frameworks import load
from tests.support.world import MakeWorld

SHAPES = [(3,), (50, 2), (1,)]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "same weights" in record.getMessage()]


frontend_of = load("mxnet").frontend


def train(context: Context, start: float, at_once: bool = True, options: GradientOptions | None = None) -> None:
    """Three steps, as the Module API makes them."""
    optimizer = wrap(frontend_of(context), mx.optimizer.SGD(learning_rate=0.1), options or GradientOptions())
    weights = [mx.nd.full(shape, start) for shape in SHAPES]
    updater = mx.optimizer.get_updater(optimizer)
    for _ in range(3):
        given = [mx.nd.ones(shape) for shape in SHAPES]
        if at_once:
            updater(list(range(len(SHAPES))), given, weights)
        else:
            for index, (gradient, weight) in enumerate(zip(given, weights, strict=True)):
                updater(index, gradient, weight)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_ranks_that_start_from_different_weights_are_told(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, check: bool, at_once: bool
) -> None:
    ranks(3, check_weights=check).run(lambda context: train(context, float(context.rank == 1), at_once))
    texts = told(caplog)
    assert len(texts) == check * (1 if at_once else len(SHAPES))
    for text in texts:
        assert re.match("rank 1 .* rank 0, ", text)
        assert "Call hvd.broadcast_parameters(net.collect_params(), root_rank=0)" in text


def test_ranks_that_start_from_the_same_weights_are_not_told_anything(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    ranks(2).run(lambda context: train(context, 1.5))
    assert told(caplog) == []


def test_only_ranks_that_share_gradients_are_compared(ranks: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    def rank_body(context: Context) -> None:
        groups = [frontend_of(context).add_process_set(members) for members in ([0, 2], [1, 3])]
        train(context, float(context.rank % 2), options=GradientOptions(process_set=groups[context.rank % 2]))

    ranks(4).run(rank_body)
    assert told(caplog) == []


@pytest.mark.parametrize("differ", [True, False])
def test_a_trainer_s_parameters_are_compared(
    ranks: MakeWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, differ: bool
) -> None:
    two = ranks(2)
    made: list[tuple[Any, Any]] = []
    for context in two.contexts:
        monkeypatch.setattr(_optimizer, "FRONTEND", frontend_of(context))
        weight = mx.gluon.Parameter(f"weight_{context.rank}", shape=(4,))
        weight.initialize(mx.init.Constant(float(differ and context.rank)))
        made.append((weight, DistributedTrainer([weight], "sgd", {"learning_rate": 0.1})))

    def rank_body(context: Context) -> None:
        weight, trainer = made[context.rank]
        for _ in range(3):
            with mx.autograd.record():
                loss = (weight.data() * (context.rank + 1)).sum()
            loss.backward()
            trainer.step(1)

    two.run(rank_body)
    assert len(told(caplog)) == differ
