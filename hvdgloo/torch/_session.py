"""The distributed part of a torch optimizer: its gradients, which ranks share, and its step.

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
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
import torch.utils.checkpoint

from hvdgloo._backends import gpu
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._collectives.spec import reduction
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo._training.exchanges import ResumableExchanges
from hvdgloo._training.options import Groups
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import (
    GradientsInFlightError,
    HorovodInternalError,
    InvalidArgumentError,
    NotInitializedError,
    OptimizerCallError,
)
from hvdgloo.torch._adapter import overlaps_itself
from hvdgloo.torch._buckets import Bucketing
from hvdgloo.torch._compilation import uncompiled
from hvdgloo.torch._kinds import GradientKinds, Kind, kind_of
from hvdgloo.torch._others import refuse_reduced_by_others
from hvdgloo.torch._parameters import HookedParameters, NamedParameters, ReductionOptions, groups_of, refuse_unsendable
from hvdgloo.torch._sparse import SparseGradients, make_sparse
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor
Closure = Callable[[], Any]


class _Gradients(enum.Enum):
    """State of the gradients that the next step will use."""

    LOCAL = "not reduced yet, or in flight"
    REDUCED = "reduced on the way, for a GradScaler"
    SYNCHRONIZED = "reduced because the user asked for it"
    ARRIVED = "reduced, and not used yet: an interrupted step goes on from here"


class _Streams:
    """The streams on which gradients of this step were computed."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[torch.device, gpu.Stream]] = {}

    def note(self, parameter: Tensor) -> None:
        """Note the present stream of a parameter's device, if that is a GPU."""
        device = gpu.of(parameter)
        if device is not None:
            key = gpu.current_key(device)
            if key not in self._known:
                self._known[key] = device, gpu.current(device)

    def gather(self) -> None:
        """Have this stream wait for the others on which gradients were computed that are sent together."""
        for device, stream in self._known.values():
            gpu.wait_for(stream, device)

    def clear(self) -> None:
        self._known.clear()


@dataclass(eq=False)
class _AdasumStep:
    """The changes that the step of this rank's optimizer has made, to be combined with the others'.

    Changes and not gradients, because an optimizer with a state (momentum, Adam) would scale an adapted gradient again
    (Maleki et al., 2021, section 3.3).

    Attributes:
        trained: the parameters, by name.
        before: the parameters as they were.
        result: the return value of the user's step.
        pending: the changes' reductions, and how to undo their compression; None before they have started.
    """

    trained: dict[str, Tensor]
    before: dict[str, Tensor]
    result: Any
    pending: dict[str, tuple[Pending[Tensor], Any]] | None = None

    def combine(self, frontend: Frontend[Tensor], options: ReductionOptions, label: Callable[[str], str]) -> None:
        """Replace this rank's changes by the combined ones. After an interrupt, another call goes on.

        Args:
            frontend, options: as for ``Session``.
            label: returns a parameter's name in messages.
        """
        if self.pending is None:
            compress = options.compression.compress
            sent = {name: compress(self.trained[name].detach() - value) for name, value in self.before.items()}
            operation = reduction(None, ReduceOp.ADASUM, 1.0, 1.0, options.process_set)
            held = interrupts.hold()
            try:
                pending = {name: frontend.start(operation, [each], label(name)) for name, (each, _) in sent.items()}
                self.pending = {name: (pending[name], context) for name, (_, context) in sent.items()}
            finally:
                interrupts.release(held)
        with torch.no_grad():
            for name, (combined, context) in self.pending.items():
                whole = options.compression.decompress(combined.result()[0], context)
                self.trained[name].copy_(self.before[name] + whole)


