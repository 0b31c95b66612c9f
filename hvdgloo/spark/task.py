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


def gpu_index(local_rank: int) -> int:
    """Which of the GPUs that it sees a rank is to use: its task's, else that of its place on its host.

    ``HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1`` passes over what Spark says.
    """
    if os.environ.get("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX") == "1":
        return local_rank
    devices = get_available_devices()
    return int(devices[0]) if devices else local_rank
