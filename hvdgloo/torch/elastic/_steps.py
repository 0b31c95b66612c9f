"""A record of the optimizers that have begun a step, and when: torch does not always count their writes."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdgloo.torch._compilation import uncompiled


class Waiting(Protocol):
    """Something that reads what optimizers write."""

    def wait(self) -> None:
        """Return once they may write."""


_steps = 0
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_readers: weakref.WeakSet[Any] = weakref.WeakSet()


@uncompiled
def _step_begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    global _steps
    for reader in list(_readers):
        reader.wait()
    _steps += 1
    _stepped[optimizer] = _steps


@functools.cache
def _watch() -> None:
    # Not when the module is imported: the hook is a graph break in every compiled step, elastic or not.
    register_optimizer_step_pre_hook(_step_begins)


def so_far() -> int:
    """Return how many steps all optimizers have begun since the first call."""
    _watch()
    return _steps


def has_stepped(optimizer: torch.optim.Optimizer, since: int) -> bool:
    """Tell whether an optimizer has begun a step since all optimizers together had begun ``since`` steps."""
    # A distributed one shares its attributes with the user's, and either may have been told to step.
    return any(steps > since and vars(other) is vars(optimizer) for other, steps in list(_stepped.items()))


def written(since: int) -> set[int]:
    """Return the addresses of parameters of all optimizers that have begun a step since there had been so many."""
    return {
        parameter.data_ptr()
        for optimizer, steps in list(_stepped.items())
        if steps > since
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def wait_before(reader: Waiting) -> None:
    """Have no step begin from now on before ``reader.wait()`` has returned."""
    _readers.add(reader)


def wait_no_more(reader: Waiting) -> None:
    """End what ``wait_before`` began."""
    _readers.discard(reader)