class Session:
    """The gradients and the steps behind one distributed optimizer.

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
        # A hook must not keep the session alive: the parameter, which holds the hook, may live on without it.
        computed = None if self.adaptive else functools.partial(_computed, weakref.ref(self))
        parameters = self.parameters = HookedParameters(plain, named_parameters, computed)
        if frontend.may_share(options.process_set):
            refuse_reduced_by_others(parameters.all.items())
        trained = [parameter for parameter in parameters.all.values() if parameter.requires_grad]
        self.groups = groups_of(groups, trained, set(parameters.names))
        grouped = [[parameters.names[id(p)] for p in group] for group in self.groups]
        self._grouped = {name for group in grouped for name in group}
        self._streams = _Streams()
        self.reducer = GradientReducer(
            frontend,
            op=None if self.adaptive else options.op,
            compression=options.compression,
            predivide_factor=options.gradient_predivide_factor,
            passes=options.backward_passes_per_step,
            groups=grouped,
            process_set=options.process_set,
            gathered=self._streams.gather,
        )
        exchanges = self._exchanges = ResumableExchanges()
        self._kinds = GradientKinds(frontend, parameters, options, exchanges)
        self._bucketing = Bucketing(frontend, self.reducer, parameters, options, exchanges)
        self._sparse = SparseGradients(frontend, options.op, options.process_set, self._grouped)
        self._stepped: _AdasumStep | None = None  # with op=Adasum: what is being combined
        self._broken_off = False  # the last step(), synchronize() or the like raised
        self._labels: dict[str, str] | None = None  # gradients' names in this Context's messages
        self._active = False
        self._context: Context | None = None
        self._enter(frontend.context)
        if not frontend.context.config.elastic:
            # No rank joins later: names are as in a job where optimizers are used in the order in which they were made.
            self._agree_on_names()

    @property
    def compensated(self) -> GradientReducer[Tensor]:
        """The reducer of what crosses between hosts, which keeps what encoding leaves out."""
        return self.reducer

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
        active = self._is_shared()
        self._drop()
        self._context, self._active = context, active
        context.tell_of_end(self)
        self._labels = None
        self.reducer.hold()
        # A lone rank may be joined by others, while a backward pass runs or the next is about to.
        if active or (context.config.elastic and self._may_be_shared()):
            self.parameters.track()

    def _is_shared(self) -> bool:
        """Return whether this rank shares gradients with others in the current Context."""
        return self.frontend.is_shared(self.options.process_set)

    def _may_be_shared(self) -> bool:
        """Return whether this rank could share gradients with others in some Context."""
        return True

    def job_ended(self) -> None:
        """Keep an unfinished step's gradients out of the next Context, on all ranks, now that this one is closed.

        In an elastic job that includes what earlier backward passes have added up: newcomers have nothing of it, and
        after a failure it may be half reduced.
        """
        self._drop()
        if self._context is not None and self._context.config.elastic:
            for parameter in self.parameters.all.values():
                parameter.grad = None

    def _drop(self) -> None:
        """Forget what is under way, and all that ranks have agreed about."""
        self.reducer.reset()
        self.reducer.part()
        self._bucketing.start_over()
        self._kinds.start_over()
        self._sparse.clear()
        self._exchanges.clear()
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
        self.parameters.put_in_order()
        names = list(self.parameters.all)
        held = interrupts.hold()
        try:
            self._labels = dict(zip(names, self.frontend.reserve_names(names), strict=True))
            self.reducer.release(self._labels)
        finally:
            interrupts.release(held)

    def add_param_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        index = len(optimizer.param_groups)
        given = group.get("params")
        if isinstance(given, (list, tuple)):  # torch says what else it may be, and takes one tensor as well
            refuse_unsendable((f"noname.{index}.{i}", p) for i, p in enumerate(given) if isinstance(p, Tensor))
        self.base.add_param_group(optimizer, group)
        names = self.parameters.add(index, optimizer.param_groups[index]["params"])
        self._follow()
        if self._labels is not None:
            self._labels.update(zip(names, self.frontend.reserve_names(names), strict=True))

    # Gradients

    def computed(self, name: str, parameter: Tensor) -> None:
        """Hand over a parameter's gradient, which is complete in this backward pass."""
        if not self.active:
            return
        self._gradients = _Gradients.LOCAL
        bucketing = self._bucketing
        if bucketing.order is not None:
            bucketing.order[name] = None
        kind = self._kinds.agreed.get(name)
        if kind is None:
            kind = kind_of(parameter, self.options)
        if kind is Kind.DENSE:
            self._streams.note(parameter)
            gradient = parameter.grad if bucketing.buckets is None else None
            if gradient is None or gradient.is_sparse or not gradient.is_contiguous():
                gradient = self._dense_gradient(name, parameter)
            if bucketing.leaving:
                return  # ``step()`` sends it
            try:
                self.reducer.ready(name, gradient)
            except GradientsInFlightError as error:
                raise _naming_checkpoints(error, name) from None
        # Sparse ones are gathered when all passes have added to them.

    def _dense_gradient(self, name: str, parameter: Tensor) -> Tensor:
        buckets = self._bucketing.buckets
        if buckets is not None and name in buckets and not self.reducer.is_open(name):
            if buckets.suit(name, parameter):
                return buckets.adopt(name, parameter)
            self.require_rest("a model was converted")
            self._bucketing.leave()
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

    def _label(self, name: str) -> str:
        """Return a gradient's name in messages, which is known since this Context's first step began."""
        return name if self._labels is None else self._labels[name]

    def _reduce(self) -> None:
        lost = self.parameters.lost
        if lost:
            raise InvalidArgumentError(
                f"{', '.join(sorted(lost))}: given to a later DistributedOptimizer, which now reduces the "
                "gradients; this one cannot step any more"
            )
        self._broken_off = True
        try:
            if self._gradients is not _Gradients.ARRIVED:
                self._exchange()
            if issubclass(self.base, torch.optim.SparseAdam):
                make_sparse(self.parameters.tracked.values())
            if self._bucketing.order is not None:
                self._bucketing.form(self._bucketing.order, self._kinds.agreed, self._grouped, self._label)
        except HorovodInternalError:  # all ranks have it, and none has the step
            self._broken_off = False
            raise
        self._broken_off = False

    def _exchange(self) -> None:
        """Send what has not been sent, and wait for all of it; the others have what was under way at an interrupt."""
        try:
            if self._bucketing.order is not None:  # the first step: a model may have been wrapped after the optimizer
                refuse_reduced_by_others(self.parameters.all.items())
            self._agree_on_names()
            self.parameters.track_unfrozen()
            self._kinds.learn()
            if self._bucketing.leaving:
                self._bucketing.wait_left()
            for name, parameter in self.parameters.tracked.items():
                if name in self._sparse or self.reducer.is_open(name):
                    continue
                self.parameters.keep_hook(name, parameter)
                # A parameter frozen since then has nothing to send, unless the rest of its group waits for it.
                if not (parameter.requires_grad or self._has_company(name)):
                    continue
                if self._kinds.agreed.get(name) is Kind.SPARSE:
                    self._sparse.start(name, parameter, self._label(name))
                else:
                    gradient = self._dense_gradient(name, parameter)
                    if self._bucketing.leaving:
                        self._bucketing.wait_left()
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
            if self._bucketing.buckets is not None:
                self._bucketing.buckets.deliver()
            for name, gradient in gathered.items():
                self.parameters.tracked[name].grad = gradient
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
        gathered, failure_of_sparse = self._sparse.rest()
        return gathered, failure or failure_of_sparse

    def _has_company(self, name: str) -> bool:
        """Tell whether other gradients cannot be sent before this one."""
        buckets = self._bucketing.buckets
        return name in self._grouped or (buckets is not None and name in buckets)

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

    def unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for a GradScaler, which is about to read the gradients, and skips the step if one is not finite."""
        if self.active:
            self.settle()

    def settle(self) -> None:
        """Reduce what is in flight because someone is about to look at the gradients."""
        keep_hook = self.parameters.keep_hook
        swapped = [name for name, parameter in self.parameters.tracked.items() if keep_hook(name, parameter)]
        if self.reducer.open or self._bucketing.leaving or (swapped and self._gradients is _Gradients.LOCAL):
            self._reduce()
            self._gradients = _Gradients.REDUCED

    # What programs read

    def reduced_parameters(self) -> set[Tensor]:
        """Return the parameters whose gradients are reduced."""
        return set(self.parameters.tracked.values()) if self.active else set()

    def under_way(self) -> dict[Tensor, tuple[None, None]]:
        """Return the parameters whose gradients were handed over and not waited for. Where Horovod has a handle and a
        compressor's context there is nothing: the reducer has both, and gradients may travel together."""
        tracked = self.parameters.tracked.items()
        return {parameter: (None, None) for name, parameter in tracked if self.reducer.is_open(name)}

    def start(self, parameter: Tensor) -> None:
        """Hand over a gradient now, in whichever backward pass; a sparse one waits for ``step()``."""
        name = self.parameters.names.get(id(parameter), "")
        if not self.active or name not in self.parameters.tracked or self.adaptive:
            raise OptimizerCallError(
                "the optimizer does not reduce this parameter's gradient: see its _requires_update"
            )
        self._gradients = _Gradients.LOCAL
        kind = self._kinds.agreed.get(name, kind_of(parameter, self.options))
        if kind is Kind.DENSE and not self.reducer.is_open(name):
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
        if self._bucketing.buckets is not None:
            self._bucketing.buckets.forget()

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
        if self._stepped is None:
            self._agree_on_names()
            self._kinds.learn()
            trained = {name: p for name, p in self.parameters.tracked.items() if p.requires_grad}
            before = {name: p.detach().clone() for name, p in trained.items()}
            given = () if closure is None else (closure,)
            self._stepped = _AdasumStep(trained, before, self._plain_step(optimizer, *given))
        try:
            self._stepped.combine(self.frontend, self.options, self._label)
        except Exception:
            self._stepped = None
            raise
        stepped, self._stepped = self._stepped, None
        return stepped.result

    def _evaluate(self, closure: Closure) -> Any:
        """Call a closure as the user's optimizer does: it gets the gradients and the loss of all ranks.

        The loss too, because optimizers decide by it (LBFGS: whether to evaluate again), and ranks must decide alike.
        """
        loss = closure()
        self._reduce()
        return None if loss is None else _averaged(loss, self.frontend, self.options.process_set)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Part of the plain optimizer's state, which some classes pickle as a whole: nothing is left of us there.
        return type(None), ()


def _averaged(loss: Any, frontend: Frontend[Tensor], process_set: ProcessSet) -> Any:
    """Return the ranks' average of a loss: a tensor, or a number, as it is given."""
    if isinstance(loss, Tensor):
        return frontend.allreduce(loss.detach(), process_set=process_set)
    local = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    return float(frontend.allreduce(local, process_set=process_set))


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
