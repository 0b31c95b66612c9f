"""The gradient of each collective, stated once for all frameworks.

A rule takes what the forward call recorded (a Tape) and the gradients that arrived for its outputs on this rank, and
returns the gradients of its inputs on this rank. Rules call collectives themselves, so every rank must run them: a
tensor needs a gradient on all ranks or on none. The linear rules are made of differentiable operations, so second
derivatives work; the rules of Min, Max and Product are not, so adapters refuse to differentiate calls marked by
``keep`` a second time.

With L = the sum of the ranks' losses, x the input of this rank and g the gradients of the outputs:

=============== ===================================================================================
allreduce       Sum, Average: the same allreduce of g, same factors (exact)
allreduce       Min, Max: sum of g where x is the extreme, shared among the ranks that tie
allreduce       Product: sum of g times the product of the other ranks' x (right for zeros too)
allgather       average of g over the ranks, of which this rank takes its own rows
broadcast       average of g over the ranks on the root, zero elsewhere
alltoall        every row of g back to where it came from (exact)
reducescatter   the ranks' g, one after another; for Sum times size; times the factors
=============== ===================================================================================

The factors of allgather and broadcast are Horovod's: 1/size of the exact gradient of L, so exact for the *mean* of
the ranks' losses, which is what data-parallel training minimises. The rule of reducescatter is Horovod's too, and is
size times the exact gradient of L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from hvdgloo._collectives.adapter import Tape, TensorAdapter
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.types import Collective, ReduceOp


class Collectives(Protocol):
    """The part of ``core.Core`` that rules call, which runs collectives."""

    adapter: TensorAdapter[Any]

    @property
    def context(self) -> Context:
        """The Context that collectives run in."""

    def apply(self, spec: CollectiveSpec, tensors: Sequence[Any]) -> list[Any]:
        """One collective, waited for, with its gradient recorded."""

    def exchange(self, spec: CollectiveSpec, tensor: Any, splits: Sequence[int]) -> list[Any]:
        """An alltoall: the received rows, and how many came from each rank."""

    def gather_integers(self, values: Sequence[int], process_set: int) -> npt.NDArray[Any]:
        """Every rank's values as an array of shape (ranks, len(values))."""

    def members(self, spec: CollectiveSpec) -> tuple[int, int]:
        """Return the number of ranks that take part, and this process's place among them."""

    def zeros(self, like: Any) -> Any:
        """A tensor of zeros of the same shape, type and device."""


# Rules compute on tensors of any framework (only *, / and ==, indexing by ranks and rows), hence Any.
Rule = Callable[[Collectives, CollectiveSpec, Tape[Any], Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Adjoint:
    """A rule, and whether it reads the forward call's inputs and outputs (which must then be kept in memory)."""

    rule: Rule
    keep: bool = False


def _same(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    return frontend.apply(spec, gradients)


def _extreme(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    if (spec.prescale, spec.postscale) != (1.0, 1.0):
        raise InvalidArgumentError(
            f"the gradient of a {spec.op.name.lower()} allreduce is defined without prescale_factor and "
            "postscale_factor only; multiply the tensor outside the call instead"
        )
    total = spec._replace(op=ReduceOp.SUM)
    adapter = frontend.adapter
    hits = [
        adapter.cast(x == y, adapter.describe(g).dtype)
        for x, y, g in zip(tape.inputs, tape.outputs, gradients, strict=True)
    ]
    ties = frontend.apply(total, hits)
    sums = frontend.apply(total, gradients)
    return [g * hit / tie for g, hit, tie in zip(sums, hits, ties, strict=True)]


def _product(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    sums = frontend.apply(spec._replace(op=ReduceOp.SUM, prescale=1.0, postscale=1.0), gradients)
    ranks, own = frontend.members(spec)
    gather = spec._replace(collective=Collective.ALLGATHER, op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    results = []
    for x, g in zip(tape.inputs, sums, strict=True):
        # Dividing the product by x would be cheaper, but wrong where x is zero.
        (everyone,) = frontend.apply(gather, [x[None]])
        for index in range(ranks):
            if index != own:
                g = g * everyone[index]
        results.append(g * (spec.postscale * spec.prescale**ranks))
    return results


def _own_rows(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    average = spec._replace(collective=Collective.ALLREDUCE, op=ReduceOp.AVERAGE)
    reduced = frontend.apply(average, gradients)
    # Every rank's number of rows, one column per tensor; only this call knows where this rank's own begin.
    rows = frontend.gather_integers([shape[0] for shape in tape.shapes], spec.process_set)
    _, own = frontend.members(spec)
    first = rows[:own].sum(axis=0)
    return [g[int(a) : int(a) + shape[0]] for g, a, shape in zip(reduced, first, tape.shapes, strict=True)]


def _to_root(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    average = spec._replace(collective=Collective.ALLREDUCE, op=ReduceOp.AVERAGE, root=-1)
    reduced = frontend.apply(average, gradients)
    if frontend.context.is_root(spec.root):
        return reduced
    return [frontend.zeros(g) for g in gradients]


def send_back(
    frontend: Collectives, spec: CollectiveSpec, counts: Sequence[int], gradients: Sequence[Any]
) -> Sequence[Any]:
    """The rule of an alltoall, the only one that needs to know how many rows came from each rank."""
    return frontend.exchange(spec, gradients[0], counts)[:1]


def _gathered(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    ranks, _ = frontend.members(spec)
    factor = spec.prescale * spec.postscale * (ranks if spec.op is ReduceOp.SUM else 1)
    gather = spec._replace(collective=Collective.ALLGATHER, op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    return [g if factor == 1 else g * factor for g in frontend.apply(gather, gradients)]


def _undefined(frontend: Collectives, spec: CollectiveSpec, tape: Tape[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    raise InvalidArgumentError("an Adasum allreduce has no gradient; it combines gradients, and is not part of a loss")


ADJOINTS: dict[tuple[Collective, ReduceOp], Adjoint] = {
    (Collective.ALLREDUCE, ReduceOp.SUM): Adjoint(_same),
    (Collective.ALLREDUCE, ReduceOp.AVERAGE): Adjoint(_same),
    (Collective.ALLREDUCE, ReduceOp.MIN): Adjoint(_extreme, keep=True),
    (Collective.ALLREDUCE, ReduceOp.MAX): Adjoint(_extreme, keep=True),
    (Collective.ALLREDUCE, ReduceOp.PRODUCT): Adjoint(_product, keep=True),
    (Collective.ALLREDUCE, ReduceOp.ADASUM): Adjoint(_undefined),
    (Collective.ALLGATHER, ReduceOp.SUM): Adjoint(_own_rows),
    (Collective.REDUCESCATTER, ReduceOp.SUM): Adjoint(_gathered),
    (Collective.REDUCESCATTER, ReduceOp.AVERAGE): Adjoint(_gathered),
    (Collective.BROADCAST, ReduceOp.SUM): Adjoint(_to_root),
}
