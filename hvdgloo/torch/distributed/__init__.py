"""hvdgloo as a backend of torch.distributed: ``dist.init_process_group("hvdgloo")``.

DDP, FSDP, DTensor and everything else that is written for torch.distributed then uses hvdgloo's shared memory and
hierarchy for tensors on the CPU. ``import torch`` registers the backend by itself, from torch 2.5 on; before, or with
TORCH_DEVICE_BACKEND_AUTOLOAD=0, ``import hvdgloo.torch.distributed`` does.
"""

import torch.distributed as dist

from hvdgloo._job import process
from hvdgloo._torch_backend import register
from hvdgloo.types import Metrics

__all__ = ["metrics", "register"]


def metrics() -> Metrics:
    """Return the counts of this process since it began, as ``hvd.metrics()`` does, with or without ``hvd.init()``.

    ``planes`` has torch.distributed's operations by their kind, such as "dist.all_reduce".
    """
    if dist.is_initialized():
        return process.group_metrics(dist.get_rank(), dist.get_world_size())
    return process.group_metrics(0, 1)


register()
