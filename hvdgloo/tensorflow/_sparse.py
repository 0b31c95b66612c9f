"""Reducing ``tf.IndexedSlices``: every rank's entries are gathered; equal indices add up where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._collectives.spec import gathering
from hvdgloo.errors import HvdglooError
from hvdgloo.tensorflow._adapter import Tensor
from hvdgloo.tensorflow._frontend import TensorFlowFrontend
from hvdgloo.types import ReduceOp


class SparseReductionError(HvdglooError, NotImplementedError):
    """A ``tf.IndexedSlices`` has no such reduction: its entries are gathered, not combined."""


def is_sparse(tensor: object) -> bool:
    """Tell whether an object is a ``tf.IndexedSlices``."""
    return isinstance(tensor, tf.IndexedSlices)


def check(op: int, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Raise for what cannot be done with ``tf.IndexedSlices``.

    Raises:
        SparseReductionError: (a NotImplementedError) neither Average nor Sum, or factors.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM) or (prescale, postscale) != (1.0, 1.0):
        raise SparseReductionError(
            "a tf.IndexedSlices can be averaged or summed, without factors; tf.convert_to_tensor makes it dense (for "
            "gradients: sparse_as_dense=True)"
        )


def sparse_allreduce(
    frontend: TensorFlowFrontend,
    slices: Any,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Any:
    """Average or sum of the ranks' ``tf.IndexedSlices``: all their entries, as a ``tf.IndexedSlices``."""
    check(op, prescale, postscale)
    gathered = frontend.apply(gathering(process_set), [slices.values, slices.indices], name, grouped=True)
    return combine(slices, gathered, op, frontend.number_of(process_set))


def combine(slices: Any, gathered: Sequence[Tensor], op: int, size: Any) -> Any:
    """All ranks' entries as one ``tf.IndexedSlices``; an average is divided by the number of ranks."""
    values, indices = gathered
    if op == ReduceOp.AVERAGE:
        values = values / tf.cast(size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)
