"""A process group of torch.distributed on hvdgloo's data planes.

Up to torch 2.13 only ``ProcessGroup`` can be extended in Python, as torchft does: an object of this class takes the
place of torch's own group. Python's functions call the methods below directly. C++ (DDP, functional collectives) calls
those for which torch has a trampoline.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, Work

from hvdgloo._backends import base, kernels
from hvdgloo._backends.base import Backend, Done
from hvdgloo._backends.shm.calls import Call
from hvdgloo._backends.shm.segment import array_at
from hvdgloo._backends.shm.small import MOST_BYTES, Patience
from hvdgloo._platform import interrupts
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch.distributed import _tensors
from hvdgloo.torch.distributed._connection import Connection
from hvdgloo.torch.distributed._messages import Messages
from hvdgloo.torch.distributed._queue import Operation, OperationQueue
from hvdgloo.torch.distributed._tensors import Finish, Reduction
from hvdgloo.types import Buffer, DType, ReduceOp

Tensor = torch.Tensor
Options = Any
"""One of torch's classes of options, or None."""

_opened: Counter[str] = Counter()
"""The number of groups of each name that this process has made: a store may still hold the keys of an earlier one."""

_groups: weakref.WeakSet[HvdglooProcessGroup] = weakref.WeakSet()

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Finished(Work):
    """Result of a synchronous operation, which ended before it returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_FINISHED = _Finished()


class _Defaults:
    """The options of a call that gives none: pybind has overloads such as ``allreduce(tensor, op)``."""

    def __init__(self, op: Any = dist.ReduceOp.SUM, root: int = 0, timeout: timedelta | None = None) -> None:
        self.reduceOp, self.rootRank, self.timeout = op, root, timeout
        self.asyncOp = True


_ProcessGroup: Any = dist.ProcessGroup
"""Without torch's stubs, which know neither its overloads' common form nor what older versions call the methods."""


class HvdglooProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """One rank's membership in a process group.

    Args:
        store: torch's, with this group's prefix.
        rank, size: within the group.
        timeout: of its operations.
        name: torch's number for it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)  # with the store, C++ would not find this class's methods
        self._own_rank, self._own_size = rank, size
        self._seconds = timeout.total_seconds()
        self._name, self._description = name, "undefined"
        _opened[name] += 1
        self._store = PrefixStore(f"hvdgloo/{_opened[name]}", store)
        label = f"process group {name}" if name not in ("", "0") else "the default process group"
        self._queue = OperationQueue(
            label,
            lambda cancelled: Connection(PrefixStore("all", self._store), rank, size, label, self._seconds, cancelled),
        )
        self._messages = Messages(self._store, rank, size, label, self._seconds)
        self._sequence = 0
        self._coalescing = False
        self._last: Work = _FINISHED
        self._small: dict[tuple[Any, ...], tuple[Call, int, DType, np.ufunc, Reduction] | None] = {}
        _groups.add(self)

    # What torch.distributed asks about a group ------------------------------------------------------------------------

    # rank() and size() stay C++'s: torch.compile would trace into Python's, and refuse what they touch.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "hvdgloo"

    def name(self) -> str:
        return "hvdgloo"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HvdglooProcessGroup:
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def get_group_store(self) -> Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        self._queue.abort()
        self._messages.abort()

    def shutdown(self) -> None:
        self._messages.close()
        self._queue.close()

    def _after_fork_in_child(self) -> None:
        self._queue.after_fork_in_child()
        self._messages.after_fork_in_child()

    # How calls are carried out ----------------------------------------------------------------------------------------

    def _timeout_of(self, opts: Options) -> float:
        given = getattr(opts, "timeout", None)
        return self._seconds if given is None or given < timedelta(0) else given.total_seconds()

    def _add(
        self, call: Call, start: Callable[[Backend], base.Work], finish: Finish | None, result: Any, opts: Options
    ) -> Work:
        self._sequence += 1
        asynchronous = getattr(opts, "asyncOp", True)
        operation = Operation(self._queue, call, start, finish, result, self._timeout_of(opts))
        if self._coalescing:
            self._last = operation
        return self._queue.add(operation, waits=not asynchronous)

    def _at_once(self, call: Call, nbytes: int, opts: Options, do: Callable[[Any, Patience], None]) -> bool:
        """Carry out a small call of a caller that waits for it, if nothing else of the group is under way.

        Args:
            nbytes: that each rank gives.
            do: is handed the ``SmallCollectives`` and a function that waits.

        Returns:
            False if the call has to take the usual way.
        """
        queue = self._queue
        connection = queue.connection
        if connection is None or connection.small is None or getattr(opts, "asyncOp", True):
            return False
        if not connection.small.fits(nbytes) or not queue.carrying_out.acquire(blocking=False):
            return False
        held = interrupts.hold()
        try:
            if queue.waiting or queue.failure is not None:
                return False
            self._sequence += 1
            assert connection.calls is not None
            connection.calls.begin(call)
            do(connection.small, queue.wait_small(call, self._timeout_of(opts)))
            if connection.calls.mismatch():
                connection.check_peers()
        except Exception as failure:
            raise queue.fail(call, failure) from failure
        except BaseException as interrupt:
            queue.fail(call, RuntimeError(f"interrupted by {type(interrupt).__name__}"))
            raise
        finally:
            queue.carrying_out.release()
            interrupts.release(held)
        return True

    # Collectives ------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if not hasattr(opts, "reduceOp"):
            opts = _Defaults(dist.ReduceOp.SUM if opts is None else opts, timeout=timeout)
        (tensor,) = tensors
        key = tensor.dtype, tensor.numel(), type(tensor), getattr(opts.reduceOp, "op", opts.reduceOp)
        if key not in self._small:
            self._small[key] = self._small_allreduce(tensor, opts.reduceOp)
        known = self._small[key]
        if known is not None and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
            _tensors.check(tensor)
            call, nbytes, dtype, combine, reduction = known
            own = array_at(tensor.data_ptr(), nbytes).view(dtype.numpy_dtype)
            if self._at_once(
                call,
                nbytes,
                opts,
                lambda small, wait: small.allreduce(own, dtype, combine, 1.0, reduction.postscale, wait),
            ):
                return _FINISHED
        return self._reduce_all([tensor], opts, "all_reduce", tensors)

    def _small_allreduce(self, tensor: Tensor, given: Any) -> tuple[Call, int, DType, np.ufunc, Reduction] | None:
        """Return what a small allreduce of such tensors needs; None if they have to take the usual way."""
        dtype = _tensors.DTYPES.get(tensor.dtype)
        if len(self._small) > 1000:
            self._small.clear()
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or dtype is None or kernels.is_half(dtype):
            return None
        if not 0 < tensor.nbytes <= MOST_BYTES:
            return None
        reduction = Reduction.of(given, self._own_size)
        if reduction.bitwise is not None or reduction.prescale != 1.0:
            return None
        call = Call("all_reduce", dtype, reduction.op, count=tensor.numel())
        return call, tensor.nbytes, dtype, kernels.ufunc(dtype, reduction.op), reduction

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Options = None) -> Work:
        return self._reduce_all(list(tensors), opts or _Defaults(), "all_reduce_coalesced", tensors)

    def _reduce_all(
        self,
        tensors: Sequence[Tensor],
        opts: Options,
        kind: str,
        result: Any,
        finish: Finish | None = None,
        root: int = 0,
    ) -> Work:
        reduction = Reduction.of(opts.reduceOp, self._own_size)
        memory, finishes = [], []
        for tensor in tensors:
            reduction.check(tensor.dtype)
            own, back = _tensors.inout(tensor)
            memory.append(own)
            finishes.append(back)
        buffers = [_tensors.numbers(own) for own in memory]
        dtype = buffers[0].dtype if buffers else None
        call = Call(kind, dtype, reduction.op, root, sum(buffer.count for buffer in buffers))
        done = _tensors.joined([*finishes, finish])
        if reduction.bitwise is not None:
            return self._combine_bits(memory, reduction.bitwise, call, done, result, opts)
        full = [buffer for buffer in buffers if buffer.count]
        return self._add(call, lambda backend: _reduce(backend, full, reduction), done, result, opts)

    def _combine_bits(
        self, tensors: Sequence[Tensor], combine: np.ufunc, call: Call, done: Finish | None, result: Any, opts: Options
    ) -> Work:
        """Gather everything, and combine it here: no data plane knows such reductions."""
        (tensor,) = tensors
        buffer = _tensors.numbers(tensor)
        whole = torch.empty(self._own_size * tensor.nbytes, dtype=torch.uint8, device="cpu")
        gathered = _tensors.content(whole)

        def start(backend: Backend) -> base.Work:
            return backend.allgather(_tensors.content(tensor), gathered, [tensor.nbytes] * self._own_size)

        def finish() -> None:
            parts = gathered.array().view(buffer.dtype.numpy_dtype).reshape(self._own_size, -1)
            buffer.array()[...] = combine.reduce(parts, axis=0)
            if done is not None:
                done()

        return self._add(call, start, finish, result, opts)

    def broadcast(self, tensors: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if not hasattr(opts, "rootRank"):
            opts = _Defaults(root=opts or 0, timeout=timeout)
        (tensor,) = tensors
        root = opts.rootRank
        memory, back = _tensors.inout(tensor) if self._own_rank == root else _tensors.target(tensor)
        buffer = _tensors.content(memory)
        call = Call("broadcast", root=root, count=buffer.nbytes)
        if self._own_rank == root:
            back = None
        if buffer.nbytes and self._at_once(
            call,
            buffer.nbytes,
            opts,
            lambda small, wait: small.broadcast(array_at(buffer.address, buffer.nbytes), root, wait),
        ):
            if back is not None:
                back()
            return _FINISHED
        return self._add(call, lambda backend: backend.broadcast(buffer, root), back, tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self._gather_all(output, input, opts, output)

    def _gather_all(
        self, output: Tensor, given: Tensor, opts: Options, result: Any, finish: Finish | None = None
    ) -> Work:
        own, (whole, back) = _tensors.source(given), _tensors.target(output)
        source, target = _tensors.content(own), _tensors.content(whole)
        nbytes, size = source.nbytes, self._own_size
        if target.nbytes != nbytes * size:
            raise InvalidArgumentError(
                f"all_gather: the output has room for {output.numel()} elements, but {size} ranks give {given.numel()} "
                "each"
            )
        call = Call("all_gather", count=nbytes)
        done = _tensors.joined([back, finish])
        overlaps = source.address < target.address + target.nbytes and target.address < source.address + nbytes
        in_place = source.address == target.address + self._own_rank * nbytes
        if nbytes and overlaps and not in_place:
            own = own.clone()
            source = _tensors.content(own)
        if nbytes and self._at_once(
            call,
            nbytes,
            opts,
            lambda small, wait: small.allgather(
                array_at(source.address, nbytes), array_at(target.address, nbytes * size), wait
            ),
        ):
            if done is not None:
                done()
            return _FINISHED
        return self._add(call, lambda backend: backend.allgather(source, target, [nbytes] * size), done, result, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(inputs, Tensor):
            outputs, inputs, opts = [outputs], [inputs], _Defaults(timeout=timeout)
        (parts,), (given,) = outputs, inputs
        for part in parts:
            _tensors.check(part)
        whole = torch.empty((self._own_size, *given.shape), dtype=given.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                for part, block in zip(parts, whole.unbind(0), strict=True):
                    part.detach().copy_(block.view(part.shape))

        return self._gather_all(whole, given, opts, outputs, finish)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [
            self._gather_all(output, given, opts, list(outputs)) for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [self.allgather([[row[n] for row in outputs]], [given], opts) for n, given in enumerate(inputs)]
        return works[-1]

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self._scatter_reduced(output, input, opts or _Defaults(), output)

    def _scatter_reduced(self, output: Tensor, given: Tensor, opts: Options, result: Any) -> Work:
        reduction = Reduction.of(opts.reduceOp, self._own_size)
        reduction.check(given.dtype)
        own, (block, back) = _tensors.source(given), _tensors.target(output)
        source, target = _tensors.numbers(own), _tensors.numbers(block)
        if source.count != target.count * self._own_size or source.dtype is not target.dtype:
            raise InvalidArgumentError(
                f"reduce_scatter: the output has {output.numel()} elements of {output.dtype}, but each of "
                f"{self._own_size} blocks of the input has {given.numel() / self._own_size:g} of {given.dtype}"
            )
        call = Call("reduce_scatter", source.dtype, reduction.op, count=source.count)
        plain = reduction.bitwise is None and reduction.prescale == 1.0
        dtype = source.dtype
        if plain and source.nbytes and not kernels.is_half(dtype):
            kind = dtype.numpy_dtype
            if self._at_once(
                call,
                source.nbytes,
                opts,
                lambda small, wait: small.reducescatter(
                    array_at(source.address, source.nbytes).view(kind),
                    array_at(target.address, target.nbytes).view(kind),
                    dtype,
                    kernels.ufunc(dtype, reduction.op),
                    reduction.postscale,
                    wait,
                ),
            ):
                if back is not None:
                    back()
                return _FINISHED
        if plain and reduction.op is ReduceOp.SUM:
            averaged = self._scaling(target, reduction)

            def start(backend: Backend) -> base.Work:
                return backend.reducescatter(source, target, [target.nbytes] * self._own_size, ReduceOp.SUM)

            return self._add(call, start, _tensors.joined([averaged, back]), result, opts)
        # Planes between hosts know but the sum.
        whole = own.clone()

        def take() -> None:
            block.view(-1).copy_(whole.view(-1)[self._own_rank * block.numel() :][: block.numel()])

        return self._reduce_all([whole], opts, "reduce_scatter", result, _tensors.joined([take, back]))

    def _scaling(self, buffer: Buffer, reduction: Reduction) -> Finish | None:
        """Return what multiplies results by the reduction's factor; None for 1."""
        if reduction.postscale == 1.0 or not buffer.nbytes:
            return None

        def scale() -> None:
            connection = self._queue.connection
            assert connection is not None
            connection.backend.scale(buffer, reduction.postscale)

        return scale

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
            opts = _Defaults(dist.ReduceOp.SUM if opts is None else opts, timeout=timeout)
        (output,), (parts,) = outputs, inputs
        for part in parts:
            _tensors.check(part)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        return self._scatter_reduced(output, whole, opts or _Defaults(), outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [
            self._scatter_reduced(output, given, opts or _Defaults(), list(outputs))
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Options = None,
    ) -> Work:
        sent = self._block_bytes(input, input_split_sizes, "input")
        received = self._block_bytes(output, output_split_sizes, "output")
        return self._exchange(Call("all_to_all"), output, input, sent, received, opts, output)

    def _block_bytes(self, tensor: Tensor, splits: Sequence[int], which: str) -> list[int]:
        """Return the bytes of each rank's block of a tensor, which is cut along its first dimension."""
        size, rows = self._own_size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise InvalidArgumentError(
                    f"all_to_all: the {which} has {rows} rows, which {size} ranks cannot share equally; give its split "
                    "sizes"
                )
            return [tensor.nbytes // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise InvalidArgumentError(
                f"all_to_all: split sizes {list(splits)} of the {which} must be {size} numbers that add up to its "
                f"{rows} rows"
            )
        row = tensor.nbytes // rows if rows else 0
        return [rows_of_one * row for rows_of_one in splits]

    def _exchange(
        self,
        call: Call,
        output: Tensor,
        given: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        opts: Options,
        result: Any,
        finish: Finish | None = None,
    ) -> Work:
        own, (whole, back) = _tensors.source(given), _tensors.target(output)
        if own.data_ptr() == whole.data_ptr():
            own = own.clone()
        source, target = _tensors.content(own), _tensors.content(whole)
        return self._add(
            call,
            lambda backend: backend.alltoall(source, target, sent, received),
            _tensors.joined([back, finish]),
            result,
            opts,
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None) -> Work:
        for tensor in (*outputs, *inputs):
            _tensors.check(tensor)
        own = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        whole = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=own.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                blocks = torch.split(whole, [tensor.numel() for tensor in outputs])
                for tensor, block in zip(outputs, blocks, strict=True):
                    tensor.detach().copy_(block.view(tensor.shape))

        sent, received = [tensor.nbytes for tensor in inputs], [tensor.nbytes for tensor in outputs]
        return self._exchange(Call("all_to_all"), whole, own, sent, received, opts, list(outputs), finish)

    def reduce(self, tensors: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(tensors, Tensor):  # reduce(tensor, root, op)
            tensors, opts = [tensors], _Defaults(more[0] if more else dist.ReduceOp.SUM, opts or 0)
        (tensor,) = tensors
        # All ranks get the result, in a copy: the tensors of others than the root keep what they have.
        copy = _tensors.source(tensor).clone()
        is_root = opts.rootRank == self._own_rank
        finish = (lambda: tensor.detach().copy_(copy)) if is_root else None
        return self._reduce_all([copy], opts, "reduce", tensors, finish, opts.rootRank)

    def gather(self, outputs: Any, inputs: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(inputs, Tensor):  # gather(outputs, input, root)
            outputs, inputs, opts = [outputs], [inputs], _Defaults(root=opts or 0)
        (given,), root, size = inputs, opts.rootRank, self._own_size
        is_root = root == self._own_rank
        for part in outputs[0] if is_root else ():
            _tensors.check(part)
        nbytes = given.nbytes
        whole = torch.empty((size if is_root else 0, *given.shape), dtype=given.dtype, device="cpu")

        def finish() -> None:
            with torch.no_grad():
                for part, block in zip(outputs[0], whole.unbind(0), strict=True):
                    part.detach().copy_(block.view(part.shape))

        sent = [nbytes if rank == root else 0 for rank in range(size)]
        received = [nbytes if is_root else 0] * size
        call = Call("gather", root=root, count=nbytes)
        return self._exchange(call, whole, given, sent, received, opts, outputs, finish if is_root else None)

    def scatter(self, outputs: Any, inputs: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(outputs, Tensor):  # scatter(output, inputs, root)
            outputs, inputs, opts = [outputs], [inputs], _Defaults(root=opts or 0)
        (output,), root, size = outputs, opts.rootRank, self._own_size
        is_root = root == self._own_rank
        nbytes = output.nbytes
        if is_root:
            for part in inputs[0]:
                _tensors.check(part)
            own = torch.cat([part.detach().reshape(-1) for part in inputs[0]])
        else:
            own = torch.empty(0, dtype=output.dtype, device="cpu")
        sent, received = [nbytes if is_root else 0] * size, [nbytes if rank == root else 0 for rank in range(size)]
        return self._exchange(Call("scatter", root=root, count=nbytes), output, own, sent, received, opts, outputs)

    def barrier(self, opts: Options = None, timeout: timedelta | None = None) -> Work:
        call = Call("barrier")
        if self._at_once(call, 0, opts, lambda small, wait: small.barrier(wait)):
            return _FINISHED
        here = torch.zeros(1, dtype=torch.uint8, device="cpu")
        buffer = _tensors.numbers(here)
        return self._add(call, lambda backend: backend.allreduce(buffer, ReduceOp.MAX), None, [here], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; the error names those that have not."""
        self.barrier(_Defaults(timeout=timeout)).wait()

    # Names of older versions of torch.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Calls within torch.distributed._coalescing_manager begin one by one.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = True

    def _end_coalescing(self, device: torch.device) -> Work:
        self._coalescing, last, self._last = False, self._last, _FINISHED
        return last  # the others have ended before it

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        (tensor,) = tensors
        return self._messages.send(_tensors.source(tensor), dstRank, tag, tensors)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: N803
        (tensor,) = tensors
        memory, back = _tensors.target(tensor)
        return self._messages.receive(memory, back, srcRank, tag, tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        (tensor,) = tensors
        memory, back = _tensors.target(tensor)
        return self._messages.receive(memory, back, None, tag, tensors)


def _reduce(backend: Backend, buffers: Sequence[Buffer], reduction: Reduction) -> base.Work:
    """Begin to combine the buffers of all ranks in place."""
    if not buffers:
        return Done()
    if isinstance(backend, base.Scattered):
        return backend.allreduce_several(buffers, buffers, reduction.op, reduction.prescale, reduction.postscale)
    for buffer in buffers:
        if reduction.prescale != 1.0:
            backend.scale(buffer, reduction.prescale)
    works = [backend.allreduce(buffer, reduction.op) for buffer in buffers]
    if reduction.postscale == 1.0:
        return base.Several(works)
    return _Scaled(base.Several(works), backend, buffers, reduction.postscale)


class _Scaled:
    """Operations whose results are multiplied by a factor at the end."""

    def __init__(self, works: base.Several, backend: Backend, buffers: Sequence[Buffer], factor: float) -> None:
        self._works, self._backend, self._buffers, self._factor = works, backend, buffers, factor

    def completes_within(self, timeout: float) -> bool:
        if not self._works.completes_within(timeout):
            return False
        for buffer in self._buffers:
            self._backend.scale(buffer, self._factor)
        return True


def create(options: Any, pg_options: Any = None) -> HvdglooProcessGroup:
    """Make a group, as torch.distributed asks for it."""
    return HvdglooProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


def _after_fork_in_child() -> None:
    for group in list(_groups):
        group._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
