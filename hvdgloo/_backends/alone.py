"""Collectives of a single rank's tensors on a GPU: copies at most, on the current stream, without a communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdgloo._backends import gpu
from hvdgloo._backends.base import Work
from hvdgloo._backends.nccl import Passed
from hvdgloo._backends.process_group import tensor_of
from hvdgloo.types import Buffer, DType, ReduceOp


class AloneBackend:
    """The only rank of a process set.

    Args:
        device: its GPU. Copies are ordered on the stream that is current there.
    """

    name = "alone"
    blocks = False
    in_rank_order = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        return Passed(self._device)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        return self._copy(source, target, sum(nbytes))

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        return Passed(self._device)

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        return self._copy(source, target, sum(sent))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        return self._copy(source, target, sum(nbytes))

    def scale(self, buffer: Buffer, factor: float) -> None:
        gpu.scale(tensor_of(buffer), factor)

    def abort(self) -> None:
        """Nothing waits for another rank."""

    def close(self) -> None:
        """Nothing to release."""

    def abandon(self) -> None:
        """Nothing to keep."""

    def _copy(self, source: Buffer, target: Buffer, nbytes: int) -> Work:
        gpu.copy(tensor_of(target, DType.UINT8)[:nbytes], tensor_of(source, DType.UINT8)[:nbytes])
        return Passed(self._device)
