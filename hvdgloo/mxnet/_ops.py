"""The collectives on MXNet's arrays, bound to this process's job, under the names that Horovod's programs use.

Each is a method of ``hvdgloo._collectives.frontend.Frontend``, whose docstring says what it promises. Those here have
Horovod's parameters for MXNet, of which ``priority`` is accepted: a call returns when its result is there, so there is
nothing to put in order. Several tensors go together in a ``grouped_*`` call, or one after another with the
``*_async`` ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.mxnet._adapter import Tensor
from hvdgloo.mxnet._frontend import FRONTEND
from hvdgloo.types import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Tensor:
    """Combine the ranks' arrays element by element: ``Frontend.allreduce``. Differentiable.

    Args:
        tensor: an ``mx.nd.NDArray`` or ``mx.np.ndarray``, the same shape and type on every rank; dense.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``.
        name: what matches the ranks' calls.
        priority: accepted for programs that pass it.
        prescale_factor, postscale_factor: multiply each rank's array before, and the result after.
        process_set: the ranks that take part.
        op: Average (default), Sum, Min, Max or Product.

    Returns:
        a new array of the same shape, type and device.
    """
    return FRONTEND.allreduce(
        tensor,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Tensor:
    """``allreduce`` in place: the result is written into ``tensor``, which is returned. Records no gradient."""
    return FRONTEND.allreduce_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Tensor]:
    """``allreduce`` of several arrays as one: none is sent before all are ready on all ranks. Differentiable."""
    return FRONTEND.grouped_allreduce(
        tensors,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Tensor]:
    """``grouped_allreduce`` in place. Records no gradient."""
    return FRONTEND.grouped_allreduce_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)


def allgather(
    tensor: Tensor,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' arrays along their first dimension: ``Frontend.allgather``. Differentiable.

    First dimensions may differ between ranks, others may not.
    """
    return FRONTEND.allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allgather`` of several arrays as one. Differentiable."""
    return FRONTEND.grouped_allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The array of one (global) rank, on all: ``Frontend.broadcast``. Differentiable."""
    return FRONTEND.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """``broadcast`` in place: the other ranks' ``tensor`` is overwritten. Records no gradient."""
    return FRONTEND.broadcast_(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send every rank a part of the array's rows, and receive one from each: ``Frontend.alltoall``. Differentiable.

    Args:
        tensor: first dimensions may differ between ranks, others may not.
        splits: how many rows go to each rank: integers, shape (set size,). None divides the rows evenly. Whole numbers
            in an array of floats, MXNet's default, will do.
        name: what matches the ranks' calls.
        priority: accepted for programs that pass it.
        process_set: the ranks that take part.

    Returns:
        the rows that came; with ``splits`` also how many came from each rank (int32, shape (set size,)).
    """
    return FRONTEND.alltoall(tensor, splits, name, process_set)


def reducescatter(
    tensor: Tensor,
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the ranks' arrays, and leave each rank its part of the rows: ``Frontend.reducescatter``. Differentiable.

    Of n rows among p ranks, the first n mod p ranks get one more than the others.
    """
    return FRONTEND.reducescatter(
        tensor, name, op=op, process_set=process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several arrays as one. Differentiable."""
    return FRONTEND.grouped_reducescatter(
        tensors,
        name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
