"""Reductions of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from hvdgloo._backends import base, kernels
from hvdgloo._backends.base import Backend, Done
from hvdgloo._backends.shm.calls import Call
from hvdgloo._backends.shm.segment import array_at
from hvdgloo._backends.shm.small import MOST_BYTES
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch.distributed import _tensors
from hvdgloo.torch.distributed._calls import FINISHED, Defaults, GroupCalls, Options
from hvdgloo.torch.distributed._queue import OperationQueue
from hvdgloo.torch.distributed._tensors import Finish, Reduction
from hvdgloo.types import Buffer, DType, ReduceOp

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_MOST_KNOWN = 1000
"""Kinds of small tensors that are remembered."""


class Reductions(GroupCalls):
    """Collectives that combine the ranks' elements."""

    def __init__(self, queue: OperationQueue, rank: int, size: int, seconds: float) -> None:
        super().__init__(queue, rank, size, seconds)
        self._small: dict[tuple[Any, ...], tuple[Call, int, DType, np.ufunc, Reduction] | None] = {}

    def allreduce(self, tensors: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(tensors, Tensor):
            tensors = [tensors]
        if not hasattr(opts, "reduceOp"):
            opts = Defaults(dist.ReduceOp.SUM if opts is None else opts, timeout=timeout)
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
                return FINISHED
        return self._reduce_all([tensor], opts, "all_reduce", tensors)

    def _small_allreduce(self, tensor: Tensor, given: Any) -> tuple[Call, int, DType, np.ufunc, Reduction] | None:
        """Return what a small allreduce of such tensors needs; None if they have to take the usual way."""
        dtype = _tensors.DTYPES.get(tensor.dtype)
        if len(self._small) > _MOST_KNOWN:
            self._small.clear()
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or dtype is None or kernels.is_half(dtype):
            return None
        if not 0 < tensor.nbytes <= MOST_BYTES:
            return None
        reduction = Reduction.of(given, self._own_size)
        if reduction.bitwise is not None or reduction.prescale != 1.0:
            return None
        call = Call("all_reduce", dtype, reduction.name, count=tensor.numel())
        return call, tensor.nbytes, dtype, kernels.ufunc(dtype, reduction.op), reduction

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Options = None) -> Work:
        return self._reduce_all(list(tensors), opts or Defaults(), "all_reduce_coalesced", tensors)

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
        call = Call(kind, dtype, reduction.name, root, sum(buffer.count for buffer in buffers))
        full = [buffer for buffer in buffers if buffer.count]
        done = _tensors.joined([self._scaling(full, reduction, by_plane=True), *finishes, finish])
        if reduction.bitwise is not None:
            return self._combine_bits(memory, reduction.bitwise, call, done, result, opts)
        return self._add(call, lambda backend: _reduce(backend, full, reduction), done, result, opts)

    def _combine_bits(
        self, tensors: Sequence[Tensor], combine: np.ufunc, call: Call, done: Finish | None, result: Any, opts: Options
    ) -> Work:
        """Gather everything, and combine it here: no data plane knows such reductions."""
        size = self._own_size
        gathered = [torch.empty(size * own.nbytes, dtype=torch.uint8, device="cpu") for own in tensors]

        def start(backend: Backend) -> base.Work:
            return base.Several([
                backend.allgather(_tensors.content(own), _tensors.content(whole), [own.nbytes] * size)
                for own, whole in zip(tensors, gathered, strict=True)
            ])  # fmt: skip

        def finish() -> None:
            for own, whole in zip(map(_tensors.numbers, tensors), gathered, strict=True):
                parts = _tensors.content(whole).array().view(own.dtype.numpy_dtype).reshape(size, -1)
                own.array()[...] = combine.reduce(parts, axis=0)
            if done is not None:
                done()

        return self._add(call, start, finish, result, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self._scatter_reduced(output, input, opts or Defaults(), output)

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
        call = Call("reduce_scatter", source.dtype, reduction.name, count=source.count)
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
                back,
            ):
                return FINISHED
        if plain and reduction.op is ReduceOp.SUM:
            averaged = self._scaling([target], reduction)

            def start(backend: Backend) -> base.Work:
                return backend.reducescatter(source, target, [target.nbytes] * self._own_size, ReduceOp.SUM)

            return self._add(call, start, _tensors.joined([averaged, back]), result, opts)
        # Planes between hosts know but the sum.
        whole = own.clone()

        def take() -> None:
            block.view(-1).copy_(whole.view(-1)[self._own_rank * block.numel() :][: block.numel()])

        return self._reduce_all([whole], opts, "reduce_scatter", result, _tensors.joined([take, back]))

    def _scaling(self, buffers: Sequence[Buffer], reduction: Reduction, *, by_plane: bool = False) -> Finish | None:
        """Return what multiplies results by the reduction's factor; None for 1.

        Args:
            by_plane: True where planes that are ``Scattered`` have done so.
        """
        if reduction.postscale == 1.0:
            return None

        def scale() -> None:
            connection = self._queue.connection
            assert connection is not None
            if not (by_plane and isinstance(connection.backend, base.Scattered)):
                for buffer in buffers:
                    connection.backend.scale(buffer, reduction.postscale)

        return scale

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Options = None, timeout: timedelta | None = None) -> Work:
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
            opts = Defaults(dist.ReduceOp.SUM if opts is None else opts, timeout=timeout)
        (output,), (parts,) = outputs, inputs
        for part in parts:
            _tensors.check(part)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        return self._scatter_reduced(output, whole, opts or Defaults(), outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Options = None
    ) -> Work:
        works = [
            self._scatter_reduced(output, given, opts or Defaults(), list(outputs))
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def reduce(self, tensors: Any, opts: Options = None, *more: Any) -> Work:
        if isinstance(tensors, Tensor):  # reduce(tensor, root, op)
            tensors, opts = [tensors], Defaults(more[0] if more else dist.ReduceOp.SUM, opts or 0)
        (tensor,) = tensors
        # All ranks get the result, in a copy: the tensors of others than the root keep what they have.
        copy = _tensors.source(tensor).clone()
        is_root = opts.rootRank == self._own_rank
        finish = (lambda: tensor.detach().copy_(copy)) if is_root else None
        return self._reduce_all([copy], opts, "reduce", tensors, finish, opts.rootRank)

    # Names of older versions of torch.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _reduce(backend: Backend, buffers: Sequence[Buffer], reduction: Reduction) -> base.Work:
    """Begin to combine the buffers of all ranks in place; planes that are not ``Scattered`` leave out the postscale."""
    if not buffers:
        return Done()
    if isinstance(backend, base.Scattered):
        return backend.allreduce_several(buffers, buffers, reduction.op, reduction.prescale, reduction.postscale)
    for buffer in buffers:
        if reduction.prescale != 1.0:
            backend.scale(buffer, reduction.prescale)
    return base.Several([backend.allreduce(buffer, reduction.op) for buffer in buffers])
