"""Gradients that live in a few large tensors, each of which is sent as a whole.

After its first step an optimizer knows which gradients it has and in which order they become ready. From then on they
are parts of buckets, in that order: a gradient is written into its part as soon as it is complete, while it is still in
the cache, and the part takes its place as ``parameter.grad``; a bucket is reduced when all its gradients are complete.
Nothing is packed or unpacked for a transfer. Where ranks share memory the buckets lie in it, and ranks read each
other's; the buckets of a GPU's gradients are on that GPU. A part has its parameter's strides: ``channels_last`` stays
what it is.

The parts are separate tensors over one piece of memory, not views of one tensor: each is saved, copied and versioned on
its own. Programs may move them elsewhere (``p.grad.data = x``, ``model.to(...)``), so each time it is checked whether a
part is still where it belongs, and if not, a new one is made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdgloo._backends import gpu
from hvdgloo._collectives.compression import is_elementwise
from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import process_set_id
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._platform import interrupts
from hvdgloo._training.exchanges import ResumableExchanges
from hvdgloo._training.reducer import GradientReducer
from hvdgloo.torch._adapter import overlaps_itself
from hvdgloo.torch._kinds import Kind
from hvdgloo.torch._parameters import HookedParameters, ReductionOptions
from hvdgloo.types import Collective

Tensor = torch.Tensor

_FIRST_BYTES = 1 << 20
"""The first bucket is small, so that its transfer begins early."""

_ALIGNED = 64
"""Parts begin at multiples of this many bytes: a cache line, and what suits vector instructions best."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that travel as one tensor.

    Attributes:
        memory: where it lies; None if it is a GPU's.
        whole: one-dimensional; between the parts there may be a few zeros.
        offsets: of the parts, in bytes, by the gradients' names in the order in which they become ready.
    """

    memory: Any
    whole: Tensor
    offsets: Mapping[str, int]

    @property
    def device(self) -> torch.device | None:
        """The bucket's GPU."""
        return gpu.of(self.whole)

    def spans(self, parameters: Mapping[str, Tensor]) -> list[tuple[int, int]]:
        """Return the first element of each part and its number of elements."""
        size = self.whole.dtype.itemsize
        return [(offset // size, parameters[name].numel()) for name, offset in self.offsets.items()]

    def part(self, name: str, parameter: Tensor) -> Tensor:
        """Make a new tensor over the place of a parameter's gradient."""
        dtype, count = self.whole.dtype, parameter.numel()
        if self.memory is None:
            flat = gpu.view(self.whole, self.address(name), dtype, count)
        else:
            flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.offsets[name])
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())

    def address(self, name: str) -> int:
        """Return the address of a part."""
        return self.whole.data_ptr() + self.offsets[name]


class Buckets:
    """The buckets of one optimizer.

    Args:
        parameters: by name, those whose gradients are in buckets.
        plan: the names in each bucket, the same on all ranks.
        frontend, process_set: where the buckets are submitted, and the ranks that share them.
    """

    def __init__(
        self,
        frontend: Frontend[Tensor],
        process_set: int,
        parameters: Mapping[str, Tensor],
        plan: Sequence[Sequence[str]],
    ) -> None:
        engine = frontend.context.engine
        self.all = [_bucket({name: parameters[name] for name in names}, engine, process_set) for names in plan]
        self._bucket_of = {name: bucket for bucket in self.all for name in bucket.offsets}
        self._parts = {name: bucket.part(name, parameters[name]) for name, bucket in self._bucket_of.items()}
        self._strides = {name: part.stride() for name, part in self._parts.items()}
        self._elsewhere: dict[str, Tensor] = {}
        self._private = uses_of_a_private_gradient()

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def suit(self, name: str, parameter: Tensor) -> bool:
        """Tell whether a parameter still has the type and shape that its part was made for."""
        bucket = self._bucket_of[name]
        if parameter.dtype is not bucket.whole.dtype:
            return False
        return parameter.is_cpu if bucket.memory is not None else gpu.of(parameter) == bucket.device

    def adopt(self, name: str, parameter: Tensor) -> Tensor:
        """Return the part with the parameter's gradient. It is the gradient from now on, unless the program holds the
        previous one: then ``deliver`` copies the result there."""
        bucket, part = self._bucket_of[name], self._parts[name]
        if part.data_ptr() != bucket.address(name) or part.stride() != self._strides[name]:
            part = self._parts[name] = bucket.part(name, parameter)
        self._elsewhere.pop(name, None)
        gradient = parameter.grad
        if gradient is part:
            return part
        with torch.no_grad():
            if gradient is None:
                part.zero_()
            else:
                part.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        private = gradient is None or gradient.is_sparse or (self._private and _uses(gradient) == self._private)
        if private or (gradient is not None and not gradient.is_contiguous() and overlaps_itself(gradient)):
            if parameter.requires_grad:
                parameter.grad = part
        elif gradient is not None:
            self._elsewhere[name] = gradient
        return part

    def deliver(self) -> None:
        """Results have arrived: tell autograd that gradients have changed, and copy those that belong elsewhere."""
        for part in self._parts.values():
            torch.autograd.graph.increment_version(part)
        with torch.no_grad():
            for name, gradient in self._elsewhere.items():
                gradient.copy_(self._parts[name])
        self._elsewhere = {}

    def zeros_like(self, bucket: GradientBucket, parameters: Mapping[str, Tensor]) -> Tensor:
        """As many zeros as a bucket has elements, of the kind that its first parameter is which it does not suit any
        more; where there is none, of the bucket's own."""
        changed = (parameters[name] for name in bucket.offsets if not self.suit(name, parameters[name]))
        like = next(changed, bucket.whole)
        return torch.zeros(bucket.whole.shape, dtype=like.dtype, device=like.device)

    def forget(self) -> None:
        """Drop the gradients so far, which will not be reduced."""
        self._elsewhere.clear()


