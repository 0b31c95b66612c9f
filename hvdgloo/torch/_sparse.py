"""Reducing sparse tensors: every rank's entries are gathered, and those at the same place are added up."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._collectives.spec import gathering
from hvdgloo._platform import interrupts
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


class SparseGradients:
    """An optimizer's sparse gradients that are being gathered.

    Args:
        op: Average (also None) or Sum.
        grouped: names that travel with others, as only dense gradients can.
    """

    def __init__(
        self, frontend: Frontend[Tensor], op: int | None, process_set: ProcessSet, grouped: Container[str]
    ) -> None:
        self._frontend = frontend
        self._op = ReduceOp.AVERAGE if op is None else op
        self._process_set = process_set
        self._grouped = grouped
        self._under_way: dict[str, Callable[[], Tensor]] = {}  # to what waits for it

    def __contains__(self, name: str) -> bool:
        return name in self._under_way

    def start(self, name: str, parameter: Tensor, label: str) -> None:
        """Start to gather a parameter's gradient, without entries if this rank has none.

        Args:
            label: its name in messages.

        Raises:
            InvalidArgumentError: (a ValueError) it is in a group.
        """
        if name in self._grouped:
            raise InvalidArgumentError(
                f"the gradient of {name} is sparse, and cannot be in a group with others; leave it out of groups=, or "
                "use sparse_as_dense=True"
            )
        gradient = parameter.grad
        if gradient is None:
            gradient = _empty_like(parameter)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        held = interrupts.hold()
        try:
            self._under_way[name] = start_sparse_allreduce(self._frontend, gradient, label, self._op, self._process_set)
        finally:
            interrupts.release(held)

    def rest(self) -> tuple[dict[str, Tensor], Exception | None]:
        """Wait until nothing is under way.

        Returns:
            the gradients that have arrived, and the first failure.
        """
        gathered, failure = {}, None
        for name, finish in self._under_way.items():
            try:
                gathered[name] = finish()
            except Exception as error:  # noqa: BLE001 - raised once all memory is at rest
                failure = failure or error
        return gathered, failure

    def clear(self) -> None:
        """Forget all."""
        self._under_way.clear()


def make_sparse(parameters: Iterable[Tensor]) -> None:
    """Leave gradients that travelled as dense ones, zeros included, as an optimizer for sparse ones needs them."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            parameter.grad = gradient.to_sparse(1)


def _empty_like(tensor: Tensor) -> Tensor:
    """Make a sparse tensor without entries, of a dense one's shape and type, with the first dimension sparse."""
    none = torch.empty((1, 0), dtype=torch.int64, device=tensor.device)
    return _sparse(none, tensor.new_empty((0, *tensor.shape[1:])), tensor.shape, tensor.device)


def _sparse(indices: Tensor, values: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    # The indices come from sparse tensors; checking them again would cost as much as the gathering.
    return torch.sparse_coo_tensor(indices, values, shape, dtype=values.dtype, device=device, check_invariants=False)
