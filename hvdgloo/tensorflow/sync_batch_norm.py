"""Batch normalisation over the batches of all ranks together (Ioffe and Szegedy, 2015).

The ranks' sums are added up, then the sums of squared deviations from the common mean: the difference of two sums of
squares would lose the variance of data with a large mean. Both sums are differentiable, and so the layer is exact.
"""

from __future__ import annotations

import inspect
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.process_sets import global_process_set
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo.errors import InvalidArgumentError, MissingDependencyError
from hvdgloo.tensorflow._frontend import FRONTEND, TensorFlowFrontend
from hvdgloo.types import Collective, ReduceOp

_total = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.SUM)

_moments = getattr(tf.keras.layers.BatchNormalization, "_moments", None)
_suits = _moments is not None and list(inspect.signature(_moments).parameters) == ["self", "inputs", "mask"]
"""True if this is Keras 3's layer, whose method for a batch's statistics, which is not public, can be overridden."""


@tf.keras.utils.register_keras_serializable("hvdgloo")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``keras.layers.BatchNormalization`` whose statistics in training are over all ranks' batches together.

    Args:
        fused: accepted for programs that pass False; the fused kernel does not know about other ranks.
        kwargs: as for ``keras.layers.BatchNormalization``.

    Ranks' batches may differ in size. In inference, and in a job of one process, it is the plain layer. All ranks must
    run it, forward and backward, in the same order.

    Raises:
        InvalidArgumentError: (a ValueError) ``fused`` is True or None.
        MissingDependencyError: (an ImportError) ``tf.keras`` is tf_keras, or a Keras that this layer does not support.
    """

    frontend: TensorFlowFrontend = FRONTEND

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if not _suits:
            raise MissingDependencyError(
                f"SyncBatchNormalization needs Keras 3 as tf.keras, of a version that works, not {tf.keras.__name__}: "
                "see docs/compatibility.md; TF_USE_LEGACY_KERAS must not be set"
            )
        if fused in (True, None):
            raise InvalidArgumentError("SyncBatchNormalization has no fused kernel; use fused=False")
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        frontend = self.frontend
        if not frontend.shares_here(global_process_set):
            return super()._moments(inputs, mask)
        axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
        values = tf.cast(inputs, tf.float32) if inputs.dtype != tf.float64 else inputs
        weights = tf.ones_like(values)
        if mask is not None:
            weights = weights * tf.cast(mask, values.dtype)[..., tf.newaxis]
        count = tf.reduce_sum(weights, axes)
        sums = frontend.apply(_total, [tf.stack([count, tf.reduce_sum(values * weights, axes)])])[0]
        total = tf.maximum(tf.stop_gradient(sums[0]), 1.0)
        mean = sums[1] / total
        shape = [1] * len(inputs.shape)
        shape[self.axis] = -1
        spread = tf.reduce_sum(weights * tf.square(values - tf.reshape(mean, shape)), axes)
        variance = frontend.apply(_total, [spread])[0] / total
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
