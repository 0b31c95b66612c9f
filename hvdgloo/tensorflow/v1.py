"""Optimizers of ``tf.compat.v1.train``: the user's is held, and steps on gradients that all ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdgloo.gradients import Options
from hvdgloo.reducer import check_passes
from hvdgloo.tensorflow.frontend import TensorFlowFrontend
from hvdgloo.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdgloo.tensorflow.gradients import GradientSync
from hvdgloo.types import ReduceOp

GradientsAndVariables = Sequence[tuple[Any, Any]]


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """What ``DistributedOptimizer`` makes of a ``tf.compat.v1.train.Optimizer``; slots and variables are that one's.

    Args:
        frontend: where collectives are submitted.
        optimizer: does the stepping.
        options: how gradients are reduced.
        passes: in how many calls gradients add up before they are reduced and applied.
        average: divide what has added up by ``passes``.
        name: for messages.
    """

    def __init__(
        self,
        frontend: TensorFlowFrontend,
        optimizer: Any,
        options: Options,
        passes: int = 1,
        *,
        average: bool = False,
        name: str | None = None,
    ) -> None:
        check_passes(passes)
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=False)
        self._held = optimizer
        self._sync = GradientSync(frontend, options)
        self._adaptive = options.op == ReduceOp.ADASUM
        self._accumulation = (
            LocalGradientAggregationHelper(passes, self._reduce, average_aggregated_gradients=average)
            if passes > 1
            else None
        )

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._sync.register_local_source(variable)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The held optimizer's gradients, reduced; with several passes per step those of the last pass are the sums."""
        pairs = list(self._held.compute_gradients(*args, **kwargs))
        if not pairs:
            return pairs
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._reduce if self._accumulation is None else self._accumulation.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: GradientsAndVariables, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's step; with several passes per step only after the last."""
        pairs = list(grads_and_vars)

        def step() -> Any:
            return self._held.apply_gradients(pairs, *args, **kwargs)

        whole = functools.partial(self._adaptive_step, step, pairs) if self._adaptive and self._sync.active else step
        return whole() if self._accumulation is None else self._accumulation.apply_gradients(whole)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        # By Adasum it is not gradients that are reduced.
        return list(gradients) if self._adaptive else self._sync.reduce(gradients, variables)

    def _adaptive_step(self, step: Callable[[], Any], pairs: GradientsAndVariables) -> Any:
        """Adasum combines what the ranks' optimizers did: each steps on its own gradients, and the changes are summed.

        Changes and not gradients, because an optimizer with a state (momentum, Adam) would scale an adapted gradient
        again (Maleki et al., 2021, section 3.3).
        """
        changing = [v for gradient, v in pairs if gradient is not None and not self._sync.is_local(v)]
        # Copies: a variable of TensorFlow 1 may hand out the memory that the step is going to change.
        before = [tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(v)) for v in changing]
        with tf.control_dependencies(before):
            done = step()
        with tf.control_dependencies([] if done is None else [done]):
            changes = [_current(v) - start for v, start in zip(changing, before, strict=True)]
        combined = self._sync.reduce(changes, changing)
        assigned = [v.assign(a + b) for v, a, b in zip(changing, before, combined, strict=True)]
        return None if tf.executing_eagerly() else tf.group(*assigned, *([] if done is None else [done]))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.variables(*args, **kwargs)


def _current(variable: Any) -> Any:
    """A variable's value, read where this is called."""
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)
