"""Persistent collectives (MPI's term), which a program starts again and again: registered once, started every step.

Everything that does not change from one start to the next (name, Request, what the engine has checked and agreed upon)
is worked out at the first start, and again if the tensors' shapes or types change, or the job is another one. A start
creates only its ``Pending``, the one future on the way from the user to the engine and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from hvdgloo._collectives.adapter import TensorAdapter
from hvdgloo._collectives.naming import names_of, template_of
from hvdgloo._collectives.spec import CollectiveSpec
from hvdgloo._engine.conventions import divide_rows
from hvdgloo._engine.handle import Handle
from hvdgloo._engine.residual import Residual
from hvdgloo._engine.submission import PersistentRequest
from hvdgloo._job.context import Context
from hvdgloo.types import Buffer, Collective, DType, TensorSpec

T = TypeVar("T")


class Pending(Handle, Generic[T]):
    """A started collective: the engine's Handle, and the tensors that it was started with."""

    __slots__ = ("_operation", "_results", "_tensors")

    def __init__(self, name: str, operation: PersistentOperation[T] | None, tensors: Sequence[T]) -> None:
        super().__init__(name)
        self._operation = operation
        self._tensors = tensors
        self._results: list[T] | None = None

    @classmethod
    def of_nothing(cls) -> Pending[T]:
        """A collective that has already ended: a group without tensors."""
        pending: Pending[T] = cls("an empty group", None, ())
        pending._results = []
        pending.resolve()
        return pending

    def result(self, timeout: float | None = None) -> list[T]:
        """Block until the collective has ended.

        Args:
            timeout: seconds; None waits until it ends, which it does at the engine's own deadlines at the latest.

        Returns:
            the results in the order of the tensors; for an in-place operation, the tensors themselves.

        Raises:
            WaitTimeoutError: not ended within ``timeout``; it may be waited for again.
            HorovodInternalError: the collective failed.
        """
        outputs = self.wait(timeout)
        results = self._results
        if results is None:
            assert self._operation is not None
            results = self._results = self._operation.deliver(outputs, self._tensors)
        return results


