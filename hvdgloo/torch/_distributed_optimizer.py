"""DistributedOptimizer: the user's optimizer, stepping on gradients that all ranks share.

**One state, two classes.** The result is made as Horovod makes it: an instance of a class whose only other base than
a marker of ours is the user's optimizer class, and which bears its name. So a program that inspects it finds one
(``vars``, ``dir``, ``inspect``, protocols), schedulers accept it, and libraries can build further classes on it or on
``type(optimizer).__bases__[0]``. Where Horovod copies the state into the new object, and the two drift apart, here both
objects have one and the same ``__dict__``: whatever is set on one, or loaded into one, the other has. A scheduler that
was given the plain optimizer before wrapping keeps working. Only our methods are this object's own, see ``own``. What
is distributed about it lives in a ``Session`` (``_session``), an ordinary object with an ordinary lifetime.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._training.options import Groups
from hvdgloo._training.subclass import shell_class
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch._buckets import uses_of_a_private_gradient
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._parameters import NamedParameters, ReductionOptions, parameters_of
from hvdgloo.torch._session import Closure, Session, Tensor
from hvdgloo.types import ReduceOp
from hvdgloo.version import library_name

F = TypeVar("F", bound=Callable[..., Any])


class _OwnMethod:
    """A method of a distributed optimizer alone, although it shares its ``__dict__`` with the plain one.

    Schedulers and other tools replace methods by assigning to them, on either of the two, and each must have its own:
    what is assigned to the plain one must not hide ours, nor the other way round.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        return _session_of(instance).replaced.get(self._name) or types.MethodType(self._function, instance)

    def __set__(self, instance: Any, value: Any) -> None:
        _session_of(instance).replaced[self._name] = value

    def __delete__(self, instance: Any) -> None:
        if _session_of(instance).replaced.pop(self._name, None) is None:
            raise AttributeError(self._name)


def own(function: F) -> F:
    return cast(F, _OwnMethod(uncompiled(function)))


class _ParamGroups:
    """``param_groups`` of a distributed optimizer: the instance's, or what a descriptor of the user's class gives.

    A GradScaler unscales gradients, and looks for infinities, before it calls ``step()``, and has no hook for us. It
    must see the reduced ones: the local ones are in flight, and either all ranks or none must skip a step.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        session = _session_of(instance)
        if sys._getframe(1).f_globals.get("__name__") == "torch.amp.grad_scaler":
            session.unscaling(instance)
        inherited = session.param_groups
        return vars(instance)["param_groups"] if inherited is None else inherited.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        inherited = _session_of(instance).param_groups
        if inherited is None:
            vars(instance)["param_groups"] = value
        else:
            inherited.__set__(instance, value)


class _Readable:
    """An attribute that programs for Horovod read. One of the user's class's own, of the same name, precedes it."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)


def _session_of(optimizer: torch.optim.Optimizer) -> Session:
    session: Session = vars(optimizer)["_hvd"]
    return session


