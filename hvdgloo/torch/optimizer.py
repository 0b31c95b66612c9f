"""``DistributedOptimizer``, where Horovod's programs look for it (``hvdgloo.torch._distributed_optimizer``), and the
optimizers that send nothing between most steps (``hvdgloo.torch._local``)."""

from __future__ import annotations

import torch

from hvdgloo._collectives.compression import Compressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import Groups, whichever
from hvdgloo._training.outer import OuterOptions
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch import _distributed_optimizer as distributed
from hvdgloo.torch import _local
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.torch._parameters import NamedParameters, ReductionOptions
from hvdgloo.torch.compression import Compression
from hvdgloo.types import ReduceOp

__all__ = ["DiLoCo", "DistributedOptimizer", "LocalSGD"]


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
            bfloat16; ``Compression.int8`` and ``Compression.int4`` leave gradients as they are within a host, and send
            float32 to other hosts in a quarter or a seventh of the bytes (docs/slow-networks.md);
            ``Compression.powersgd(rank=4)`` sends matrices as two thin ones, with Average or Sum.
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


def LocalSGD(  # noqa: N802 - named as DistributedOptimizer
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    sync_every: int,
    *,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    outer_clip: float | None = None,
    start: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    inner: str = "rank",
    compression: Compressor[torch.Tensor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> _local.LocalTorchOptimizer:
    """An optimizer that steps on each rank's own gradients, and averages the ranks' parameters every ``sync_every``
    steps: for networks on which ``DistributedOptimizer`` waits longer than it computes.

    ``step()`` is an inner step; every ``sync_every``-th also makes an *outer step*: it averages what all ranks have
    changed since the last one, and afterwards all ranks have the same parameters, to the last bit, and the same
    buffers: floating ones are averaged, others are the first rank's. The optimizer's own state (momentum, Adam's
    moments) stays each rank's. Schedules of the learning rate count inner steps, and the rate need not be multiplied by
    ``hvd.size()``. A ``torch.amp.GradScaler`` may skip steps on some ranks only; skipped steps count.

    Between two outer steps the ranks' parameters differ, and with ``fragments`` or ``overlap`` always: **call**
    ``finish()`` **on all ranks before evaluating or saving the model, and at the end.** Checkpoints need
    ``outer_state_dict()`` as well.

    An average with an inf or a NaN is refused: all ranks return to the parameters of the last outer step. In an elastic
    job hosts come and go at outer steps only (of the last fragment); if a rank is lost, the others go on from just
    before the next one, without it. Newcomers begin with the parameters and the outer momentum of an outer step.

    Args:
        optimizer: a plain optimizer. It and the result share one state; use the result for steps.
        model: the module that has the optimizer's parameters.
        sync_every: the number of inner steps from one outer step to the next.
        outer_lr, outer_momentum: of the outer optimizer, SGD with Nesterov's momentum, for which the averaged change is
            the gradient. 1 and 0 make it a plain average.
        outer_clip: the greatest norm of the averaged change, to which a greater one is scaled; None for no limit.
        start: so many steps at the beginning are each followed by a plain average: post-local SGD.
        fragments: the number of parts that the parameters are divided into. Each has its own outer step in a round of
            ``sync_every`` steps, one after another, so that fewer bytes travel at a time (Streaming DiLoCo,
            arXiv 2501.18512). Buffers are averaged with the last.
        overlap: an outer step that begins after inner step t is applied after step t + overlap, and inner steps go on
            meanwhile; less than ``sync_every / fragments``. Buffers that are not floating are then sent by ``finish()``
            only.
        inner: "rank": each rank steps on its own gradients. "host": the ranks of a host share gradients in every step,
            and only hosts differ between two outer steps.
        compression: how changes travel: one of ``Compression.int8``, ``int4``, ``fp16`` and ``bf16``. Buffers travel as
            they are.
        op, backward_passes_per_step: only Average, and only 1: gradients add up over as many backward passes as run
            before ``step()``.
        process_set: the ranks that meet; with ``inner="rank"`` only.

    Returns:
        an instance of a class made from the optimizer's own, of the same name, with the methods of
        ``hvdgloo.torch._local.LocalTorchOptimizer``. Its state dict is the plain optimizer's.

    Raises:
        InvalidArgumentError: (a ValueError) an argument cannot be used, or the optimizer has parameters that are not
            the model's.
        NotInitializedError: before ``init()``.
    """
    if ReduceOp(op) is not ReduceOp.AVERAGE:
        raise InvalidArgumentError(
            "hvd.LocalSGD and hvd.DiLoCo average; leave op out, or use hvd.DistributedOptimizer for another operation"
        )
    _local.refuse_passes(backward_passes_per_step)
    options = OuterOptions(
        sync_every, outer_lr, outer_momentum, outer_clip, start, compression, process_set, fragments, overlap
    )
    return _local.wrap_local(FRONTEND, optimizer, model, inner, options)


def DiLoCo(  # noqa: N802 - as above
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    sync_every: int,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    outer_clip: float | None = None,
    start: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    inner: str = "rank",
    compression: Compressor[torch.Tensor] = Compression.none,
    op: int = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> _local.LocalTorchOptimizer:
    """``LocalSGD`` with an outer momentum, by default with the paper's settings (arXiv 2311.08105), for long
    pre-training with hundreds of steps from one outer step to the next.

    In short runs these settings train worse than ``LocalSGD`` or differ more from seed to seed, and
    ``outer_momentum=0.5`` is as good or better; try ``LocalSGD`` first. Everything else is as there.
    """
    return LocalSGD(
        optimizer,
        model,
        sync_every,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        outer_clip=outer_clip,
        start=start,
        fragments=fragments,
        overlap=overlap,
        inner=inner,
        compression=compression,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        process_set=process_set,
    )
