"""The PyTorch front-end: ``import hvdgloo.torch as hvd``.

::

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

and each rank trains on its own part of the data. The collectives are documented where they are defined, once for all
frameworks: ``hvdgloo.frontend.Frontend``.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from hvdgloo.errors import MissingDependencyError

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError("hvdgloo.torch needs PyTorch: pip install 'hvdgloo[torch]'") from error

from hvdgloo import context, objects
from hvdgloo.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
)
from hvdgloo.compression import Compressor
from hvdgloo.errors import HorovodInternalError, InvalidArgumentError
from hvdgloo.frontend import Frontend
from hvdgloo.process_sets import ProcessSet, global_process_set
from hvdgloo.torch import functions
from hvdgloo.torch import optimizer as _optimizer
from hvdgloo.torch.adapter import TorchAdapter
from hvdgloo.torch.compression import Compression
from hvdgloo.types import ReduceOp

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

T = TypeVar("T")

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

_frontend: Frontend[torch.Tensor] = Frontend(TorchAdapter(), context.current, module=__name__)

rank = _frontend.rank
size = _frontend.size
local_rank = _frontend.local_rank
local_size = _frontend.local_size
cross_rank = _frontend.cross_rank
cross_size = _frontend.cross_size
is_homogeneous = _frontend.is_homogeneous

allreduce = _frontend.allreduce
allreduce_async = _frontend.allreduce_async
allreduce_ = _frontend.allreduce_
allreduce_async_ = _frontend.allreduce_async_
grouped_allreduce = _frontend.grouped_allreduce
grouped_allreduce_async = _frontend.grouped_allreduce_async
grouped_allreduce_ = _frontend.grouped_allreduce_
grouped_allreduce_async_ = _frontend.grouped_allreduce_async_
allgather = _frontend.allgather
allgather_async = _frontend.allgather_async
grouped_allgather = _frontend.grouped_allgather
grouped_allgather_async = _frontend.grouped_allgather_async
broadcast = _frontend.broadcast
broadcast_async = _frontend.broadcast_async
broadcast_ = _frontend.broadcast_
broadcast_async_ = _frontend.broadcast_async_
alltoall = _frontend.alltoall
alltoall_async = _frontend.alltoall_async
reducescatter = _frontend.reducescatter
reducescatter_async = _frontend.reducescatter_async
grouped_reducescatter = _frontend.grouped_reducescatter
grouped_reducescatter_async = _frontend.grouped_reducescatter_async
join = _frontend.join
barrier = _frontend.barrier
poll = _frontend.poll
synchronize = _frontend.synchronize
add_process_set = _frontend.add_process_set
remove_process_set = _frontend.remove_process_set


def DistributedOptimizer(  # noqa: N802 - Horovod's name; it makes an instance of a class of its own
    optimizer: torch.optim.Optimizer,
    named_parameters: _optimizer.NamedParameters | None = None,
    compression: Compressor[torch.Tensor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: _optimizer.Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _optimizer.Distributed:
    """An optimizer that steps on gradients reduced over all ranks.

    Gradients are sent while the backward pass still runs, and ``step()`` waits for them. Call it on every rank with the
    same arguments, after ``init()``.

    Args:
        optimizer: a plain optimizer. It is held and does the stepping; use the result instead of it.
        named_parameters: ``model.named_parameters()``: names for messages. All of the optimizer's parameters, or None.
        compression: ``Compression.fp16`` sends float32 gradients as float16.
        backward_passes_per_step: gradients add up over this many backward passes (as torch adds them) before they are
            sent; one ``step()`` then follows.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: splits an average's division: by this before the sum, by size / this after it.
        num_groups: deprecated: the same as an integer for ``groups``.
        groups: how many groups of gradients to send as one each (0: every gradient by itself), or a list of lists of
            parameters that are groups.
        sparse_as_dense: send sparse gradients as dense ones; without it they are refused.
        process_set: the ranks that share gradients.

    Returns:
        an instance of the optimizer's own class, with the methods of ``hvdgloo.torch.optimizer.Distributed`` besides.
        Its state dict is that of the plain optimizer, and either loads the other's. A parameter without a gradient
        counts as zeros. Copying it deeply gives another distributed optimizer, pickling it the plain one.

    Raises:
        InvalidArgumentError: (a ValueError) names that are not tuples, not unique, or not complete; malformed groups;
            ``gradient_predivide_factor`` without Average; ``backward_passes_per_step`` below 1.
        NotInitializedError: before ``init()``.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        if groups is not None:
            raise InvalidArgumentError("num_groups= and groups= exclude each other; leave num_groups= out")
        groups = num_groups
    options = _optimizer.Options(
        compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense, process_set
    )
    return _optimizer.wrap(_frontend, optimizer, named_parameters, groups, options)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite all ranks' tensors with one rank's, usually before training.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of (name, tensor) pairs; the same names and shapes on
            every rank.
        root_rank: global rank of the source.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is neither a dict nor a list, or has values that are no tensors.
    """
    functions.broadcast_parameters(_frontend, params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give all ranks' optimizers the state and the hyperparameters of one rank's, usually after loading a checkpoint.

    Ranks whose optimizer has no state yet get the root's. No step is made for it.

    Args:
        optimizer: plain or distributed, with the same parameters on every rank.
        root_rank: global rank of the source.
        model: accepted for programs that pass it; the optimizer knows its parameters.

    Raises:
        InvalidArgumentError: (a ValueError) for LBFGS, whose state cannot be sent.
    """
    functions.broadcast_optimizer_state(_frontend, optimizer, root_rank)


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """The Python object of one rank, on all: see ``hvdgloo.objects.broadcast_object``."""
    return objects.broadcast_object(_frontend, obj, root_rank, name, process_set)


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Every rank's Python object, in rank order: see ``hvdgloo.objects.allgather_object``."""
    return objects.allgather_object(_frontend, obj, name, process_set)
