"""Learning rates that follow the number of workers, wherever optimizers and schedulers keep them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdgloo.errors import InvalidArgumentError

_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "swa_lr")
"""Keys under which schedulers keep rates in the optimizer's groups, besides ``lr``."""

_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
"""Attributes in which schedulers keep rates."""


def scale(optimizer: torch.optim.Optimizer, factor: Any, schedulers: tuple[Any, ...]) -> None:
    """Multiply all rates of an optimizer and its schedulers, or none of them if an argument is wrong.

    Raises:
        InvalidArgumentError: (a ValueError) see ``hvdgloo.torch.functions.scale_learning_rate``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise InvalidArgumentError(f"factor must be a positive number, such as hvd.size() / saved_size; got {factor!r}")
    for scheduler in schedulers:
        if not isinstance(scheduler, LRScheduler):
            raise InvalidArgumentError(
                f"a {type(scheduler).__name__} is not a scheduler of torch.optim.lr_scheduler, so it is unknown which "
                "rates it keeps; multiply them yourself"
            )
        if scheduler.optimizer.param_groups is not optimizer.param_groups:
            raise InvalidArgumentError(f"the {type(scheduler).__name__} belongs to another optimizer")
    # A scheduler marks the step of the optimizer that it was given: the distributed one, or the plain one in it.
    steps = (optimizer.step, vars(optimizer).get("step"))
    if not schedulers and any(getattr(step, "_wrapped_by_lr_sched", False) for step in steps):
        raise InvalidArgumentError(
            "the optimizer has a scheduler, which would return to the old rates; pass it: "
            "hvd.scale_learning_rate(optimizer, factor, scheduler)"
        )
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled and captured steps read this very tensor
            with torch.no_grad():
                group["lr"].mul_(factor)
        else:
            group["lr"] *= factor
        group.update({key: _product(group[key], factor) for key in _OF_GROUPS if key in group})
    for scheduler in schedulers:
        _scale_scheduler(scheduler, factor)


def _scale_scheduler(scheduler: Any, factor: float) -> None:
    kept = vars(scheduler)
    kept.update({name: _product(kept[name], factor) for name in _OF_SCHEDULERS if name in kept})
    for part in kept.get("_schedulers", ()):  # of a SequentialLR or a ChainedScheduler
        _scale_scheduler(part, factor)


def _product(rates: Any, factor: float) -> Any:
    if isinstance(rates, (list, tuple)):
        return [_product(rate, factor) for rate in rates]
    return rates if rates is None else rates * factor
