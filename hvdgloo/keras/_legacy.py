"""Optimizers of tf_keras, which is Keras 2: what ``tf.keras`` is if a program asks for it (TF_USE_LEGACY_KERAS=1).

Their gradients pass through ``apply_gradients``, with the variables. tf_keras is imported only once there is such an
optimizer.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

from hvdgloo._training.reducer import check_passes
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.keras._distributed import FINITE, KerasOptions, check_op, saved_as, train_without_xla

_NO_PASSES = (
    "backward_passes_per_step= cannot be combined with a LossScaleOptimizer of tf_keras; accumulate gradients in the "
    "training step"
)


class DistributedLegacy:
    """What an optimizer of tf_keras has in addition once it is distributed."""

    _hvd: _State
    _hvd_options: ClassVar[KerasOptions]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain optimizer's step, on the gradients of all ranks; with several passes per step after the last."""
        pairs, state, plain = list(grads_and_vars), self._hvd, super().apply_gradients  # type: ignore[misc]
        if state.is_reduced:
            return plain(pairs, *args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        passes = state.passes
        reduce = state.sync.reduce if passes is None else passes.compute_gradients
        together = list(zip(reduce(gradients, variables), variables, strict=True))
        if passes is None:
            return plain(together, *args, **kwargs)
        trained = [variable for gradient, variable in pairs if gradient is not None]
        # No variables can be made in a branch.
        make = self.build if hasattr(self, "build") else self._create_all_weights  # type: ignore[attr-defined]
        return passes.apply_gradients(lambda: plain(together, *args, **kwargs), lambda: make(trained))

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._hvd.sync.register_local_source(variable)

    def register_local_layer(self, layer: Any) -> None:
        """Leave a built layer's gradients to this rank alone."""
        for variable in layer.trainable_variables:
            self.register_local_var(variable)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """The optimizer of a configuration, distributed as this class's are; what is local must be registered again.

        tf_keras itself asks the plain class for it, whose name is in what it saves.
        """
        plain = cls.__bases__[0].from_config(config, **kwargs)  # type: ignore[attr-defined]
        return wrap(plain, cls._hvd_options)


def is_legacy(optimizer: Any) -> bool:
    """Whether it is an optimizer of tf_keras."""
    return any(
        base.__module__.startswith("tf_keras.") and base.__name__ in ("Optimizer", "OptimizerV2", "_BaseOptimizer")
        for base in type(optimizer).__mro__
    )


def wrap(optimizer: Any, options: KerasOptions) -> Any:
    """``DistributedOptimizer`` of an optimizer of tf_keras.

    Raises:
        InvalidArgumentError: (a ValueError) it is already distributed, or an option cannot be used.
    """
    if isinstance(optimizer, DistributedLegacy):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    if hasattr(optimizer, "inner_optimizer"):
        if options.backward_passes_per_step != 1:
            raise InvalidArgumentError(_NO_PASSES)
        wrap(optimizer.inner_optimizer, options)
        return optimizer
    check_passes(options.backward_passes_per_step)
    check_op(options)
    state = _State(options)
    _prepare()
    keras = importlib.import_module("tf_keras")
    optimizer.__class__ = saved_as(keras.saving, DistributedLegacy, type(optimizer), options)
    object.__setattr__(optimizer, "_hvd", state)
    return optimizer


def load_model(filepath: Any, names: dict[str, Any], options: KerasOptions) -> Any:
    """A model that tf_keras has saved, whose optimizer is distributed.

    Args:
        filepath: of a ``.keras`` or ``.h5`` file, or of a SavedModel's folder.
        names: what names in it stand for.
        options: of the optimizer.
    """
    model = importlib.import_module("tf_keras").models.load_model(filepath, custom_objects=names)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        wrap(optimizer, options)
    return model


class _State:
    """What is distributed about an optimizer; not part of what tf_keras tracks and saves."""

    def __init__(self, options: KerasOptions, local_variables: Iterable[Any] = ()) -> None:
        gradients = importlib.import_module("hvdgloo.tensorflow._gradients")
        aggregation = importlib.import_module("hvdgloo.tensorflow.gradient_aggregation")
        frontend = importlib.import_module("hvdgloo.tensorflow._frontend").FRONTEND
        self.sync = gradients.GradientSync(frontend, options)
        for variable in local_variables:
            self.sync.register_local_source(variable)
        self.passes: Any = None
        if options.backward_passes_per_step > 1:
            self.passes = aggregation.LocalGradientAggregationHelper(
                options.backward_passes_per_step,
                self.sync.reduce,
                average_aggregated_gradients=options.average_aggregated_gradients,
                renewed=self.sync.renewed,
            )
        self.is_reduced = False  # whether the LossScaleOptimizer around this one has reduced the gradients

    def __deepcopy__(self, memo: Any) -> _State:
        return _State(self.sync.options, self.sync.local_sources)


def _prepare() -> None:
    """Change what tf_keras does for distributed optimizers alone, once.

    LossScaleOptimizers look at the gradients of all ranks: all skip a step, or none.
    """
    keras = importlib.import_module("tf_keras")
    train_without_xla(keras.Model, DistributedLegacy)
    known = keras.mixed_precision.LossScaleOptimizer
    for name in ("LossScaleOptimizer", "LossScaleOptimizerV3"):
        kind = getattr(sys.modules[known.__module__], name, None)
        if kind is not None and not hasattr(kind.apply_gradients, "hvdgloo"):
            kind.apply_gradients = _reducing(kind.apply_gradients)


def _reducing(plain: Any) -> Any:
    @functools.wraps(plain)
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self.inner_optimizer, "_hvd", None)
        if not isinstance(state, _State):
            return plain(self, grads_and_vars, *args, **kwargs)
        if state.passes is not None:
            raise InvalidArgumentError(_NO_PASSES)
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = state.sync.reduce_alike([gradient for gradient, _ in pairs], variables, FINITE)
        state.is_reduced = True
        try:
            return plain(self, list(zip(reduced, variables, strict=True)), *args, **kwargs)
        finally:
            state.is_reduced = False

    apply_gradients.hvdgloo = True  # type: ignore[attr-defined]
    return apply_gradients
