"""Reducing sparse tensors: every rank's entries are gathered, and those at the same place are added up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._collectives.spec import gathering
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor


def start_sparse_allreduce(
    frontend: Frontend[Tensor], tensor: Tensor, name: str | None, op: int, process_set: ProcessSet
) -> Callable[[], Tensor]:
    """Start to gather all ranks' entries, indices and values in one group.

    Args:
        tensor: of layout sparse_coo. It must not be changed before the result is there.
        name: what matches the ranks' calls; None for an automatic one.
        op: Average or Sum.

    Returns:
        a function that waits for them and returns their sum or average as a coalesced tensor, the same on every rank.

    Raises:
        InvalidArgumentError: (a ValueError) the tensor is not sparse, or ``op`` is neither Average nor Sum.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise InvalidArgumentError("expected a torch tensor of layout sparse_coo; allreduce takes dense ones")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(f"op of a sparse allreduce must be Average or Sum, not {op!r}")
    operation = gathering(process_set)
    entries = tensor.detach().coalesce()
    parts = [entries.indices().t().contiguous(), entries.values()]
    pending = frontend.start(operation, parts, name, grouped=True)

    @uncompiled
    def finish() -> Tensor:
        indices, values = pending.result()
        if op == ReduceOp.AVERAGE:
            values = values / frontend.members(operation)[0]
        return _sparse(indices.t(), values, tensor.shape, tensor.device).coalesce()

    return finish


def empty_like(tensor: Tensor) -> Tensor:
    """Make a sparse tensor without entries, of a dense one's shape and type, with the first dimension sparse."""
    none = torch.empty((1, 0), dtype=torch.int64, device=tensor.device)
    return _sparse(none, tensor.new_empty((0, *tensor.shape[1:])), tensor.shape, tensor.device)


def _sparse(indices: Tensor, values: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    # The indices come from sparse tensors; checking them again would cost as much as the gathering.
    return torch.sparse_coo_tensor(indices, values, shape, dtype=values.dtype, device=device, check_invariants=False)