class PersistentOperation(Generic[T]):
    """A collective with its parameters and name, to be started with tensors any number of times.

    It must not be started again before the previous start has ended, unless it has automatic names.

    Args:
        adapter: the framework's tensors.
        context: returns the Context to work in, or raises NotInitializedError.
        spec: the collective and its parameters.
        name: without the operation's prefix; None for an automatic one at each start.
        in_place: write the results into the tensors, which otherwise are never written.
        grouped: the name is a group's.
        residual: for error feedback, if values are encoded.
    """

    __slots__ = (
        "_adapter",
        "_context",
        "_export",
        "_late",
        "_registered",
        "_residual",
        "in_place",
        "name",
        "prefix",
        "spec",
    )

    def __init__(
        self,
        adapter: TensorAdapter[T],
        context: Callable[[], Context],
        spec: CollectiveSpec,
        name: str | None,
        *,
        in_place: bool,
        grouped: bool,
        residual: Residual | None = None,
    ) -> None:
        self.spec = spec
        self._residual = residual
        self.name = name
        self.prefix = spec.collective.prefix(grouped=grouped)
        self.in_place = in_place
        self._adapter = adapter
        self._export = adapter.export
        self._context = context
        self._late = spec.collective.sized_late
        self._registered: tuple[Context, PersistentRequest] | None = None  # one value, since threads may share it

    def start(self, tensors: Sequence[T], *, splits: Sequence[int] = (), waits: bool = False) -> Pending[T]:
        """Hand the collective to the engine, and return at once.

        Args:
            tensors: taken together: negotiated, executed and failed as one.
            splits: for an alltoall: rows for each rank. Its results are the received rows and how many came from each
                rank (int32).
            waits: the caller is about to wait for it.

        Raises:
            InvalidArgumentError: this start itself is invalid; nothing was sent to other ranks.
            DuplicateNameError: the previous start has not ended yet.
            HorovodInternalError: the job has ended.
        """
        context, export, in_place = self._context(), self._export, self.in_place
        registered = self._registered
        persistent = registered[1] if registered is not None and registered[0] is context else None
        if persistent is None or len(persistent.request.tensors) != len(tensors):
            inputs = [export(tensor, writable=in_place) for tensor in tensors]
            persistent = self._register(context, inputs)
        else:
            inputs, same = [], True
            for tensor, spec in zip(tensors, persistent.request.tensors):  # noqa: B905 - of equal length
                buffer = export(tensor, writable=in_place, known=spec)
                inputs.append(buffer)
                if buffer.spec is not spec and buffer.spec != spec:
                    same = False
            if not same:
                persistent = self._register(context, inputs)
        on_device = persistent.request.on_device
        if self.name is None:
            names = names_of(context)
            persistent = persistent.numbered(names.count(self.spec.process_set, self.prefix))
        pending: Pending[T] = Pending(persistent.request.name, self, tensors)
        launch = context.engine.launch
        if self._late:
            fence = self._adapter.fence(tensors) if on_device else None
            allocate = self._allocating(tensors)
            launch(persistent, pending, inputs, allocate=allocate, ready=fence, splits=splits, waits=waits)
        else:
            outputs = inputs if in_place else self._outputs(context, inputs, tensors)
            fence = self._adapter.fence(tensors) if on_device else None  # once the results are allocated
            launch(persistent, pending, inputs, outputs, ready=fence, waits=waits)
        return pending

    def deliver(self, outputs: Sequence[Buffer], tensors: Sequence[T]) -> list[T]:
        """Turn the engine's results into what the caller of ``start`` gets."""
        deliver, in_place, delivered = self._adapter.deliver, self.in_place, []
        for buffer, tensor in zip(outputs, tensors):  # noqa: B905 - an alltoall has one tensor and two outputs
            owner: Any = buffer.owner
            delivered.append(deliver(owner, tensor, in_place=in_place))
        if self.spec.collective is Collective.ALLTOALL:
            delivered.append(self._integers(outputs[1].array(), tensors[0]))
        return delivered

    def _register(self, context: Context, inputs: Sequence[Buffer]) -> PersistentRequest:
        """Make the request of all starts with tensors of this kind; with automatic names, their template."""
        specs = tuple([buffer.spec for buffer in inputs])
        full_name = template_of(self.prefix) if self.name is None else f"{self.prefix}.{self.name}"
        persistent = PersistentRequest(
            self.spec.request(full_name, specs, wire_threshold=context.engine.wire_threshold), self._residual
        )
        self._registered = context, persistent
        return persistent

    def _allocating(self, tensors: Sequence[T]) -> Callable[[int, TensorSpec], Buffer]:
        adapter = self._adapter

        def allocate(index: int, spec: TensorSpec) -> Buffer:
            return adapter.export(adapter.allocate(spec, tensors[index]), writable=True)

        return allocate

    def _outputs(self, context: Context, inputs: Sequence[Buffer], tensors: Sequence[T]) -> list[Buffer]:
        outputs = []
        for exported, tensor in zip(inputs, tensors, strict=True):
            spec = exported.spec
            if self.spec.collective is Collective.REDUCESCATTER:
                spec = replace(spec, shape=self._own_part(context, spec.shape))
            elif exported.owner is not tensor:
                outputs.append(exported)  # a staged input is a private copy already: it can hold the result as well
                continue
            outputs.append(self._export(self._adapter.allocate(spec, tensor), writable=True, known=spec))
        return outputs

    def _own_part(self, context: Context, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape:
            return shape  # the engine refuses it
        ranks = context.engine.members_of(self.spec.process_set, self.spec.collective.value)
        return divide_rows(shape[0], len(ranks))[ranks.index(context.engine.rank)], *shape[1:]

    def _integers(self, values: npt.NDArray[np.int64], like: T) -> T:
        """A tensor of int32, shape (len(values),), on the host: numbers of rows are read there."""
        memory = self._adapter.allocate(TensorSpec(DType.INT32, values.shape), like)
        self._export(memory, writable=True).array()[:] = values
        return self._adapter.deliver(memory, memory if isinstance(like, type(memory)) else like, in_place=False)
