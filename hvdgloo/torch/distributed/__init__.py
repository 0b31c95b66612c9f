"""hvdgloo as a backend of torch.distributed: ``dist.init_process_group("hvdgloo")``.

DDP, FSDP, DTensor and everything else that is written for torch.distributed then uses hvdgloo's shared memory and
hierarchy for tensors on the CPU. ``import torch`` registers the backend by itself; with
TORCH_DEVICE_BACKEND_AUTOLOAD=0, ``import hvdgloo.torch.distributed`` does.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hvdgloo._collectives.logged import record
from hvdgloo._job import process
from hvdgloo._torch_backend import register, why_too_old
from hvdgloo.errors import InvalidArgumentError, MissingDependencyError
from hvdgloo.types import Metrics

if _reason := why_too_old(torch.__version__):
    raise MissingDependencyError(_reason)

__all__ = ["log", "metrics", "register"]


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    average: bool = False,
    step: int | None = None,
    steps: int | None = None,
    epoch: int | None = None,
    epochs: int | None = None,
    note: str | None = None,
    **named: Any,
) -> None:
    """Show numbers of the program, and its progress, as ``hvd.log()`` does, with or without ``hvd.init()``.

    Args:
        values, step, steps, epoch, epochs, note, named: as for ``hvd.log``.
        average: log averages over all ranks of the default group: a ``dist.all_reduce``.

    Raises:
        InvalidArgumentError: (a ValueError) a value is not one number, there are more than 64 names, or averages are
            asked for before ``dist.init_process_group()``.
        MismatchError: ranks that average have different names.
    """
    if average and not dist.is_initialized():
        raise InvalidArgumentError("hvdgloo.torch.distributed.log(average=True): call dist.init_process_group() before")
    rank = dist.get_rank() if dist.is_initialized() else 0
    progress = {"step": step, "steps": steps, "epoch": epoch, "epochs": epochs}
    record(process.group_counters(), rank, values, named, note, _add_up if average else None, **progress)


def _add_up(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    tensor = torch.from_numpy(array)
    if dist.get_backend() == "nccl":  # which takes no others
        tensor = tensor.cuda()
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()


def metrics() -> Metrics:
    """Return the counts of this process since it began, as ``hvd.metrics()`` does, with or without ``hvd.init()``.

    ``planes`` has torch.distributed's operations by their kind, such as "dist.all_reduce".
    """
    if dist.is_initialized():
        return process.group_metrics(dist.get_rank(), dist.get_world_size())
    return process.group_metrics(0, 1)


register()
