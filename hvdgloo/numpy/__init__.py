"""The numpy front-end: ``import hvdgloo.numpy as hvd``.

The collectives on arrays, for programs without a framework; numpy records no gradients, so there is no
DistributedOptimizer here. They are documented where they are defined, once for all frameworks:
``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

from hvdgloo._collectives.names import EAGER, OBJECTS, VALUES, bind
from hvdgloo.numpy import elastic  # noqa: F401 - programs write hvd.elastic.run, and import only hvd
from hvdgloo.numpy._compression import Compression  # noqa: F401 - one of those that are exported below
from hvdgloo.numpy._frontend import FRONTEND
from hvdgloo.numpy._outer import OuterOptimizer  # noqa: F401 - likewise

__all__ = bind(globals(), [FRONTEND], [*EAGER, *OBJECTS, *VALUES], own=["Compression", "OuterOptimizer"])
