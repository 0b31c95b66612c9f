"""A worker's access to its Spark task: ``hvdgloo.spark.task.get_available_devices()``."""

from __future__ import annotations

import os

__all__ = ["get_available_devices"]

DEVICES = "HVDGLOO_SPARK_DEVICES"


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark assigned to this task: ``["0"]``.

    They are indices into the GPUs that the executor sees. The list is empty if Spark manages no GPUs
    (``spark.task.resource.gpu.amount``), and in a process that no task started.
    """
    return [address for address in os.environ.get(DEVICES, "").split(",") if address]


def gpu_index(local_rank: int) -> int:
    """Return the index of the GPU for a rank among those it sees: its task's, otherwise ``local_rank``.

    ``HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1`` ignores the GPUs that Spark assigned.
    """
    if os.environ.get("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX") == "1":
        return local_rank
    devices = get_available_devices()
    return int(devices[0]) if devices else local_rank
