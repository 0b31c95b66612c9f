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

and after the first step ``hvd.broadcast_variables(model.variables, root_rank=0)``, and the same for the optimizer's;
each rank trains on its own part of the data. The collectives are documented where they are defined, once for all
frameworks: ``hvdgloo._collectives.frontend.Frontend``. Programs that call ``model.fit`` take
``hvdgloo.tensorflow.keras`` or ``hvdgloo.keras``.
"""

from __future__ import annotations

from hvdgloo.errors import MissingDependencyError

try:
    import tensorflow  # to say what is missing, before anything else fails for want of it
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise MissingDependencyError("hvdgloo.tensorflow needs TensorFlow: pip install 'hvdgloo[tensorflow]'") from error

from hvdgloo._collectives.names import BASE, COLLECTIVES, OBJECTS, VALUES, bind
from hvdgloo.tensorflow import (
    _optimizer,
    _session,
    _xla,
    compression,
    elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
    functions,
    mpi_ops,
    sync_batch_norm,
)
from hvdgloo.tensorflow._optimizer import _make_allreduce_grads_fn  # noqa: F401 - programs look here
from hvdgloo.tensorflow.util import _executing_eagerly  # noqa: F401 - and libraries here

if tensorflow.keras.backend.backend() == "tensorflow":
    _xla.spare(tensorflow.keras.Model)

__all__ = bind(
    globals(),
    [mpi_ops, functions, _optimizer, _session, compression, sync_batch_norm],
    [*BASE, *COLLECTIVES, *OBJECTS, *VALUES],
    own=[
        "BroadcastGlobalVariablesHook",
        "Compression",
        "DistributedGradientTape",
        "DistributedOptimizer",
        "PartialDistributedGradientTape",
        "SyncBatchNormalization",
        "broadcast_",
        "broadcast_global_variables",
        "broadcast_object_fn",
        "broadcast_variables",
        "local_rank_op",
        "local_size_op",
        "process_set_included_op",
        "rank_op",
        "size_op",
    ],
)
