"""What ranks say to each other before data moves: values, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

from hvdgloo.types import Collective, ReduceOp, TensorSpec


@dataclass(frozen=True)
class Request:
    """One rank's wish to take part in one collective.

    A group of tensors is one Request (ready, executed and failed together); a single tensor is a group of one.

    Attributes:
        name: unique among what is pending in the process set, e.g. ``allreduce.fc.weight``. Ranks are matched by it.
        collective: what to do.
        tensors: what ranks must agree upon; in an allgather the first dimensions may differ.
        op: of an allreduce.
        prescale, postscale: factors applied before and after an allreduce, in addition to the average's 1/size.
        root: global rank of a broadcast's source, else -1.
        process_set: id of the set that takes part; 0 is all ranks.
    """

    name: str
    collective: Collective
    tensors: tuple[TensorSpec, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    process_set: int = 0
