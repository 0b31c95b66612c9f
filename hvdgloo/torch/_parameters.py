"""The parameters of a distributed optimizer: their names, their hooks, and how their gradients are reduced."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


_owners: weakref.WeakValueDictionary[int, HookedParameters] = weakref.WeakValueDictionary()
"""A parameter's id to the object with its hook: the latest one, by rule and not by the accidents of garbage collection,
which differ between ranks. It keeps its parameters, so their ids are theirs while it lives. Nothing refers weakly to a
parameter: torch could not swap its content, as loading and converting a model may."""


class HookedParameters:
    """An optimizer's parameters, and the hooks that are called when their gradients are complete.

    Args:
        optimizer, named_parameters: as for ``DistributedOptimizer``.
        computed: a hook, called with a parameter's name and the parameter; None for no hooks, as with op=Adasum, where
            frozen parameters count as well.

    Attributes:
        all: by name.
        names: by the parameters' ids.
        tracked: by name, those whose gradients are reduced.
        lost: names of those that a later optimizer has taken over.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: NamedParameters | None,
        computed: Callable[[str, Tensor], None] | None,
    ) -> None:
        self._computed = computed
        self.names = names_of(optimizer, named_parameters)
        self.all = {self.names[id(parameter)]: parameter for parameter in parameters_of(optimizer)}
        refuse_unsendable(self.all.items())
        self.tracked: dict[str, Tensor] = {}
        self.lost: set[str] = set()
        self._frozen: dict[str, Tensor] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._contents: dict[str, int] = {}  # of parameters with hooks: which of torch's own objects is inside

    def add(self, group: int, parameters: Sequence[Tensor]) -> list[str]:
        """Add another group's parameters, and track them if others are tracked. Return their names."""
        added = {f"noname.{group}.{i}": parameter for i, parameter in enumerate(parameters)}
        self.names.update((id(parameter), name) for name, parameter in added.items())
        self.all.update(added)
        if self.tracked or self._frozen:
            self.track()
        return list(added)

    def track(self) -> None:
        """Hook all parameters that are not hooked yet, frozen ones not before ``track_unfrozen`` finds them trained."""
        for name, parameter in self.all.items():
            if name in self.tracked or name in self.lost:
                continue
            if self._computed is None:
                self.tracked[name] = parameter
            else:
                self._frozen[name] = parameter
        self.track_unfrozen()

    def track_unfrozen(self) -> None:
        """Track the parameters that were frozen before and are not any more."""
        for name, parameter in list(self._frozen.items()):
            if parameter.requires_grad:
                del self._frozen[name]
                self._track(name, parameter)

    def put_in_order(self) -> None:
        """Have the tracked parameters depend on nothing but which are frozen now: not on when this rank has frozen and
        unfrozen them."""
        self.track_unfrozen()
        if self._computed is None:
            return
        for name in [name for name, parameter in self.tracked.items() if not parameter.requires_grad]:
            self._frozen[name] = self.tracked.pop(name)
            self._remove_hook(name)
        self.tracked = {name: self.tracked[name] for name in self.all if name in self.tracked}

    def keep_hook(self, name: str, parameter: Tensor) -> bool:
        """Install a parameter's hook again if its content was swapped for another tensor's, as a model's conversion may
        do: torch then leaves the hook behind.

        Returns:
            whether it was.
        """
        if name not in self._hooks or self._contents[name] == parameter._cdata:
            return False
        self._contents[name] = parameter._cdata
        hooked: Any = parameter
        hooked._post_accumulate_grad_hooks = hooked._post_accumulate_grad_hooks
        return True

    def _track(self, name: str, parameter: Tensor) -> None:
        assert self._computed is not None
        earlier = _owners.get(id(parameter))
        if earlier is not None:
            name_there = earlier.names[id(parameter)]
            if earlier._remove_hook(name_there):
                earlier.lost.add(name_there)
        _owners[id(parameter)] = self
        self.tracked[name] = parameter
        hook = functools.partial(self._computed, name)
        self._hooks[name] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._contents[name] = parameter._cdata

    def _remove_hook(self, name: str) -> bool:
        """Remove a parameter's hook; False if it has none."""
        hook = self._hooks.pop(name, None)
        if hook is not None:
            hook.remove()
        return hook is not None
