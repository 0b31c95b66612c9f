"""``DistributedOptimizer`` with its arguments in the order that programs of ``tf.keras`` give them in."""

from __future__ import annotations

from typing import Any

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import Groups, whichever
from hvdgloo.keras import _optimizer as keras
from hvdgloo.types import ReduceOp

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Any] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """``hvdgloo.keras.DistributedOptimizer``, which has the same arguments in another order.

    Args:
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set,
            scale_local_gradients: see there.
    """
    return keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        0,
        whichever(num_groups, groups),
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )
