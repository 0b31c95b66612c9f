"""The MXNet front-end: ``import hvdgloo.mxnet as hvd``.

::

    hvd.init()
    net.initialize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.01 * hvd.size()})

and each rank trains on its own part of the data. Programs of the Module API take ``DistributedOptimizer``. The
collectives are documented where they are defined, once for all frameworks: ``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

import numpy

from hvdgloo.errors import MissingDependencyError

try:
    import mxnet  # noqa: F401 - to say what is missing, before anything else fails for want of it
except (ModuleNotFoundError, AttributeError) as error:
    # MXNet, which is not developed any more, uses names that numpy 1.24 has removed.
    if getattr(error, "name", None) != "mxnet" and "'numpy'" not in str(error) and "np." not in str(error):
        raise
    raise MissingDependencyError(
        "hvdgloo.mxnet needs MXNet 1.9.1 and a numpy that it works with: pip install mxnet==1.9.1 numpy==1.23.5, on "
        f"Python 3.10 or 3.11 (here is numpy {numpy.__version__}: {str(error).splitlines()[0]})"
    ) from error

from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job import process
from hvdgloo.errors import HorovodInternalError
from hvdgloo.mxnet._optimizer import DistributedOptimizer, DistributedTrainer
from hvdgloo.mxnet.compression import Compression
from hvdgloo.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from hvdgloo.mxnet.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)

process.shut_down_first_at_exit()  # MXNet waits for gradients under way

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
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
