"""The collectives on torch tensors, bound to this process's job, and those that only torch has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.names import PLACES, REDUCTIONS
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job import process
from hvdgloo.common.util import get_average_backwards_compatibility_fun
from hvdgloo.torch._adapter import TorchAdapter
from hvdgloo.torch._compilation import uncompiled_methods
from hvdgloo.torch._sparse import start_sparse_allreduce


class TorchFrontend(Frontend[torch.Tensor]):
    """A Frontend that also takes sparse tensors."""

    def sparse_allreduce_async(
        self, tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
    ) -> Callable[[], torch.Tensor]:
        """Start averaging or adding up the ranks' sparse tensors.

        Args:
            tensor: of layout sparse_coo, with the same shape, dtype and number of sparse dimensions on every rank.
            name: what matches the ranks' calls; None for an automatic one.
            op: Average or Sum.
            process_set: the ranks that take part.

        Returns:
            a function that waits for the result and returns it: a coalesced sparse tensor, the same on every rank.

        Raises:
            InvalidArgumentError: (a ValueError) the tensor is not sparse, or ``op`` is neither Average nor Sum.
        """
        return start_sparse_allreduce(self, tensor, name, op, process_set)


uncompiled_methods(TorchFrontend, *PLACES)

FRONTEND = TorchFrontend(TorchAdapter(), process.current, module=__name__)

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(SimpleNamespace(**REDUCTIONS))
