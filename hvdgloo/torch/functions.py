"""State that all ranks must start from, under the names that Horovod's programs import."""

from __future__ import annotations

from typing import Any

import torch

from hvdgloo.torch import _state as state
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._frontend import FRONTEND

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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


broadcast_object = FRONTEND.broadcast_object
allgather_object = FRONTEND.allgather_object
