"""Keras on torch: hooks hand every gradient to the reducer while the backward pass still runs.

``fit`` gives the optimizer the same gradient objects that the parameters hold. Other objects were changed after the
backward pass (scaled, clipped, masked): if so on any rank, all ranks discard the gradients that the hooks sent, send
the given ones, and use no hooks any more. So gradients are not reduced in place: the program never sees them half
reduced. With accumulation, or a loss scale of the optimizer's own, there are no hooks to begin with.

In an elastic job's next epoch everything starts over, also with hooks that had been given up: newcomers have them.

After a Ctrl-C in a step, other ranks may have made it. So the next step continues the interrupted one, with what it has
sent and received.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import process_set_id
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo._training.labels import agreed_labels
from hvdgloo._training.options import make_reducer, named_groups
from hvdgloo._training.weights import check_late
from hvdgloo.keras._distributed_optimizer import REMEDY, KerasOptions, label_of
from hvdgloo.torch._compilation import uncompiled, uncompiled_methods
from hvdgloo.torch._frontend import FRONTEND
from hvdgloo.torch._weights import checksum_of
from hvdgloo.types import Collective, ReduceOp

Tensor = torch.Tensor

logger = logging.getLogger(__name__)

# How the given gradients relate to those that hooks have sent; the greatest value of any rank counts.
_NOTHING, _SENT, _RENEWED, _CHANGED = range(4)

_owners: weakref.WeakValueDictionary[int, TorchSync] = weakref.WeakValueDictionary()
"""A parameter's id to the TorchSync whose hook it may have: the latest one, by rule and not by the accidents of garbage
collection, which differ between ranks. A TorchSync keeps its parameters, so their ids are theirs while it lives."""


@dataclass
class _Step:
    """Progress of a step under way.

    Attributes:
        asked: the question how gradients relate to what hooks have sent.
        is_settled: the hooks' gradients have arrived.
        received: reduced gradients by name.
        identity: what stands for this step.
    """

    asked: Pending[Tensor] | None = None
    is_settled: bool = False
    received: dict[str, Tensor] = field(default_factory=dict)
    identity: object = field(default_factory=object)


class TorchSync:
    """See ``hvdgloo.keras._distributed_optimizer.Sync``."""

    def __init__(self, options: KerasOptions) -> None:
        self._options = options
        self._reducer = make_reducer(FRONTEND, options, [], options.compression)
        self._shared: list[Any] = []
        self._names: dict[int, str] = {}
        self._begin = ""  # of the names
        self._is_agreed = False  # what they are called in messages
        self._local = {id(variable) for variable in options.local_variables}
        self._hooked: dict[str, Any] = {}
        self._hooks: list[Any] = []
        self._sent: dict[str, tuple[Tensor, int]] = {}  # by hooks: gradients, and their versions at the time
        self.arrived: list[list[Any]] = []
        self._step: _Step | None = None  # begun, and not ended
        self._is_renewed = False  # no step followed the previous backward pass, or it was interrupted
        self._agreeing: list[Pending[Tensor]] = []  # whether to step, while that is asked
        self._label = ""  # of the first gradient
        self._is_compared = False  # ranks' weights, in this job
        self._is_new = True  # no step since the hooks were made
        self._hooks_wanted = False
        self._context: Context | None = None  # of the last step

    @property
    def active(self) -> bool:
        """True if there are other ranks to reduce with; collective when read for the first time."""
        self._follow()
        if not self._ranks():
            return False
        if not self._is_agreed:
            labels = agreed_labels(FRONTEND, self._begin, self._shared, self._options.process_set)
            self._reducer.release(dict(zip(self._names.values(), labels, strict=True)))
            self._label = next(iter(labels), "")
            self._is_agreed = True
        return True

    def track(self, variables: Sequence[Any], *, changes: bool) -> None:
        self._abandon()
        self._unhook()
        self._is_new = True
        for variable in self._shared:
            if _owners.get(id(variable.value)) is self:
                del _owners[id(variable.value)]
        self._shared = [v for v in variables if id(v) not in self._local]
        self._name(label_of(self._shared))
        self._hooks_wanted = not changes
        if not FRONTEND.may_share(self._options.process_set):
            return
        for variable in self._shared:
            owner = _owners.get(id(variable.value))
            if owner is not None and owner is not self:
                owner._lose()
            _owners[id(variable.value)] = self
        self._hook()

    def ready(self, name: str, gradient: Tensor) -> None:
        """Send a gradient that a backward pass has computed; called by a parameter's hook."""
        if not self.active or self._step is not None or self._is_renewed:
            return
        try:
            if self._reducer.is_open(name):
                self._is_renewed = True
                return
            self._sent[name] = gradient, gradient._version
            self._reducer.ready(name, gradient)
        except KeyboardInterrupt:
            self._is_renewed = True
            raise

    def complete(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        if not self.active:
            return results
        hooks_ran = not (self._is_first or self._is_renewed) and self._step is None
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None and id(variable) not in self._local:
                results[index] = zeros = torch.zeros_like(variable.value, requires_grad=False)
                name = self._names.get(id(variable))
                if hooks_ran and name in self._hooked and not self._reducer.is_open(name):
                    self.ready(name, zeros)
        return results

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        try:
            if not self.arrived:
                self.arrived.append(self._reduced(gradients, variables) if self.active else list(gradients))
        except Exception:
            self._drop()
            raise
        self._step, self._is_renewed = None, False
        FRONTEND.end_step()
        return self.arrived[0]

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        places: dict[str, int] = {}
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            name = self._names.get(id(variable))
            if name is not None:
                places[name] = index
            else:
                results[index] = self._options.local(gradient, len(self._ranks()))
        reduced = self._reduce({name: gradients[index] for name, index in places.items()})
        for name, index in places.items():
            results[index] = reduced[name]
        return results

    def agree(self, holds: Any) -> Any:
        if not self.active:
            return holds
        if not self._agreeing:
            known = holds if isinstance(holds, Tensor) else torch.tensor(holds, dtype=torch.bool, device="cpu")
            flag = known.to(torch.uint8).reshape(1)
            least = CollectiveSpec(
                Collective.ALLREDUCE, ReduceOp.MIN, process_set=process_set_id(self._options.process_set)
            )
            held = interrupts.hold()
            try:
                name = f"finite.{next(iter(self._names.values()), 'gradients')}"
                self._agreeing.append(FRONTEND.start(least, [flag], name))
            finally:
                interrupts.release(held)
        try:
            return (self._agreeing[0].result(), self._agreeing.pop())[0][0].bool()[0]
        except Exception:
            self._agreeing.clear()
            raise

    def _reduce(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._step is None:
            self._step = _Step()
        step = self._step
        if self._hooked and not step.is_settled:
            self._receive_from_hooks(step, given)
        self._receive(step, {name: gradient for name, gradient in given.items() if name not in step.received})
        return step.received

    def _receive(self, step: _Step, given: dict[str, Tensor]) -> None:
        """Send gradients, unless they are under way, and wait for them."""
        for name, gradient in given.items():
            if not self._reducer.is_open(name):
                self._reducer.ready(name, gradient.detach())
        failure = self._reducer.rest()
        if failure is None and not self._is_compared and self._shared:
            compared = check_late(
                FRONTEND, self._options.process_set, self._label, REMEDY, self._checksum, step.identity
            )
            self._is_compared = compared
        held = interrupts.hold()
        try:
            step.received.update(self._reducer.wait())
        finally:
            interrupts.release(held)

    def _checksum(self) -> int | None:
        return checksum_of(variable.value for variable in self._shared)

    def _is_as_sent(self, name: str, gradient: Tensor) -> bool:
        tensor, version = self._sent.get(name, (None, 0))
        return tensor is gradient and gradient._version == version

    @property
    def _is_first(self) -> bool:
        """True if no hook can have sent anything for this step."""
        return self._is_new and not self._sent

    def _receive_from_hooks(self, step: _Step, given: dict[str, Tensor]) -> None:
        """Receive what hooks have sent; drop it on all ranks if something else is given to be reduced on any rank.

        Hooks are given up if gradients were changed after a backward pass. They stay if it was another backward pass
        that computed them, or if some hooks are so new that they have sent nothing: the first step makes them.
        """
        if step.asked is None:
            is_first = self._is_first
            if is_first:
                state = _NOTHING
            elif self._is_renewed:
                state = _RENEWED
            else:
                sent = all(self._is_as_sent(name, g) for name, g in given.items() if name in self._hooked)
                state = _SENT if sent else _CHANGED
            most = CollectiveSpec(
                Collective.ALLREDUCE, ReduceOp.MAX, process_set=process_set_id(self._options.process_set)
            )
            mine = torch.tensor([state, is_first], dtype=torch.uint8, device="cpu")
            held = interrupts.hold()
            try:
                step.asked = FRONTEND.start(most, [mine], f"changed.{next(iter(self._hooked))}")
                self._is_new = False
            finally:
                interrupts.release(held)
        greatest, some_are_first = step.asked.result()[0].tolist()
        if greatest != _NOTHING:
            self._send_zeros()
            self._reducer.rest()
        held = interrupts.hold()
        try:
            reduced = self._reducer.wait()
            self._sent.clear()
            step.is_settled = True
            if greatest == _CHANGED:
                logger.info(
                    "gradients have been changed since the backward pass computed them (clipped or scaled by the "
                    "program?): from now on they are sent at each step"
                )
                self._unhook()
            elif greatest == _SENT and not some_are_first:
                step.received.update(reduced)
        finally:
            interrupts.release(held)

    def _send_zeros(self) -> None:
        """Send zeros for parameters that other ranks' backward passes may have reached, and this rank's has not."""
        for name, parameter in self._hooked.items():
            if not self._reducer.is_open(name):
                self._reducer.ready(name, torch.zeros_like(parameter, requires_grad=False))

    def _settle(self) -> dict[str, Tensor]:
        """Return the results of the gradients that hooks have sent."""
        self._send_zeros()
        self._sent.clear()
        return self._reducer.wait()

    def _abandon(self) -> None:
        self._follow()
        if not (self._sent or self._reducer.open):
            return
        try:
            self._settle()
        except Exception:  # noqa: BLE001 - it belonged to a step that has failed and said why
            self._drop()

    def _drop(self) -> None:
        self._sent.clear()
        self._step, self._is_renewed = None, False
        self._agreeing.clear()
        self.arrived.clear()
        try:
            self._reducer.reset()
        except Exception:  # noqa: BLE001 - as above
            pass

    def _follow(self) -> None:
        """Begin in an elastic job's next epoch, if there is one; what was under way has ended with the one before."""
        if FRONTEND.context is self._context:
            return
        if self._context is not None:
            self._drop()
            self._name(self._begin)
            self._is_new = True
            self._is_compared = False
            if not self._hooked:
                self._hook()
        self._context = FRONTEND.context

    def _lose(self) -> None:
        """Leave the hooks to another optimizer, which takes over these parameters; this one sends given gradients."""
        self._abandon()
        self._unhook()
        self._hooks_wanted = False
        # The other's gradients may be under way when this one steps.
        self._name(f"{label_of(self._shared)}.late")

    def _hook(self) -> None:
        if not self._hooks_wanted:
            return
        for variable in self._shared:
            parameter, name = variable.value, self._names[id(variable)]
            if parameter.requires_grad and parameter.is_leaf:
                # The hook must not keep this object alive: the parameter, which holds the hook, may live on without it.
                ready = functools.partial(_ready, weakref.ref(self), name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
                self._hooked[name] = parameter

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], {}

    def _name(self, begin: str) -> None:
        self._begin, self._is_agreed = begin, False
        names = [f"{begin}.{index}" for index in range(len(self._shared))]
        self._names = {id(v): name for v, name in zip(self._shared, names, strict=True)}
        groups = named_groups(self._options.groups, names, self._shared)
        self._reducer = make_reducer(FRONTEND, self._options, groups, self._options.compression)
        self._reducer.hold()

    def _ranks(self) -> tuple[int, ...]:
        return FRONTEND.sharers(self._options.process_set)


# Keras compiles the whole step if jit_compile is set.
uncompiled_methods(TorchSync)


@uncompiled
def _ready(sync: weakref.ref[TorchSync], name: str, parameter: Tensor) -> None:
    alive = sync()
    if alive is not None and parameter.grad is not None:
        alive.ready(name, parameter.grad)


def open_sync(options: KerasOptions) -> TorchSync:
    """Make the object that reduces gradients on this backend."""
    return TorchSync(options)
