"""``DistributedGradientTape``: the user's tape, with gradients reduced over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdgloo._training.options import GradientOptions
from hvdgloo._training.subclass import shell_class
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow._frontend import TensorFlowFrontend, public
from hvdgloo.tensorflow._gradients import GradientSync


class DistributedTape:
    """Methods that the result of ``DistributedGradientTape`` adds to ``tf.GradientTape``."""

    __slots__ = ("_hvd",)
    _hvd: GradientSync

    @public
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """``tf.GradientTape.gradient``, reduced over the ranks.

        Returns:
            new tensors in the structure of ``sources``, the same on every rank; None where there is no gradient. Where
            an outer tape records, they can be differentiated again, unless some gradient is sparse.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = self._hvd.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources), differentiable=True)
        return tf.nest.pack_sequence_as(sources, flat)

    @public
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> tuple[list[Any], list[Any]]:
        """``gradient``, apart: the gradients of local sources, and those that all ranks share.

        Returns:
            two lists, each in the order of ``sources``.
        """
        reduced = tf.nest.flatten(self.gradient(target, sources, output_gradients, unconnected_gradients))
        local: list[Any] = []
        shared: list[Any] = []
        for gradient, source in zip(reduced, tf.nest.flatten(sources), strict=True):
            (local if self._hvd.is_local(source) else shared).append(gradient)
        return local, shared

    def register_local_source(self, source: Any) -> None:
        """Leave a variable's gradient to this rank alone, e.g. of a layer that differs between ranks."""
        self._hvd.register_local_source(source)


def wrap(frontend: TensorFlowFrontend, tape: Any, options: GradientOptions) -> Any:
    """Make a ``DistributedGradientTape`` on a given Frontend.

    Raises:
        InvalidArgumentError: (a ValueError) not a tape, one that is already distributed, or an option that cannot
            be used.
    """
    if not isinstance(tape, tf.GradientTape):
        raise InvalidArgumentError(f"expected a tf.GradientTape, not {type(tape).__name__}")
    if isinstance(tape, DistributedTape):
        raise InvalidArgumentError("the tape is already distributed; wrap it only once")
    shell: Any = object.__new__(shell_class(DistributedTape, type(tape)))
    # One state: what the user's tape has recorded, and will record, is what this one differentiates.
    shell.__dict__ = tape.__dict__
    shell._hvd = GradientSync(frontend, options)
    return shell
