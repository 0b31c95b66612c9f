"""State that all ranks must start from, under the names that Horovod's programs import, and their learning rate."""

from __future__ import annotations

from typing import Any

import torch

from hvdgloo.torch import _learning_rate as learning_rate
from hvdgloo.torch import _state as state
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._frontend import FRONTEND

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "scale_learning_rate",
]


@uncompiled
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite all ranks' tensors with one rank's, usually before training.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of (name, tensor) pairs; the same names and shapes on
            every rank.
        root_rank: global rank of the source.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is neither a dict nor a list, or has values that are not
            tensors.
    """
    state.broadcast_parameters(FRONTEND, params, root_rank)


@uncompiled
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks' optimizers the state and the hyperparameters of one rank's, usually after loading a checkpoint.

    Ranks whose optimizer has no state yet get the root's. What state the root lacks is initialised as one step with
    gradients of zero would do it, if the optimizer can make such a step; no parameter changes. Afterwards parameters
    that had no gradient have one of zeros.

    Args:
        optimizer: plain or distributed, with the same parameters on every rank.
        root_rank: global rank of the source.
        model: accepted for programs that pass it; the optimizer knows its parameters.

    Raises:
        InvalidArgumentError: (a ValueError) for LBFGS, whose state cannot be sent.
    """
    state.broadcast_optimizer_state(FRONTEND, optimizer, root_rank)


def scale_learning_rate(
    optimizer: torch.optim.Optimizer, factor: float, *schedulers: torch.optim.lr_scheduler.LRScheduler
) -> None:
    """Multiply all learning rates, because another number of ranks goes on with the training.

    A checkpoint's rates are for the number of ranks that wrote it, and ``load_state_dict`` restores them. If the
    checkpoint has that number, ``hvd.scale_learning_rate(optimizer, hvd.size() / saved["workers"])`` corrects them.
    The whole schedule is multiplied: the schedulers' base rates, and their highest and lowest ones.

    Args:
        optimizer: plain or distributed.
        factor: the new number of ranks divided by the number that the rates are for.
        schedulers: all that the optimizer has, from ``torch.optim.lr_scheduler`` or derived from its classes, after
            their own ``load_state_dict``. Those in a ``SequentialLR`` or a ``ChainedScheduler`` are included.

    Raises:
        InvalidArgumentError: (a ValueError) the factor is not a positive number; the optimizer's schedulers were not
            passed, or belong to another optimizer.
    """
    learning_rate.scale(optimizer, factor, schedulers)


broadcast_object = FRONTEND.broadcast_object
allgather_object = FRONTEND.allgather_object
