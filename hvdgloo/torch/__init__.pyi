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
from hvdgloo.torch import compression as compression
from hvdgloo.torch import elastic as elastic
from hvdgloo.torch import functions as functions
from hvdgloo.torch import mpi_ops as mpi_ops
from hvdgloo.torch import optimizer as optimizer
from hvdgloo.torch import sync_batch_norm as sync_batch_norm
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.torch.compression import Compression
from hvdgloo.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    scale_learning_rate,
)
from hvdgloo.torch.optimizer import DiLoCo, DistributedOptimizer, LocalSGD
from hvdgloo.torch.sync_batch_norm import SyncBatchNorm
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalSGD",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
    "scale_learning_rate",
    "shutdown",
    "size",
    "sparse_allreduce_async",
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
sparse_allreduce_async = FRONTEND.sparse_allreduce_async
synchronize = FRONTEND.synchronize
