"""The Frontend of MXNet, which runs the gradients of several collectives at a time."""

from __future__ import annotations

from collections.abc import Sequence

from mxnet import autograd

from hvdgloo.core import Core
from hvdgloo.frontend import Frontend, NamedFrontend
from hvdgloo.mxnet.adapter import Tensor
from hvdgloo.operations import Operation


class MXNetFrontend(Frontend[Tensor]):
    """A Frontend whose collectives have names when they are recorded, and so their gradients have: by their order in
    the program, whatever that of the backward pass is."""

    def apply(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        name: str | None = None,
        *,
        grouped: bool | None = None,
    ) -> list[Tensor]:
        group = len(tensors) > 1 if grouped is None else grouped
        return super().apply(operation, tensors, self._label(operation, name, grouped=group), grouped=group)

    def exchange(
        self, operation: Operation, tensor: Tensor, splits: Sequence[int], name: str | None = None
    ) -> list[Tensor]:
        return super().exchange(operation, tensor, splits, self._label(operation, name, grouped=False))

    def _label(self, operation: Operation, name: str | None, *, grouped: bool) -> str | None:
        if name is not None or not autograd.is_recording():
            return name
        prefix = operation.prefix(grouped=grouped)
        return self.automatic_name(prefix, operation.process_set).removeprefix(f"{prefix}.")

    def _for_gradient(self, name: str | None) -> Core[Tensor]:
        return NamedFrontend(self.adapter, self._context, f"{name}.gradient")
