"""Workers on a Ray cluster: ``RayExecutor`` starts them as Ray actors, and calls functions on all of them at once.

The names are Horovod's. Ray is imported when an executor is made, not before.
"""

from hvdgloo.ray.elastic import ElasticRayExecutor
from hvdgloo.ray.runner import RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]
