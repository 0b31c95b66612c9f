"""The collectives on torch tensors, bound to this process's job; ``hvdgloo.torch`` exports them.

The module has the name under which Horovod's programs know it. They are documented where they are defined, once for all
frameworks: ``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

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
from hvdgloo.common import basics as _basics  # noqa: F401 - programs look here for what is behind the functions
from hvdgloo.common.util import get_average_backwards_compatibility_fun
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.torch._sparse import start_sparse_allreduce
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
    "handle_average_backwards_compatibility",
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
    "sparse_allreduce_async",
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

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(sys.modules[__name__])

_frontend: Frontend[torch.Tensor] = Frontend(TorchAdapter(), process.current, module=__name__)

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


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to average or add up the ranks' sparse tensors.

    Args:
        tensor: of layout sparse_coo, with the same shape, dtype and number of sparse dimensions on every rank.
        name: what matches the ranks' calls; None for an automatic one.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        what waits for the result and returns it: a coalesced sparse tensor, the same on every rank.

    Raises:
        InvalidArgumentError: (a ValueError) not such a tensor, or another operation.
    """
    return start_sparse_allreduce(_frontend, tensor, name, op, process_set)


add_process_set = _frontend.add_process_set
remove_process_set = _frontend.remove_process_set
