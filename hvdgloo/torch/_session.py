"""The distributed part of a torch optimizer: its parameters' names and hooks, the reducer, and the step.

A step: every parameter's hook fires as its gradient is complete and hands it to the reducer, whose transfers overlap
with the rest of the backward pass; ``step()`` waits for them and lets the user's class step.

A session outlives the job that it was made in: an elastic job's next epoch is another Context, with other ranks, of
which some have made their optimizers today and others long ago. So whatever ranks have to agree about (names, kinds,
buckets, the order of parameters) is worked out again in each Context, and from nothing but what is the same on all of
them: the parameters, and the order in which the program calls ``step()`` of its optimizers.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.checkpoint

from hvdgloo._backends import gpu
from hvdgloo._collectives.compression import is_elementwise
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import process_set_id
from hvdgloo._collectives.spec import reduction
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo._training.options import Groups
from hvdgloo._training.reducer import GradientReducer
from hvdgloo._training.weights import all_equal, start_gathering, to_send, warn
from hvdgloo.errors import (
    GradientsInFlightError,
    HorovodInternalError,
    InvalidArgumentError,
    NotInitializedError,
    OptimizerCallError,
)
from hvdgloo.torch import _sparse as sparse
from hvdgloo.torch._adapter import overlaps_itself
from hvdgloo.torch._buckets import Buckets, agree, plan, suits
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._others import refuse_reduced_by_others
from hvdgloo.torch._parameters import (
    NamedParameters,
    ReductionOptions,
    groups_of,
    names_of,
    parameters_of,
    refuse_unsendable,
)
from hvdgloo.torch._weights import checksum_of
from hvdgloo.types import ReduceOp

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
Closure = Callable[[], Any]
T = TypeVar("T")

_REMEDY = "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on all ranks before the first step"

_owners: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
"""A parameter's id to the Session that reduces its gradient: the latest one, by rule and not by the accidents of
garbage collection, which differ between ranks. A Session keeps its parameters, so their ids are theirs while it lives.
Nothing refers weakly to a parameter: torch could not swap its content, as loading and converting a model may."""


class _Gradients(enum.Enum):
    """State of the gradients that the next step will use."""

    LOCAL = "not reduced yet, or in flight"
    REDUCED = "reduced on the way, for a GradScaler"
    SYNCHRONIZED = "reduced because the user asked for it"
    ARRIVED = "reduced, and not used yet: an interrupted step goes on from here"


class _Kind(enum.IntEnum):
    """Form in which a parameter's gradient travels; the greatest value of any rank holds for all."""

    NONE = 0  # no gradient so far
    SPARSE = 1
    DENSE = 2


@dataclass
class _Stepped:
    """The changes that an Adasum optimizer's step has made, and their reductions.

    Attributes:
        before: the parameters as they were.
        result: the return value of the user's step.
        pending: the changes' reductions, and how to undo their compression; None before they have started.
    """

    before: dict[str, Tensor]
    result: Any
    pending: dict[str, tuple[Pending[Tensor], Any]] | None = None


def _kind_of(parameter: Tensor, options: ReductionOptions) -> _Kind:
    if parameter.grad is None:
        return _Kind.NONE
    return _Kind.SPARSE if parameter.grad.is_sparse and not options.sparse_as_dense else _Kind.DENSE


