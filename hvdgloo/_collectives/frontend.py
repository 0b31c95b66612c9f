"""Every collective once, for all frameworks, under the names that users know.

Horovod has {allreduce, allgather, ...} x {blocking, asynchronous} x {in place, new result} x {one tensor, group} x
framework. Here each axis is handled once, in ``core``; the methods below only say which operation is meant, and hold
the only docstrings.

A framework's package binds one Frontend to the process's Context and exports its methods. Tests and embedding programs
construct their own, each with its own Context, which allows many ranks in one process.

Adding a collective: a member of ``types.Collective``, its methods here, their names in ``names``, a row in
``adjoints.ADJOINTS``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from hvdgloo._collectives import logged, objects
from hvdgloo._collectives.adapter import TensorAdapter
from hvdgloo._collectives.compression import Compressor, NoneCompressor
from hvdgloo._collectives.core import Core, T
from hvdgloo._collectives.persistent import Pending
from hvdgloo._collectives.process_sets import ProcessSet, global_process_set, process_set_id
from hvdgloo._collectives.spec import (
    CollectiveSpec,
    broadcasting,
    crossing,
    exchanging,
    gathering,
    reduction,
    scattering,
)
from hvdgloo._engine.handle import Handle
from hvdgloo._job.context import Context
from hvdgloo.types import Collective, ReduceOp

V = TypeVar("V")


class Frontend(Core[T]):
    """The collectives of one framework on one Context.

    Args:
        adapter: the framework's tensors.
        context: returns the Context to work in, or raises NotInitializedError.
        module: of a Frontend that a module binds, that module's name: its methods are then pickled by reference.

    All collectives are *collective*: every rank of the process set must call them, with the same name, element type and
    parameters, in any order. ``name`` is what matches the calls of different ranks; without one, calls of a kind are
    matched by their order. Common errors, not repeated below:

    Raises:
        InvalidArgumentError: (a ValueError) the call itself is invalid; nothing was sent to other ranks.
        DuplicateNameError: (a ValueError) an operation with the same name has not ended yet.
        NotInitializedError: (a ValueError and a HorovodInternalError) before ``init()``, after ``shutdown()``.
        HorovodInternalError: (a RuntimeError) the operation failed on all ranks: they disagree about it (the job stays
            usable), one of them was lost or shut down, or the data plane failed. Asynchronous forms raise it when they
            are waited for.
    """

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
            op: Average (default), Sum, Adasum, Min, Max or Product. An integers' average is truncated toward zero.
            prescale_factor: multiplies each rank's tensor before, ...
            postscale_factor: ... and the result after; integers are truncated toward zero both times.
            process_set: the ranks that take part.

        Returns:
            a new tensor of the same shape, type and device.
        """
        operation = crossing(reduction(average, op, prescale_factor, postscale_factor, process_set), compression)
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
        arguments = average, op, prescale_factor, postscale_factor, process_set
        return self._number(self._start_allreduce(tensor, arguments, name, in_place=False))

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
        arguments = average, op, prescale_factor, postscale_factor, process_set
        return self._start_allreduce(tensor, arguments, name, in_place=True, waits=True).result()[0]

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
        arguments = average, op, prescale_factor, postscale_factor, process_set
        return self._number(self._start_allreduce(tensor, arguments, name, in_place=True))

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
        return self._apply_compressed(operation, tensors, name, compression)

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
        return self._number(self._start_group(operation, tensors, name, in_place=False), list)

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
        return self._start_group(operation, tensors, name, in_place=True, waits=True).result()

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
        return self._number(self._start_group(operation, tensors, name, in_place=True), list)

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

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """``allgather`` of several tensors as one: none is sent before all are ready on all ranks. Differentiable."""
        group = self._own_group(tensors)
        return self.apply(gathering(process_set), group, name, grouped=True) if group else []

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """``grouped_allgather`` that returns one handle for the list. Records no gradient."""
        return self._number(self._start_group(gathering(process_set), tensors, name, in_place=False), list)

    # alltoall ---------------------------------------------------------------------------------------------------------

    def alltoall(
        self, tensor: T, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T | tuple[T, T]:
        """Send every rank a part of the tensor's rows, and receive its part of each. Differentiable.

        Args:
            tensor: at least one-dimensional; first dimensions may differ between ranks, others may not.
            splits: how many rows go to each rank of the set, in order: integers, shape (set size,), whose sum may be
                less than the tensor's rows (the rest is not sent). None divides the rows evenly.
            name: what matches the ranks' calls.
            process_set: the ranks that take part.

        Returns:
            the received rows, in order of the ranks that sent them; with ``splits`` also how many came from each
            (int32, shape (set size,), in host memory).
        """
        operation = exchanging(process_set)
        rows = self._splits(operation, self._own(tensor), splits)
        received, counts = self.exchange(operation, tensor, rows, name)
        return received if splits is None else (received, counts)

    def alltoall_async(
        self, tensor: T, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """``alltoall`` that returns a handle, whose result is always the pair. Records no gradient."""
        operation = exchanging(process_set)
        rows = self._splits(operation, self._own(tensor), splits)
        return self._number(self.start(operation, [tensor], name, splits=rows), tuple)

    # reducescatter ----------------------------------------------------------------------------------------------------

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: Compressor[T] = NoneCompressor,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Combine the ranks' tensors element by element, and leave each rank its part of the rows. Differentiable.

        Args:
            tensor: at least one-dimensional, the same shape and element type on every rank.
            name: what matches the ranks' calls.
            compression: how the tensor travels.
            op: Average or Sum.
            process_set: the ranks that take part.
            prescale_factor, postscale_factor: as in ``allreduce``.

        Returns:
            this rank's rows: of n rows among p ranks, the first n mod p ranks get one more than the others.
        """
        operation = scattering(op, prescale_factor, postscale_factor, process_set)
        sent, ctx = compression.compress(self._own(tensor))
        return compression.decompress(self.apply(operation, [sent], name)[0], ctx)

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """``reducescatter`` that returns a handle. Records no gradient."""
        operation = scattering(op, prescale_factor, postscale_factor, process_set)
        return self._number(self.start(operation, [tensor], name))

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        compression: Compressor[T] = NoneCompressor,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """``reducescatter`` of several tensors as one. Differentiable."""
        operation = scattering(op, prescale_factor, postscale_factor, process_set)
        return self._apply_compressed(operation, tensors, name, compression)

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = ReduceOp.AVERAGE,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """``grouped_reducescatter`` that returns one handle for the list. Records no gradient."""
        operation = scattering(op, prescale_factor, postscale_factor, process_set)
        return self._number(self._start_group(operation, tensors, name, in_place=False), list)

    # broadcast --------------------------------------------------------------------------------------------------------

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Return one rank's tensor on all ranks. Differentiable.

        Args:
            tensor: the same shape and type on every rank; only the root's values matter.
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
        return self.start(broadcasting(root_rank, process_set), [tensor], name, in_place=True, waits=True).result()[0]

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """``broadcast_`` that returns a handle."""
        return self._number(self.start(broadcasting(root_rank, process_set), [tensor], name, in_place=True))

    # Python objects ---------------------------------------------------------------------------------------------------

    def broadcast_object(
        self, obj: V, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> V:
        """Return one rank's Python object on all ranks.

        Args:
            obj: anything that cloudpickle can pickle; only the root's value matters.
            root_rank: global rank of the source.
            name: what matches the ranks' calls; by default they are matched by their order.
            process_set: the ranks that take part.

        Returns:
            ``obj`` itself on the root, a copy of it elsewhere.

        Raises:
            AuthenticationError: what arrived was not made by a rank of this job; it was not unpickled.
            HorovodInternalError: the root could not pickle its object. On the root, whatever pickling raised.
        """
        return objects.broadcast_object(self, obj, root_rank, name, process_set)

    def allgather_object(
        self, obj: V, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[V]:
        """Return every rank's Python object, in rank order.

        Args:
            obj: anything that cloudpickle can pickle; types and sizes may differ between ranks.
            name: what matches the ranks' calls; by default they are matched by their order.
            process_set: the ranks that take part.

        Returns:
            one object for each rank. This rank's own is a copy too, so that all ranks have equal lists.

        Raises:
            AuthenticationError: what arrived was not made by a rank of this job; it was not unpickled.
            HorovodInternalError: some rank could not pickle its object. On that rank, whatever pickling raised.
        """
        return objects.allgather_object(self, obj, name, process_set)

    # barrier ----------------------------------------------------------------------------------------------------------

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return once every rank has called it."""
        self.start(CollectiveSpec(Collective.BARRIER, process_set=process_set_id(process_set)), [], waits=True).result()

    # The program's own numbers ---------------------------------------------------------------------------------------

    def log(
        self,
        values: Mapping[str, Any] | None = None,
        /,
        *,
        average: bool = False,
        step: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        epochs: int | None = None,
        note: str | None = None,
        **named: Any,
    ) -> None:
        """Show numbers of the program, and its progress, on the job's page, in its report, ``hvdgloo-run top`` and
        ``/metrics``.

        Rank 0's numbers are shown, so it does not matter whether the other ranks call this too, except for averages.
        The numbers are sent with rank 0's next report, about once a second; between two of them, the last value counts.
        A tensor on a GPU is waited for, as by ``item()``.

        Args:
            values: numbers by name, for names that cannot be written as ``named``.
            average: log averages over all ranks, which must all call this with the same names: an allreduce.
            step: number of the step that the values are about, from 0, in its epoch if there are epochs.
            steps: number of steps in an epoch, or in the whole training if there are no epochs. Without ``step``, the
                steps of the optimizer are counted.
            epoch: number of the epoch, from 0; without ``step``, the epoch has ended.
            epochs: number of epochs.
            note: line for the job's events, and a mark on its charts, such as "saved a checkpoint".
            **named: numbers by name: Python numbers, or tensors with one element.

        Raises:
            InvalidArgumentError: (a ValueError) a value is not one number, or there are more than 64 names.
            MismatchError: ranks that average have different names.
        """
        context = self._context()
        operation = CollectiveSpec(Collective.ALLREDUCE, ReduceOp.SUM)
        logged.record(
            context.engine.counters,
            context.rank,
            values,
            named,
            note,
            (lambda array: self.start_array(operation, array, "hvd.log")()) if average else None,
            step=step,
            steps=steps,
            epoch=epoch,
            epochs=epochs,
        )


class NamedFrontend(Frontend[T]):
    """A Frontend for one run of a gradient's rule, in frameworks where runs of rules have no fixed order: all its calls
    have names.

    Args:
        adapter, context: as for ``Frontend``.
        label: the prefix of the names; the same on all ranks.
    """

    def __init__(self, adapter: TensorAdapter[T], context: Callable[[], Context], label: str) -> None:
        super().__init__(adapter, context)
        self._label = label
        self._calls = itertools.count(1)

    def start(self, operation: CollectiveSpec, tensors: Sequence[T], name: str | None = None, **how: Any) -> Pending[T]:
        return super().start(operation, tensors, name or self.next_name(), **how)

    def _submit_array(
        self, operation: CollectiveSpec, array: npt.NDArray[Any], name: str | None
    ) -> tuple[Handle, Callable[[], npt.NDArray[Any]]]:
        return super()._submit_array(operation, array, name or self.next_name())

    def next_name(self) -> str:
        """The name of the next call."""
        return f"{self._label}.{next(self._calls)}"
