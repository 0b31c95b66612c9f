"""The TensorFlow front-end: ``import hvdgloo.tensorflow as hvd``.

::

    hvd.init()
    optimizer = tf.keras.optimizers.SGD(0.01 * hvd.size())

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

and after the first step ``hvd.broadcast_variables(model.variables, root_rank=0)``, likewise the optimizer's; each rank
trains on its own part of the data. The collectives are documented where they are defined, once for all frameworks:
``hvdgloo._collectives.frontend.Frontend``. Programs of ``model.fit`` take ``hvdgloo.tensorflow.keras`` or
``hvdgloo.keras``.
"""

from __future__ import annotations

from hvdgloo.errors import MissingDependencyError

try:
    import tensorflow  # noqa: F401 - to say what is missing, before anything else fails for want of it
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise MissingDependencyError("hvdgloo.tensorflow needs TensorFlow: pip install 'hvdgloo[tensorflow]'") from error

from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo.errors import HorovodInternalError
from hvdgloo.tensorflow._optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    _make_allreduce_grads_fn,  # noqa: F401 - programs look here
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
from hvdgloo.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from hvdgloo.tensorflow.sync_batch_norm import SyncBatchNormalization

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
