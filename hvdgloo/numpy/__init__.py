"""The numpy front-end: ``import hvdgloo.numpy as hvd``.

The collectives on arrays, for programs without a framework; numpy records no gradients, so there is no optimizer here.
They are documented where they are defined, once for all frameworks: ``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

from typing import TypeVar

from hvdgloo._collectives import objects
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
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job import process
from hvdgloo.errors import HorovodInternalError
from hvdgloo.numpy._adapter import Array, NumpyAdapter
from hvdgloo.numpy._compression import Compression
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
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

T = TypeVar("T")

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_frontend: Frontend[Array] = Frontend(NumpyAdapter(), process.current, module=__name__)

rank = _frontend.rank
size = _frontend.size
local_rank = _frontend.local_rank
local_size = _frontend.local_size
cross_rank = _frontend.cross_rank
cross_size = _frontend.cross_size
is_homogeneous = _frontend.is_homogeneous

allreduce = _frontend.allreduce
allreduce_async = _frontend.allreduce_async
allreduce_ = _frontend.allreduce_
allreduce_async_ = _frontend.allreduce_async_
grouped_allreduce = _frontend.grouped_allreduce
grouped_allreduce_async = _frontend.grouped_allreduce_async
grouped_allreduce_ = _frontend.grouped_allreduce_
grouped_allreduce_async_ = _frontend.grouped_allreduce_async_
allgather = _frontend.allgather
allgather_async = _frontend.allgather_async
grouped_allgather = _frontend.grouped_allgather
grouped_allgather_async = _frontend.grouped_allgather_async
broadcast = _frontend.broadcast
broadcast_async = _frontend.broadcast_async
broadcast_ = _frontend.broadcast_
broadcast_async_ = _frontend.broadcast_async_
alltoall = _frontend.alltoall
alltoall_async = _frontend.alltoall_async
reducescatter = _frontend.reducescatter
reducescatter_async = _frontend.reducescatter_async
grouped_reducescatter = _frontend.grouped_reducescatter
grouped_reducescatter_async = _frontend.grouped_reducescatter_async
join = _frontend.join
barrier = _frontend.barrier
poll = _frontend.poll
synchronize = _frontend.synchronize
add_process_set = _frontend.add_process_set
remove_process_set = _frontend.remove_process_set


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The Python object of one rank, on all: see ``hvdgloo._collectives.objects.broadcast_object``."""
    return objects.broadcast_object(_frontend, obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every rank's Python object, in rank order: see ``hvdgloo._collectives.objects.allgather_object``."""
    return objects.allgather_object(_frontend, obj, name, process_set)
