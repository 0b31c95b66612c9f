"""Collectives in terms of what torch's process groups have in common, whichever library carries them.

None of these groups becomes torch's default group, so a user's own torch.distributed is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdgloo._backends import gpu
from hvdgloo._backends.base import Several, Work
from hvdgloo.types import Buffer, DType, ReduceOp, TensorSpec

TORCH_DTYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in DType}

OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# Bools are 0 and 1: their "or" is a maximum, their "and" a minimum.
BOOL_OPS = {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_FLOATS = {integers: floats for floats, integers in _INTEGERS.items()}


SIGNED = {DType.UINT16: DType.INT16, DType.UINT32: DType.INT32, DType.UINT64: DType.INT64}
"""Unsigned types, which neither torch nor the libraries can compute with, and the signed types whose sums and products
have the same bits."""


def tensor_of(buffer: Buffer, dtype: DType | None = None) -> torch.Tensor:
    """A flat tensor over the same memory.

    Args:
        dtype: another element type to see the bytes as.
    """
    kind = TORCH_DTYPES[dtype or buffer.dtype]
    owner = buffer.owner
    if isinstance(owner, torch.Tensor) and not owner.is_cpu:
        return gpu.view(owner, buffer.address, kind, buffer.nbytes // kind.itemsize)
    array = buffer.array()
    if (dtype or buffer.dtype) is not buffer.dtype or array.dtype.kind == "V":
        return torch.from_numpy(array.view(np.uint8)).view(kind)
    return torch.from_numpy(array)


class ProcessGroupBackend:
    """The collectives of a ``torch.distributed`` process group.

    Args:
        rank, size: within the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._group: Any = None
        self._options: dict[Any, Any] = {}

    def _work(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> Work:
        """An operation that the group has begun.

        Args:
            what: it is, for messages.
            work: the group's own.
            keep: what must live until it has ended.
            finish: what is to be done after it.
        """
        raise NotImplementedError

    def _begin(self, function: Callable[..., Any], nbytes: int, *args: Any) -> Any:
        """Call a method of the group that begins a collective, and return what it returns.

        Args:
            nbytes: the size of what is sent.
        """
        return function(*args)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        what = f"allreduce of {buffer.nbytes} bytes"
        if buffer.dtype in (DType.INT16, DType.UINT16):  # neither Gloo nor NCCL has 16-bit integers
            narrow = tensor_of(buffer)
            wide = narrow.to(torch.int32)
            return self._work(what, self._allreduce(wide, OPS[op]), buffer, lambda: narrow.copy_(wide))
        if buffer.dtype in SIGNED:
            return self._allreduce_unsigned(buffer, op, what)
        if buffer.dtype is DType.BOOL:
            return self._work(what, self._allreduce(tensor_of(buffer, DType.UINT8), BOOL_OPS[op]), buffer)
        if buffer.dtype.is_floating and op in (ReduceOp.MIN, ReduceOp.MAX):
            # Both Gloo and NCCL compare in ways that lose a NaN; integers in the same order keep it.
            values = tensor_of(buffer)
            ordered = _to_ordered(values, op)
            return self._work(
                what, self._allreduce(ordered, OPS[op]), buffer, lambda: values.copy_(_from_ordered(ordered))
            )
        return self._work(what, self._allreduce(tensor_of(buffer), OPS[op]), buffer)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        largest, total = max(nbytes), sum(nbytes)
        own, whole = tensor_of(source, DType.UINT8), tensor_of(target, DType.UINT8)
        keep = (source, target)
        if all(size == largest for size in nbytes):
            work = self._begin(self._group._allgather_base, total, whole, own)
            return self._work("allgather", work, keep)
        if largest * self._size > 2 * total:
            return self._gather_by_broadcasts(source, target, nbytes)
        padded_own = own.new_empty(largest)
        padded_own[: len(own)] = own
        padded = own.new_empty(largest * self._size)

        def finish() -> None:
            blocks = [padded[rank * largest : rank * largest + size] for rank, size in enumerate(nbytes)]
            torch.cat(blocks, out=whole)

        work = self._begin(self._group._allgather_base, padded.nbytes, padded, padded_own)
        return self._work("allgather", work, keep, finish)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        work = self._begin(self._group.broadcast, buffer.nbytes, [tensor_of(buffer, DType.UINT8)], options)
        return self._work(f"broadcast of {buffer.nbytes} bytes", work, buffer)

    def alltoall(
        self,
        source: Buffer,
        target: Buffer,
        sent: Sequence[int],
        received: Sequence[int],
        *,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        """See ``Backend``; ``finish`` is called once everything has arrived."""
        own, whole = tensor_of(source, DType.UINT8)[: sum(sent)], tensor_of(target, DType.UINT8)
        work = self._begin(self._group.alltoall_base, sum(sent), whole, own, list(received), list(sent))
        return self._work("alltoall", work, (source, target), finish)

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        # Gloo's own would move all of it to all ranks. In rank order, so that results do not depend on the timing.
        own = tensor_of(source, DType.UINT8)
        blocks = own.new_empty(nbytes[self._rank] * self._size)
        received = [nbytes[self._rank]] * self._size
        work = self._begin(self._group.alltoall_base, sum(nbytes), blocks, own, received, list(nbytes))

        def finish() -> None:
            if target.nbytes:
                out = tensor_of(target, SIGNED.get(target.dtype))
                _sum(blocks.view(out.dtype).view(self._size, -1), out)

        return self._work("reducescatter", work, (source, target), finish)

    def _allreduce(self, tensor: torch.Tensor, op: Any) -> Any:
        options = self._options.get(op)
        if options is None:
            options = self._options[op] = dist.AllreduceOptions()
            options.reduceOp = op
        return self._begin(self._group.allreduce, tensor.nbytes, [tensor], options)

    def _allreduce_unsigned(self, buffer: Buffer, op: ReduceOp, what: str) -> Work:
        """As signed integers, which wrap around alike; their order is the same if the highest bit is flipped."""
        integers = tensor_of(buffer, SIGNED[buffer.dtype])
        if op not in (ReduceOp.MIN, ReduceOp.MAX):
            return self._work(what, self._allreduce(integers, OPS[op]), buffer)
        highest = torch.iinfo(integers.dtype).min
        integers.bitwise_xor_(highest)
        return self._work(what, self._allreduce(integers, OPS[op]), buffer, lambda: integers.bitwise_xor_(highest))

    def _gather_by_broadcasts(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        """One broadcast per rank that has anything: padding to the largest block would more than double the bytes."""
        works: list[Work] = []
        begin = 0
        for root, size in enumerate(nbytes):
            if size:
                spec = TensorSpec(DType.UINT8, (size,), target.device)
                block = Buffer(target.address + begin, spec, target.owner)
                if root == self._rank:
                    tensor_of(block).copy_(tensor_of(source, DType.UINT8))
                works.append(self.broadcast(block, root))
                begin += size
        return Several(works)


def _to_ordered(values: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """As ``kernels.to_ordered``, on any device, and for half types, too, whose values are widened."""
    wide = values if values.dtype in _INTEGERS else values.float()
    integers = _INTEGERS[wide.dtype]
    limits = torch.iinfo(integers)
    return _turned(wide.view(integers)).masked_fill_(wide.isnan(), limits.min if op is ReduceOp.MIN else limits.max)


def _from_ordered(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_to_ordered``: float32 for half types."""
    return _turned(ordered).view(_FLOATS[ordered.dtype])


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """A new tensor; its own inverse."""
    return (bits >> (8 * bits.itemsize - 1)).bitwise_and_(torch.iinfo(bits.dtype).max).bitwise_xor_(bits)


def _sum(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Add rows in order; half types are accumulated in float32 and rounded once."""
    half = out.dtype in (torch.float16, torch.bfloat16)
    total = rows[0].float() if half else out.copy_(rows[0])
    for row in rows[1:]:
        total += row
    if half:
        out.copy_(total)
