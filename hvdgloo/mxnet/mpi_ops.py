"""The collectives on MXNet's arrays, bound to this process's job, under the names that Horovod's programs use.

Each is a method of ``hvdgloo._collectives.frontend.Frontend``, whose docstring says what it promises. Those here have
Horovod's parameters for MXNet, of which ``priority`` is accepted: a call returns when its result is there, so there is
nothing to put in order. Several tensors go together in a ``grouped_*`` call, or one after another with the
``*_async`` ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdgloo._collectives.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    start_timeline,
    stop_timeline,
)
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job import process
from hvdgloo.common import basics as _basics  # noqa: F401 - programs look here for what is behind the functions
from hvdgloo.mxnet._adapter import MXNetAdapter, Tensor
from hvdgloo.mxnet._frontend import MXNetFrontend
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_frontend = MXNetFrontend(MXNetAdapter(), process.current, module=__name__)

rank = _frontend.rank
size = _frontend.size
local_rank = _frontend.local_rank
local_size = _frontend.local_size
cross_rank = _frontend.cross_rank
cross_size = _frontend.cross_size
is_homogeneous = _frontend.is_homogeneous

allreduce_async = _frontend.allreduce_async
allreduce_async_ = _frontend.allreduce_async_
grouped_allreduce_async = _frontend.grouped_allreduce_async
grouped_allreduce_async_ = _frontend.grouped_allreduce_async_
allgather_async = _frontend.allgather_async
grouped_allgather_async = _frontend.grouped_allgather_async
broadcast_async = _frontend.broadcast_async
broadcast_async_ = _frontend.broadcast_async_
alltoall_async = _frontend.alltoall_async
reducescatter_async = _frontend.reducescatter_async
grouped_reducescatter_async = _frontend.grouped_reducescatter_async
join = _frontend.join
barrier = _frontend.barrier
poll = _frontend.poll
synchronize = _frontend.synchronize
add_process_set = _frontend.add_process_set
remove_process_set = _frontend.remove_process_set


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
    return _frontend.allreduce(
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
    return _frontend.allreduce_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)


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
    return _frontend.grouped_allreduce(
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
    return _frontend.grouped_allreduce_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)


def allgather(
    tensor: Tensor,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' arrays along their first dimension: ``Frontend.allgather``. Differentiable.

    First dimensions may differ between ranks, others may not.
    """
    return _frontend.allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allgather`` of several arrays as one. Differentiable."""
    return _frontend.grouped_allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The array of one (global) rank, on all: ``Frontend.broadcast``. Differentiable."""
    return _frontend.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """``broadcast`` in place: the other ranks' ``tensor`` is overwritten. Records no gradient."""
    return _frontend.broadcast_(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send every rank a part of the array's rows, and receive its part of each: ``Frontend.alltoall``. Differentiable.

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
    return _frontend.alltoall(tensor, splits, name, process_set)


def reducescatter(
    tensor: Tensor,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the ranks' arrays, and leave each rank its part of the rows: ``Frontend.reducescatter``. Differentiable.

    Of n rows among p ranks, the first n mod p ranks get one more than the others.
    """
    return _frontend.reducescatter(
        tensor, name, op=op, process_set=process_set, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several arrays as one. Differentiable."""
    return _frontend.grouped_reducescatter(
        tensors,
        name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
