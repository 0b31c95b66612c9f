"""The progress of an elastic training with torch: models, optimizers, samplers and whatever else it consists of."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeGuard

import torch

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._training.outer import Outer
from hvdgloo.config import Config
from hvdgloo.elastic._values import copied, digest
from hvdgloo.elastic.state import ObjectState
from hvdgloo.torch import _state as broadcasting
from hvdgloo.torch._compilation import uncompiled_methods
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, plain_class
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.torch._local import LocalTorchOptimizer
from hvdgloo.torch.elastic import _steps
from hvdgloo.torch.elastic._behind import Behind
from hvdgloo.torch.elastic._copies import Copies, Saved, filled, taken_apart
from hvdgloo.torch.elastic.sampler import ElasticSampler

__all__ = [
    "LocalOptimizerStateHandler",
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

Tensor = torch.Tensor

logger = logging.getLogger(__name__)


class StateHandler:
    """Way to save one value of a ``TorchState``, restore it, and send it to other workers.

    Args:
        value: the value.
    """

    frontend: Frontend[Tensor] = FRONTEND

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Take another value in its place, and save it."""
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers the state of rank 0's value, and save it; collective."""
        raise NotImplementedError


class _Handler(StateHandler):
    """A handler whose saving is in two parts, so that all of a state's values change what is restored at once."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.adopt(self.take())

    def sync(self) -> None:
        self.receive(0)
        self.save()

    def take(self, *, later: bool = False) -> Any:
        """Copy the value's state. What was saved before stays as it is.

        Args:
            later: prepare that, but do not copy tensors that only optimizers' steps write.
        """
        raise NotImplementedError

    def adopt(self, saved: Any) -> None:
        """Make what ``take`` returned that which ``restore`` returns to."""
        raise NotImplementedError

    def receive(self, root: int) -> None:
        """Take the state of one rank's value; collective."""
        raise NotImplementedError

    def keep(self) -> None:
        """Do what is left of ``receive`` where all workers have the same state: nothing, in general."""

    def fingerprint(self) -> str:
        """A text that differs between workers unless their values have the state that each saved last, or have changed
        in the same way since."""
        raise NotImplementedError


class _TensorHandler(_Handler):
    """A handler of a value whose state dict is mostly tensors."""

    _copies: Copies

    def take(self, *, later: bool = False) -> Saved:
        return self._copies.take(self._state(), later=later)

    def adopt(self, saved: Saved) -> None:
        self._copies.adopt(saved)

    def _state(self) -> Mapping[str, Any]:
        raise NotImplementedError


class ModelStateHandler(_TensorHandler):
    """A module, by its ``state_dict()``."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Batch normalisation's statistics, for example, are written in each forward pass.
        self._copies = Copies(lambda tensor: isinstance(tensor, torch.nn.Parameter), _stepped_parameters)
        super().__init__(model)

    def restore(self) -> None:
        """Return to what was saved last; parameters that have not changed since are not written."""
        if self._copies.put_back(self._state()) is None:
            self.value.load_state_dict(self._copies.saved.structure())

    def receive(self, root: int) -> None:
        broadcasting.broadcast_parameters(self.frontend, self.value.state_dict(), root)

    def fingerprint(self) -> str:
        return "" if self._copies.is_unchanged(self._state()) else _like_no_other()

    def _state(self) -> Mapping[str, Any]:
        # The parameters themselves, instead of an alias of each, which would take longer than all the rest.
        own = type(self.value).state_dict is torch.nn.Module.state_dict
        state: Mapping[str, Any] = self.value.state_dict(keep_vars=True) if own else self.value.state_dict()
        return state


def _stepped_parameters(tensors: Sequence[Tensor], since: int) -> Collection[int]:
    written = _steps.written(since)
    return {i for i, tensor in enumerate(tensors) if tensor.data_ptr() in written} if written else ()


class OptimizerStateHandler(_TensorHandler):
    """An optimizer, plain or distributed, by its ``state_dict()``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._copies = Copies(lambda _: True, self._stepped)
        super().__init__(optimizer)

    def _stepped(self, tensors: Sequence[Tensor], since: int) -> Collection[int]:
        return range(len(tensors)) if _steps.has_stepped(self.value, since) else ()

    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.value.state_dict()
        return state

    def restore(self) -> None:
        """Return to what was saved last, and clear the gradients: they may be a part of a step that has failed."""
        optimizer: torch.optim.Optimizer = self.value
        saved = self._copies.put_back(optimizer.state_dict()) if _is_torchs(optimizer) else None
        if saved is None or saved["state"].keys() != optimizer.state_dict()["state"].keys():
            optimizer.load_state_dict(self._copies.saved.structure())
        else:
            for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in values.items() if key != "params"})
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, values in saved["state"].items():
                optimizer.state[parameters[index]].update(values)
        if isinstance(optimizer, DistributedTorchOptimizer):
            optimizer._hvd.forget()
        optimizer.zero_grad()

    def receive(self, root: int) -> None:
        # What has no state on the root gets none here: training goes on as the root's would.
        broadcasting.broadcast_optimizer_state(self.frontend, self.value, root, initialise=False)

    def fingerprint(self) -> str:
        state = self.value.state_dict()
        if not self._copies.is_unchanged(state):
            return _like_no_other()
        skeleton, _, tensors = taken_apart(state)
        return digest(filled(skeleton, range(len(tensors))))


