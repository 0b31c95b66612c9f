"""What is distributed about a torch optimizer: its parameters' names and hooks, the reducer, and the step.

A step: every parameter's hook fires as its gradient is complete and hands it to the reducer, whose transfers overlap
with the rest of the backward pass; ``step()`` waits for them and lets the user's class step.
"""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdgloo._backends import gpu
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.spec import reduction
from hvdgloo._training.options import Groups, divided
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.errors import GradientsInFlightError, InvalidArgumentError, OptimizerCallError
from hvdgloo.torch import _sparse as sparse
from hvdgloo.torch._buckets import Buckets, agree, plan, suits
from hvdgloo.torch.compression import Compression
from hvdgloo.types import ReduceOp

Tensor = torch.Tensor
NamedParameters = Iterable[tuple[str, Tensor]]
Closure = Callable[[], Any]

_ELEMENTWISE = (Compression.none, Compression.fp16, Compression.bf16)
"""Compressors that treat many gradients at once just as they treat each of them."""

_owners: MutableMapping[Tensor, weakref.ref[Session]] = WeakIdKeyDictionary()
"""Parameter to a weak reference to the Session that reduces its gradient: the latest one, by rule and not
by the accidents of garbage collection, which differ between ranks."""


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced; the arguments of ``DistributedOptimizer`` that do not name parameters."""

    compression: Compressor[Tensor] = NoneCompressor
    backward_passes_per_step: int = 1
    op: int | None = None
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set


class _Gradients(enum.Enum):
    """What is known about the gradients that the next step will use."""

    LOCAL = "not reduced yet, or in flight"
    REDUCED = "reduced on the way, for a GradScaler"
    SYNCHRONIZED = "reduced because the user asked for it"


class _Kind(enum.IntEnum):
    """How a parameter's gradient travels; the greatest value of any rank holds for all."""

    NONE = 0  # no gradient so far
    SPARSE = 1
    DENSE = 2


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
        self.active = frontend.is_shared(options.process_set)
        self.adaptive = options.op == ReduceOp.ADASUM
        if self.adaptive and options.gradient_predivide_factor != 1.0:
            raise InvalidArgumentError("gradient_predivide_factor divides an average, so it needs op=Average")
        self._gradients = _Gradients.LOCAL
        parameters = list(parameters_of(plain))
        self.user_names = _names(plain, named_parameters)
        self.groups = _groups(groups, [p for p in parameters if p.requires_grad], {id(p) for p in parameters})
        names = frontend.reserve_names([self.user_names[id(p)] for p in parameters])
        self._name_of = {id(p): name for p, name in zip(parameters, names, strict=True)}
        grouped = [[self._name_of[id(p)] for p in group] for group in self.groups]
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
        self._lost: set[str] = set()
        self._first_order: dict[str, None] | None = {}  # as gradients became ready; None once there are buckets
        self._buckets: Buckets | None = None
        self._sparse: dict[str, Callable[[], Tensor]] = {}  # gradients under way, to what waits for them
        self._kinds: dict[str, _Kind] = {}
        self._track_all(parameters)

    # Parameters and hooks

    def _track_all(self, parameters: Iterable[Tensor]) -> None:
        if not self.active:
            return
        if self.adaptive:
            self._tracked.update((self._name_of[id(p)], p) for p in parameters)
            return
        for parameter in parameters:
            name = self._name_of[id(parameter)]
            if parameter.requires_grad:
                self._track(name, parameter)
            else:
                self._frozen[name] = parameter

    def _track(self, name: str, parameter: Tensor) -> None:
        previous = _owners.get(parameter)
        session = None if previous is None else previous()
        if session is not None:
            session._lose(name_in_session=session._name_of[id(parameter)])
        _owners[parameter] = weakref.ref(self)
        self._tracked[name] = parameter
        # The hook must not keep the session alive: the parameter, which holds the hook, may live on without it.
        computed = functools.partial(_computed, weakref.ref(self), name)
        self._hooks[name] = parameter.register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]

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
        self.base.add_param_group(optimizer, group)
        index = len(optimizer.param_groups) - 1
        added = list(optimizer.param_groups[index]["params"])
        names = [f"noname.{index}.{i}" for i in range(len(added))]
        self.user_names.update((id(p), name) for p, name in zip(added, names, strict=True))
        reserved = self.frontend.reserve_names(names)
        self._name_of.update((id(p), name) for p, name in zip(added, reserved, strict=True))
        self._track_all(added)

    # Gradients

    def computed(self, name: str, parameter: Tensor) -> None:
        """A parameter's gradient is complete in this backward pass."""
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
            if gradient is None or gradient.is_sparse:
                gradient = self._dense_gradient(name, parameter)
            self.reducer.ready(name, gradient)
        # Sparse ones are gathered when all passes have added to them.

    def _gathered(self) -> None:
        """Gradients that were computed on several streams are sent together, after what this one has been given."""
        for device, stream in self._streams.values():
            gpu.wait_for(stream, device)

    def _dense_gradient(self, name: str, parameter: Tensor) -> Tensor:
        buckets = self._buckets
        if buckets is not None and name in buckets and not self.reducer.is_open(name):
            if buckets.context is self.frontend.context and buckets.suit(name, parameter):
                return buckets.adopt(name, parameter)
            self._leave_buckets()
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                parameter.grad = gradient
        elif gradient.is_sparse:
            gradient = parameter.grad = gradient.to_dense()
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
        self._sparse[name] = sparse.start_sparse_allreduce(self.frontend, gradient, name, op, self.options.process_set)

    def _learn_kinds(self) -> None:
        """Agree on how gradients travel that no rank has had so far: a rank that lacks one cannot know.

        A gradient that is dense on some rank is sent as dense by all from then on: that rank may already have sent it.
        """
        unknown = {name: p for name, p in self._tracked.items() if name not in self._kinds}
        if not unknown:
            return
        if self.options.sparse_as_dense:
            self._kinds.update(dict.fromkeys(unknown, _Kind.DENSE))
            return
        kinds = torch.tensor([_kind_of(parameter, self.options) for parameter in unknown.values()], dtype=torch.uint8)
        self.frontend.allreduce_(kinds, op=ReduceOp.MAX, process_set=self.options.process_set)
        for name, kind in zip(unknown, kinds.tolist(), strict=True):
            if kind != _Kind.NONE:
                self._kinds[name] = _Kind(kind)

    def _reduce(self) -> None:
        if self._lost:
            raise InvalidArgumentError(
                f"{', '.join(sorted(self._lost))}: given to a later DistributedOptimizer, which now reduces the "
                "gradients; this one cannot step any more"
            )
        self._track_unfrozen()
        opened = self.reducer.open
        try:
            self._learn_kinds()
            for name, parameter in self._tracked.items():
                # A parameter frozen since then has nothing to send, unless the rest of its group waits for it.
                if name in opened or not (parameter.requires_grad or self._has_company(name)):
                    continue
                if self._kinds.get(name) is _Kind.SPARSE:
                    self._start_sparse(name, parameter)
                else:
                    self.reducer.ready(name, self._dense_gradient(name, parameter), final=True)
        finally:
            # Also when sending failed: memory must be at rest before the error leaves.
            gathering, self._sparse = self._sparse, {}
            try:
                self.reducer.wait()
            finally:
                self._streams.clear()
                if self._buckets is not None:
                    self._buckets.deliver()
                for name, finish in gathering.items():
                    self._tracked[name].grad = finish()
        if issubclass(self.base, torch.optim.SparseAdam):
            self._make_sparse()
        if self._first_order is not None:
            self._form_buckets(self._first_order)

    def _make_sparse(self) -> None:
        """Leave gradients that travelled as dense ones, zeros included, as the optimizer needs them."""
        for parameter in self._tracked.values():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                parameter.grad = gradient.to_sparse(1)

    def _has_company(self, name: str) -> bool:
        """Whether other gradients cannot be sent before this one."""
        return name in self._grouped or (self._buckets is not None and name in self._buckets)

    def _form_buckets(self, order: dict[str, None]) -> None:
        """From now on put gradients into buckets, as the set's first rank decides: its settings may differ."""
        limit = self.frontend.context.config.gradient_bucket
        chosen: dict[str, Tensor] = {}
        if limit and any(self.options.compression is elementwise for elementwise in _ELEMENTWISE):
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
        agreed = agree(self.frontend, process_set, names, planned, f"{names[0]}.buckets")
        if agreed:
            self._buckets = Buckets(self.frontend, process_set, self._tracked, agreed)
            for bucket in self._buckets.all:
                self.reducer.merge(list(bucket.offsets), bucket.whole)
        self._first_order = None

    def _leave_buckets(self) -> None:
        """A new job, or a converted model: start over, as all ranks do, with a step without buckets."""
        self.require_rest("a model was converted, or hvd.init() was called again,")
        self._buckets = None
        self._first_order = {}
        self.reducer.part()

    def synchronize(self) -> None:
        if self.active and not self.adaptive:
            self._reduce()
            self._gradients = _Gradients.SYNCHRONIZED

    @contextmanager
    def skip(self) -> Iterator[None]:
        """Inside, a step does not reduce gradients.

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
        if self.reducer.open:
            self._reduce()
            self._gradients = _Gradients.REDUCED

    # What programs read

    def reduced_parameters(self) -> set[Tensor]:
        """Those whose gradients are reduced."""
        return set(self._tracked.values())

    def under_way(self) -> dict[Tensor, tuple[None, None]]:
        """Those whose gradients have been handed over and not been waited for. Where Horovod has a handle and a
        compressor's context there is nothing: the reducer has both, and gradients may travel together."""
        return {parameter: (None, None) for name, parameter in self._tracked.items() if self.reducer.is_open(name)}

    def start(self, parameter: Tensor) -> None:
        """Hand over a gradient now, in whichever backward pass; a sparse one waits for ``step()``."""
        name = self._name_of.get(id(parameter), "")
        if name not in self._tracked or self.adaptive:
            raise OptimizerCallError(
                "the optimizer does not reduce this parameter's gradient: see its _requires_update"
            )
        self._gradients = _Gradients.LOCAL
        if not self.reducer.is_open(name) and self._kinds.get(name, _kind_of(parameter, self.options)) is _Kind.DENSE:
            self.reducer.ready(name, self._dense_gradient(name, parameter), final=True)

    def forget(self) -> None:
        """Start over with gradients and with counting backward passes."""
        self.reducer.reset()
        if self._buckets is not None:
            self._buckets.forget()

    def require_rest(self, action: str) -> None:
        opened = self.reducer.open
        if opened:
            raise GradientsInFlightError(
                f"{action} while {len(opened)} gradients ({min(opened)}, ...) are being reduced; call step() or "
                "synchronize() first"
            )

    # Steps

    def step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        if not self.active:
            return self._plain_step(optimizer, closure)
        if self.skipping:
            self.require_rest("step() inside skip_synchronize()")
            return self._plain_step(optimizer, closure)
        if self.adaptive:
            return self._adaptive_step(optimizer, closure)
        if closure is not None:
            return self._plain_step(optimizer, functools.partial(self._evaluate, closure))
        if self._gradients is _Gradients.LOCAL:
            self._reduce()
        elif self._gradients is _Gradients.SYNCHRONIZED:
            warnings.warn(
                # Horovod's words, by which programs filter the warning.
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "the gradients are reduced already, and step() will not do it again; wrap step() in 'with "
                "optimizer.skip_synchronize():' to say that this is meant",
                stacklevel=3,
            )
        self._gradients = _Gradients.LOCAL
        return self._plain_step(optimizer)

    def _plain_step(self, optimizer: torch.optim.Optimizer, *closure: Closure | None) -> Any:
        """The step of the user's optimizer; as replaced on it, where somebody has done that."""
        replaced = vars(optimizer).get("step")
        if replaced is None:
            return cast(Any, self.base).step(optimizer, *closure)
        self._kept = self._kept or self.plain()
        return replaced(*closure)

    def _adaptive_step(self, optimizer: torch.optim.Optimizer, closure: Closure | None) -> Any:
        """Adasum combines what the ranks' optimizers did: each steps on its own gradients, and the changes are summed.

        Changes and not gradients, because an optimizer with a state (momentum, Adam) would scale an adapted gradient
        again (Maleki et al., 2021, section 3.3).
        """
        trained = {name: p for name, p in self._tracked.items() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in trained.items()}
        result = self._plain_step(optimizer, closure) if closure is not None else self._plain_step(optimizer)
        changes = {name: p.detach() - before[name] for name, p in trained.items()}
        operation = reduction(None, ReduceOp.ADASUM, 1.0, 1.0, self.options.process_set)
        compression = self.options.compression
        sent = {name: compression.compress(change) for name, change in changes.items()}
        pending = {name: self.frontend.start(operation, [tensor], name) for name, (tensor, _) in sent.items()}
        with torch.no_grad():
            for name, combined in pending.items():
                whole = compression.decompress(combined.result()[0], sent[name][1])
                trained[name].copy_(before[name] + whole)
        return result

    def _evaluate(self, closure: Closure) -> Any:
        """A closure as the user's optimizer sees it: the gradients and the loss are those of all ranks.

        The loss too, because optimizers decide by it (LBFGS: whether to evaluate again), and ranks must decide alike.
        """
        loss = closure()
        self._reduce()
        if loss is None:
            return None
        local = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        mean = self.frontend.allreduce(local, process_set=self.options.process_set)
        return mean if isinstance(loss, Tensor) else float(mean)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Part of the plain optimizer's state, which some classes pickle as a whole: nothing is left of us there.
        return type(None), ()


def _computed(session: weakref.ref[Session], name: str, parameter: Tensor) -> None:
    alive = session()
    if alive is not None:
        alive.computed(name, parameter)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[int, str]:
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


def _groups(groups: Groups, trained: Sequence[Tensor], known: set[int]) -> list[list[Tensor]]:
    """Parameters that are reduced as one, from either form of ``groups``."""
    chosen = divided(groups, trained)
    if not isinstance(groups, int) and any(id(each) not in known for group in groups or () for each in group):
        raise InvalidArgumentError("groups has something that is not a parameter of the optimizer")
    return chosen
