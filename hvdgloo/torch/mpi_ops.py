"""The collectives on torch tensors, bound to this process's job; ``hvdgloo.torch`` exports them.

The module has the name under which Horovod's programs know it. They are documented where they are defined, once for all
frameworks: ``hvdgloo._collectives.frontend.Frontend``.
"""

from __future__ import annotations

from hvdgloo._collectives.names import EAGER, bind
from hvdgloo.common import basics as _basics  # noqa: F401 - programs look here for what is behind the functions
from hvdgloo.torch import _frontend

__all__ = bind(
    globals(),
    [_frontend.FRONTEND, _frontend],
    EAGER,
    own=["handle_average_backwards_compatibility", "sparse_allreduce_async"],
)
