"""The collectives of compiled functions, as they run.

XLA calls ``execute`` in one of its threads. The engine works on XLA's own memory: an allreduce or a broadcast in place,
in the memory that XLA gives to both argument and result.

**Threads.** ``execute`` does not wait for other ranks, or ranks that wait for each other's calls could use up XLA's
threads. It works for the engine for a moment, as a thread that waits does, and if the result is not there yet, it
returns a future. XLA continues in the thread that sets the future, and may start, and wait for, the next collective
there. So it is never one of the engine's threads, nor one that has another future to set: ``_in_thread``.
Only a small call that the ranks of one host offer to each other (``_engine.offers``) is waited for here. There can be
one at a time, and rank 0 orders it as soon as some rank makes another call first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import json
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from hvdgloo._collectives.adapter import Tape
from hvdgloo._collectives.core import Core
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._job.context import Context
from hvdgloo._platform.error_tokens import ForeignError
from hvdgloo.errors import HvdglooError, InvalidArgumentError, NotInitializedError
from hvdgloo.jax import _ffi as ffi
from hvdgloo.jax._adapter import dtype_of
from hvdgloo.types import Buffer, Collective, DType, ReduceOp, TensorSpec, WireFormat


@dataclass(frozen=True)
class Call:
    """A collective in a compiled function, with everything that is known when the function is traced.

    Attributes:
        home: the Frontend that it belongs to: the name of a module, or a number of this process's.
        spec: the collective and its parameters.
        name: the user's name, or None for one that is counted as the call runs.
        grouped: the name is a group's.
        splits: for an alltoall: how many rows go to each rank.
        inputs, results: types and shapes.
        counts: for an alltoall: how many rows come from each rank.
        ends_step: a training step has ended when the call has.
    """

    home: str
    spec: CollectiveSpec
    name: str | None
    grouped: bool
    inputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    splits: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    ends_step: bool = False

    @property
    def in_place(self) -> bool:
        """Return whether the results take the memory of the inputs."""
        return self.spec.collective in (Collective.ALLREDUCE, Collective.BROADCAST)

    @functools.cached_property
    def text(self) -> str:
        """All of it as text, the same in each process, so that compiled functions can be cached on disk."""
        values: dict[str, Any] = {
            "home": self.home,
            "spec": [self.spec.collective.value, *self.spec[1:-1], self.spec.wire.value],
            "name": self.name,
            "grouped": self.grouped,
            "inputs": [(spec.dtype.value, spec.shape) for spec in self.inputs],
            "results": [(spec.dtype.value, spec.shape) for spec in self.results],
            "splits": self.splits,
            "counts": self.counts,
            "ends_step": self.ends_step,
        }
        return json.dumps(values)

    def resized(self, shapes: Sequence[tuple[int, ...]]) -> Call:
        """Return the same call on arrays of other shapes.

        Raises:
            InvalidArgumentError: it does not work element by element.
        """
        if not self.in_place:
            raise InvalidArgumentError(
                f"a {self.spec.collective.value} cannot be inside jax.vmap; call it outside, on all rows at once"
            )
        specs = tuple(TensorSpec(spec.dtype, shape) for spec, shape in zip(self.inputs, shapes, strict=True))
        return replace(self, inputs=specs, results=specs)


class HostCall:
    """A function of this process in a compiled function. It runs outside of XLA's threads, so it may wait.

    Args:
        function: works in place on numpy arrays, which are XLA's memory.
        specs: the arrays' types and shapes.

    Attributes:
        text: distinguishes this one from all others of this process.
    """

    in_place = True

    def __init__(self, function: Callable[[Sequence[Any]], None], specs: Sequence[TensorSpec]) -> None:
        self.inputs = self.results = tuple(specs)
        self.function = function
        self.text = f"function {next(_numbers)}"
        _host_calls[self.text.encode()] = self

    def resized(self, shapes: Sequence[tuple[int, ...]]) -> HostCall:
        """Refuse, as ``Call.resized`` does."""
        raise InvalidArgumentError("a training step cannot be inside jax.vmap; what it computes the loss with can")

    def start(self, sources: Sequence[int], targets: Sequence[int], future: ffi.Future) -> None:
        """Run the function, and set the future."""
        _move(sources, targets, self.inputs)
        buffers = [Buffer(address, spec, _XLA) for address, spec in zip(targets, self.inputs, strict=True)]
        arrays = [buffer.array().view(dtype_of(buffer.dtype)).reshape(buffer.shape) for buffer in buffers]
        _in_thread(functools.partial(_settle, future, functools.partial(self.function, arrays)))


_numbers = itertools.count(1)
_host_calls: weakref.WeakValueDictionary[bytes, HostCall] = weakref.WeakValueDictionary()


def like(specs: Sequence[TensorSpec]) -> list[jax.ShapeDtypeStruct]:
    """Return types and shapes for JAX."""
    return [jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in specs]


_COLLECTIVES = {each.value: each for each in Collective}


@functools.lru_cache(maxsize=4096)
def _parsed(text: bytes) -> Call:
    values = json.loads(text)
    collective, op, prescale, postscale, root, process_set, wire = values["spec"]
    spec = CollectiveSpec(
        _COLLECTIVES[collective], ReduceOp(op), prescale, postscale, root, process_set, WireFormat(wire)
    )
    inputs, results = (
        tuple(TensorSpec(DType(dtype), tuple(shape)) for dtype, shape in values[key]) for key in ("inputs", "results")
    )
    splits, counts = tuple(values["splits"]), tuple(values["counts"])
    name, grouped, ends_step = values["name"], values["grouped"], values["ends_step"]
    return Call(values["home"], spec, name, grouped, inputs, results, splits, counts, ends_step)


class _MemoryAdapter:
    """TensorAdapter for XLA's memory, whose tensors are Buffers."""

    def owns(self, tensor: object) -> bool:
        return isinstance(tensor, Buffer)

    def describe(self, tensor: Buffer) -> TensorSpec:
        return tensor.spec

    def export(self, tensor: Buffer, *, writable: bool = False, known: TensorSpec | None = None) -> Buffer:
        return tensor

    def allocate(self, spec: TensorSpec, like: Buffer) -> Buffer:
        memory = np.empty(spec.nbytes, np.uint8)
        return Buffer(_address(memory), spec, memory)

    def deliver(self, result: Any, target: Buffer, *, in_place: bool) -> Any:
        return result

    def values(self, tensor: Buffer) -> Any:
        return tensor.array()

    def cast(self, tensor: Buffer, dtype: DType) -> Buffer:
        raise NotImplementedError("compiled functions cast their arrays themselves")

    def fence(self, tensors: Sequence[Buffer]) -> Callable[[], None] | None:
        return None

    def differentiable(
        self,
        forward: Callable[[Sequence[Buffer]], list[Buffer]],
        backward: Callable[[Tape[Buffer], Sequence[Buffer]], Sequence[Buffer]],
        inputs: Sequence[Buffer],
        *,
        keep: bool,
    ) -> list[Buffer]:
        return forward(inputs)


