"""The Frontend of MXNet, which runs the gradients of several collectives at a time."""

from __future__ import annotations

from hvdgloo.core import Core
from hvdgloo.frontend import Frontend, NamedFrontend
from hvdgloo.mxnet.adapter import Tensor
from hvdgloo.operations import Operation


class MXNetFrontend(Frontend[Tensor]):
    """A Frontend whose gradients are named by their calls' order in the program, whatever that of the backward pass."""

    def _for_gradient(self, operation: Operation, name: str | None) -> Core[Tensor]:
        # Calls with names may come in any order, so each name is counted by itself.
        prefix = "gradient" if name is None else f"{name}.gradient"
        return NamedFrontend(self.adapter, self._context, self.automatic_name(prefix, operation.process_set))