class LocalOptimizerStateHandler(OptimizerStateHandler):
    """An optimizer made by ``LocalSGD`` or ``DiLoCo``: its own state, which differs between workers, and the outer
    optimizer's, which all of them have in common."""

    def take(self, *, later: bool = False) -> Any:
        return super().take(), self._outer.state()

    def adopt(self, saved: Any) -> None:
        own, self._saved_outer = saved
        super().adopt(own)

    def restore(self) -> None:
        """Return to what was saved last, and clear the gradients."""
        super().restore()
        self._outer.restore(self._saved_outer)

    def receive(self, root: int) -> None:
        super().receive(root)
        self._outer.receive(root)

    def fingerprint(self) -> str:
        if not self._outer.is_unchanged(self._saved_outer):
            return _like_no_other()
        return digest([super().fingerprint(), self._outer.counters()])

    @property
    def may_be_saved(self) -> bool:
        """True if a round has just ended, so that workers may come and go."""
        return self._outer.is_at_end_of_round

    @property
    def precedes_outer_step(self) -> bool:
        """True if the next inner step is followed by an outer one, which may fail."""
        return self._outer.precedes_outer_step

    @property
    def _outer(self) -> Outer[Tensor]:
        outer: Outer[Tensor] = self.value._hvd.outer
        return outer


