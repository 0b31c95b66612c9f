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

import atexit

import numpy

from hvdgloo.errors import MissingDependencyError

try:
    import mxnet  # noqa: F401 - to say what is missing, before anything else fails for want of it
except (ModuleNotFoundError, AttributeError) as error:
    # MXNet, which is no longer developed, uses names that numpy 1.24 has removed.
    if getattr(error, "name", None) != "mxnet" and "'numpy'" not in str(error) and "np." not in str(error):
        raise
    raise MissingDependencyError(
        "hvdgloo.mxnet needs MXNet 1.9.1 and a numpy that it works with: pip install mxnet==1.9.1 numpy==1.23.5, on "
        f"Python 3.10 or 3.11 (here is numpy {numpy.__version__}: {str(error).splitlines()[0]})"
    ) from error

from hvdgloo._collectives.names import EAGER, OBJECTS, VALUES, bind
from hvdgloo._job import process
from hvdgloo.mxnet import (
    _optimizer,
    _recording,
    compression,
    elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
    functions,
    mpi_ops,
)

# Last in, first out: the job ends, so that no gradient waits for other ranks any more; then those under way end, and
# then MXNet does.
atexit.register(_recording.settle)
process.shut_down_first_at_exit()

__all__ = bind(
    globals(),
    [mpi_ops, functions, _optimizer, compression],
    [*EAGER, *OBJECTS, *VALUES],
    own=["Compression", "DistributedOptimizer", "DistributedTrainer", "broadcast_parameters"],
)
