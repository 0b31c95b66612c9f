"""The Keras 3 front-end, on its TensorFlow, torch and JAX backends: ``import hvdgloo.keras as hvd``.

::

    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.fit(own_part_of_the_data, callbacks=callbacks, verbose=hvd.rank() == 0)
"""

from __future__ import annotations

from hvdgloo.errors import MissingDependencyError

try:
    import keras  # noqa: F401 - to say what is missing, before anything else fails for want of it
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing in ("tensorflow", "torch", "jax"):
        raise MissingDependencyError(
            f"Keras is set to use {missing}, which is not installed: pip install {missing}, or set KERAS_BACKEND "
            "to another of tensorflow, torch and jax"
        ) from error
    if missing != "keras":
        raise
    raise MissingDependencyError(
        "hvdgloo.keras needs Keras 3: pip install 'hvdgloo[keras]'; and a backend for it: pip install one of "
        "tensorflow, torch and jax, and name it by KERAS_BACKEND unless it is tensorflow"
    ) from error

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
from hvdgloo.errors import HorovodInternalError
from hvdgloo.keras import callbacks
from hvdgloo.keras._compression import Compression
from hvdgloo.keras._functions import (
    _frontend,
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    load_model,
    reducescatter,
)
from hvdgloo.keras._optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
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
]

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

rank = _frontend.rank
size = _frontend.size
local_rank = _frontend.local_rank
local_size = _frontend.local_size
cross_rank = _frontend.cross_rank
cross_size = _frontend.cross_size
is_homogeneous = _frontend.is_homogeneous
add_process_set = _frontend.add_process_set
remove_process_set = _frontend.remove_process_set