class Session:
    """The parameters' names, hooks and reducer behind one distributed optimizer.

    Attributes:
        base: the class of the user's optimizer.
        plain: the user's optimizer, if it still exists.
        replaced: methods that were assigned to the distributed optimizer, by name.
        param_groups: the user's class's descriptor (a property) for it, if it has one.
    """

    def __init__(
        self,
        frontend: Frontend[Tensor],
        plain: torch.optim.Optimizer,
        named_parameters: NamedParameters | None,
        groups: Groups,
        options: ReductionOptions,
    ) -> None:
        self.frontend = frontend
        self.base = type(plain)
        self.plain = weakref.ref(plain)
        # What replaces the plain optimizer's own step (a scheduler, to count steps) needs it, and may not keep it.
        self._kept = plain if "step" in vars(plain) else None
        self.replaced: dict[str, Any] = {}
        self.param_groups: Any = inspect.getattr_static(self.base, "param_groups", None)
        self.options = options
        self.skipping = False
        self.adaptive = options.op == ReduceOp.ADASUM
        if self.adaptive and options.gradient_predivide_factor != 1.0:
            raise InvalidArgumentError("gradient_predivide_factor divides an average, so it needs op=Average")
        self._gradients = _Gradients.LOCAL
        parameters = list(parameters_of(plain))
        self.user_names = names_of(plain, named_parameters)
        self._parameters = {self.user_names[id(p)]: p for p in parameters}
        refuse_unsendable(self._parameters.items())
        if frontend.may_share(options.process_set):
            refuse_reduced_by_others(self._parameters.items())
        self.groups = groups_of(groups, [p for p in parameters if p.requires_grad], {id(p) for p in parameters})
        grouped = [[self.user_names[id(p)] for p in group] for group in self.groups]
        self._grouped = {name for group in grouped for name in group}
        self.reducer = GradientReducer(
            frontend,
            op=None if self.adaptive else options.op,
            compression=options.compression,
            predivide_factor=options.gradient_predivide_factor,
            passes=options.backward_passes_per_step,
            groups=grouped,
            process_set=options.process_set,
            gathered=self._gathered,
        )
        # On which gradients of this step were computed.
        self._streams: dict[Hashable, tuple[torch.device, gpu.Stream]] = {}
        self._tracked: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._contents: dict[str, int] = {}  # of parameters with hooks: which of torch's own objects is inside
        self._lost: set[str] = set()
        self._first_order: dict[str, None] | None = {}  # as gradients became ready; None once there are buckets
        self._buckets: Buckets | None = None
        self._sparse: dict[str, Callable[[], Tensor]] = {}  # gradients under way, to what waits for them
        self._leaving: list[Pending[Tensor]] = []  # what is sent in place of buckets that are given up
        self._asked: dict[str, Callable[[], Any]] = {}  # what is being agreed upon, to what waits for the answer
        self._stepped: _Stepped | None = None  # with op=Adasum: what is being combined
        self._broken_off = False  # the last step(), synchronize() or the like raised
        self._kinds: dict[str, _Kind] = {}
        self._asked_about: list[str] = []  # names in the last question about kinds
        self._is_new = True  # no step in this Context so far
        self._differs = False  # the ranks' weights were found to differ, and no warning was logged yet
        self._labels: dict[str, str] | None = None  # gradients' names in this Context's messages
        self._active = False
        self._context: Context | None = None
        self._enter(frontend.context)
        if not frontend.context.config.elastic:
            # No rank joins later: names are as in a job where optimizers are used in the order in which they were made.
            self._agree_on_names()

    # The job

    @property
    def active(self) -> bool:
        """True if there are other ranks to reduce with."""
        self._follow()
        return self._active

    def _follow(self) -> None:
        """Go over to the next job, if the one that this session was in has ended and there is another."""
        try:
            context = self.frontend.context
        except NotInitializedError:
            return  # trains alone, or hears of it from its next collective
        if context is not self._context:
            self._enter(context)

    def _enter(self, context: Context) -> None:
        active = self.frontend.is_shared(self.options.process_set)
        self._drop()
        self._context, self._active = context, active
        context.tell_of_end(self)
        self._labels = None
        self.reducer.hold()
        # A lone rank may be joined by others, while a backward pass runs or the next is about to.
        if active or context.config.elastic:
            self._track_all()

    def job_ended(self) -> None:
        """Keep an unfinished step's gradients out of the next Context, on all ranks, now that this one is closed.

        In an elastic job that includes what earlier backward passes have added up: newcomers have nothing of it, and
        after a failure it may be half reduced.
        """
        self._drop()
        if self._context is not None and self._context.config.elastic:
            for parameter in self._parameters.values():
                parameter.grad = None

    def _drop(self) -> None:
        """Forget what is under way, and all that ranks have agreed about."""
        self.reducer.reset()
        self.reducer.part()
        self._buckets = None
        self._first_order = {}
        self._kinds.clear()
        self._is_new, self._differs = True, False
        self._sparse.clear()
        self._asked.clear()
        self._leaving = []
        self._stepped = None
        self._broken_off = False
        self._streams.clear()
        self._gradients = _Gradients.LOCAL

    def _agree_on_names(self) -> None:
        """Agree on names in the first step in this Context: all ranks step in the same order, whenever they made their
        optimizers.

        Ranks outside the process set do it, too: their other optimizers may have names in common with this one.
        """
        if self._labels is not None or self._context is None or self._context.closed:
            return
        self._track_unfrozen()
        if not self.adaptive:
            # In the order of parameters, and not of the times at which this rank has frozen and unfrozen them.
            for name in [name for name, parameter in self._tracked.items() if not parameter.requires_grad]:
                self._untrack(name)
            self._tracked = {name: self._tracked[name] for name in self._parameters if name in self._tracked}
        held = interrupts.hold()
        try:
            self._labels = dict(zip(self._parameters, self.frontend.reserve_names(list(self._parameters)), strict=True))
            self.reducer.release(self._labels)
        finally:
            interrupts.release(held)

    # Parameters and hooks

    def _track_all(self) -> None:
        for name, parameter in self._parameters.items():
            if name in self._tracked or name in self._lost:
                continue
            if self.adaptive:
                self._tracked[name] = parameter
            elif parameter.requires_grad:
                self._frozen.pop(name, None)
                self._track(name, parameter)
            else:
                self._frozen[name] = parameter

    def _untrack(self, name: str) -> None:
        self._frozen[name] = self._tracked.pop(name)
        hook = self._hooks.pop(name, None)
        if hook is not None:
            hook.remove()

    def _track(self, name: str, parameter: Tensor) -> None:
        session = _owners.get(id(parameter))
        if session is not None:
            session._lose(name_in_session=session.user_names[id(parameter)])
        _owners[id(parameter)] = self
        self._tracked[name] = parameter
        # The hook must not keep the session alive: the parameter, which holds the hook, may live on without it.
        computed = functools.partial(_computed, weakref.ref(self), name)
        self._hooks[name] = parameter.register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]
        self._contents[name] = parameter._cdata

    def _keep_hook(self, name: str, parameter: Tensor) -> bool:
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

    def _lose(self, name_in_session: str) -> None:
        hook = self._hooks.pop(name_in_session, None)
        if hook is not None:
            hook.remove()
            self._lost.add(name_in_session)

    def _track_unfrozen(self) -> None:
        for name, parameter in list(self._frozen.items()):
            if parameter.requires_grad:
                del self._frozen[name]
                self._track(name, parameter)

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        index = len(optimizer.param_groups)
        given = group.get("params")
        if isinstance(given, (list, tuple)):  # torch says what else it may be, and takes one tensor as well
            refuse_unsendable((f"noname.{index}.{i}", p) for i, p in enumerate(given) if isinstance(p, Tensor))
        self.base.add_param_group(optimizer, group)
        added = list(optimizer.param_groups[index]["params"])
        names = [f"noname.{index}.{i}" for i in range(len(added))]
        self.user_names.update((id(p), name) for p, name in zip(added, names, strict=True))
        self._parameters.update(zip(names, added, strict=True))
        self._follow()
        if self._labels is not None:
            self._labels.update(zip(names, self.frontend.reserve_names(names), strict=True))
        if self._tracked or self._frozen:
            self._track_all()

    # Gradients

    def computed(self, name: str, parameter: Tensor) -> None:
        """Hand over a parameter's gradient, which is complete in this backward pass."""
        if not self.active:
            return
        self._gradients = _Gradients.LOCAL
        if self._first_order is not None:
            self._first_order[name] = None
        kind = self._kinds.get(name)
        if kind is None:
            kind = _kind_of(parameter, self.options)
        if kind is _Kind.DENSE:
            device = gpu.of(parameter)
            if device is not None:
                key = gpu.current_key(device)
                if key not in self._streams:
                    self._streams[key] = device, gpu.current(device)
            gradient = parameter.grad if self._buckets is None else None
            if gradient is None or gradient.is_sparse or not gradient.is_contiguous():
                gradient = self._dense_gradient(name, parameter)
            if self._leaving:
                return  # ``step()`` sends it
            try:
                self.reducer.ready(name, gradient)
            except GradientsInFlightError as error:
                raise _naming_checkpoints(error, name) from None
        # Sparse ones are gathered when all passes have added to them.

    def _gathered(self) -> None:
        """Have this stream wait for the others on which gradients were computed that are sent together."""
        for device, stream in self._streams.values():
            gpu.wait_for(stream, device)

    def _dense_gradient(self, name: str, parameter: Tensor) -> Tensor:
        buckets = self._buckets
        if buckets is not None and name in buckets and not self.reducer.is_open(name):
            if buckets.suit(name, parameter):
                return buckets.adopt(name, parameter)
            self._leave_buckets()
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                parameter.grad = gradient
        elif gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
        elif overlaps_itself(gradient):  # it was expanded, say, and nothing can be written into it
            gradient = parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        return gradient

    def _start_sparse(self, name: str, parameter: Tensor) -> None:
        if name in self._grouped:
            raise InvalidArgumentError(
                f"the gradient of {name} is sparse, and cannot be in a group with others; leave it out of groups=, or "
                "use sparse_as_dense=True"
            )
        gradient = parameter.grad
        if gradient is None:
            gradient = sparse.empty_like(parameter)
        elif not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        op = ReduceOp.AVERAGE if self.options.op is None else self.options.op
        label, process_set = self._label(name), self.options.process_set
        held = interrupts.hold()
        try:
            self._sparse[name] = sparse.start_sparse_allreduce(self.frontend, gradient, label, op, process_set)
        finally:
            interrupts.release(held)

    def _label(self, name: str) -> str:
        """Return a gradient's name in messages, which is known since this Context's first step began."""
        return name if self._labels is None else self._labels[name]

    def _learn_kinds(self) -> None:
        """Agree on how gradients travel that no rank has had so far: a rank that lacks one cannot know.

        A gradient that is dense on some rank is sent as dense by all from then on: that rank may already have sent it.
        """
        unknown = {name: p for name, p in self._tracked.items() if name not in self._kinds}
        if self.options.sparse_as_dense or self.adaptive:
            self._kinds.update(dict.fromkeys(unknown, _Kind.DENSE))
            unknown = {}
        if not (unknown or self._is_new or "kinds" in self._asked):
            return
        is_new, own = self._is_new, None
        if is_new and self.frontend.context.config.check_weights:
            own = checksum_of(self._parameters.values())

        def ask() -> Callable[[], npt.NDArray[np.uint8]]:
            kinds = np.array([_kind_of(parameter, self.options) for parameter in unknown.values()], np.uint8)
            most = reduction(None, ReduceOp.MAX, 1.0, 1.0, self.options.process_set)
            self._asked_about = list(unknown)
            return self.frontend.start_array(most, np.concatenate([kinds, to_send(own)]) if is_new else kinds, None)

        def use(most: npt.NDArray[np.uint8]) -> None:
            names = self._asked_about
            kinds = {name: _Kind(kind) for name, kind in zip(names, most.tolist(), strict=False)}
            self._kinds.update({name: kind for name, kind in kinds.items() if kind != _Kind.NONE})
            self._is_new, self._differs = False, is_new and not all_equal(most[len(names) :])

        self._agree("kinds", ask, use)
        if self._differs:
            self._tell_of_weights(own)

    def _tell_of_weights(self, own: int | None) -> None:
        """Warn of different weights, on one rank."""

        def ask() -> Callable[[], npt.NDArray[np.int64]]:
            return start_gathering(self.frontend, own, self.options.process_set)

        def use(checksums: npt.NDArray[np.int64]) -> None:
            self._differs = False
            warn(self.frontend, self.options.process_set, checksums, _REMEDY)

        self._agree("weights", ask, use)

    def _agree(self, what: str, ask: Callable[[], Callable[[], T]], use: Callable[[T], None]) -> None:
        """Exchange something with all ranks, and use the answer. Where that was interrupted, the next call goes on."""
        answer = self._asked.get(what)
        if answer is None:
            held = interrupts.hold()
            try:
                answer = self._asked[what] = ask()
            finally:
                interrupts.release(held)
        try:
            agreed = answer()
        except Exception:
            del self._asked[what]
            raise
        held = interrupts.hold()
        try:
            del self._asked[what]
            use(agreed)
        finally:
            interrupts.release(held)

    def _reduce(self) -> None:
        if self._lost:
            raise InvalidArgumentError(
                f"{', '.join(sorted(self._lost))}: given to a later DistributedOptimizer, which now reduces the "
                "gradients; this one cannot step any more"
            )
        self._broken_off = True
        try:
            if self._gradients is not _Gradients.ARRIVED:
                self._exchange()
            if issubclass(self.base, torch.optim.SparseAdam):
                self._make_sparse()
            if self._first_order is not None:
                self._form_buckets(self._first_order)
        except HorovodInternalError:  # all ranks have it, and none has the step
            self._broken_off = False
            raise
        self._broken_off = False

    def _exchange(self) -> None:
        """Send what has not been sent, and wait for all of it. What was under way when an interrupt came is not sent
        again: the others have it."""
        try:
            if self._first_order is not None:  # the first step: a model may have been wrapped after the optimizer
                refuse_reduced_by_others(self._parameters.items())
            self._agree_on_names()
            self._track_unfrozen()
            self._learn_kinds()
            if self._leaving:
                self._leave()
            for name, parameter in self._tracked.items():
                if name in self._sparse or self.reducer.is_open(name):
                    continue
                self._keep_hook(name, parameter)
                # A parameter frozen since then has nothing to send, unless the rest of its group waits for it.
                if not (parameter.requires_grad or self._has_company(name)):
                    continue
                if self._kinds.get(name) is _Kind.SPARSE:
                    self._start_sparse(name, parameter)
                else:
                    gradient = self._dense_gradient(name, parameter)
                    if self._leaving:
                        self._leave()
                    self.reducer.ready(name, gradient, final=True)
        except HorovodInternalError:
            self._rest()
            self._sparse.clear()
            self.reducer.reset()
            raise
        except Exception:
            self._rest()  # memory must be at rest before the error leaves
            raise
        gathered, failure = self._rest()
        held = interrupts.hold()
        try:
            if self._buckets is not None:
                self._buckets.deliver()
            for name, gradient in gathered.items():
                self._tracked[name].grad = gradient
            self._sparse.clear()
            self._streams.clear()
            self.reducer.wait()
            if failure is not None:
                raise failure
            self._gradients = _Gradients.ARRIVED
        finally:
            interrupts.release(held)

    def _rest(self) -> tuple[dict[str, Tensor], Exception | None]:
        """Wait until nothing is under way.

        Returns:
            the sparse gradients that have arrived, and the first failure.
        """
        failure = self.reducer.rest()
        gathered = {}
        for name, finish in self._sparse.items():
            try:
                gathered[name] = finish()
            except Exception as error:  # noqa: BLE001 - raised once all memory is at rest
                failure = failure or error
        return gathered, failure

    def _make_sparse(self) -> None:
        """Leave gradients that travelled as dense ones, zeros included, as the optimizer needs them."""
        for parameter in self._tracked.values():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                parameter.grad = gradient.to_sparse(1)

    def _has_company(self, name: str) -> bool:
        """Tell whether other gradients cannot be sent before this one."""
        return name in self._grouped or (self._buckets is not None and name in self._buckets)

    def _form_buckets(self, order: dict[str, None]) -> None:
        """Put gradients into buckets from now on, as the set's first rank decides: its settings may differ."""
        limit = self.frontend.context.config.gradient_bucket
        chosen: dict[str, Tensor] = {}
        if limit and is_elementwise(self.options.compression):
            chosen = {
                name: parameter
                for name, parameter in self._tracked.items()
                if self._kinds.get(name) is _Kind.DENSE and name not in self._grouped and suits(parameter)
            }
        # Those for which this rank had no gradient at first come last.
        planned = plan(chosen, [name for name in {**order, **self._tracked} if name in chosen], limit)
        names = list(self._tracked)
        if not names:
            return
        process_set = process_set_id(self.options.process_set)

        def use(agreed: list[list[str]]) -> None:
            if agreed:
                self._buckets = Buckets(self.frontend, process_set, self._tracked, agreed)
                for bucket in self._buckets.all:
                    self.reducer.merge(list(bucket.offsets), bucket.whole)
            self._first_order = None

        label = f"{self._label(names[0])}.buckets"
        self._agree("buckets", lambda: agree(self.frontend, process_set, names, planned, label), use)

    def _leave_buckets(self) -> None:
        """Start over with a step without buckets after a model was converted, as all ranks do. If only this one does,
        its zeros of the new kind meet the others' buckets, and all get an error."""
        self.require_rest("a model was converted")
        buckets = self._buckets
        assert buckets is not None
        last = [(next(iter(bucket.offsets)), buckets.zeros_like(bucket, self._parameters)) for bucket in buckets.all]
        held = interrupts.hold()
        try:
            self._buckets = None
            self._first_order = {}
            self._leaving = self.reducer.part(last)
        finally:
            interrupts.release(held)

    def _leave(self) -> None:
        """Wait until all ranks have left their buckets; until then nothing else is sent.

        Raises:
            MismatchError: others have not, since their models are not like this one.
        """
        try:
            for pending in self._leaving:
                pending.result()
        except Exception:
            self._leaving = []
            raise
        self._leaving = []

    def synchronize(self) -> None:
        if not self.active:
            self._agree_on_names()
        elif not self.adaptive:
            self._reduce()
            self._gradients = _Gradients.SYNCHRONIZED

    @contextmanager
    def skip(self) -> Iterator[None]:
        """Have a step inside the block not reduce gradients.

        Raises:
            OptimizerCallError: (a ValueError and an AssertionError) with op=Adasum, where there is nothing to skip.
        """
        if self.adaptive and self.active:
            raise OptimizerCallError(
                "with op=Adasum there is nothing to skip: step() combines the ranks' changes, not gradients"
            )
        before, self.skipping = self.skipping, True
        try:
            yield
        finally:
            self.skipping = before
            self._gradients = _Gradients.LOCAL

    def settle(self) -> None:
        """Reduce what is in flight because someone is about to look at the gradients."""
        swapped = [name for name, parameter in self._tracked.items() if self._keep_hook(name, parameter)]
        if self.reducer.open or self._leaving or (swapped and self._gradients is _Gradients.LOCAL):
            self._reduce()
            self._gradients = _Gradients.REDUCED

    # What programs read

    def reduced_parameters(self) -> set[Tensor]:
        """Return the parameters whose gradients are reduced."""
        return set(self._tracked.values()) if self.active else set()

    def under_way(self) -> dict[Tensor, tuple[None, None]]:
        """Return the parameters whose gradients were handed over and not waited for. Where Horovod has a handle and a
        compressor's context there is nothing: the reducer has both, and gradients may travel together."""
        return {parameter: (None, None) for name, parameter in self._tracked.items() if self.reducer.is_open(name)}

    def start(self, parameter: Tensor) -> None:
        """Hand over a gradient now, in whichever backward pass; a sparse one waits for ``step()``."""
        name = self.user_names.get(id(parameter), "")
        if not self.active or name not in self._tracked or self.adaptive:
            raise OptimizerCallError(
                "the optimizer does not reduce this parameter's gradient: see its _requires_update"
            )
        self._gradients = _Gradients.LOCAL
        if not self.reducer.is_open(name) and self._kinds.get(name, _kind_of(parameter, self.options)) is _Kind.DENSE:
            self.reducer.ready(name, self._dense_gradient(name, parameter), final=True)

    def forget(self) -> None:
        """Start over with gradients and with counting backward passes.

        A step that was broken off is first brought to where the others are, but for the optimizer's part in it.
        """
        if self._broken_off:
            with suppress(Exception):  # it has been raised, or the next step raises it
                self._reduce()
            self._sparse.clear()
            self._broken_off = False
        self.reducer.reset()
        if self._gradients is _Gradients.ARRIVED:
            self._gradients = _Gradients.LOCAL
        if self._buckets is not None:
            self._buckets.forget()

    def require_rest(self, action: str) -> None:
        opened = self.reducer.open
        if opened and not self._broken_off:
            raise GradientsInFlightError(
                f"{action} while {len(opened)} gradients ({min(opened)}, ...) are being reduced; call step() or "
                "synchronize() first"
            )

    # Steps

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        result = self._step(optimizer, closure)
        self.frontend.end_step()
        return result

    def _step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        if not self.active:
            self._agree_on_names()
            return self._plain_step(optimizer, closure)
        if self.skipping:
            self.require_rest("step() inside skip_synchronize()")
            return self._plain_step(optimizer, closure)
        if self.adaptive:
            return self._adaptive_step(optimizer, closure)
        if closure is not None:
            return self._plain_step(optimizer, functools.partial(self._evaluate, closure))
        if self._gradients in (_Gradients.LOCAL, _Gradients.ARRIVED):
            self._reduce()
        elif self._gradients is _Gradients.SYNCHRONIZED:
            warnings.warn(
                # Horovod's words, by which programs filter the warning.
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "the gradients are reduced already, and step() will not do it again; wrap step() in 'with "
                "optimizer.skip_synchronize():' to say that this is meant",
                stacklevel=3,
            )
        result = self._plain_step(optimizer)
        self._gradients = _Gradients.LOCAL  # not before: a step that is repeated has its gradients already
        return result

    def _plain_step(self, optimizer: torch.optim.Optimizer, *closure: Closure | None) -> Any:
        """Make the step of the user's optimizer; the replaced one, if the program has replaced it."""
        replaced = vars(optimizer).get("step")
        if replaced is None:
            return cast(Any, self.base).step(optimizer, *closure)
        self._kept = self._kept or self.plain()
        return replaced(*closure)

    def _adaptive_step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        """Combine the changes that the ranks' optimizers made, each on its own gradients.

        Changes and not gradients, because an optimizer with a state (momentum, Adam) would scale an adapted gradient
        again (Maleki et al., 2021, section 3.3).
        """
        stepped = self._stepped
        if stepped is None:
            self._agree_on_names()
            self._learn_kinds()
            trained = {name: p for name, p in self._tracked.items() if p.requires_grad}
            before = {name: p.detach().clone() for name, p in trained.items()}
            given = () if closure is None else (closure,)
            stepped = self._stepped = _Stepped(before, self._plain_step(optimizer, *given))
        if stepped.pending is None:
            compress = self.options.compression.compress
            sent = {name: compress(self._tracked[name].detach() - value) for name, value in stepped.before.items()}
            operation = reduction(None, ReduceOp.ADASUM, 1.0, 1.0, self.options.process_set)
            held = interrupts.hold()
            try:
                pending = {n: self.frontend.start(operation, [each], self._label(n)) for n, (each, _) in sent.items()}
                stepped.pending = {name: (pending[name], context) for name, (_, context) in sent.items()}
            except Exception:
                self._stepped = None
                raise
            finally:
                interrupts.release(held)
        try:
            with torch.no_grad():
                for name, (combined, context) in stepped.pending.items():
                    whole = self.options.compression.decompress(combined.result()[0], context)
                    self._tracked[name].copy_(stepped.before[name] + whole)
        except Exception:
            self._stepped = None
            raise
        self._stepped = None
        return stepped.result

    def _evaluate(self, closure: Closure) -> Any:
        """Call a closure as the user's optimizer does: it gets the gradients and the loss of all ranks.

        The loss too, because optimizers decide by it (LBFGS: whether to evaluate again), and ranks must decide alike.
        """
        loss = closure()
        self._reduce()
        if loss is None:
            return None
        if isinstance(loss, Tensor):
            local = loss.detach()
        else:
            local = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
        mean = self.frontend.allreduce(local, process_set=self.options.process_set)
        return mean if isinstance(loss, Tensor) else float(mean)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Part of the plain optimizer's state, which some classes pickle as a whole: nothing is left of us there.
        return type(None), ()


def _naming_checkpoints(error: GradientsInFlightError, name: str) -> GradientsInFlightError:
    """Return the error of a hook with advice on reentrant checkpoints, each of which runs a backward pass itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != torch.utils.checkpoint.__name__:
        frame = frame.f_back
    if frame is None:  # it is the other one that ran in a checkpoint's, if any did
        return GradientsInFlightError(
            f"{error}; or its layer is used several times, also under a reentrant torch.utils.checkpoint: then call "
            "checkpoint(..., use_reentrant=False)"
        )
    return GradientsInFlightError(
        f"the gradient of {name} became ready twice in one backward pass: its layer is used several times under "
        "torch.utils.checkpoint, and each reentrant checkpoint runs a backward pass of its own; call checkpoint(..., "
        "use_reentrant=False)"
    )


@uncompiled
def _computed(session: weakref.ref[Session], name: str, parameter: Tensor) -> None:
    alive = session()
    if alive is not None:
        alive.computed(name, parameter)
