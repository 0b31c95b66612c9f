"""The PyTorch front-end: ``import hvdgloo.torch as hvd``.

::

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

and each rank trains on its own part of the data. The collectives are documented where they are defined, once for all
frameworks: ``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

from hvdgloo.errors import MissingDependencyError

try:
    import torch  # noqa: F401 - to say what is missing, before anything else fails for want of it
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError("hvdgloo.torch needs PyTorch: pip install 'hvdgloo[torch]'") from error

from hvdgloo._platform.imports import collector_paused

with collector_paused():
    from hvdgloo._collectives.names import EAGER, OBJECTS, VALUES, bind
    from hvdgloo.torch import (
        compression,
        elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
        functions,
        mpi_ops,
        optimizer,
        sync_batch_norm,
    )

__all__ = bind(
    globals(),
    [mpi_ops, functions, optimizer, sync_batch_norm, compression],
    [*EAGER, *OBJECTS, *VALUES],
    own=[
        "Compression",
        "DiLoCo",
        "DistributedOptimizer",
        "LocalSGD",
        "SyncBatchNorm",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "scale_learning_rate",
        "sparse_allreduce_async",
    ],
)
