"""A job that goes on with another number of ranks trains at the rate for these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from hvdgloo.errors import InvalidArgumentError
from tests.support.frameworks import need

need("torch")

import torch  # noqa: E402 - where there is one
from torch.optim import lr_scheduler as torchs  # noqa: E402
from torch.optim.swa_utils import SWALR  # noqa: E402

import hvdgloo.torch as hvd  # noqa: E402

Optimizer = torch.optim.Optimizer
Schedule = Callable[[Any], Any]

SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: torchs.StepLR(o, step_size=2, gamma=0.1),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, milestones=[1, 4]),
    "ConstantLR": lambda o: torchs.ConstantLR(o, total_iters=5),
    "LinearLR": lambda o: torchs.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, total_iters=8),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, T_max=5, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=4, eta_min=0.01),
    "CyclicLR": lambda o: torchs.CyclicLR(o, base_lr=0.02, max_lr=0.1, step_size_up=4),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, max_lr=0.4, total_steps=12),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0, min_lr=0.02, factor=0.5),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, total_iters=4), torchs.CosineAnnealingLR(o, T_max=5)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.LinearLR(o, total_iters=4), torchs.LambdaLR(o, lambda epoch: 0.9**epoch)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def make_optimizer(rate: Any = 0.1) -> Optimizer:
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": each} for each in (rate, rate / 2)]
    return torch.optim.SGD(groups, lr=rate)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def epochs(optimizer: Optimizer, scheduler: Any) -> Iterator[list[float]]:
    """The rates that a scheduler gives the optimizer, epoch by epoch."""
    while True:
        yield rates(optimizer)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, torchs.ReduceLROnPlateau) else []))


def test_there_is_a_case_for_each_of_torchs_schedulers() -> None:
    assert set(torchs.__all__) - {"LRScheduler"} <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rest_of_a_schedule_that_goes_on_with_other_ranks_is_as_many_times_higher(name: str) -> None:
    """In a new process, from a checkpoint, as a tutorial's reader resumes: 2 ranks, then 3, then 1."""
    alone = make_optimizer()
    expected = list(islice(epochs(alone, SCHEDULES[name](alone)), 12))
    found, saved = [], None
    for size, more in ((2, 3), (3, 4), (1, 5)):
        optimizer = make_optimizer()
        scheduler = SCHEDULES[name](optimizer)
        if saved is not None:
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
        hvd.scale_learning_rate(optimizer, size / (saved["size"] if saved else 1), scheduler)
        assert scheduler.get_last_lr() == pytest.approx(rates(optimizer))
        stepping = epochs(optimizer, scheduler)
        found += [[rate / size for rate in each] for each in islice(stepping, more)]
        next(stepping)  # its last step leads to the next run's first rate
        saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "size": size}
    assert found == [pytest.approx(each) for each in expected]


def test_a_rate_in_a_tensor_stays_in_this_tensor() -> None:
    """Compiled steps and CUDA graphs read it there."""
    optimizer = make_optimizer(torch.tensor(0.1))
    scheduler = torchs.StepLR(optimizer, step_size=1, gamma=0.5)
    kept = [group["lr"] for group in optimizer.param_groups]
    hvd.scale_learning_rate(optimizer, 3, scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == kept
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, kept, strict=True))
    assert rates(optimizer) == pytest.approx([0.3, 0.15])
    optimizer.step()
    scheduler.step()
    assert rates(optimizer) == pytest.approx([0.15, 0.075])


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_scheduler_that_was_forgotten_is_an_error_and_nothing_has_changed(wrapped_first: bool) -> None:
    plain = make_optimizer()
    hvd.init()
    try:
        if wrapped_first:
            optimizer = hvd.DistributedOptimizer(plain)
            scheduler = torchs.StepLR(optimizer, step_size=1)
        else:
            scheduler = torchs.StepLR(plain, step_size=1)
            optimizer = hvd.DistributedOptimizer(plain)
        with pytest.raises(InvalidArgumentError, match=r"pass it: hvd.scale_learning_rate\(optimizer, factor, sched"):
            hvd.scale_learning_rate(optimizer, 2)
        assert rates(optimizer) == [0.1, 0.05]
        hvd.scale_learning_rate(optimizer, 2, scheduler)
        assert rates(optimizer) == scheduler.base_lrs == [0.2, 0.1]
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: (torch.nn.Linear(1, 1), 2), "expected a torch.optim.Optimizer, not Linear"),
        (lambda: (make_optimizer(), 0), "positive number"),
        (lambda: (make_optimizer(), math.nan), "positive number"),
        (lambda: (make_optimizer(), "2"), "positive number"),
        (lambda: (make_optimizer(), 2, torchs.StepLR(make_optimizer(), 1)), "StepLR belongs to another optimizer"),
        (lambda: (make_optimizer(), 2, object()), "an? object is not a scheduler of torch.optim.lr_scheduler"),
    ],
)
def test_what_cannot_be_scaled_is_refused(arguments: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        hvd.scale_learning_rate(*arguments())
