"""The Frontend of MXNet, which runs the gradients of several collectives at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdgloo._collectives.core import Core
from hvdgloo._collectives.frontend import Frontend, NamedFrontend
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job import process
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.mxnet._adapter import MXNetAdapter, Tensor


class MXNetFrontend(Frontend[Tensor]):
    """A Frontend that names gradients by the order of calls in the program, not in the backward pass."""

    def _for_gradient(self, operation: CollectiveSpec, name: str | None) -> Core[Tensor]:
        # Calls with names may come in any order, so each name is counted separately.
        prefix = "gradient" if name is None else f"{name}.gradient"
        return NamedFrontend(self.adapter, self._context, self.automatic_name(prefix, operation.process_set))

    def _splits(self, operation: CollectiveSpec, tensor: Tensor, splits: Any) -> list[int]:
        # MXNet turns a list of integers into float32 unless told otherwise.
        if self.adapter.owns(splits) and self.adapter.describe(splits).dtype.is_floating:
            splits = _integers(splits)
        return super()._splits(operation, tensor, splits)


FRONTEND = MXNetFrontend(MXNetAdapter(), process.current, module=__name__)
"""This process's."""


def _integers(splits: Tensor) -> Any:
    given = FRONTEND.adapter.values(splits)
    beyond = 2.0 ** (np.finfo(given.dtype).nmant + 1)  # from where on the type does not hold every integer
    if not all(number.is_integer() and abs(number) < beyond for number in map(float, given.flat)):
        raise InvalidArgumentError(
            f"splits are whole numbers of rows; got {given.tolist()}, and mx.nd.array(splits, dtype='int32') holds them"
        )
    return given.astype(np.int64)
