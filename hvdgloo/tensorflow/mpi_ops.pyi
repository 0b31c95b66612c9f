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
from hvdgloo._job.process import is_initialized
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
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
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
