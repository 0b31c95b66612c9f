"""Optimizers of tf_keras, which is Keras 2: what ``tf.keras`` is if a program asks for it (TF_USE_LEGACY_KERAS=1).

Their gradients pass through ``apply_gradients``, with the variables; nothing of tf_keras is imported here.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras.distributed import check_op


class DistributedLegacy:
    """What an optimizer of tf_keras has besides, once it is distributed."""

    _hvd: Any

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain optimizer's step, on the gradients of all ranks."""
        pairs = list(grads_and_vars)
        reduced = self._hvd.reduce([g for g, _ in pairs], [v for _, v in pairs])
        together = list(zip(reduced, [v for _, v in pairs], strict=True))
        return super().apply_gradients(together, *args, **kwargs)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._hvd.register_local_source(variable)

    def register_local_layer(self, layer: Any) -> None:
        """Leave a built layer's gradients to this rank alone."""
        for variable in layer.trainable_variables:
            self.register_local_var(variable)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """The plain optimizer of a configuration, which knows nothing of ranks."""
        return cls.__bases__[1].from_config(config, **kwargs)  # type: ignore[attr-defined]


def is_legacy(optimizer: Any) -> bool:
    """Whether it is an optimizer of tf_keras."""
    return any(
        base.__module__.startswith("tf_keras.") and base.__name__ in ("Optimizer", "OptimizerV2", "_BaseOptimizer")
        for base in type(optimizer).__mro__
    )


def wrap(optimizer: Any, options: Any) -> Any:
    """``DistributedOptimizer`` of an optimizer of tf_keras."""
    if isinstance(optimizer, DistributedLegacy):
        raise InvalidArgumentError("the optimizer is distributed already; wrap it once")
    check_op(options)
    if options.backward_passes_per_step != 1:
        raise InvalidArgumentError(
            "backward_passes_per_step= is for optimizers of Keras 3 and of tf.compat.v1; with tf_keras accumulate "
            "gradients in the training step"
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise InvalidArgumentError(
            "of a LossScaleOptimizer of tf_keras the optimizer inside is to be distributed, before it is put inside"
        )
    gradients = importlib.import_module("hvdgloo.tensorflow.gradients")
    frontend = importlib.import_module("hvdgloo.tensorflow.mpi_ops")._frontend
    sync = gradients.GradientSync(frontend, options)
    kind: Any = type(optimizer)
    optimizer.__class__ = _class_of(kind)
    object.__setattr__(optimizer, "_hvd", sync)
    return optimizer


@functools.cache
def _class_of(base: Any) -> type:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (DistributedLegacy, base), names)
