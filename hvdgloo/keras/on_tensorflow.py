"""Keras on TensorFlow: gradients go the way of ``hvdgloo.tensorflow``'s tape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo.keras.distributed import Options
from hvdgloo.operations import Operation
from hvdgloo.process_sets import process_set_id
from hvdgloo.tensorflow.gradients import GradientSync
from hvdgloo.tensorflow.mpi_ops import _frontend
from hvdgloo.types import Collective, ReduceOp


class TensorFlowSync:
    """See ``hvdgloo.keras.distributed.Sync``."""

    def __init__(self, options: Options) -> None:
        self._sync = GradientSync(_frontend, options)
        self._agreement = Operation(Collective.ALLREDUCE, ReduceOp.MIN, process_set=process_set_id(options.process_set))
        for variable in options.local_variables:
            self._sync.register_local_source(variable)

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        """Nothing to do: gradients are sent from where they are computed."""

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return list(gradients)  # a compiled step is the same on all ranks

    def reduce(self, given: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._sync.reduce(given, variables)

    def agree(self, holds: Any) -> Any:
        if not self._sync.active:
            return holds
        (everywhere,) = _frontend.apply(self._agreement, [tf.cast(holds, tf.uint8)], "gradients_are_finite")
        return tf.cast(everywhere, tf.bool)


def open_sync(options: Options) -> TensorFlowSync:
    """How gradients are reduced on this backend."""
    return TensorFlowSync(options)
