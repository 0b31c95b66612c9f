"""LocalSGD and DiLoCo: the user's optimizer stepping on each rank, or each host, alone, and an outer optimizer.

The result is made as ``DistributedOptimizer``'s is, from the user's optimizer class, and shares the state of the user's
optimizer (``_distributed_optimizer``). Its session reduces gradients among the ranks of a host, or not at all; the
rest, which ranks do together every so many steps, is ``hvdgloo._training.outer``.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdgloo._collectives import process_sets
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set
from hvdgloo._job.context import Context
from hvdgloo._training.outer import Outer, OuterOptions
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import InvalidArgumentError, OptimizerCallError
from hvdgloo.torch._distributed_optimizer import DistributedTorchOptimizer, distributed, own
from hvdgloo.torch._parameters import ReductionOptions, parameters_of
from hvdgloo.torch._session import Closure, Session, Tensor
from hvdgloo.torch._weights import checksum_of

logger = logging.getLogger(__name__)

_REMEDY = "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on all ranks before the first step"

_is_trained = operator.attrgetter("requires_grad")

_NARROW = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy with at least 32 bits: in fewer, small changes are lost between two outer steps."""
    return tensor.detach().to(torch.float32 if tensor.dtype in _NARROW else tensor.dtype, copy=True)


class _ModelVariables:
    """The parameters of an optimizer and the buffers of its model, for an ``Outer``.

    Args:
        model: what ``named_parameters`` and ``named_buffers`` are read from. Buffers that no checkpoint has
            (``persistent=False``) are left out: a program computes them.
        parameters: of the optimizer, by name.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._model = model
        self._parameters = parameters
        self._are_trained: list[bool] = []
        self._trained: list[str] = []

    def trained(self) -> Sequence[str]:
        are_trained = list(map(_is_trained, self._parameters.values()))  # in every inner step, so it has to be fast
        if are_trained != self._are_trained:
            self._trained = list(itertools.compress(self._parameters, are_trained))
            self._are_trained = are_trained
        return self._trained

    def averaged(self) -> Sequence[str]:
        return [name for name, buffer in self._buffers() if buffer.is_floating_point()]

    def copied(self) -> Sequence[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._buffers() if not buffer.is_floating_point()]

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer

    def _tensor(self, name: str) -> Tensor:
        found = self._parameters.get(name)
        return self._model.get_buffer(name) if found is None else found

    def describe(self, name: str) -> str:
        tensor = self._tensor(name)
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def value(self, name: str) -> Tensor:
        return _wide(self._tensor(name))

    def nbytes(self, name: str) -> int:
        tensor = self._tensor(name)
        return tensor.numel() * max(4, tensor.element_size())

    def change(self, name: str, before: Tensor, after: Tensor | None = None) -> Tensor:
        now = self._tensor(name).detach() if after is None else after
        change = before - now
        return change if _is_finite(change) else change.masked_fill_(before == now, 0)  # inf - inf

    def assign(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self._tensor(name).copy_(value)

    def adopt(self, name: str, value: Any) -> Tensor:
        own = self._tensor(name)
        if not isinstance(value, Tensor) or value.shape != own.shape:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidArgumentError(
                f"the outer state's {name} is {found}, but this model's has the shape {list(own.shape)}; load the "
                "outer_state_dict() of the same model"
            )
        return _wide(value.to(own.device, torch.float32 if own.dtype in _NARROW else own.dtype))

    def is_finite(self, values: Sequence[Tensor]) -> bool:
        return all(_is_finite(value) for value in values)

    def norm(self, values: Sequence[Tensor]) -> float:
        return math.sqrt(sum(float(value.double().square().sum()) for value in values))

    def checksum(self) -> int | None:
        return checksum_of(self._parameters[name] for name in self.trained())


def _is_finite(value: Tensor) -> bool:
    # A sum reads each element once. Finite elements may add up to an infinity, but never the other way round.
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


class _HostRanks(ProcessSet):
    """The ranks on this process's host, in whichever job; registered by ``form`` in each."""

    def __init__(self) -> None:
        super().__init__([0])

    def form(self, context: Context) -> None:
        """Register the sets of all hosts with several ranks; collective over all ranks of the job."""
        hosts: dict[int, list[int]] = {}
        for worker in context.topology.workers if context.plan is None else ():
            hosts.setdefault(worker.host, []).append(worker.rank)
        self._ranks, self._number, self._context = (context.rank,), 0, context
        for ranks in map(tuple, hosts.values()):
            number = None
            if len(ranks) > 1:
                known = {members: number for number, members in context.engine.process_sets.items()}
                number = known.get(ranks)
                if number is None:
                    number = process_sets.add(context, ranks).process_set_id
            if context.rank in ranks:
                self._ranks, self._number = ranks, number or 0

    @property
    def is_shared(self) -> bool:
        """True if there are other ranks on this host."""
        return len(self.ranks) > 1


