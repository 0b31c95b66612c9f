# Written by docs/generate_stubs.py; do not edit.

from hvdgloo._collectives.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    metrics,
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
from hvdgloo._job.process import is_initialized
from hvdgloo.errors import HorovodInternalError
from hvdgloo.numpy import elastic as elastic
from hvdgloo.numpy._compression import Compression
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.numpy._outer import OuterOptimizer
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "OuterOptimizer",
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
    "log",
    "metrics",
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

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Max = ReduceOp.MAX
Min = ReduceOp.MIN
Product = ReduceOp.PRODUCT
Sum = ReduceOp.SUM
add_process_set = FRONTEND.add_process_set
allgather = FRONTEND.allgather
allgather_async = FRONTEND.allgather_async
allgather_object = FRONTEND.allgather_object
allreduce = FRONTEND.allreduce
allreduce_ = FRONTEND.allreduce_
allreduce_async = FRONTEND.allreduce_async
allreduce_async_ = FRONTEND.allreduce_async_
alltoall = FRONTEND.alltoall
alltoall_async = FRONTEND.alltoall_async
barrier = FRONTEND.barrier
broadcast = FRONTEND.broadcast
broadcast_ = FRONTEND.broadcast_
broadcast_async = FRONTEND.broadcast_async
broadcast_async_ = FRONTEND.broadcast_async_
broadcast_object = FRONTEND.broadcast_object
cross_rank = FRONTEND.cross_rank
cross_size = FRONTEND.cross_size
grouped_allgather = FRONTEND.grouped_allgather
grouped_allgather_async = FRONTEND.grouped_allgather_async
grouped_allreduce = FRONTEND.grouped_allreduce
grouped_allreduce_ = FRONTEND.grouped_allreduce_
grouped_allreduce_async = FRONTEND.grouped_allreduce_async
grouped_allreduce_async_ = FRONTEND.grouped_allreduce_async_
grouped_reducescatter = FRONTEND.grouped_reducescatter
grouped_reducescatter_async = FRONTEND.grouped_reducescatter_async
is_homogeneous = FRONTEND.is_homogeneous
join = FRONTEND.join
local_rank = FRONTEND.local_rank
local_size = FRONTEND.local_size
log = FRONTEND.log
poll = FRONTEND.poll
rank = FRONTEND.rank
reducescatter = FRONTEND.reducescatter
reducescatter_async = FRONTEND.reducescatter_async
remove_process_set = FRONTEND.remove_process_set
size = FRONTEND.size
synchronize = FRONTEND.synchronize
