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
from hvdgloo.jax import elastic as elastic
from hvdgloo.jax._compression import Compression
from hvdgloo.jax._errors import errors_of, translated
from hvdgloo.jax._frontend import FRONTEND
from hvdgloo.jax._optimizer import (
    DistributedOptimizer,
    broadcast_parameters,
    distributed_gradients,
)
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "distributed_gradients",
    "errors_of",
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
    "local_size",
    "log",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "translated",
]

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
Max = ReduceOp.MAX
Min = ReduceOp.MIN
Product = ReduceOp.PRODUCT
Sum = ReduceOp.SUM
add_process_set = FRONTEND.add_process_set
allgather = FRONTEND.allgather
allgather_object = FRONTEND.allgather_object
allreduce = FRONTEND.allreduce
alltoall = FRONTEND.alltoall
barrier = FRONTEND.barrier
broadcast = FRONTEND.broadcast
broadcast_object = FRONTEND.broadcast_object
cross_rank = FRONTEND.cross_rank
cross_size = FRONTEND.cross_size
grouped_allgather = FRONTEND.grouped_allgather
grouped_allreduce = FRONTEND.grouped_allreduce
grouped_reducescatter = FRONTEND.grouped_reducescatter
is_homogeneous = FRONTEND.is_homogeneous
join = FRONTEND.join
local_rank = FRONTEND.local_rank
local_size = FRONTEND.local_size
log = FRONTEND.log
rank = FRONTEND.rank
reducescatter = FRONTEND.reducescatter
remove_process_set = FRONTEND.remove_process_set
size = FRONTEND.size
