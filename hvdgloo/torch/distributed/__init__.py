"""hvdgloo as a backend of torch.distributed: ``dist.init_process_group("hvdgloo")``.

DDP, FSDP, DTensor and everything else that is written for torch.distributed then uses hvdgloo's shared memory and
hierarchy for tensors on the CPU. ``import torch`` registers the backend by itself, from torch 2.5 on; before, or with
TORCH_DEVICE_BACKEND_AUTOLOAD=0, ``import hvdgloo.torch.distributed`` does.
"""

from hvdgloo._torch_backend import register

__all__ = ["register"]

register()