class LocalSession(Session):
    """The steps behind one ``LocalSGD`` or ``DiLoCo``.

    Attributes:
        outer: the outer optimizer.
        model: the user's.
    """

    def __init__(
        self,
        frontend: Frontend[Tensor],
        plain: torch.optim.Optimizer,
        model: torch.nn.Module,
        inner: str,
        options: OuterOptions,
    ) -> None:
        self.model = model
        self._host = _HostRanks() if inner == "host" else None
        named = _names(model, parameters_of(plain))
        if self._host is not None:
            self._host.form(frontend.context)
        super().__init__(frontend, plain, named, None, ReductionOptions(process_set=self._host or options.process_set))
        variables = _ModelVariables(model, self.parameters.all)
        self.outer = Outer(frontend, variables, options, inner=inner, remedy=_REMEDY)
        self._counted = False  # the next step() has been counted when a GradScaler read its gradients
        self._warned = False

    @property
    def compensated(self) -> GradientReducer[Tensor]:
        return self.outer.changes

    def _enter(self, context: Context) -> None:
        if self._host is not None and self._host._context is not context:
            self._host.form(context)
        super()._enter(context)

    def _is_shared(self) -> bool:
        return self._host is not None and self._host.is_shared

    def _may_be_shared(self) -> bool:
        return self._host is not None

    def job_ended(self) -> None:
        super().job_ended()
        context = self._context
        if context is not None and not context.config.elastic and context.rank == 0:
            self.warn_between("the job has ended")

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        raise OptimizerCallError(
            "parameters cannot be added to an optimizer of hvd.LocalSGD or hvd.DiLoCo: call finish() on all ranks, add "
            "them to the plain optimizer, and make another one"
        )

    def forget(self) -> None:
        super().forget()
        self._counted = False

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the iteration here: a GradScaler may skip this rank's step, and the other ranks do not hear of it."""
        super().unscaling(optimizer)
        outer = self.outer
        outer.begin()
        outer.count()
        self._counted = True
        # Where the step is skipped there is no call after which to make an outer step, and nothing to wait for.
        if (
            outer.due
            and not getattr(optimizer, "_step_supports_amp_scaling", False)
            and not _finite(self.parameters.all)
        ):
            outer.sync()

    def _step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        if closure is not None:
            raise OptimizerCallError(
                "hvd.LocalSGD and hvd.DiLoCo count the evaluations of no closure, since ranks may need different "
                "numbers; call step() without one, or use hvd.DistributedOptimizer"
            )
        outer = self.outer
        if not self._counted:  # otherwise an outer step may be due, but after this inner one
            outer.begin()
        result = super()._step(optimizer, None)
        if not self._counted:
            outer.count()
        self._counted = False
        if outer.due:
            outer.sync()
        return result

    def finish(self) -> None:
        self.outer.begin()
        self.outer.finish()

    def warn_between(self, what: str) -> None:
        """Warn that the ranks' parameters differ, once."""
        steps = self.outer.between
        if steps and not self._warned:
            self._warned = True
            logger.warning(
                "%s %d step%s after the last outer step, so each rank has parameters of its own; call "
                "optimizer.finish() on all ranks before you evaluate or save the model, and at the end",
                what,
                steps,
                "" if steps == 1 else "s",
            )