_homes: weakref.WeakValueDictionary[str, MemoryCore] = weakref.WeakValueDictionary()


class MemoryCore(Core[Buffer]):
    """Starts the collectives of one Frontend's compiled functions.

    Attributes:
        home: what calls name it by.
    """

    def __init__(self, context: Callable[[], Context], module: str | None) -> None:
        super().__init__(_MemoryAdapter(), context)
        self.home = module or f"#{id(self)}"
        _homes[self.home] = self


def _core_of(home: str) -> MemoryCore:
    found = _homes.get(home)
    if found is None and not home.startswith("#"):
        importlib.import_module(home)  # a function from JAX's compilation cache
        found = _homes.get(home)
    if found is None:
        raise NotInitializedError("the Frontend that this compiled function was made with no longer exists")
    return found


class _Started(NamedTuple):
    """A call under way.

    Attributes:
        targets: addresses of the results.
    """

    call: Call
    pending: Pending[Buffer]
    targets: Sequence[int]

    def finish(self) -> None:
        """Wait for the collective, and put its results where they belong.

        Raises:
            HvdglooError: it failed, or its results have other sizes than was known when the function was traced.
        """
        outputs = self.pending.wait()
        call = self.call
        if call.ends_step:
            _core_of(call.home).end_step()
        if call.in_place:
            return
        for output, expected, target in zip(outputs, call.results, self.targets, strict=False):
            if output.shape != expected.shape:
                raise InvalidArgumentError(_sizes_differ(self.pending.name, output.shape, expected.shape))
            if call.counts and outputs[1].array().tolist() != [*call.counts]:
                raise InvalidArgumentError(
                    f"{self.pending.name}: in a compiled function splits= must be the same on all ranks; ranks sent "
                    f"{outputs[1].array().tolist()} rows, and {[*call.counts]} were expected"
                )
            ctypes.memmove(target, output.address, output.nbytes)


