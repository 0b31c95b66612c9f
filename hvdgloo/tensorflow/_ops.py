"""The collectives of TensorFlow's front-end, under the names and with the parameters that Horovod's programs use.

Each is a method of ``hvdgloo._collectives.frontend.Frontend``, whose docstring says what it promises. Here are only
the parameters that TensorFlow's programs pass in addition: ``device_dense`` and ``device_sparse`` (there is one place
where collectives run), and ``ignore_name_scope`` (names do not depend on scopes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._collectives.spec import resolve_op
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.tensorflow import _state as state
from hvdgloo.tensorflow._adapter import Tensor
from hvdgloo.tensorflow._frontend import FRONTEND, public
from hvdgloo.tensorflow._sparse import check as check_sparse
from hvdgloo.tensorflow._sparse import is_sparse, sparse_allreduce
from hvdgloo.types import ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


@public
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Combine the ranks' tensors element by element: ``Frontend.allreduce``, eagerly and in graphs. Differentiable.

    Args:
        tensor: a tensor, a variable, or what ``tf.convert_to_tensor`` takes; of the same shape and type on every rank.
            Of a ``tf.IndexedSlices``, whose entries may differ in number, all ranks' entries are gathered.
        average: deprecated: True for ``op=Average``, False for ``op=Sum``.
        device_dense, device_sparse, ignore_name_scope: accepted for programs that pass them.
        compression: how the tensor travels; a ``tf.IndexedSlices`` travels as it is.
        op: Average (default), Sum, Min, Max or Product; Average or Sum of a ``tf.IndexedSlices``.
        prescale_factor, postscale_factor: multiply each rank's tensor before, and the result after.
        name: what matches the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        a new tensor of the same shape and type.

    Raises:
        NotImplementedError: another reduction, or factors, of a ``tf.IndexedSlices``.
    """
    if is_sparse(tensor):
        reduction = resolve_op(average, op)
        return sparse_allreduce(FRONTEND, tensor, name, reduction, prescale_factor, postscale_factor, process_set)
    given = tf.convert_to_tensor(tensor)
    return FRONTEND.allreduce(given, average, name, compression, op, prescale_factor, postscale_factor, process_set)


@public
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Tensor]:
    """``allreduce`` of several tensors as one: none is sent before all are ready on all ranks. Differentiable.

    Dense ones and ``tf.IndexedSlices`` may be mixed. An empty group returns an empty list and sends nothing.
    """
    if not isinstance(tensors, (list, tuple)):
        return FRONTEND.grouped_allreduce(tensors)  # which says what is wrong
    reduction = resolve_op(average, op)
    results: list[Any] = list(tensors)
    dense = [index for index, tensor in enumerate(tensors) if not is_sparse(tensor)]
    # Before anything is sent: other ranks may refuse their groups for the same reason.
    for tensor in tensors:
        if is_sparse(tensor):
            check_sparse(reduction, prescale_factor, postscale_factor)
        for part in (tensor.values, tensor.indices) if is_sparse(tensor) else (tf.convert_to_tensor(tensor),):
            FRONTEND.adapter.describe(part)
    given = [tf.convert_to_tensor(tensors[index]) for index in dense]
    reduced = FRONTEND.grouped_allreduce(
        given, None, name, compression, reduction, prescale_factor, postscale_factor, process_set
    )
    for index, tensor in zip(dense, reduced, strict=True):
        results[index] = tensor
    for index, tensor in enumerate(tensors):
        if is_sparse(tensor):
            label = None if name is None else f"{name}.{index}"
            results[index] = sparse_allreduce(
                FRONTEND, tensor, label, reduction, prescale_factor, postscale_factor, process_set
            )
    return results


