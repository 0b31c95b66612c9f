"""Keras on TensorFlow: gradients are reduced as by ``hvdgloo.tensorflow``'s tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdgloo.keras._distributed_optimizer import FINITE, KerasOptions
from hvdgloo.tensorflow import _xla as xla
from hvdgloo.tensorflow._frontend import FRONTEND, in_graph
from hvdgloo.tensorflow._gradients import GradientSync


class TensorFlowSync:
    """See ``hvdgloo.keras._distributed_optimizer.Sync``."""

    def __init__(self, options: KerasOptions) -> None:
        self._sync = GradientSync(FRONTEND, options)
        for variable in options.local_variables:
            self._sync.register_local_source(variable)
        self._step: tuple[list[Any], list[Any]] = [], []  # what apply() was given
        self.arrived: list[list[Any]] = []

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        """Do nothing: gradients are sent from where they are computed."""

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._step = list(gradients), list(variables)
        return list(gradients)  # a compiled step is the same on all ranks

    def reduce(self, given: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        # Those without gradients have been left out, and other ranks may have them.
        every = {id(variable) for variable in self._step[1]}
        among = self._step if all(id(variable) in every for variable in variables) else None
        if not in_graph(given):
            if not self.arrived:
                self.arrived.append(self._sync.reduce(given, variables, among=among))
            return self.arrived[0]
        return self._sync.reduce(given, variables, among=among)

    def agree(self, holds: Any) -> Any:
        return self._sync.agree(holds, FINITE)


def prepare() -> None:
    """Have models train without XLA where it would be asked to compile collectives."""
    xla.spare(keras.Model)


def open_sync(options: KerasOptions) -> TensorFlowSync:
    """Make the object that reduces gradients on this backend."""
    return TensorFlowSync(options)
