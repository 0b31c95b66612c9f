"""Every collective once, for all frameworks.

Horovod has {allreduce, allgather, ...} x {blocking, asynchronous} x {in place, new result} x {one tensor, group} x
framework. Here each axis is met once: a collective is an ``Operation``; ``Frontend.start`` runs any Operation on a list
of tensors (one tensor is a list of one, in place means that the inputs are also the outputs) and returns a ``Pending``;
blocking means waiting for it. The well-known names are thin methods over that core, and theirs are the only docstrings.

A framework's package binds one Frontend to the process's Context and exports its methods. Tests and embedders construct
their own, each with its own Context, which is what allows many ranks in one process.

Adding a collective: a member of ``types.Collective``, its methods here, a row in ``adjoints.ADJOINTS``.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo.adapters import Tape, TensorAdapter
from hvdgloo.adjoints import ADJOINTS
from hvdgloo.compression import Compressor, NoneCompressor
from hvdgloo.context import Context
from hvdgloo.engine.handle import Handle
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.naming import names_of
from hvdgloo.operations import Operation, broadcasting, gathering, reduction
from hvdgloo.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo.types import Buffer, Collective, TensorSpec

T = TypeVar("T")


class Pending(Generic[T]):
    """A collective under way: the engine's Handle, and what turns its outputs into the user's tensors."""

    __slots__ = ("_finish", "_handle", "_results")

    def __init__(self, handle: Handle, finish: Callable[[], list[T]]) -> None:
        self._handle = handle
        self._finish: Callable[[], list[T]] | None = finish
        self._results: list[T] = []

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> list[T]:
        """Block until the collective has ended.

        Args:
            timeout: seconds; None waits until it ends, which it does at the engine's own deadlines at the latest.

        Returns:
            the results in the order of the tensors; in an in-place operation those very tensors.

        Raises:
            WaitTimeoutError: not ended within ``timeout``; it may be waited for again.
            HorovodInternalError: the collective failed.
        """
        self._handle.wait(timeout)
        finish = self._finish
        if finish is not None:
            self._results = finish()
            self._finish = None
        return self._results


class _Session(Generic[T]):
    """What a Frontend keeps for one Context: its names, and the numbers that stand for pending operations."""

    def __init__(self, context: Context) -> None:
        self.names = names_of(context)
        self.numbers = itertools.count(1)
        self.pending: dict[int, tuple[Pending[T], bool]] = {}


class Frontend(Generic[T]):
    """The collectives of one framework on one Context.

    Args:
        adapter: the framework's tensors.
        context: returns the Context to work in, or raises NotInitializedError.
        module: of a Frontend that a module binds, that module's name: its methods are then pickled by reference.

    All collectives are *collective*: every rank of the process set must call them, with the same name, element type and
    parameters, in any order. ``name`` is what matches the calls of different ranks; without one, calls of a kind are
    matched by their order. Common errors, not repeated below:

    Raises:
        InvalidArgumentError: (a ValueError) this call is wrong in itself; nothing was sent to other ranks.
        DuplicateNameError: (a ValueError) an operation of the same name has not ended yet.
        NotInitializedError: (a ValueError and a HorovodInternalError) before ``init()``, after ``shutdown()``.
        HorovodInternalError: (a RuntimeError) the operation failed on all ranks: they disagree about it (the job stays
            usable), one of them was lost or shut down, or the data plane failed. Asynchronous forms raise it when they
            are waited for.
    """

    def __init__(self, adapter: TensorAdapter[T], context: Callable[[], Context], *, module: str | None = None) -> None:
        self.adapter = adapter
        self._context = context
        self._module = module
        self._lock = threading.Lock()
        self._bound: tuple[Context, _Session[T]] | None = None

    def __reduce__(self) -> tuple[Callable[[str], Frontend[Any]], tuple[str]]:
        if self._module is None:
            raise TypeError("this Frontend belongs to a Context of this process and cannot be pickled")
        return _frontend_of, (self._module,)

    # The core ---------------------------------------------------------------------------------------------------------

    def start(
        self,
        operation: Operation,
        tensors: Sequence[T],
        name: str | None = None,
        *,
        in_place: bool = False,
        grouped: bool = False,
    ) -> Pending[T]:
        """Hand one collective to the engine, and return at once.

        Args:
            operation: what to do.
            tensors: taken together: negotiated, executed and failed as one.
            name: without the operation's prefix; None for an automatic one.
            in_place: write the results into ``tensors``, which otherwise are never written.
            grouped: the names are those of a group's.
        """
        context, session = self._bind()
        adapter = self.adapter
        inputs = [adapter.export(tensor, writable=in_place) for tensor in tensors]
        fence = adapter.fence(tensors)
        prefix = "grouped_" + operation.collective.value if grouped else operation.collective.value
        full_name = session.names.next(operation.process_set, prefix) if name is None else f"{prefix}.{name}"
        request = operation.request(full_name, tuple(buffer.spec for buffer in inputs))
        owners: list[Any]
        if operation.collective is Collective.ALLGATHER:
            owners = [None] * len(inputs)

            def allocate(index: int, spec: TensorSpec) -> Buffer:
                owners[index] = adapter.allocate(spec, tensors[index])
                return adapter.export(owners[index], writable=True)

            handle = context.engine.submit(request, inputs, allocate=allocate, ready=fence)
        else:
            outputs = inputs if in_place else [self._output(b, t) for b, t in zip(inputs, tensors, strict=True)]
            owners = [buffer.owner for buffer in outputs]
            handle = context.engine.submit(request, inputs, outputs, ready=fence)

        def finish() -> list[T]:
            return [adapter.deliver(r, t, in_place=in_place) for r, t in zip(owners, tensors, strict=True)]

        return Pending(handle, finish)

    def apply(
        self,
        operation: Operation,
        tensors: Sequence[T],
        name: str | None = None,
        *,
        grouped: bool | None = None,
    ) -> list[T]:
        """One collective, waited for, with its gradient recorded where the framework records gradients.

        ``grouped``: as in ``start``; by default, whether there is more than one tensor.
        """
        group = len(tensors) > 1 if grouped is None else grouped
        adjoint = ADJOINTS[operation.collective, operation.op]

        def forward(inputs: Sequence[T]) -> list[T]:
            return self.start(operation, inputs, name, grouped=group).wait()

        def backward(tape: Tape[T], gradients: Sequence[T]) -> Sequence[T]:
            return adjoint.rule(self, operation, tape, gradients)

        return self.adapter.differentiable(forward, backward, tensors, keep=adjoint.keep)

    def reserve_names(self, names: Sequence[str]) -> list[str]:
        """Names for tensors that are submitted again and again, such as an optimizer's gradients.

        A name that was reserved before in this job gets a number behind it: two models may both have a ``fc.weight``
        whose gradients are under way at the same time.
        """
        return self._bind()[1].names.reserve(names)

    def gather_integers(self, values: Sequence[int], process_set: int = 0, name: str | None = None) -> npt.NDArray[Any]:
        """Every rank's ``values`` (int64, the same number on each) as an array of shape (ranks, len(values))."""
        own = np.asarray(values, dtype=np.int64).reshape(1, -1)
        operation = Operation(Collective.ALLGATHER, process_set=process_set)
        return self.start_array(operation, own, name)().reshape(-1, len(values))

    def automatic_name(self, prefix: str, process_set: int = 0) -> str:
        """The next automatic name of a kind of operation, the same on all ranks that call in the same order."""
        return self._bind()[1].names.next(process_set, prefix)

    def start_array(
        self, operation: Operation, array: npt.NDArray[Any], name: str | None = None
    ) -> Callable[[], npt.NDArray[Any]]:
        """Start a collective on a plain C-contiguous numpy array, whatever the framework; for the library's own use.

        Returns:
            what waits for the result and returns it: a new array, or ``array`` itself in a broadcast.
        """
        context, session = self._bind()
        prefix = operation.collective.value
        full_name = session.names.next(operation.process_set, prefix) if name is None else f"{prefix}.{name}"
        buffer = Buffer.of_array(array)
        request = operation.request(full_name, (buffer.spec,))
        if operation.collective is not Collective.ALLGATHER:
            handle = context.engine.submit(request, [buffer], [buffer])
            return lambda: (handle.wait(), array)[1]
        gathered: list[npt.NDArray[Any]] = []

        def allocate(index: int, spec: TensorSpec) -> Buffer:
            gathered.append(np.empty(spec.shape, spec.dtype.numpy_dtype))
            return Buffer.of_array(gathered[-1])

        handle = context.engine.submit(request, [buffer], allocate=allocate)
        return lambda: (handle.wait(), gathered[0])[1]

    def members(self, operation: Operation) -> tuple[int, int]:
        """How many ranks take part in an operation, and this process's place among them."""
        context = self._context()
        return context.size, context.rank

    def zeros(self, like: T) -> T:
        """A tensor of zeros of the same shape, type and device."""
        memory = self.adapter.allocate(self.adapter.describe(like), like)
        self.adapter.export(memory, writable=True).array().fill(0)
        return self.adapter.deliver(memory, like, in_place=False)

    @property
    def context(self) -> Context:
        """The Context that collectives run in; raises NotInitializedError without one."""
        return self._context()

    def _bind(self) -> tuple[Context, _Session[T]]:
        context = self._context()
        bound = self._bound
        if bound is None or bound[0] is not context:
            with self._lock:
                bound = self._bound
                if bound is None or bound[0] is not context:
                    bound = self._bound = context, _Session(context)
        return bound

    def _output(self, exported: Buffer, tensor: T) -> Buffer:
        # A staged input is a private copy already: it can hold the result as well.
        if exported.owner is not tensor:
            return exported
        return self.adapter.export(self.adapter.allocate(exported.spec, tensor), writable=True)

    # Who and where ----------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """This process's number among all, from 0."""
        return self._context().rank

    def size(self) -> int:
        """Number of processes in the job."""
        return self._context().size

    def local_rank(self) -> int:
        """This process's number among those on its host: which GPU to take, for example."""
        return self._context().local_rank

    def local_size(self) -> int:
        """Number of processes on this host."""
        return self._context().local_size

    def cross_rank(self) -> int:
        """This host's number among the hosts that have a process with this local rank."""
        return self._context().cross_rank

    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank."""
        return self._context().cross_size

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of processes."""
        return self._context().is_homogeneous

    # Handles ----------------------------------------------------------------------------------------------------------

    def poll(self, handle: int) -> bool:
        """Whether ``synchronize(handle)`` would return at once.

        Raises:
            InvalidArgumentError: (a ValueError) no such operation, or it was synchronized already.
        """
        entry = None if self._bound is None else self._bound[1].pending.get(handle)
        if entry is None:
            raise InvalidArgumentError(
                f"there is no pending operation {handle!r}; poll() takes what an *_async function returned, and only "
                "until synchronize() has been called with it"
            )
        return entry[0].done()

    def synchronize(self, handle: int) -> Any:
        """Wait for an asynchronous operation.

        Returns:
            its result: a tensor, or a list of them for a group; None if the handle is unknown or was synchronized.
        """
        entry = None if self._bound is None else self._bound[1].pending.pop(handle, None)
        if entry is None:
            return None
        pending, grouped = entry
        results = pending.wait()
        return results if grouped else results[0]

    def _number(self, pending: Pending[T], *, grouped: bool = False) -> int:
        session = self._bind()[1]
        number = next(session.numbers)
        session.pending[number] = (pending, grouped)
        return number

    # allreduce --------------------------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor[T] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Combine the ranks' tensors element by element. Differentiable.

        Args:
            tensor: the same shape and element type on every rank; need not be contiguous.
            average: deprecated: True for ``op=Average``, False for ``op=Sum``.
            name: what matches the ranks' calls.
            compression: how the tensor travels.
            op: Average (default), Sum, Min, Max or Product. An integers' average is truncated toward zero.
            prescale_factor: multiplies each rank's tensor before, ...
            postscale_factor: ... and the result after; integers are truncated toward zero both times.
            process_set: the ranks that take part.

        Returns:
            a new tensor of the same shape, type and device.
        """
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        sent, ctx = compression.compress(self._own(tensor))
        return compression.decompress(self.apply(operation, [sent], name)[0], ctx)

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """``allreduce`` that returns a handle for ``poll`` and ``synchronize``. Records no gradient.

        ``tensor`` must not be written until ``synchronize`` has returned.
        """
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._number(self.start(operation, [tensor], name))

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """``allreduce`` in place: the result is written into ``tensor``, which is returned. Records no gradient."""
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self.start(operation, [tensor], name, in_place=True).wait()[0]

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """``allreduce_`` that returns a handle. ``tensor`` is not to be touched until ``synchronize`` has returned."""
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._number(self.start(operation, [tensor], name, in_place=True))

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor[T] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """``allreduce`` of several tensors as one: none is sent before all are ready on all ranks. Differentiable.

        Shapes and types may differ within the group. An empty group returns an empty list and sends nothing.
        """
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        pairs = [compression.compress(tensor) for tensor in self._own_group(tensors)]
        if not pairs:
            return []
        reduced = self.apply(operation, [sent for sent, _ in pairs], name, grouped=True)
        return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """``grouped_allreduce`` that returns one handle for the list. Records no gradient."""
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._number(self._start_group(operation, tensors, name, in_place=False), grouped=True)

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """``grouped_allreduce`` in place. Records no gradient."""
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._start_group(operation, tensors, name, in_place=True).wait()

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """``grouped_allreduce_`` that returns one handle for the list."""
        operation = reduction(average, op, prescale_factor, postscale_factor, process_set)
        return self._number(self._start_group(operation, tensors, name, in_place=True), grouped=True)

    # allgather --------------------------------------------------------------------------------------------------------

    def allgather(self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """Concatenate the ranks' tensors along their first dimension, in rank order. Differentiable.

        Args:
            tensor: at least one-dimensional; first dimensions may differ between ranks (and be zero), others may not.
            name: what matches the ranks' calls.
            process_set: the ranks that take part.

        Returns:
            a new tensor, the same on every rank.
        """
        return self.apply(gathering(process_set), [self._own(tensor)], name)[0]

    def allgather_async(self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
        """``allgather`` that returns a handle. Records no gradient."""
        return self._number(self.start(gathering(process_set), [tensor], name))

    # broadcast --------------------------------------------------------------------------------------------------------

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """The tensor of one rank, on all. Differentiable.

        Args:
            tensor: the same shape and type on every rank; its values count on the root alone.
            root_rank: global rank of the source.
            name: what matches the ranks' calls.
            process_set: the ranks that take part.

        Returns:
            a new tensor.
        """
        return self.apply(broadcasting(root_rank, process_set), [self._own(tensor)], name)[0]

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """``broadcast`` that returns a handle. Records no gradient."""
        return self._number(self.start(broadcasting(root_rank, process_set), [tensor], name))

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """``broadcast`` in place: the other ranks' ``tensor`` is overwritten. Records no gradient."""
        return self.start(broadcasting(root_rank, process_set), [tensor], name, in_place=True).wait()[0]

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """``broadcast_`` that returns a handle."""
        return self._number(self.start(broadcasting(root_rank, process_set), [tensor], name, in_place=True))

    # barrier ----------------------------------------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return once every rank has called it."""
        self.start(Operation(Collective.BARRIER, process_set=process_set_id(process_set)), []).wait()

    # Checks -----------------------------------------------------------------------------------------------------------

    def _own(self, tensor: T) -> T:
        # Compressors and differentiation look at a tensor before ``export`` would refuse it.
        if not self.adapter.owns(tensor):
            self.adapter.export(tensor)
        return tensor

    def _own_group(self, tensors: Sequence[T]) -> list[T]:
        if not isinstance(tensors, (list, tuple)):
            raise InvalidArgumentError(f"a group is a list or tuple of tensors, not a {type(tensors).__name__}")
        return [self._own(tensor) for tensor in tensors]

    def _start_group(
        self, operation: Operation, tensors: Sequence[T], name: str | None, *, in_place: bool
    ) -> Pending[T]:
        group = self._own_group(tensors)
        if not group:
            nothing = Handle("an empty group")
            nothing.resolve()
            return Pending(nothing, list)
        return self.start(operation, group, name, in_place=in_place, grouped=True)


def _frontend_of(module: str) -> Frontend[Any]:
    """The Frontend that a front-end's module binds; how its methods are unpickled."""
    frontend: Frontend[Any] = importlib.import_module(module)._frontend
    return frontend
