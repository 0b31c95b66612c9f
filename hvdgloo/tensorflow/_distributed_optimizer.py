"""Optimizers of ``tf.compat.v1.train``: the user's, which steps on gradients that all ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._training.options import GradientOptions
from hvdgloo._training.reducer import check_passes
from hvdgloo._training.subclass import shell_class
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow._frontend import TensorFlowFrontend
from hvdgloo.tensorflow._gradients import GradientSync
from hvdgloo.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdgloo.types import ReduceOp

GradientsAndVariables = Sequence[tuple[Any, Any]]


class DistributedV1Optimizer:
    """Methods that the result of ``DistributedOptimizer`` adds to the user's class."""

    __slots__ = ("_accumulation", "_adaptive", "_sync")
    _sync: GradientSync
    _adaptive: bool
    _accumulation: LocalGradientAggregationHelper | None

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._sync.register_local_source(variable)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients and reduce them; with several passes per step, reduce the sums in the last pass."""
        pairs = list(super().compute_gradients(*args, **kwargs))  # type: ignore[misc]
        if not pairs:
            return pairs
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduce = self._reduce if self._accumulation is None else self._accumulation.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: GradientsAndVariables, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step; with several passes per step only after the last."""
        pairs = list(grads_and_vars)
        apply: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]

        def step() -> Any:
            return apply(pairs, *args, **kwargs)

        whole = functools.partial(self._adaptive_step, step, pairs) if self._adaptive and self._sync.active else step
        return whole() if self._accumulation is None else self._accumulation.apply_gradients(whole)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        # With Adasum it is not gradients that are reduced.
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


def wrap(
    frontend: TensorFlowFrontend, optimizer: Any, options: GradientOptions, passes: int = 1, *, average: bool = False
) -> Any:
    """Make a ``DistributedOptimizer`` on a given Frontend.

    Args:
        frontend: where collectives are submitted.
        optimizer: does the stepping. It and the result share one state: slots, variables, what a checkpoint holds.
        options: how gradients are reduced.
        passes: over how many calls gradients add up before they are reduced and applied.
        average: divide what has added up by ``passes``.

    Raises:
        InvalidArgumentError: it is already distributed, or an option cannot be used.
    """
    if isinstance(optimizer, DistributedV1Optimizer):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    check_passes(passes)
    shell: Any = object.__new__(shell_class(DistributedV1Optimizer, type(optimizer)))
    shell.__dict__ = optimizer.__dict__
    shell._adaptive = options.op == ReduceOp.ADASUM
    # With Adasum, changes are reduced when each rank's weights have changed already.
    shell._sync = GradientSync(frontend, options, compares=not shell._adaptive)
    shell._accumulation = (
        LocalGradientAggregationHelper(
            passes, shell._reduce, average_aggregated_gradients=average, renewed=shell._sync.renewed
        )
        if passes > 1
        else None
    )
    return shell


def _current(variable: Any) -> Any:
    """Return a variable's value, read where this is called."""
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)
