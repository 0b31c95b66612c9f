"""``DistributedOptimizer``, where Horovod's programs look for it; see ``hvdgloo.torch._distributed_optimizer``."""

from __future__ import annotations

import torch

from hvdgloo._collectives.compression import Compressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import Groups, whichever
from hvdgloo.torch import _distributed_optimizer as distributed
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.torch._parameters import NamedParameters, ReductionOptions
from hvdgloo.torch.compression import Compression
from hvdgloo.types import ReduceOp

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name; it makes an instance of a class of its own
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: Compressor[torch.Tensor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> distributed.DistributedTorchOptimizer:
    """An optimizer that steps on gradients reduced over all ranks.

    Gradients are sent while the backward pass still runs, and ``step()`` waits for them. Call it on every rank with the
    same arguments, after ``init()``.

    In an elastic job the optimizer follows: it reduces over the ranks that are there, and alone it trains alone. When
    ranks come or go, gradients that no step has used yet are dropped, with the count of backward passes, on all ranks;
    so are the errors that PowerSGD keeps.

    Args:
        optimizer: a plain optimizer. It and the result share one state, whichever is changed; use the result for steps.
        named_parameters: ``model.named_parameters()``: names for messages. All of the optimizer's parameters, or None.
        compression: ``Compression.fp16`` and ``Compression.bf16`` send float32 and float64 gradients as float16 or
            bfloat16; ``Compression.powersgd(rank=4)`` sends matrices as two thin ones, with Average or Sum.
        backward_passes_per_step: gradients add up over this many backward passes (as torch adds them) before they are
            sent; one ``step()`` then follows.
        op: Average, Sum, Min, Max or Product of the gradients; or Adasum, for which each rank steps on its own
            gradients, and what these steps changed is combined.
        gradient_predivide_factor: splits an average's division: by this before the sum, by size / this after it.
        num_groups: deprecated: the same as an integer for ``groups``.
        groups: how many groups of gradients to send as one each (0: each gradient separately), or a list of lists of
            parameters that are groups.
        sparse_as_dense: send sparse gradients as dense ones; without it all ranks' entries are gathered, with Average
            or Sum, and not in groups.
        process_set: the ranks that share gradients.

    Returns:
        an instance of a class made from the optimizer's own, of the same name, with the methods of
        ``hvdgloo.torch._distributed_optimizer.DistributedTorchOptimizer``.
        Its state dict is the plain optimizer's, and either loads the other's. A parameter without a gradient
        counts as zeros. A deep copy is another distributed optimizer, a pickle the plain one.

    Raises:
        InvalidArgumentError: (a ValueError) names that are not tuples, not unique, or not complete; malformed groups;
            ``gradient_predivide_factor`` without Average; ``backward_passes_per_step`` below 1.
        NotInitializedError: before ``init()``.
    """
    groups = whichever(num_groups, groups)
    options = ReductionOptions(
        compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense, process_set
    )
    return distributed.wrap(FRONTEND, optimizer, named_parameters, groups, options)