def _sizes_differ(name: str, shape: Sequence[int], expected: Sequence[int]) -> str:
    return (
        f"{name}: the result has shape {tuple(shape)}, and the function was compiled for {tuple(expected)}: there, all "
        "ranks have as many rows. Pad the arrays to the same number of rows, or call this outside of jax.jit"
    )


def _start(call: Call, sources: Sequence[int], targets: Sequence[int]) -> _Started:
    core = _core_of(call.home)
    if call.in_place:
        _move(sources, targets, call.inputs)
        sources = targets
    buffers = [Buffer(address, spec, _XLA) for address, spec in zip(sources, call.inputs, strict=True)]
    pending = core.start(
        call.spec,
        buffers,
        call.name,
        in_place=call.in_place,
        grouped=call.grouped,
        splits=call.splits,
        waits=True,
    )
    return _Started(call, pending, targets)


def _move(sources: Sequence[int], targets: Sequence[int], specs: Sequence[TensorSpec]) -> None:
    for source, target, spec in zip(sources, targets, specs, strict=True):
        if source != target:
            ctypes.memmove(target, source, spec.nbytes)


_XLA = object()
"""The owner of XLA's memory, which stays until the call has ended."""


def execute(called: ffi.Call) -> ffi.Future | None:
    """Handle a custom call: start the collective, and return a future unless it has already ended.

    Raises:
        ForeignError: it failed.
    """
    try:
        text = called.text()
        host_call = _host_calls.get(text)
        if host_call is not None:
            count, future = len(host_call.inputs), called.future()
            host_call.start(called.arguments(count), called.results(count), future)
            return future
        call = _parsed(text)
        started = _start(call, called.arguments(len(call.inputs)), called.results(len(call.results)))
        pending = started.pending
        help_engine = pending.before_waiting
        if help_engine is not None and not pending.done():
            help_engine(pending)
        if pending.done():
            started.finish()
            return None
    except HvdglooError as error:
        raise ForeignError(error) from None
    future = called.future()
    pending.add_done_callback(lambda handle: _in_thread(functools.partial(_settle, future, started.finish)))
    return future


def execute_arrays(call: Call | HostCall, *arrays: Any) -> list[Any]:
    """Run a call on arrays, where custom calls cannot be used.

    Raises:
        ForeignError: it failed.
    """
    try:
        if isinstance(call, HostCall):
            targets = [np.array(array) for array in arrays]
            call.function(targets)
        else:
            sources = [np.ascontiguousarray(array) for array in arrays]
            targets = [np.empty(each.shape, each.dtype) for each in like(call.results)]
            _start(call, [_address(array) for array in sources], [_address(array) for array in targets]).finish()
    except HvdglooError as error:
        raise ForeignError(error) from None
    return targets


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_idle: list[queue.SimpleQueue[Callable[[], None]]] = []


def _in_thread(work: Callable[[], None]) -> None:
    """Do something in a thread that does nothing else meanwhile. Threads are kept."""
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="hvdgloo-jax").start()
    inbox.put(work)


def _serve(inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        inbox.get()()
        _idle.append(inbox)


def _settle(future: ffi.Future, finish: Callable[[], None]) -> None:
    try:
        finish()
    except HvdglooError as error:
        future.set(str(ForeignError(error)))
    except BaseException as error:  # noqa: BLE001 - XLA would wait for ever
        future.set(f"{type(error).__name__}: {error}")
    else:
        future.set()
