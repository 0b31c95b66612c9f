"""``DistributedOptimizer`` and the tapes, where Horovod's programs look for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import GradientOptions, Groups, layers_in, whichever
from hvdgloo.tensorflow import _distributed_optimizer as v1
from hvdgloo.tensorflow import _tape as tape
from hvdgloo.tensorflow._adapter import Tensor
from hvdgloo.tensorflow._frontend import FRONTEND, public
from hvdgloo.tensorflow._gradients import GradientSync
from hvdgloo.types import ReduceOp

__all__ = ["DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"]


@public
def DistributedGradientTape(  # noqa: N802 - Horovod's name; it makes an instance of a class of its own
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape whose ``gradient()`` returns gradients reduced over all ranks; eagerly and in a ``tf.function``.

    In a function, gradients are sent while the rest of the backward pass is computed.

    Args:
        gradtape: a ``tf.GradientTape``, which may have recorded already; the two share one state from then on.
        device_dense, device_sparse: accepted for programs that pass them.
        compression: ``Compression.fp16`` and ``Compression.bf16`` send float32 and float64 as float16 or bfloat16;
            ``Compression.int8`` and ``Compression.int4`` leave tensors as they are within a host, and send float32 to
            other hosts in a quarter or a seventh of the bytes (docs/slow-networks.md).
        sparse_as_dense: send a ``tf.IndexedSlices`` as a dense tensor; without it all ranks' entries are gathered.
        op: Average, Sum, Adasum, Min, Max or Product; Average or Sum of a ``tf.IndexedSlices``.
        gradient_predivide_factor: splits an average's division: by this before the sum, by size / this after it.
        num_groups: deprecated: the same as an integer for ``groups``.
        groups: how many groups of gradients to send as one each (0: each gradient separately), or a list of lists of
            variables that are groups.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of ``register_local_source(variable)`` by the number of ranks.

    Returns:
        an instance of the tape's own class, which also has the methods of ``hvdgloo.tensorflow._tape.DistributedTape``.

    Raises:
        InvalidArgumentError: (a ValueError) not a tape, or an option that cannot be used.
        NotImplementedError: (from ``gradient``) another reduction, or a predivide factor, of a ``tf.IndexedSlices``.
    """
    options = GradientOptions(
        compression,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        whichever(num_groups, groups),
        process_set,
        scale_local_gradients,
    )
    return tape.wrap(FRONTEND, gradtape, options)


@public
def PartialDistributedGradientTape(  # noqa: N802 - as above
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    sparse_as_dense: bool = False,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A ``DistributedGradientTape`` that leaves the gradients of some layers to each rank alone.

    Args:
        local_layers: a layer, or several, that are built.
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
            groups, process_set, scale_local_gradients: as for ``DistributedGradientTape``.
    """
    made = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers_in(local_layers):
        for variable in layer.trainable_variables:
            made.register_local_source(variable)
    return made


@public
def DistributedOptimizer(  # noqa: N802 - as above
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that steps on gradients reduced over all ranks.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``, whose state the result shares; or one of Keras, which is itself
            distributed from then on: see ``hvdgloo.keras.DistributedOptimizer``.
        name, use_locking, device_dense, device_sparse: accepted for programs that pass them.
        compression: ``Compression.fp16`` and ``Compression.bf16`` send float32 and float64 as float16 or bfloat16;
            ``Compression.int8`` and ``Compression.int4`` leave tensors as they are within a host, and send float32 to
            other hosts in a quarter or a seventh of the bytes (docs/slow-networks.md).
        sparse_as_dense: send a ``tf.IndexedSlices`` as a dense tensor; without it all ranks' entries are gathered.
        backward_passes_per_step: gradients add up over this many calls before they are reduced and applied.
        op: Average, Sum, Min, Max or Product of the gradients; or, for ``tf.compat.v1``, Adasum, for which each rank
            steps on its own gradients, and what these steps changed is combined.
        gradient_predivide_factor: splits an average's division: by this before the sum, by size / this after it.
        average_aggregated_gradients: divide what has added up by ``backward_passes_per_step``.
        num_groups: deprecated: the same as an integer for ``groups``.
        groups: how many groups of gradients to send as one each, or a list of lists of variables that are groups.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of ``register_local_var(variable)`` by the number of ranks.

    Raises:
        InvalidArgumentError: (a ValueError) not such an optimizer, or an option that cannot be used.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        options = GradientOptions(
            compression,
            op,
            gradient_predivide_factor,
            sparse_as_dense,
            whichever(num_groups, groups),
            process_set,
            scale_local_gradients,
        )
        return v1.wrap(FRONTEND, optimizer, options, backward_passes_per_step, average=average_aggregated_gradients)
    keras = importlib.import_module("hvdgloo.tensorflow.keras")
    return keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Compressor[Tensor],
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: Groups,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """A function that reduces gradients of some variables, for programs that have an optimizer of their own."""
    options = GradientOptions(compression, op, gradient_predivide_factor, sparse_as_dense, groups, process_set)
    return GradientSync(FRONTEND, options).reduce