@contextmanager
def _own_moments(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer keep what it knows about its parameters, such as moments, whatever it receives meanwhile."""
    own = {
        parameter: {key: value.clone() for key, value in values.items() if isinstance(value, Tensor)}
        for parameter, values in optimizer.state.items()
    }
    yield
    for parameter, values in own.items():
        for key, value in values.items():
            optimizer.state[parameter][key].copy_(value)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer's state dict holds the tensors that it works with, and nothing changes loaded ones."""
    plain, torchs = plain_class(optimizer), torch.optim.Optimizer
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (
        plain.state_dict is torchs.state_dict
        and plain.load_state_dict is torchs.load_state_dict
        and not any(vars(optimizer).get(f"_optimizer_{name}_hooks") for name in hooks)
    )


class _StateDictHandler(_Handler):
    """Any value with ``state_dict()`` and ``load_state_dict()``: a learning rate's schedule, a GradScaler."""

    def take(self, *, later: bool = False) -> Any:
        return copied({"state": self.value.state_dict()})

    def adopt(self, saved: Any) -> None:
        self._saved = saved

    def restore(self) -> None:
        self.value.load_state_dict(copied(self._saved)["state"])

    def receive(self, root: int) -> None:
        self.value.load_state_dict(self.frontend.broadcast_object(self.value.state_dict(), root))

    def fingerprint(self) -> str:
        return digest(self.value.state_dict())


class SamplerStateHandler(_StateDictHandler):
    """An ``ElasticSampler``: what is left of the epoch is divided among the workers that there are."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler)

    def keep(self) -> None:
        self.value.load_state_dict(self.value.state_dict())


def _like_no_other() -> str:
    return os.urandom(16).hex()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (LocalTorchOptimizer, LocalOptimizerStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of a type and the handler of its values; the first that fits is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the registry, for states that are made from now on."""
    global _registry
    _registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    has_state = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return _StateDictHandler(value) if has_state and not isinstance(value, type) else None


class TorchState(ObjectState):
    """The progress of a training with torch.

    Args:
        model, optimizer: saved, restored and sent by their state dicts.
        overlap: copy parameters and optimizers' state while the next forward and backward pass run; the next step waits
            for it. By default as HVDGLOO_ELASTIC_OVERLAP says: no. Nothing else than optimizers' steps may write into
            them meanwhile; if something does, that commit is dropped, with a warning. A GPU's are copied into
            page-locked memory of the host.
        kwargs: further attributes. An ``ElasticSampler``, and whatever has ``state_dict()`` and ``load_state_dict()``,
            is treated likewise; the rest are plain objects, as in ``ObjectState``.

    With ``hvd.LocalSGD`` or ``hvd.DiLoCo``, call ``commit()`` after every step. Between two outer steps each worker has
    parameters of its own: there ``check_host_updates()`` does nothing, and ``commit()`` only saves just before an outer
    step, which may fail.

    A commit copies tensors into memory that is kept, twice their size, and only those that have changed. A value that
    is assigned to an attribute later (``state.model = another``) replaces the former one, and is saved at once.
    """

    _handlers: dict[str, StateHandler]
    _behind: Behind | None
    _is_torn = False

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        overlap: bool | None = None,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: _handler_of(value) for name, value in values.items()}
        handlers = {name: handler for name, handler in found.items() if handler is not None}
        vars(self).update({name: handler.value for name, handler in handlers.items()}, _handlers=handlers)
        plain = {name: value for name, value in values.items() if name not in handlers}
        self._behind = None
        self._overlap = Config.from_env().elastic_overlap if overlap is None else overlap
        super().__init__(FRONTEND.broadcast_object, FRONTEND.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self._handlers.get(name)
        if handler is not None:
            self._settle()
            handler.set_value(value)

    def commit(self) -> None:
        """Save, so that nothing before is lost to a failure, and check for updates; collective.

        Raises:
            HostsUpdatedInterrupt: hosts are coming or going; ``elastic.run`` deals with it.
        """
        if self._may_be_saved:
            super().commit()
        elif all(each.precedes_outer_step for each in self._local_handlers):
            # If the outer step fails, it is repeated without the lost workers, by workers with parameters of their own.
            self.save()

    def check_host_updates(self) -> None:
        """Let the job's workers change here if hosts are coming or going; collective, and cheap.

        Raises:
            HostsUpdatedInterrupt: hosts are coming or going; ``elastic.run`` deals with it.
        """
        if self._may_be_saved:
            super().check_host_updates()

    @property
    def _may_be_saved(self) -> bool:
        """False between two outer steps, when each worker has parameters of its own: there is no state of the job."""
        return all(handler.may_be_saved for handler in self._local_handlers)

    @property
    def _local_handlers(self) -> list[LocalOptimizerStateHandler]:
        return [each for each in self._handlers.values() if isinstance(each, LocalOptimizerStateHandler)]

    def save(self) -> None:
        """Keep copies of everything; if that is interrupted, the previous copies are still there."""
        if self._behind is not None:
            self._behind.wait()
        was_torn, self._is_torn = self._is_torn, False
        # The first save, and one that others have already counted on, are there at once.
        later = self._overlap and not was_torn and self._progress.serial >= 0 and self._progress.newest is None
        taken: list[tuple[_Handler, Any]] = []
        for handler in self._handlers.values():
            if _saves_in_parts(handler):
                taken.append((handler, handler.take(later=later)))
            else:
                handler.save()
        plain = copied(self._live())
        unfinished = [saved for _, saved in taken if isinstance(saved, Saved) and saved.later]

        def adopt() -> None:
            for handler, saved in taken:
                handler.adopt(saved)
            self._saved_state = plain

        def end(is_whole: bool) -> None:
            if is_whole:
                adopt()
                return
            self._progress.serial -= 1
            self._is_torn = True
            logger.warning(
                "something other than an optimizer's step has written into the state while a commit was copied, so "
                "that commit is dropped; the next one is copied at once. Such a program is better off without overlap"
            )

        if unfinished:
            self._behind = Behind(unfinished, end)
        else:
            self._behind = None
            adopt()

    def _settle(self) -> None:
        """Wait until the last save can be read."""
        if self._behind is not None:
            self._behind.settle()
            self._behind = None

    def restore(self) -> None:
        """Return to what was saved last. What has not changed since is not written."""
        self._settle()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all workers the state of one, and save it; collective."""
        self._settle()
        for handler in self._handlers.values():
            if not _receives(handler):
                handler.sync()
            elif self._progress.unchanged:
                handler.keep()
            else:
                keeps = self._progress.is_newest and isinstance(handler, LocalOptimizerStateHandler)
                with _own_moments(handler.value) if keeps else nullcontext():
                    handler.receive(self._progress.root)
        super().sync()

    def _digest(self) -> str:
        self._settle()
        return super()._digest()

    def _fingerprint(self) -> str:
        self._settle()
        known = [handler.fingerprint() for handler in self._handlers.values() if _receives(handler)]
        return digest([super()._fingerprint(), *known])


uncompiled_methods(TorchState)


def _saves_in_parts(handler: StateHandler) -> TypeGuard[_Handler]:
    """Tell whether a handler is one of ours, and not of a subclass that saves in a way of its own."""
    return isinstance(handler, _Handler) and type(handler).save is _Handler.save


def _receives(handler: StateHandler) -> TypeGuard[_Handler]:
    return isinstance(handler, _Handler) and type(handler).sync is _Handler.sync
