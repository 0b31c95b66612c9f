"""The path that every collective of every framework takes: tensors in, a request to the engine, tensors out.

A collective is a ``CollectiveSpec``. ``Core.persistent`` makes it into something that can be started on lists of
tensors (one tensor is a list of one; in place means that the inputs are also the outputs). ``Core.start`` starts one at
once, reusing the operation of an earlier call with the same name. What is started is a ``Pending``; blocking means
waiting for it; ``apply`` does that and records a gradient. The well-known functions in ``frontend`` are thin methods
over it.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from hvdgloo._collectives.adapter import Tape, TensorAdapter
from hvdgloo._collectives.adjoints import ADJOINTS, send_back
from hvdgloo._collectives.compression import Compressor
from hvdgloo._collectives.job_functions import JobFunctions
from hvdgloo._collectives.naming import names_of
from hvdgloo._collectives.persistent import Pending, PersistentOperation
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.spec import CollectiveSpec, broadcasting, crossing, reduction
from hvdgloo._engine.conventions import divide_rows
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.messages import Request
from hvdgloo._engine.residual import Residual
from hvdgloo._job import process
from hvdgloo._job.context import Context
from hvdgloo._platform import interrupts
from hvdgloo.errors import InvalidArgumentError, NotInitializedError
from hvdgloo.types import Buffer, Collective, TensorSpec

T = TypeVar("T")

_MOST_OPERATIONS = 1 << 14
"""The number of named operations that are kept to be started again."""


class _Session(Generic[T]):
    """A Frontend's state in one Context: its names, the operations registered by calls with names, and the numbers
    that stand for pending operations."""

    def __init__(self, context: Context) -> None:
        self.names = names_of(context)
        self.operations: dict[tuple[object, ...], PersistentOperation[T]] = {}  # by everything that distinguishes them
        self.numbers = itertools.count(1)
        self.pending: dict[int, tuple[Pending[T], Callable[[list[T]], Any]]] = {}
        self.join: Handle | None = None  # under way


class Core(JobFunctions, Generic[T]):
    """The machinery of one framework's collectives on one Context; ``Frontend`` adds the names that users know.

    Args:
        adapter: the framework's tensors.
        context: returns the Context to work in, or raises NotInitializedError.
        module: of a Frontend that a module binds, that module's name: its methods are then pickled by reference.
    """

    def __init__(self, adapter: TensorAdapter[T], context: Callable[[], Context], *, module: str | None = None) -> None:
        super().__init__(context)
        self.adapter = adapter
        self._module = module
        self._lock = threading.Lock()
        self._bound: tuple[Context, _Session[T]] | None = None

    def __reduce__(self) -> tuple[Callable[[str], Core[Any]], tuple[str]]:
        if self._module is None:
            raise TypeError("this Frontend belongs to a Context of this process and cannot be pickled")
        return _frontend_of, (self._module,)

    def persistent(
        self,
        spec: CollectiveSpec,
        name: str | None,
        *,
        in_place: bool = False,
        grouped: bool = False,
        residual: Residual | None = None,
    ) -> PersistentOperation[T]:
        """Register a collective that is going to be started again and again; see ``PersistentOperation``."""
        return PersistentOperation(
            self.adapter, self._context, spec, name, in_place=in_place, grouped=grouped, residual=residual
        )

    def start(
        self,
        operation: CollectiveSpec,
        tensors: Sequence[T],
        name: str | None = None,
        *,
        in_place: bool = False,
        grouped: bool = False,
        splits: Sequence[int] = (),
        waits: bool = False,
    ) -> Pending[T]:
        """Hand one collective to the engine, and return at once.

        It is persistent: a call that repeats its name, or has none either, starts what the first one registered.

        Args:
            operation: the collective and its parameters.
            tensors: as for ``PersistentOperation.start``.
            name: without the operation's prefix; None for an automatic one.
            in_place: write the results into ``tensors``, which otherwise are never written.
            grouped: the names are a group's.
            splits, waits: as for ``PersistentOperation.start``.
        """
        session = self._bind()[1]
        key = name, in_place, grouped, operation
        known = session.operations.get(key)
        if known is None:
            known = self._keep(session, key, self.persistent(operation, name, in_place=in_place, grouped=grouped))
        return known.start(tensors, splits=splits, waits=waits)

    def _start_allreduce(
        self,
        tensor: T,
        arguments: tuple[bool | None, int | None, float, float, ProcessSet],
        name: str | None,
        *,
        in_place: bool,
        waits: bool = False,
    ) -> Pending[T]:
        """``start`` for the arguments that users give to ``reduction``, which need not be checked each time."""
        if arguments[0] is not None:
            return self.start(reduction(*arguments, depth=3), [tensor], name, in_place=in_place, waits=waits)
        session = self._bind()[1]
        _, op, prescale, postscale, process_set = arguments
        key = name, in_place, op, prescale, postscale, process_set_id(process_set)
        try:
            known = session.operations.get(key)
        except TypeError:  # not numbers; ``reduction`` says so
            known = None
        if known is None:
            known = self._keep(session, key, self.persistent(reduction(*arguments), name, in_place=in_place))
        return known.start((tensor,), waits=waits)

    @staticmethod
    def _keep(
        session: _Session[T], key: tuple[object, ...], operation: PersistentOperation[T]
    ) -> PersistentOperation[T]:
        if len(session.operations) >= _MOST_OPERATIONS:
            session.operations.clear()  # a program that keeps inventing names
        session.operations[key] = operation
        return operation

    def apply(
        self,
        operation: CollectiveSpec,
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
        rules = self._for_gradient(operation, name)

        def forward(inputs: Sequence[T]) -> list[T]:
            return self.start(operation, inputs, name, grouped=group, waits=True).result()

        def backward(tape: Tape[T], gradients: Sequence[T]) -> Sequence[T]:
            return adjoint.rule(rules, operation, tape, gradients)

        return self.adapter.differentiable(forward, backward, tensors, keep=adjoint.keep)

    def exchange(self, operation: CollectiveSpec, tensor: T, splits: Sequence[int], name: str | None = None) -> list[T]:
        """An alltoall, waited for, with its gradient recorded: the received rows, and (int32) how many came from each
        rank."""
        counts: list[T] = []
        came: list[int] = []  # the same, for the gradient
        rules = self._for_gradient(operation, name)

        def forward(inputs: Sequence[T]) -> list[T]:
            pending = self.start(operation, inputs, name, splits=splits, waits=True)
            received, numbers = pending.result()
            counts.append(numbers)
            came.extend(pending.outputs[1].array().tolist())
            return [received]

        def backward(tape: Tape[T], gradients: Sequence[T]) -> Sequence[T]:
            return send_back(rules, operation, came, gradients)

        # Rows that are not sent have no gradient; slicing tells the framework so.
        total = sum(splits)
        sent: Any = tensor
        shape = self.adapter.describe(tensor).shape
        if shape and total < shape[0]:  # a scalar is refused by the engine
            sent = sent[:total]
        return [*self.adapter.differentiable(forward, backward, [sent], keep=False), *counts]

    def _apply_compressed(
        self, operation: CollectiveSpec, tensors: Sequence[T], name: str | None, compression: Compressor[T]
    ) -> list[T]:
        """``apply`` to a group of tensors that are compressed on the way."""
        pairs = [compression.compress(tensor) for tensor in self._own_group(tensors)]
        if not pairs:
            return []
        reduced = self.apply(crossing(operation, compression), [sent for sent, _ in pairs], name, grouped=True)
        return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]

    def _for_gradient(self, operation: CollectiveSpec, name: str | None) -> Core[T]:
        """Return the Core on which the gradient of a call runs its collectives; requested in the order of the calls."""
        return self

    def reserve_names(self, names: Sequence[str]) -> list[str]:
        """Names for tensors that are submitted again and again, such as an optimizer's gradients.

        A name that was reserved before in this job gets a number appended: two models may both have an ``fc.weight``
        whose gradients are under way at the same time.
        """
        return self._bind()[1].names.reserve(names)

    def gather_integers(self, values: Sequence[int], process_set: int = 0, name: str | None = None) -> npt.NDArray[Any]:
        """Every rank's ``values`` (int64, the same number on each) as an array of shape (ranks, len(values))."""
        own = np.asarray(values, dtype=np.int64).reshape(1, -1)
        operation = CollectiveSpec(Collective.ALLGATHER, process_set=process_set)
        return self.start_array(operation, own, name)().reshape(-1, len(values))

    def automatic_name(self, prefix: str, process_set: int = 0) -> str:
        """The next automatic name of a kind of operation, the same on all ranks that call in the same order."""
        return self._bind()[1].names.next(process_set, prefix)

    def start_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None = None
    ) -> Callable[[], npt.NDArray[Any]]:
        """Start a collective on a plain C-contiguous numpy array, whatever the framework; for the library's own use.

        Returns:
            what waits for the result and returns it: a new array, or ``array`` itself in a broadcast.
        """
        handle, result = self._submit_array(operation, array, name)
        return lambda: (handle.wait(), result())[1]

    def numbered_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None = None
    ) -> tuple[npt.NDArray[Any], int]:
        """Do as ``start_array``, and wait; return the result and the operation's ``Handle.order``."""
        handle, result = self._submit_array(operation, array, name)
        handle.wait()
        return result(), handle.order

    def _submit_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None
    ) -> tuple[Handle, Callable[[], npt.NDArray[Any]]]:
        context, session = self._bind()
        prefix = operation.collective.value
        full_name = session.names.next(operation.process_set, prefix) if name is None else f"{prefix}.{name}"
        buffer = Buffer.of_array(array)
        request = operation.request(full_name, (buffer.spec,))
        if operation.collective is not Collective.ALLGATHER:
            handle = context.engine.submit(request, [buffer], [buffer])
            return handle, lambda: array
        gathered: list[npt.NDArray[Any]] = []

        def allocate(index: int, spec: TensorSpec) -> Buffer:
            gathered.append(np.empty(spec.shape, spec.dtype.numpy_dtype))
            return Buffer.of_array(gathered[-1])

        handle = context.engine.submit(request, [buffer], allocate=allocate)
        return handle, lambda: gathered[0]

    def broadcast_all(
        self,
        named: Iterable[tuple[str, T]],
        root_rank: int,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
    ) -> list[T]:
        """Return the root's tensors, each sent under its own name, as new ones or in place of these; all are under way
        before any is awaited."""
        operation, given = broadcasting(root_rank, process_set), list(named)
        for name, tensor in given:
            self.check(name, tensor)  # before anything is sent
        pending = []
        for name, tensor in given:
            try:
                pending.append(self.start(operation, [tensor], name, in_place=in_place))
            except InvalidArgumentError as error:
                raise error if name in str(error) else InvalidArgumentError(f"{name}: {error}") from None
        return [broadcast.result()[0] for broadcast in pending]

    def join(self, device: int = -1) -> int:
        """Say that this rank has no more data; return when all ranks have said so.

        Until then the others' allreduces go on without it: it adds zeros to their sums, averages still divide by all
        ranks, and minima, maxima and products are of the others alone. Other collectives fail meanwhile. The same
        applies to operations that a rank submitted before it joined and that the others never submit.

        Args:
            device: ignored; accepted for programs that pass it.

        Returns:
            the rank that came last, the same on all ranks.
        """
        context, session = self._bind()
        held = interrupts.hold()
        try:
            handle = session.join = session.join or context.engine.submit(Request("join", Collective.JOIN))
        finally:
            interrupts.release(held)
        try:
            handle.wait()
        except Exception:
            session.join = None
            raise
        session.join = None
        # A rank that joined earlier has counted fewer operations than the others.
        session.names.restart()
        return handle.value

    def members(self, operation: CollectiveSpec) -> tuple[int, int]:
        """Return the number of ranks that take part in an operation, and this process's place among them.

        Raises:
            InvalidArgumentError: this process is not in the operation's process set.
        """
        context = self._context()
        ranks = context.engine.members_of(operation.process_set, operation.collective.value)
        return len(ranks), ranks.index(context.engine.rank)

    def own_rows(self, operation: CollectiveSpec, rows: int) -> int:
        """Return how many of ``rows`` rows this process gets in a reducescatter."""
        ranks, own = self.members(operation)
        return divide_rows(rows, ranks)[own]

    def sharers(self, process_set: ProcessSet) -> tuple[int, ...]:
        """The set's ranks, if this process and at least one other are among them; else none.

        A rank with no other to reduce with trains exactly as it would without hvdgloo.
        """
        process.asked_for_ranks()
        ranks = self.context.engine.process_sets.get(process_set_id(process_set), ())
        return ranks if len(ranks) > 1 and self.context.rank in ranks else ()

    def is_shared(self, process_set: ProcessSet) -> bool:
        """Return whether this process and at least one other are in the set."""
        return bool(self.sharers(process_set))

    def may_share(self, process_set: ProcessSet) -> bool:
        """Return whether there are other processes to share with, now or later in an elastic job.

        For what is made once and used in all epochs, such as a traced function.
        """
        return self.context.config.elastic or self.is_shared(process_set)

    def zeros(self, like: T) -> T:
        """A tensor of zeros of the same shape, type and device."""
        memory = self.adapter.allocate(replace(self.adapter.describe(like), device="cpu"), like)
        self.adapter.export(memory, writable=True).array().fill(0)
        return self.adapter.deliver(memory, like, in_place=False)

    def end_step(self) -> None:
        """A training step has ended; see ``Context.end_step``. Nothing is counted before ``init()``."""
        with suppress(NotInitializedError):
            self._context().end_step()

    def count_outer_steps(self, count: int, nbytes: int, seconds: float, *, every: int) -> None:
        """Count outer steps; see ``Context.count_outer_steps``. Nothing is counted before ``init()``."""
        with suppress(NotInitializedError):
            self._context().count_outer_steps(count, nbytes, seconds, every=every)

    def _bind(self) -> tuple[Context, _Session[T]]:
        context = self._context()
        bound = self._bound
        if bound is None or bound[0] is not context:
            with self._lock:
                bound = self._bound
                if bound is None or bound[0] is not context:
                    bound = self._bound = context, _Session(context)
        return bound

    # Handles ----------------------------------------------------------------------------------------------------------

    def poll(self, handle: int) -> bool:
        """Return whether ``synchronize(handle)`` would return at once.

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
            its result: a tensor, a list of them for a group, or the pair of an alltoall; None if the handle is unknown
            or was synchronized.
        """
        known = {} if self._bound is None else self._bound[1].pending
        entry = known.get(handle)
        if entry is None:
            return None
        pending, shape = entry
        try:
            results = pending.result()
        except Exception:
            known.pop(handle, None)
            raise
        known.pop(handle, None)  # not if the wait was interrupted: it may be waited for again
        return shape(results)

    def _number(self, pending: Pending[T], shape: Callable[[list[T]], Any] = itemgetter(0)) -> int:
        """The number that stands for a pending operation; ``shape`` turns its results into what users get."""
        _, session = self._bind()
        number = next(session.numbers)
        session.pending[number] = (pending, shape)
        return number

    # Checks -----------------------------------------------------------------------------------------------------------

    def check(self, name: str, tensor: T) -> None:
        """Check that a tensor can be sent.

        Raises:
            InvalidArgumentError: (a ValueError) it cannot; the text begins with the name.
        """
        try:
            self.adapter.describe(self._own(tensor))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{name}: {error}") from None

    def _own(self, tensor: T) -> T:
        # Compressors and differentiation look at a tensor before ``export`` would refuse it.
        if not self.adapter.owns(tensor):
            self.adapter.export(tensor)
        return tensor

    def _own_group(self, tensors: Sequence[T]) -> list[T]:
        if not isinstance(tensors, (list, tuple)):
            raise InvalidArgumentError(f"a group is a list or tuple of tensors, not a {type(tensors).__name__}")
        return [self._own(tensor) for tensor in tensors]

    def _splits(self, operation: CollectiveSpec, tensor: T, splits: Any) -> list[int]:
        """Return the number of rows for each rank of the operation's set, from the user's argument.

        Raises:
            InvalidArgumentError: the splits are not integers, too many or too few, negative, or more than there are
                rows; or the rows cannot be divided evenly.
        """
        shape = self.adapter.describe(tensor).shape
        rows = shape[0] if shape else 0
        size, _ = self.members(operation)
        if splits is None:
            if rows % size:
                raise InvalidArgumentError(
                    f"{rows} rows cannot be divided evenly among {size} ranks; give splits= with a number for each"
                )
            return [rows // size] * size
        given = self.adapter.values(splits) if self.adapter.owns(splits) else np.asarray(splits)
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
            raise InvalidArgumentError(f"splits are integers in one dimension, one for each rank; got {splits!r}")
        plan = self._context().plan
        expected = size if plan is None else plan.size
        if len(given) != expected:
            raise InvalidArgumentError(f"{len(given)} splits were given for {expected} ranks; give one for each")
        if (given < 0).any():
            raise InvalidArgumentError(f"splits are numbers of rows and cannot be negative; got {given.tolist()}")
        if given.sum() > rows:
            raise InvalidArgumentError(f"splits {given.tolist()} ask for {given.sum()} rows, and there are only {rows}")
        return [int(n) for n in given] if plan is None else [int(given.sum())]

    def _start_group(
        self, operation: CollectiveSpec, tensors: Sequence[T], name: str | None, *, in_place: bool, waits: bool = False
    ) -> Pending[T]:
        group = self._own_group(tensors)
        if not group:
            return Pending.of_nothing()
        return self.start(operation, group, name, in_place=in_place, grouped=True, waits=waits)


def _frontend_of(module: str) -> Core[Any]:
    """The Frontend that a front-end's module binds; used to unpickle its methods."""
    frontend: Core[Any] = importlib.import_module(module).FRONTEND
    return frontend
