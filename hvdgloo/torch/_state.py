"""State that all ranks must start from: parameters, optimizer state, objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvdgloo._collectives import objects
from hvdgloo._collectives.frontend import Frontend
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._distributed_optimizer import plain_class
from hvdgloo.torch._parameters import refuse_unsendable
from hvdgloo.types import TensorSpec

Tensor = torch.Tensor


def broadcast_parameters(frontend: Frontend[Tensor], params: Any, root_rank: int) -> None:
    """Overwrite tensors with the root's, each under its own name; a dict's are matched by name, a list's by position.

    Raises:
        InvalidArgumentError: (a ValueError) ``params`` is neither a dict nor a list, or has values that are not
            tensors.
    """
    frontend.broadcast_all(_named(params), root_rank, in_place=True)


def _named(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, Mapping):
        pairs = sorted(((str(name), tensor) for name, tensor in params.items()), key=lambda pair: pair[0])
    elif isinstance(params, (list, tuple)):
        pairs = [p if isinstance(p, tuple) and len(p) == 2 else (f"parameter.{i}", p) for i, p in enumerate(params)]
    else:
        raise InvalidArgumentError(
            "params must be a dict such as model.state_dict(), or a list of tensors or of (name, tensor) pairs; got "
            f"{type(params).__name__} (list(...) makes a list of an iterator)"
        )
    for name, tensor in pairs:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InvalidArgumentError(
                f"params: {name!r} is a {type(tensor).__name__}, not a tensor; broadcast_object sends other values"
            )
    refuse_unsendable(pairs)
    return pairs


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a structure that is sent without its tensors.

    Attributes:
        index: among the tensors that are sent.
        spec: what it is; on which GPU, if it is on one, each rank knows for itself.
        parameter: whose state it is part of, counted over all groups; None if it is not a parameter's.
    """

    index: int
    spec: TensorSpec
    parameter: int | None


def broadcast_optimizer_state(
    frontend: Frontend[Tensor], optimizer: torch.optim.Optimizer, root_rank: int, *, initialise: bool = True
) -> None:
    """Load the root's state dict into all other ranks' optimizers: its structure as one object, then its tensors.

    Before, with ``initialise``, the root initialises the state that it lacks, and all ranks their missing gradients: as
    if a step with gradients of zero had been made, except that no parameter changes. Training then differs a little
    from an optimizer without state: such a step counts for Adam's corrections, and has a momentum of its weight decay.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, or LBFGS, whose state cannot be sent.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError(
            "LBFGS keeps its state in a form that cannot be broadcast; begin with a new one on all ranks"
        )
    is_root = frontend.context.is_root(root_rank)
    takes_zeros = _initialise_state(optimizer) if is_root and initialise else False
    tensors: list[Tensor] = []
    structure = _take_tensors(frontend, optimizer.state_dict(), tensors) if is_root else None
    # The structure says what there is: ranks whose optimizer has no state yet, or a different one, create the root's.
    structure, takes_zeros = objects.broadcast_object(frontend, (structure, takes_zeros), root_rank)
    for parameter in _trained(optimizer) if takes_zeros else ():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    if not is_root:
        slots: list[_Slot] = []
        _collect_slots(structure, slots)
        tensors = [frontend.adapter.allocate(slot.spec, _like(slot, frontend, optimizer)) for slot in slots]
    label = frontend.automatic_name("broadcast_optimizer_state")
    frontend.broadcast_all([(f"{label}.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank, in_place=True)
    if not is_root:
        optimizer.load_state_dict(_put_tensors(structure, tensors))


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _initialise_state(optimizer: torch.optim.Optimizer) -> bool:
    """Have the optimizer's class make a step with gradients of zero for the parameters without state, and undo what it
    does to parameters and groups.

    Returns:
        whether the optimizer can step so. If not (it wants a closure, or sparse gradients), everything is as it was.
    """
    parameters = _trained(optimizer)
    lacking = {parameter for parameter in parameters if parameter not in optimizer.state}
    if not lacking:
        return not issubclass(plain_class(optimizer), torch.optim.SparseAdam)
    gradients = [parameter.grad for parameter in parameters]
    values = {parameter: parameter.detach().clone() for parameter in lacking}
    groups = [dict(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False) if parameter in lacking else None
    step: Any = plain_class(optimizer).step
    try:
        with _without_step_hooks(optimizer):
            step(optimizer)
    except Exception:  # noqa: BLE001 - whatever an optimizer raises: it goes without state, as it was made
        for parameter in lacking:
            optimizer.state.pop(parameter, None)
        return False
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
        with torch.no_grad():
            for parameter, value in values.items():
                parameter.copy_(value)
    return True


@contextmanager
def _without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hooks are for steps of the program."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    vars(optimizer).update({name: OrderedDict() for name in kept})
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def _map(structure: Any, leaf: Any) -> Any:
    """Apply ``leaf`` to everything in a structure of dicts, lists and tuples, in a fixed order."""
    if isinstance(structure, dict):
        return {key: _map(value, leaf) for key, value in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(_map(value, leaf) for value in structure)
    return leaf(structure)


def _take_tensors(frontend: Frontend[Tensor], structure: Any, tensors: list[Tensor]) -> Any:
    def take(value: Any, parameter: object = None) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        number = parameter if isinstance(parameter, int) else None
        return _Slot(len(tensors) - 1, frontend.adapter.describe(value), number)

    # torch numbers parameters, and files their state under these numbers.
    state = {key: _map(value, partial(take, parameter=key)) for key, value in structure.get("state", {}).items()}
    return {"state": state, **{key: _map(value, take) for key, value in structure.items() if key != "state"}}


def _like(slot: _Slot, frontend: Frontend[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a tensor of this rank that is where a slot's tensor belongs."""
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if slot.parameter is not None and slot.parameter < len(parameters):
        return parameters[slot.parameter]
    # A learning rate, for example, which may be on a GPU; the parameters' will do.
    kinds = (parameter for parameter in parameters if frontend.adapter.describe(parameter).device == slot.spec.device)
    return next(kinds, parameters[0])


def _collect_slots(structure: Any, slots: list[_Slot]) -> None:
    _map(structure, lambda value: slots.append(value) if isinstance(value, _Slot) else None)


def _put_tensors(structure: Any, tensors: list[Tensor]) -> Any:
    return _map(structure, lambda value: tensors[value.index] if isinstance(value, _Slot) else value)
