"""Finds the models whose gradients torch.distributed, or another library, reduces.

Nothing about a parameter tells, and to look through all objects takes seconds in a program with large data in Python's
lists; so wrappers of models are noted as they are made.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from hvdgloo.errors import InvalidArgumentError

_NAMES = frozenset({"DistributedDataParallel", "FullyShardedDataParallel"})
"""Classes of wrappers, torch's and other libraries', that reduce the gradients of their parameters."""

_wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@functools.cache
def _reduces(kind: type) -> bool:
    return any(base.__name__ in _NAMES for base in kind.__mro__)


def _note(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    if _reduces(type(module)):  # type: ignore[arg-type]
        _wrappers.add(module)


register_module_module_registration_hook(_note)


def refuse_reduced_by_others(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that no other wrapper reduces the gradients of these parameters.

    Raises:
        InvalidArgumentError: one does; the message names the parameter and the class.
    """
    pairs, reduced = list(named_parameters), _reduced()
    if not any(id(parameter) in reduced for _, parameter in pairs):
        return
    gc.collect()  # a wrapper that the program has dropped is still there until then
    reduced = _reduced()
    for name, parameter in pairs:
        other = reduced.get(id(parameter))
        if other is not None:
            raise InvalidArgumentError(
                f"{name}: {other} reduces this parameter's gradient as well, and neither of the two would be right; "
                f"leave out {other}, or train with it and the plain optimizer, without hvd.DistributedOptimizer"
            )


def _reduced() -> dict[int, str]:
    """Return the parameters of all wrappers, by id, and the wrappers' classes."""
    return {
        id(parameter): type(module).__name__
        for module in list(_wrappers)
        # Not the class's own function, which for FullyShardedDataParallel needs more.
        for _, parameter in torch.nn.Module.named_parameters(module)
        if not getattr(parameter, "_ddp_ignored", False)
    }
