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
from hvdgloo.tensorflow import compression as compression
from hvdgloo.tensorflow import elastic as elastic
from hvdgloo.tensorflow import functions as functions
from hvdgloo.tensorflow import mpi_ops as mpi_ops
from hvdgloo.tensorflow import sync_batch_norm as sync_batch_norm
from hvdgloo.tensorflow._frontend import FRONTEND
from hvdgloo.tensorflow._ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from hvdgloo.tensorflow._optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)
from hvdgloo.tensorflow._session import BroadcastGlobalVariablesHook
from hvdgloo.tensorflow.compression import Compression
from hvdgloo.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdgloo.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "log",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Max = ReduceOp.MAX
Min = ReduceOp.MIN
Product = ReduceOp.PRODUCT
Sum = ReduceOp.SUM
add_process_set = FRONTEND.add_process_set
barrier = FRONTEND.barrier
cross_rank = FRONTEND.cross_rank
cross_size = FRONTEND.cross_size
is_homogeneous = FRONTEND.is_homogeneous
local_rank = FRONTEND.local_rank
local_size = FRONTEND.local_size
log = FRONTEND.log
rank = FRONTEND.rank
remove_process_set = FRONTEND.remove_process_set
size = FRONTEND.size
