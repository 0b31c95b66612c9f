"""The JAX front-end: ``import hvdgloo.jax as hvd``.

Collectives on arrays and pytrees, eagerly and inside ``jax.jit``, where they are differentiable and run in the order in
which they were written. They are documented where they are defined, once for all frameworks:
``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

from hvdgloo._collectives.names import BASE, COLLECTIVES, OBJECTS, VALUES, bind
from hvdgloo.jax import (
    _errors,
    _optimizer,
    elastic,  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
)
from hvdgloo.jax._compression import Compression  # noqa: F401 - one of those that are exported below
from hvdgloo.jax._frontend import FRONTEND

__all__ = bind(
    globals(),
    [FRONTEND, _optimizer, _errors],
    [*BASE, *COLLECTIVES, *OBJECTS, *VALUES],
    own=[
        "Compression",
        "DistributedOptimizer",
        "broadcast_parameters",
        "distributed_gradients",
        "errors_of",
        "translated",
    ],
)
