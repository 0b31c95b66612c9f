"""State that all ranks must start from, under the names that Horovod's programs import."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from hvdgloo._collectives import objects
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.torch import _state as state
from hvdgloo.torch.mpi_ops import _frontend

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

T = TypeVar("T")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite all ranks' tensors with one rank's, usually before training.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of (name, tensor) pairs; the same names and shapes on
            every rank.
        root_rank: global rank of the source.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is neither a dict nor a list, or has values that are no tensors.
    """
    state.broadcast_parameters(_frontend, params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks' optimizers the state and the hyperparameters of one rank's, usually after loading a checkpoint.

    Ranks whose optimizer has no state yet get the root's. No step is made for it.

    Args:
        optimizer: plain or distributed, with the same parameters on every rank.
        root_rank: global rank of the source.
        model: accepted for programs that pass it; the optimizer knows its parameters.

    Raises:
        InvalidArgumentError: (a ValueError) for LBFGS, whose state cannot be sent.
    """
    state.broadcast_optimizer_state(_frontend, optimizer, root_rank)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The Python object of one rank, on all: see ``hvdgloo._collectives.objects.broadcast_object``."""
    return objects.broadcast_object(_frontend, obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every rank's Python object, in rank order: see ``hvdgloo._collectives.objects.allgather_object``."""
    return objects.allgather_object(_frontend, obj, name, process_set)
