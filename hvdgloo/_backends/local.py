"""Ranks as threads of one process: the reference backend, and the one that a job of a single process uses.

Ranks meet at a barrier, read each other's memory, and meet again before any rank's memory is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo._backends.base import Done, Work
from hvdgloo.errors import BackendError
from hvdgloo.types import Buffer, ReduceOp

T = TypeVar("T")


class LocalGroup:
    """The state that the ranks of one process share. ``group.backend(rank)`` is one rank's view of it.

    Args:
        size: number of ranks.
        timeout: how many seconds ranks wait for each other within one operation.
    """

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self._timeout = timeout
        self._barrier = threading.Barrier(size)
        self._shown: list[Any] = [None] * size

    def backend(self, rank: int) -> LocalBackend:
        """The backend of one rank."""
        return LocalBackend(self, rank)

    def exchange(self, rank: int, shown: T, compute: Callable[[list[T]], Callable[[], None]]) -> None:
        """Let every rank see what all show: their buffers.

        Args:
            compute: reads what all ranks show and returns what to do once no rank reads it any more.

        Raises:
            BackendError: a rank did not come in time, or the group was aborted.
        """
        self._shown[rank] = shown
        self._meet()
        store = compute(list(self._shown))
        self._meet()
        store()
        self._meet()

    def abort(self) -> None:
        """Fail every exchange that is under way, and all later ones."""
        self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait(self._timeout)
        except threading.BrokenBarrierError:
            raise BackendError("another rank of this process did not take part, or the job was aborted") from None


class LocalBackend:
    """One rank's view of a LocalGroup."""

    name = "local"
    in_rank_order = True

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self.blocks = group.size > 1

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        def compute(buffers: list[Buffer]) -> Callable[[], None]:
            result = kernels.reduce([b.array() for b in buffers], buffer.dtype, op)
            return lambda: np.copyto(buffer.array(), result)

        self._group.exchange(self._rank, buffer, compute)
        return Done()

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        def compute(buffers: list[Buffer]) -> Callable[[], None]:
            pieces = [b.array().view(np.uint8) for b in buffers]
            np.concatenate(pieces, out=target.array().view(np.uint8))
            return _nothing

        self._group.exchange(self._rank, source, compute)
        return Done()

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        def compute(buffers: list[Buffer]) -> Callable[[], None]:
            if self._rank != root:
                np.copyto(buffer.array(), buffers[root].array())
            return _nothing

        self._group.exchange(self._rank, buffer, compute)
        return Done()

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        def compute(shown: list[tuple[Buffer, Sequence[int]]]) -> Callable[[], None]:
            blocks = [_block(theirs, sizes, self._rank) for theirs, sizes in shown]
            np.concatenate(blocks, out=target.array().view(np.uint8))
            return _nothing

        self._group.exchange(self._rank, (source, sent), compute)
        return Done()

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        def compute(buffers: list[Buffer]) -> Callable[[], None]:
            blocks = [_block(theirs, nbytes, self._rank).view(target.dtype.numpy_dtype) for theirs in buffers]
            np.copyto(target.array(), kernels.reduce(blocks, target.dtype, op))
            return _nothing

        self._group.exchange(self._rank, source, compute)
        return Done()

    def scale(self, buffer: Buffer, factor: float) -> None:
        kernels.scale(buffer, factor)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        """Nothing to release."""

    def abandon(self) -> None:
        """Nothing to keep."""


def _block(buffer: Buffer, sizes: Sequence[int], rank: int) -> npt.NDArray[np.uint8]:
    """The bytes of a buffer that are for ``rank``, given each rank's size in ``sizes``."""
    begin = sum(sizes[:rank])
    return buffer.array().view(np.uint8)[begin : begin + sizes[rank]]


def _nothing() -> None:
    pass