@public
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenate the ranks' tensors along their first dimension: ``Frontend.allgather``. Differentiable.

    First dimensions may differ between ranks (and be zero), others may not.
    """
    return FRONTEND.allgather(tf.convert_to_tensor(tensor), name, process_set)


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """``allgather`` of several tensors as one. Differentiable."""
    return FRONTEND.grouped_allgather(_tensors(tensors), name, process_set)


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The tensor of one (global) rank, on all: ``Frontend.broadcast``. Differentiable."""
    return FRONTEND.broadcast(tf.convert_to_tensor(tensor), root_rank, name, process_set)


@public
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Assign one rank's values to the other ranks' variables.

    Args:
        variables: ``tf.Variable`` or Keras variables, in the same order and of the same shapes on every rank.
        root_rank: global rank of the source.
        name: what matches the ranks' calls.
        process_set: the ranks that take part.

    Returns:
        the variables; in a graph of TensorFlow 1 a list of their new values, which are assigned where one is computed.
    """
    return state.broadcast_variables(FRONTEND, variables, root_rank, process_set, name)


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send every rank a part of the tensor's rows, and receive one from each: ``Frontend.alltoall``. Differentiable.

    Args:
        tensor: first dimensions may differ between ranks, others may not.
        splits: how many rows go to each rank: integers, shape (set size,). None divides the rows evenly.
        name: what matches the ranks' calls.
        ignore_name_scope: accepted for programs that pass it.
        process_set: the ranks that take part.

    Returns:
        the rows that came; with ``splits`` also how many came from each rank (int32, shape (set size,)).
    """
    return FRONTEND.alltoall(tf.convert_to_tensor(tensor), splits, name, process_set)


@public
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the ranks' tensors, and leave each rank its part of the rows: ``Frontend.reducescatter``. Differentiable.

    Of n rows among p ranks, the first n mod p ranks get one more than the others.
    """
    return FRONTEND.reducescatter(
        tf.convert_to_tensor(tensor), name, compression, op, process_set, prescale_factor, postscale_factor
    )


@public
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor[Tensor] = NoneCompressor,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Tensor]:
    """``reducescatter`` of several tensors as one. Differentiable."""
    return FRONTEND.grouped_reducescatter(
        _tensors(tensors), name, compression, op, process_set, prescale_factor, postscale_factor
    )


@public
def join() -> Tensor:
    """Say that this rank has no more data; wait until all have said so: ``Frontend.join``.

    Returns:
        the rank that joined last, int32; in a ``tf.function`` a tensor of it.
    """
    return FRONTEND.reads(FRONTEND.join)


@public
def rank_op(name: str | None = None) -> Tensor:
    """This process's rank as a tensor (int32) that a graph asks for each time it runs."""
    return FRONTEND.reads(FRONTEND.rank)


@public
def local_rank_op(name: str | None = None) -> Tensor:
    """The rank among the processes of this host, as a tensor (int32) that a graph asks for each time it runs."""
    return FRONTEND.reads(FRONTEND.local_rank)


@public
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """The number of ranks in a process set, as a tensor (int32) that a graph asks for each time it runs."""
    return FRONTEND.reads(lambda: len(_ranks(process_set_id)))


@public
def local_size_op(name: str | None = None) -> Tensor:
    """The number of processes on this host, as a tensor (int32) that a graph asks for each time it runs."""
    return FRONTEND.reads(FRONTEND.local_size)


@public
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 if this process is in the process set, else 0 (int32); a graph asks for it each time it runs."""
    return FRONTEND.reads(lambda: int(FRONTEND.rank() in _ranks(process_set_id)))


def _ranks(number: int) -> tuple[int, ...]:
    ranks = FRONTEND.context.engine.process_sets.get(number)
    if ranks is None:
        raise InvalidArgumentError(f"there is no process set {number}; add_process_set registers one")
    return ranks


def _tensors(tensors: Any) -> Any:
    # Whatever is not a group is left to the Frontend, which says what is wrong.
    return [tf.convert_to_tensor(tensor) for tensor in tensors] if isinstance(tensors, (list, tuple)) else tensors
