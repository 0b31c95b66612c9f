"""Arguments of a distributed optimizer: its parameters, their names, and how their gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._training.options import Groups, divided
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._memory import refusal

Tensor = torch.Tensor
NamedParameters = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ReductionOptions:
    """Arguments of ``DistributedOptimizer`` that determine how gradients are reduced."""

    compression: Compressor[Tensor] = NoneCompressor
    backward_passes_per_step: int = 1
    op: int | None = None
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def names_of(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[int, str]:
    """Parameter's id to the name that its gradient is reduced under, before it is made unique in the job."""
    if named_parameters is None:
        return {
            id(parameter): f"noname.{g}.{i}"
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise InvalidArgumentError(
                "named_parameters must be (name, parameter) tuples, as model.named_parameters() gives; found a "
                f"{type(pair).__name__}"
            )
    names = [name for name, _ in pairs]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InvalidArgumentError(f"named_parameters has names that occur more than once: {', '.join(duplicates)}")
    named = {id(parameter): name for name, parameter in pairs}
    unnamed = sum(id(parameter) not in named for parameter in parameters_of(optimizer))
    if unnamed:
        raise InvalidArgumentError(
            f"{unnamed} of the optimizer's parameters are not in named_parameters; name them all, or leave "
            "named_parameters out"
        )
    return {id(parameter): named[id(parameter)] for parameter in parameters_of(optimizer)}


def refuse_unsendable(named_parameters: NamedParameters) -> None:
    """Check that all parameters have memory, and so will their gradients.

    Raises:
        InvalidArgumentError: one has none; it is named.
    """
    for name, parameter in named_parameters:
        reason = refusal(parameter)
        if reason is not None:
            raise InvalidArgumentError(f"{name}: {reason}")


def groups_of(groups: Groups, trained: Sequence[Tensor], known: set[int]) -> list[list[Tensor]]:
    """Return lists of parameters that are reduced as one, from either form of ``groups``."""
    chosen = divided(groups, trained)
    if not isinstance(groups, int) and any(id(each) not in known for group in groups or () for each in group):
        raise InvalidArgumentError("groups has something that is not a parameter of the optimizer")
    return chosen
