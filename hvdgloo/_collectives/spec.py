"""A collective and its parameters as one value, and how it is made from users' arguments."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from hvdgloo._collectives.compression import wire_of
from hvdgloo._collectives.process_sets import ProcessSet, process_set_id
from hvdgloo._engine.messages import Request
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import ENCODABLE, Collective, ReduceOp, TensorSpec, WireFormat

REDUCE_OPS = frozenset(ReduceOp)


class CollectiveSpec(NamedTuple):
    """A collective and its parameters, without tensors and names. The fields are ``Request``'s."""

    collective: Collective
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    process_set: int = 0
    wire: WireFormat = WireFormat.FULL

    def request(self, name: str, tensors: tuple[TensorSpec, ...], *, wire_threshold: int = 0) -> Request:
        """This operation on some tensors, under the full name ``name``.

        Args:
            wire_threshold: bytes of all tensors together below which they cross between hosts as they are.
        """
        wire = self.wire
        if wire is not WireFormat.FULL and not (
            self.collective is Collective.ALLREDUCE
            and self.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
            and sum([spec.nbytes for spec in tensors]) >= wire_threshold
            and any(spec.dtype in ENCODABLE[wire] for spec in tensors)
        ):
            wire = WireFormat.FULL
        return Request(
            name,
            self.collective,
            tensors,
            self.op,
            self.prescale,
            self.postscale,
            self.root,
            self.process_set,
            wire=wire,
        )


def crossing(operation: CollectiveSpec, compressor: object) -> CollectiveSpec:
    """The operation, with values that cross between hosts as a program's compressor has them."""
    wire = wire_of(compressor)
    return operation if wire is None else operation._replace(wire=wire)


def resolve_op(average: bool | None, op: int | None, *, depth: int = 3) -> ReduceOp:
    """The reduction that ``average=`` and ``op=`` ask for together.

    Args:
        depth: calls between the user's and this one, which a warning is to point to.

    Raises:
        InvalidArgumentError: both are given, or ``op`` is not one of Average, Sum, Adasum, Min, Max, Product.
    """
    if average is not None:
        if op is not None:
            raise InvalidArgumentError("average= and op= exclude each other; leave average= out, it is deprecated")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=1 + depth)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return ReduceOp.AVERAGE
    if type(op) is ReduceOp:
        return op
    try:
        resolved = ReduceOp(op)
    except ValueError:
        resolved = None
    if resolved not in REDUCE_OPS:
        raise InvalidArgumentError(f"op must be one of Average, Sum, Adasum, Min, Max and Product, not {op!r}")
    return ReduceOp(op)


def reduction(
    average: bool | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    *,
    depth: int = 2,
) -> CollectiveSpec:
    """An allreduce, from the arguments that users give.

    Args:
        depth: calls between the user's and this one, which a warning is to point to.

    Raises:
        InvalidArgumentError: as for ``resolve_op``; factors that are not numbers; a process set that cannot be used.
    """
    factors = _factors(prescale, postscale)
    resolved = resolve_op(average, op, depth=depth + 1)
    return CollectiveSpec(Collective.ALLREDUCE, resolved, *factors, process_set=process_set_id(process_set))


def scattering(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> CollectiveSpec:
    """A reducescatter, from the arguments that users give.

    Raises:
        InvalidArgumentError: op is neither Average nor Sum; otherwise as for ``reduction``.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidArgumentError(f"op of a reducescatter must be Average or Sum, not {op!r}")
    factors = _factors(prescale, postscale)
    return CollectiveSpec(Collective.REDUCESCATTER, ReduceOp(op), *factors, process_set=process_set_id(process_set))


def _factors(prescale: float, postscale: float) -> tuple[float, float]:
    try:
        return float(prescale), float(postscale)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"prescale_factor and postscale_factor are numbers, not {prescale!r} and {postscale!r}"
        ) from None


def exchanging(process_set: ProcessSet) -> CollectiveSpec:
    """An alltoall.

    Raises:
        InvalidArgumentError: the process set cannot be used.
    """
    return CollectiveSpec(Collective.ALLTOALL, process_set=process_set_id(process_set))


def gathering(process_set: ProcessSet) -> CollectiveSpec:
    """An allgather.

    Raises:
        InvalidArgumentError: the process set cannot be used.
    """
    return CollectiveSpec(Collective.ALLGATHER, process_set=process_set_id(process_set))


def broadcasting(root_rank: int, process_set: ProcessSet) -> CollectiveSpec:
    """A broadcast from a global rank.

    Raises:
        InvalidArgumentError: the root is not a whole number, or the process set cannot be used.
    """
    if not isinstance(root_rank, (int, np.integer)) or isinstance(root_rank, bool):
        raise InvalidArgumentError(f"root_rank is a global rank, a whole number from 0, not {root_rank!r}")
    return CollectiveSpec(Collective.BROADCAST, root=int(root_rank), process_set=process_set_id(process_set))
