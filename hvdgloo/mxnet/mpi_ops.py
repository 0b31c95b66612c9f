"""The collectives on MXNet's arrays, bound to this process's job, where Horovod's programs look for them."""

from __future__ import annotations

from hvdgloo._collectives.names import EAGER, bind
from hvdgloo.common import basics as _basics  # noqa: F401 - programs look here for what is behind the functions
from hvdgloo.mxnet import _ops
from hvdgloo.mxnet._frontend import FRONTEND

__all__ = bind(globals(), [_ops, FRONTEND], EAGER)
