"""The collectives of TensorFlow's front-end, bound to this process's job, where Horovod's programs look for them."""

from __future__ import annotations

from hvdgloo._collectives.names import BASE, COLLECTIVES, bind
from hvdgloo.common import basics as _basics  # noqa: F401 - programs look here for what is behind the functions
from hvdgloo.tensorflow import _ops
from hvdgloo.tensorflow._frontend import FRONTEND

__all__ = bind(globals(), [_ops, FRONTEND], [*BASE, *COLLECTIVES], own=_ops.__all__)
