"""The collectives on arrays, bound to this process's job."""

from __future__ import annotations

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._job import process
from hvdgloo.numpy._adapter import Array, NumpyAdapter

FRONTEND: Frontend[Array] = Frontend(NumpyAdapter(), process.current, module=__name__)
