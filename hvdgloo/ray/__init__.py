"""Workers on a Ray cluster: ``RayExecutor`` starts them as Ray actors, and calls functions on all of them at once.

The names are Horovod's. Ray is not imported before an executor is created.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdgloo.ray.elastic import ElasticRayExecutor
    from hvdgloo.ray.runner import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]

# Imported lazily: actors and workers import other modules of this package, but do not need the launcher's.
_FROM = {"ElasticRayExecutor": "hvdgloo.ray.elastic", "RayExecutor": "hvdgloo.ray.runner"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'hvdgloo.ray' has no attribute {name!r}")
