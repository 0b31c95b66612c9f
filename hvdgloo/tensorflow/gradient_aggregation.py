"""Several backward passes per step, for optimizers whose gradients are tensors of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._training.reducer import check_passes
from hvdgloo.errors import InvalidArgumentError

__all__ = ["LocalGradientAggregationHelper"]


class LocalGradientAggregationHelper:
    """Adds gradients up over several passes, in additional variables of the graph.

    Args:
        backward_passes_per_step: how many passes.
        allreduce_func: given gradients and their variables, returns the reduced gradients; called with the sums of the
            last pass.
        sparse_as_dense: accepted; sums are dense.
        average_aggregated_gradients: divide the sums by the number of passes.
        renewed: called in each pass; returns a boolean tensor that says to begin from zero with this pass, or None.

    Raises:
        InvalidArgumentError: (a ValueError) the number of passes is not a positive whole number.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        sparse_as_dense: bool = True,
        average_aggregated_gradients: bool = False,
        *,
        renewed: Callable[[], Any] | None = None,
    ) -> None:
        check_passes(backward_passes_per_step)
        self._passes = backward_passes_per_step
        self._reduce = allreduce_func
        self._renewed = renewed
        self._divisor = backward_passes_per_step if average_aggregated_gradients else 1
        self._sums: list[Any] = []
        self._count: Any = None
        self._is_last: Any = None

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add gradients up.

        Returns:
            in the last pass of a step the reduced sums, before that the sums so far; None where None was given.
        """
        variables = vars
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        if self._count is None:
            with tf.init_scope():
                self._count = _variable(tf.zeros([], tf.int64), "hvdgloo_passes")
                self._sums = [
                    None if g is None else _variable(tf.zeros_like(v), "hvdgloo_sum")
                    for g, v in zip(dense, variables, strict=True)
                ]
        pairs = [(g, s) for g, s in zip(dense, self._sums, strict=True) if g is not None]
        restarts = None if self._renewed is None else self._renewed()
        with tf.control_dependencies([g for g, _ in pairs]):
            count = _add(self._count, 1, restarts)
        self._is_last = tf.equal(count % self._passes, 0)
        sums = [_add(s, g, restarts) for g, s in pairs]

        def reduce() -> list[Any]:
            whole = [s / tf.cast(self._divisor, s.dtype) for s in sums]
            of = [v for g, v in zip(dense, variables, strict=True) if g is not None]
            reduced = self._reduce(whole, of)
            with tf.control_dependencies(reduced):
                cleared = [s.assign(tf.zeros_like(s)) for _, s in pairs]
            with tf.control_dependencies([tf.convert_to_tensor(c) for c in cleared]):
                return [tf.identity(r) for r in reduced]

        chosen = iter(tf.cond(self._is_last, reduce, lambda: [tf.identity(s) for s in sums]))
        return [None if g is None else next(chosen) for g in dense]

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> Any:
        """Step, in the last pass only.

        Args:
            apply_grads_closure: makes the step, and its operator in a graph.
            prepare: makes the variables that the step needs; in a branch of a graph the step itself cannot make any.

        Returns:
            an operator that steps or does not; eagerly, whether it did.

        Raises:
            InvalidArgumentError: (a ValueError) nothing has been added up.
        """
        if self._is_last is None:
            raise InvalidArgumentError("apply_gradients() comes after compute_gradients() if gradients are to add up")

        with tf.init_scope():
            prepare()

        def stepped() -> Any:
            done = apply_grads_closure()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        made = tf.cond(self._is_last, stepped, lambda: tf.constant(False))
        return made if tf.executing_eagerly() else made.op


def _add(sum: Any, value: Any, restarts: Any) -> Any:
    """Add to a variable, or to zero where ``restarts`` holds; return its new value."""
    if restarts is None:
        return sum.assign_add(value, read_value=True)
    return sum.assign(tf.where(restarts, tf.zeros_like(sum), sum) + tf.cast(value, sum.dtype), read_value=True)


def _variable(value: Any, name: str) -> Any:
    return tf.compat.v1.Variable(value, trainable=False, name=name, use_resource=True)
