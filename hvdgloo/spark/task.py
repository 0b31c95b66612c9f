"""What a worker may ask about its task: ``hvdgloo.spark.task.get_available_devices()``."""

from __future__ import annotations

import os

__all__ = ["get_available_devices"]

DEVICES = "HVDGLOO_SPARK_DEVICES"


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark has given to this task: ``["0"]``.

    They are indices of what the executor sees. Without resources of Spark's (``spark.task.resource.gpu.amount``), and
    in a process that no task has started, there are none.
    """
    return [address for address in os.environ.get(DEVICES, "").split(",") if address]