class DistributedTorchOptimizer(torch.optim.Optimizer):
    """Base of ``DistributedOptimizer``'s results: their classes are made from the user's optimizer class and this one.

    Readable, as in Horovod: ``op``, ``process_set``, ``backward_passes_per_step``, ``gradient_predivide_factor`` and
    ``sparse_as_dense``, the arguments; ``_parameter_names`` (parameters to names), ``_requires_update`` (the set of
    parameters whose gradients are reduced) and ``_handles`` (parameters whose gradients were handed over and not waited
    for).
    """

    _hvd: Session

    param_groups = _ParamGroups()
    op = _Readable(lambda self: ReduceOp.AVERAGE if self._hvd.options.op is None else ReduceOp(self._hvd.options.op))
    process_set = _Readable(lambda self: self._hvd.options.process_set)
    backward_passes_per_step = _Readable(lambda self: self._hvd.options.backward_passes_per_step)
    gradient_predivide_factor = _Readable(lambda self: self._hvd.options.gradient_predivide_factor)
    sparse_as_dense = _Readable(lambda self: self._hvd.options.sparse_as_dense)
    _parameter_names = _Readable(lambda self: {p: self._hvd.parameters.names[id(p)] for p in parameters_of(self)})
    _requires_update = _Readable(lambda self: self._hvd.reduced_parameters())
    _handles = _Readable(lambda self: self._hvd.under_way())

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Libraries make another optimizer of the same kind in this way. What they do not know is how it is distributed.
        plain = type(self).__bases__[0].__name__
        raise TypeError(
            f"{plain} is distributed here, so its class cannot be called: make a plain one, and distribute it: "
            f"hvd.DistributedOptimizer({plain}(parameters, ...))"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle is the plain optimizer: it can be read where no job runs, like the state dict in a checkpoint.
        return _itself, (_plain_of(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedTorchOptimizer:
        session, plain = self._hvd, _plain_of(self)
        copied = copy.deepcopy(plain, memo)
        copies = dict(zip(map(id, parameters_of(plain)), parameters_of(copied), strict=True))
        named = [(session.parameters.names[i], parameter) for i, parameter in copies.items()]
        groups = [[copies[id(p)] for p in group] for group in session.groups]
        return wrap(session.frontend, copied, named, groups or None, session.options)

    @own
    def synchronize(self) -> None:
        """Wait until all gradients have been reduced; a parameter without a gradient counts as zeros.

        For looking at gradients before ``step()``, e.g. to clip them; then step inside ``skip_synchronize()``.

        Raises:
            HorovodInternalError: a reduction failed.
        """
        self._hvd.synchronize()

    @own
    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Inside, ``step()`` does not reduce gradients: ``synchronize()`` was called before.

        Raises:
            OptimizerCallError: (a ValueError and an AssertionError) with op=Adasum, where there is nothing to skip.
        """
        return self._hvd.skip()

    @own
    def step(self, closure: Closure | None = None) -> Any:
        """Wait until all gradients have been reduced, and let the user's optimizer step.

        Args:
            closure: evaluates the model again and returns the loss; may be called several times. Its gradients are
                reduced after every call, and the loss is averaged, so that all ranks take the same decisions.

        Returns:
            what the user's optimizer's ``step`` returns: with a closure, usually the loss (the ranks' mean).

        Raises:
            HorovodInternalError: a reduction failed.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            # It makes the optimizer's state, by a step on zeros that changes nothing; perhaps on one rank only.
            return self._hvd.base.step(self, closure)
        return self._hvd.step(self, closure)

    @own
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and restart the count of backward passes: what they have added up is gone.

        Raises:
            GradientsInFlightError: (an AssertionError) they are being reduced.
        """
        self._hvd.require_rest("zero_grad()")
        self._hvd.forget()
        self._hvd.base.zero_grad(self, set_to_none)

    @own
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this or of the plain optimizer; the count of backward passes restarts."""
        self._hvd.forget()
        self._hvd.base.load_state_dict(self, state_dict)

    @own
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on every rank; their gradients are reduced under automatic names."""
        self._hvd.add_param_group(self, param_group)

    @own
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce gradients after this many backward passes, counted from now on.

        Raises:
            InvalidArgumentError: (a ValueError) not a positive whole number.
        """
        self._hvd.reducer.set_passes(passes)
        self._hvd.options = replace(self._hvd.options, backward_passes_per_step=passes)

    @own
    def residual_state_dict(self) -> dict[str, Tensor]:
        """Return what ``Compression.int4_feedback`` has left out of gradients so far, for a checkpoint.

        Collective: call it on all ranks; all get the same, by the names of parameters, in one dimension each.

        Raises:
            GradientsInFlightError: (an AssertionError) gradients are being reduced.
        """
        self._hvd.require_rest("residual_state_dict()")
        return {name: torch.from_numpy(values) for name, values in self._hvd.compensated.left_out().items()}

    @own
    def load_residual_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Add what ``residual_state_dict`` has returned to the next gradients; on all ranks, of which there may be
        another number."""
        self._hvd.require_rest("load_residual_state_dict()")
        self._hvd.compensated.set_left_out({name: values.cpu().numpy() for name, values in state_dict.items()})

    @own
    def _allreduce_grad_async(self, p: Tensor) -> tuple[None, None]:
        """Hand a parameter's gradient over now, whatever the number of backward passes so far.

        Returns:
            None instead of a handle: ``synchronize()`` and ``step()`` of the optimizer wait for it.

        Raises:
            OptimizerCallError: (a ValueError and an AssertionError) not one of ``_requires_update``.
        """
        self._hvd.start(p)
        return None, None


# torch would have its step hooks run around this step as well, and not only around the user's class's step.
DistributedTorchOptimizer.step.hooked = True  # type: ignore[attr-defined]


def wrap(
    frontend: Frontend[Tensor],
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    groups: Groups,
    options: ReductionOptions,
) -> DistributedTorchOptimizer:
    """Make a ``DistributedOptimizer`` on a given Frontend.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, one that is already distributed, or an option that
            cannot be used.
    """
    return distributed(
        optimizer, DistributedTorchOptimizer, lambda: Session(frontend, optimizer, named_parameters, groups, options)
    )


D = TypeVar("D", bound=DistributedTorchOptimizer)


def distributed(optimizer: torch.optim.Optimizer, template: type[D], session: Callable[[], Session]) -> D:
    """Make an instance of a class made from ``template`` and the optimizer's, which shares the optimizer's state.

    Args:
        optimizer: a plain one.
        template: of the result's class, as for ``shell_class``.
        session: makes what is behind it.

    Raises:
        InvalidArgumentError: (a ValueError) not an optimizer, or one that is already distributed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, DistributedTorchOptimizer):
        raise InvalidArgumentError("the optimizer is already distributed; wrap it only once")
    uses_of_a_private_gradient()
    behind = session()
    # Its module is ours: libraries look for "horovod" in the class's text, and do not wrap such an optimizer again.
    kind = shell_class(template, type(optimizer), f"{library_name().lower()}.torch.optimizer")
    made: D = object.__new__(kind)
    made.__dict__ = optimizer.__dict__
    vars(made)["_hvd"] = behind
    return made


def plain_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the user's optimizer, also of a distributed one."""
    return _session_of(optimizer).base if isinstance(optimizer, DistributedTorchOptimizer) else type(optimizer)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def _plain_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the user's optimizer; if only the distributed one is left, another that shares its state."""
    session = _session_of(optimizer)
    plain = session.plain()
    if plain is None:
        plain = object.__new__(session.base)
        plain.__dict__ = optimizer.__dict__
        session.plain = weakref.ref(plain)
    return plain
