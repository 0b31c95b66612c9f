"""The callbacks' arguments, in today's order and in Horovod 0.19's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras import callbacks
from hvdgloo.keras.callbacks import BestModelCheckpoint, LearningRateScheduleCallback, LearningRateWarmupCallback

Schedule, Warmup = LearningRateScheduleCallback, LearningRateWarmupCallback


def half(epoch: float) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("make", "initial_lr", "start", "end", "factor_at_3"),
    [
        (lambda: Schedule(0.1, 0.5), 0.1, 0, None, 0.125),
        (lambda: Schedule(0.1, half, 1, 4), 0.1, 1, 4, 0.5),
        (lambda: Schedule(initial_lr=0.1, multiplier=0.5, start_epoch=2), 0.1, 2, None, 0.5),
        (lambda: Schedule(0.1, multiplier=half, end_epoch=9), 0.1, 0, 9, 0.5),
        # As in 0.19: the multiplier first, the learning rate last or the optimizer's.
        (lambda: Schedule(half), None, 0, None, 0.5),
        (lambda: Schedule(0.5), None, 0, None, 0.5),
        (lambda: Schedule(multiplier=0.5, start_epoch=1, end_epoch=7), None, 1, 7, 0.5),
        (lambda: Schedule(multiplier=0.5, start_epoch=1, initial_lr=None), None, 1, None, 0.5),
        (lambda: Schedule(half, 1, 4), None, 1, 4, 0.5),
        (lambda: Schedule(0.5, 1, initial_lr=0.1), 0.1, 1, None, 0.25),
        (lambda: Schedule(half, 0, None, True, True, None, 0.1), 0.1, 0, None, 0.5),
        (lambda: Schedule(multiplier=half, start_epoch=3), None, 3, None, 0.5),
    ],
)
def test_schedules(
    make: Callable[[], Any], initial_lr: float | None, start: int, end: int | None, factor_at_3: float
) -> None:
    callback = make()
    assert (callback.initial_lr, callback.start_epoch, callback.end_epoch) == (initial_lr, start, end)
    assert callback.factor(3) == pytest.approx(factor_at_3)


@pytest.mark.parametrize(
    ("make", "initial_lr", "epochs", "steps", "verbose"),
    [
        (lambda: Warmup(0.1), 0.1, 5, None, 0),
        (lambda: Warmup(0.1, 3), 0.1, 3, None, 0),
        (lambda: Warmup(0.1, 3, True, 20, 1), 0.1, 3, 20, 1),
        (lambda: Warmup(initial_lr=0.1, warmup_epochs=2, verbose=1), 0.1, 2, None, 1),
        (lambda: Warmup(1, warmup_epochs=2), 1, 2, None, 0),
        # As in 0.19: the epochs first, the learning rate last or the optimizer's.
        (lambda: Warmup(), None, 5, None, 0),
        (lambda: Warmup(3), None, 3, None, 0),
        (lambda: Warmup(3, True, 20), None, 3, 20, 0),
        (lambda: Warmup(3, initial_lr=0.1), 0.1, 3, None, 0),
        (lambda: Warmup(warmup_epochs=3, steps_per_epoch=7), None, 3, 7, 0),
    ],
)
def test_warm_ups(
    make: Callable[[], Any], initial_lr: float | None, epochs: int, steps: int | None, verbose: int
) -> None:
    callback = make()
    assert (callback.initial_lr, callback.warmup_epochs, callback.end_epoch) == (initial_lr, epochs, epochs)
    assert (callback.steps_per_epoch, callback.verbose) == (steps, verbose)


def test_a_warm_up_goes_from_one_rank_s_share_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks.FRONTEND, "size", lambda: 4)
    callback = Warmup(0.1, warmup_epochs=2, steps_per_epoch=5)
    factors = [callback.factor(batch / 5) for batch in range(10)]
    assert factors == pytest.approx([(1 + 3 * (batch + 1) / 10) / 4 for batch in range(10)])
    assert factors[-1] == pytest.approx(1.0)


def test_wrong_arguments() -> None:
    for wrong in (lambda: Schedule(0.1, "x"), lambda: Schedule(), lambda: Schedule(initial_lr=0.1)):
        with pytest.raises(InvalidArgumentError, match="multiplier"):
            wrong()
    for unknown in (lambda: Schedule(0.1, 0.5, rate=1), lambda: Warmup(0.1, 3, True, 20, 1, 7)):
        with pytest.raises(TypeError):
            unknown()
    with pytest.raises(TypeError, match="twice"):
        Schedule(0.1, 0.5, multiplier=0.5)
    assert list(inspect.signature(Schedule).parameters)[:2] == ["initial_lr", "multiplier"]


def test_a_best_model_needs_a_place() -> None:
    with pytest.raises(InvalidArgumentError, match="filepath"):
        BestModelCheckpoint().on_train_begin()