def _names(model: torch.nn.Module, parameters: Iterator[Tensor]) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters with their names in the model.

    Raises:
        InvalidArgumentError: one is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = list(parameters)
    foreign = [parameter for parameter in given if id(parameter) not in names]
    if foreign:
        raise InvalidArgumentError(
            f"{len(foreign)} of the optimizer's parameters (the first of shape {list(foreign[0].shape)}) are not the "
            "model's; pass the module that has all of them (torch.nn.ModuleList([...]) makes one of several)"
        )
    return [(names[id(parameter)], parameter) for parameter in given]


def _finite(parameters: Mapping[str, Tensor]) -> bool:
    """Tell whether all gradients are finite, as a GradScaler does."""
    for parameter in parameters.values():
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not bool(torch.isfinite(values).all()):
                return False
    return True


class LocalTorchOptimizer(DistributedTorchOptimizer):
    """Base of the results of ``LocalSGD`` and ``DiLoCo``: their classes are made from the user's optimizer class and
    this one."""

    _hvd: LocalSession

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedTorchOptimizer:
        raise OptimizerCallError(
            "an optimizer of hvd.LocalSGD or hvd.DiLoCo belongs to its model and cannot be copied; copy the plain "
            "optimizer together with the model, and make another one"
        )

    @own
    def finish(self) -> None:
        """Make an outer step now, if there was an inner step since the last one: afterwards all ranks have the same
        parameters and buffers. Collective; call it before evaluating or saving the model, and at the end.

        Raises:
            HorovodInternalError: the exchange failed.
        """
        self._hvd.finish()

    @own
    def outer_state_dict(self) -> dict[str, Any]:
        """Return what the outer optimizer needs to go on: the anchor, the momentum, and how many steps there were.

        For a checkpoint, beside the model's and the optimizer's ``state_dict()``. After ``finish()`` one rank's serves
        all ranks; between two outer steps, each rank needs the checkpoint that it has written itself.
        """
        self._hvd.warn_between("an outer state is saved")
        return self._hvd.outer.state()

    @own
    def load_outer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Return to what ``outer_state_dict`` has returned; on all ranks.

        Raises:
            InvalidArgumentError: (a ValueError) it is another model's; nothing has changed.
        """
        self._hvd.outer.load(state_dict)

    @own
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept 1 only: gradients add up over as many backward passes as run before ``step()``.

        Raises:
            InvalidArgumentError: (a ValueError) another number.
        """
        refuse_passes(passes)


def refuse_passes(passes: int) -> None:
    """Check ``backward_passes_per_step``.

    Raises:
        InvalidArgumentError: it is not 1.
    """
    if passes != 1:
        raise InvalidArgumentError(
            f"backward_passes_per_step={passes!r} is not for hvd.LocalSGD and hvd.DiLoCo: gradients add up over as "
            "many backward passes as run before step(); leave it out"
        )


def wrap_local(
    frontend: Frontend[Tensor],
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    inner: str,
    options: OuterOptions,
) -> LocalTorchOptimizer:
    """Make a ``LocalSGD`` or ``DiLoCo`` on a given Frontend.

    Raises:
        InvalidArgumentError: (a ValueError) not a plain optimizer, not its model, or an option that cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"the second argument must be the model, a torch.nn.Module, not {type(model).__name__}"
        )
    if inner not in ("rank", "host"):
        raise InvalidArgumentError(
            f"inner must be 'rank' (each rank steps on its own gradients) or 'host' (the ranks of a host share them), "
            f"not {inner!r}"
        )
    if inner == "host" and options.process_set is not global_process_set:
        raise InvalidArgumentError("inner='host' is for all ranks; leave process_set out, or choose inner='rank'")
    make = functools.partial(LocalSession, frontend, optimizer, model, inner, options)
    return distributed(optimizer, LocalTorchOptimizer, make)