def _bucket(parameters: Mapping[str, Tensor], engine: Any, process_set: int) -> GradientBucket:
    first = next(iter(parameters.values()))
    dtype, device = first.dtype, gpu.of(first)
    size = dtype.itemsize
    room = [-(-parameter.numel() * size // _ALIGNED) * _ALIGNED for parameter in parameters.values()]
    memory = None
    if device is not None:
        whole = gpu.empty((sum(room) // size,), dtype, device)
    else:
        memory = engine.allocate(process_set, sum(room))
        if memory is None:
            memory = np.empty(sum(room), np.uint8)
        whole = torch.frombuffer(memory, dtype=dtype)
    whole.zero_()
    return GradientBucket(memory, whole, dict(zip(parameters, accumulate(room, initial=0), strict=False)))


def suits(parameter: Tensor) -> bool:
    """Tell whether a parameter's dense gradient may be in a bucket."""
    return (parameter.is_cpu or gpu.of(parameter) is not None) and parameter.numel() > 0 and is_dense(parameter)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill its memory, in any order of dimensions, and none share a place."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def plan(parameters: Mapping[str, Tensor], order: Iterable[str], limit: int) -> list[list[str]]:
    """Divide gradients into buckets of at most ``limit`` bytes (or a single gradient), each of one dtype and device.

    Args:
        parameters: by name.
        order: the names, in the order in which their gradients become ready.
    """
    done: list[list[str]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name in order:
        parameter = parameters[name]
        nbytes = parameter.numel() * parameter.dtype.itemsize
        kind = parameter.dtype, parameter.device
        names, so_far = filling.get(kind, ([], 0))
        bound = limit if done else min(limit, _FIRST_BYTES)
        if names and so_far + nbytes > bound:
            done.append(names)
            names, so_far = [], 0
        names.append(name)
        filling[kind] = names, so_far + nbytes
    return done + [names for names, _ in filling.values()]


def agree(
    frontend: Frontend[Tensor], process_set: int, names: Sequence[str], planned: Sequence[Sequence[str]], label: str
) -> Callable[[], list[list[str]]]:
    """Ask for the plan of the set's first rank, which applies to all.

    Args:
        names: of all gradients, in an order that is the same on all ranks.
        planned: this rank's plan.
        label: names this exchange.

    Returns:
        a function that waits for it and returns it.
    """
    index = {name: i for i, name in enumerate(names)}
    # For each place in the common order: bucket and place of the gradient, or -1.
    places: npt.NDArray[np.int64] = np.full((len(names), 2), -1, np.int64)
    for number, members in enumerate(planned):
        for position, name in enumerate(members):
            places[index[name]] = number, position
    root = frontend.context.engine.process_sets[process_set][0]
    operation = CollectiveSpec(Collective.BROADCAST, root=root, process_set=process_set)
    answer = frontend.start_array(operation, places, label)

    def agreed() -> list[list[str]]:
        buckets: dict[int, dict[int, str]] = {}
        for name, (number, position) in zip(names, answer().tolist(), strict=True):
            if number >= 0:
                buckets.setdefault(number, {})[position] = name
        return [[members[position] for position in sorted(members)] for _, members in sorted(buckets.items())]

    return agreed


@dataclass(eq=False)
class Bucketing:
    """An optimizer's way into buckets, in its first step in a Context, and out of them, if its model is converted.

    Attributes:
        order: names in the order in which their gradients became ready in the first step; None after it.
        buckets: None as long as there are none.
        leaving: what is sent in place of buckets that are given up.
    """

    _frontend: Frontend[Tensor]
    _reducer: GradientReducer[Tensor]
    _parameters: HookedParameters
    _options: ReductionOptions
    _exchanges: ResumableExchanges
    order: dict[str, None] | None = field(default_factory=dict)
    buckets: Buckets | None = None
    leaving: Sequence[Pending[Tensor]] = ()

    def start_over(self) -> None:
        """Begin with a step without buckets, in another Context."""
        self.order, self.buckets, self.leaving = {}, None, ()

    def form(
        self,
        order: Iterable[str],
        kinds: Mapping[str, Kind],
        grouped: Container[str],
        label: Callable[[str], str],
    ) -> None:
        """Put gradients into buckets from now on, as the set's first rank decides: its settings may differ.

        Args:
            order: names in the order in which their gradients became ready; those for which this rank had none follow.
            kinds: on which ranks have agreed; only dense gradients are put into buckets.
            grouped: names that travel with others as the program has decided.
            label: returns a gradient's name in messages.
        """
        tracked = self._parameters.tracked
        if not tracked:
            return
        limit = self._frontend.context.config.gradient_bucket
        chosen: dict[str, Tensor] = {}
        if limit and is_elementwise(self._options.compression):
            chosen = {
                name: parameter
                for name, parameter in tracked.items()
                if kinds.get(name) is Kind.DENSE and name not in grouped and suits(parameter)
            }
        names = list(tracked)
        planned = plan(chosen, [name for name in dict.fromkeys([*order, *names]) if name in chosen], limit)
        process_set = process_set_id(self._options.process_set)

        def use(agreed: list[list[str]]) -> None:
            if agreed:
                self.buckets = Buckets(self._frontend, process_set, tracked, agreed)
                for bucket in self.buckets.all:
                    self._reducer.merge(list(bucket.offsets), bucket.whole, bucket.spans(tracked))
            self.order = None

        label_of_all = f"{label(names[0])}.buckets"
        self._exchanges.make("buckets", lambda: agree(self._frontend, process_set, names, planned, label_of_all), use)

    def leave(self) -> None:
        """Start over with a step without buckets after a model was converted, as all ranks do. If only this one does,
        its zeros of the new kind meet the others' buckets, and all get an error. No gradient may be under way."""
        buckets = self.buckets
        assert buckets is not None
        last = [
            (next(iter(bucket.offsets)), buckets.zeros_like(bucket, self._parameters.all)) for bucket in buckets.all
        ]
        held = interrupts.hold()
        try:
            self.start_over()
            self.leaving = self._reducer.part(last)
        finally:
            interrupts.release(held)

    def wait_left(self) -> None:
        """Wait until all ranks have left their buckets; until then nothing else is sent.

        Raises:
            MismatchError: others have not, since their models are not like this one.
        """
        try:
            for pending in self.leaving:
                pending.result()
        except Exception:
            self.leaving = ()
            raise
        self.leaving = ()


_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


def _uses(gradient: Tensor) -> tuple[int, ...]:
    """Return the numbers of references to a tensor and to its memory, as Python and torch count; empty if unknown."""
    if _storage_uses is None or type(gradient) is not Tensor or gradient.requires_grad:
        return ()
    return sys.getrefcount(gradient), _storage_uses(gradient.untyped_storage()._cdata)


@functools.cache
def uses_of_a_private_gradient() -> tuple[int, ...]:
    """Find out what ``_uses`` returns for a gradient to which only its parameter refers.

    It differs between versions of torch. In a backward pass that torch compiles there are more references, and
    gradients are taken for shared ones, so the first call must not be made in one.
    """
    found: list[tuple[int, ...]] = []
    probe = torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))

    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        found.append(_uses(gradient))

    probe.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        (probe * 2).sum().backward()  # type: ignore[no-untyped-call]
    return found[0]
