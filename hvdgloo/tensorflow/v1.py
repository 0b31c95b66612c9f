"""Optimizers of ``tf.compat.v1.train``: the user's is held, and steps on gradients that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow.frontend import TensorFlowFrontend
from hvdgloo.tensorflow.gradients import GradientSync, Options

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
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise InvalidArgumentError(f"backward_passes_per_step must be a whole number from 1, not {passes!r}")
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=False)
        self._held = optimizer
        self._sync = GradientSync(frontend, options)
        self._accumulation = _Accumulation(passes, average) if passes > 1 else None

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable's gradient to this rank alone."""
        self._sync.register_local_source(variable)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The held optimizer's gradients, reduced; with several passes per step those of the last pass are the sums."""
        pairs = list(self._held.compute_gradients(*args, **kwargs))
        if not pairs:
            return pairs
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._accumulation is not None:
            reduced = self._accumulation.add(gradients, variables, self._sync)
        else:
            reduced = self._sync.reduce(gradients, variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, grads_and_vars: GradientsAndVariables, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's step; with several passes per step only after the last."""
        pairs = list(grads_and_vars)
        if self._accumulation is None:
            return self._held.apply_gradients(pairs, *args, **kwargs)
        return self._accumulation.apply(lambda: self._held.apply_gradients(pairs, *args, **kwargs))

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """The held optimizer's."""
        return self._held.variables(*args, **kwargs)


class _Accumulation:
    """Gradients that add up over several passes, in variables that the graph has besides."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._factor = 1.0 / passes if average else 1.0
        self._sums: list[Any] = []
        self._count: Any = None
        self._is_last: Any = None

    def add(self, gradients: Sequence[Any], variables: Sequence[Any], sync: GradientSync) -> list[Any]:
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        if self._count is None:
            with tf.init_scope():
                self._count = _variable(tf.zeros([], tf.int64), "hvdgloo_passes")
                self._sums = [
                    None if g is None else _variable(tf.zeros_like(v), "hvdgloo_sum")
                    for g, v in zip(dense, variables, strict=True)
                ]
        pairs = [(g, s) for g, s in zip(dense, self._sums, strict=True) if g is not None]
        with tf.control_dependencies([g for g, _ in pairs]):
            count = self._count.assign_add(1, read_value=True)
        self._is_last = tf.equal(count % self._passes, 0)
        sums = [s.assign_add(g, read_value=True) for g, s in pairs]

        def reduce() -> list[Any]:
            whole = [s * tf.cast(self._factor, s.dtype) for s in sums]
            of = [v for g, v in zip(dense, variables, strict=True) if g is not None]
            reduced = sync.reduce(whole, of)
            with tf.control_dependencies(reduced):
                cleared = [s.assign(tf.zeros_like(s)) for _, s in pairs]
            with tf.control_dependencies([tf.convert_to_tensor(c) for c in cleared]):
                return [tf.identity(r) for r in reduced]

        chosen = iter(tf.cond(self._is_last, reduce, lambda: [tf.identity(s) for s in sums]))
        return [None if g is None else next(chosen) for g in dense]

    def apply(self, step: Any) -> Any:
        if self._is_last is None:
            raise InvalidArgumentError("apply_gradients() comes after compute_gradients() if gradients are to add up")

        def stepped() -> Any:
            done = step()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        made = tf.cond(self._is_last, stepped, lambda: tf.constant(False))
        return made if tf.executing_eagerly() else made.op


def _variable(value: Any, name: str) -> Any:
    return tf.compat.v1.Variable(value, trainable=False, name=name, use_resource=True)
