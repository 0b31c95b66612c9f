"""``DistributedOptimizer`` of Keras's front-end; how it works is in ``hvdgloo.keras._distributed_optimizer``."""

from __future__ import annotations

from typing import Any

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import Groups, layers_in, whichever
from hvdgloo.keras import _distributed_optimizer as distributed
from hvdgloo.keras import _legacy as legacy
from hvdgloo.keras._distributed_optimizer import KerasOptions
from hvdgloo.types import ReduceOp

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]

Average = ReduceOp.AVERAGE


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Any] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Have an optimizer step on gradients reduced over all ranks. Call it on every rank alike, after ``init()``.

    Args:
        optimizer: of Keras 3, on its TensorFlow, torch or JAX backend, also a LossScaleOptimizer; or of tf_keras. This
            object itself is distributed from then on, with all the state it has.
        name, device_dense, device_sparse: accepted for programs that pass them.
        compression: ``Compression.fp16`` and ``Compression.bf16`` send float32 and float64 as float16 or bfloat16;
            ``Compression.int8`` and ``Compression.int4`` leave tensors as they are within a host, and send float32 to
            other hosts in a quarter or a seventh of the bytes (docs/slow-networks.md).
        sparse_as_dense: send an embedding's gradient as a dense tensor; without it all ranks' rows are gathered.
        gradient_predivide_factor: splits an average's division: by this before the sum, by size / this after it.
        op: Average, Sum, Min, Max or Product.
        num_groups: deprecated: the same as an integer for ``groups``.
        groups: how many groups of gradients to send as one each, or a list of lists of variables that are groups.
        backward_passes_per_step: gradients add up over this many steps before they are reduced and applied.
        average_aggregated_gradients: divide what has added up by ``backward_passes_per_step``.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of ``register_local_var(variable)`` by the number of ranks.

    Returns:
        the optimizer, of a class that has the same name and derives from its own. So are its copies, and what its class
        makes ``from_config``. What is saved is the plain optimizer; it is also what Keras gives to copies of a compiled
        model, and puts into copies of a LossScaleOptimizer: distribute these again.

    Raises:
        InvalidArgumentError: (a ValueError) not such an optimizer, one that is already distributed, or an option that
            cannot be used.
        NotInitializedError: before ``init()``, when it steps.
    """
    options = KerasOptions(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=whichever(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return legacy.wrap(optimizer, options) if legacy.is_legacy(optimizer) else distributed.wrap(optimizer, options)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Any] = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A ``DistributedOptimizer`` that leaves the gradients of some layers to each rank alone.

    Args:
        local_layers: a layer, or several; they may be built later, but before the optimizer steps for the first time.
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            num_groups, groups, backward_passes_per_step, average_aggregated_gradients, process_set,
            scale_local_gradients: as for ``DistributedOptimizer``.
    """
    made = DistributedOptimizer(
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
    stepping = getattr(made, "inner_optimizer", made)
    for layer in layers_in(local_layers):
        stepping.register_local_layer(layer)
    return made
