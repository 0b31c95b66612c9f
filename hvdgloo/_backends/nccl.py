"""Collectives of CUDA tensors over NCCL, as torch carries it: ``ProcessGroupNCCL`` on the rendezvous store.

NCCL refuses two ranks on one GPU, and runs what it is given in order on a CUDA stream. Nothing here waits for the GPU:
an operation has completed when an event that follows it on the stream has happened.

torch's own watchdog would end the process when a peer is lost. It is switched off for this group: the engine notices a
lost peer by itself, and ``abort`` then makes NCCL give up.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdgloo._backends import gpu
from hvdgloo._backends.base import RendezvousStore, Work, first_line
from hvdgloo._backends.process_group import BOOL_OPS, OPS, SIGNED, ProcessGroupBackend, tensor_of
from hvdgloo.errors import AuthenticationError, BackendError, ConnectError, RendezvousError
from hvdgloo.types import Buffer, DType, ReduceOp

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


class NcclStore(dist.Store):  # type: ignore[name-defined,misc] # absent from torch's own annotations
    """A rendezvous store as NCCL's process group sees it: the first rank puts an id there that the others read."""

    def __init__(self, store: RendezvousStore, prefix: str, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix
        self._timeout = timeout

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.get_many([self._prefix + key for key in keys], timeout=self._timeout)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        self._store.get_many([self._prefix + key for key in keys], timeout=seconds)


class Passed:
    """A Mark: a place in a GPU's current stream. It completes when the GPU has done everything before it; not earlier,
    even after ``abort``, since kernels behind an aborted one still use their memory."""

    def __init__(self, device: torch.device, is_aborted: Callable[[], bool] = lambda: False) -> None:
        self._event = gpu.record(device)
        self._is_aborted = is_aborted

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        try:
            while not gpu.has_happened(self._event):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)  # CUDA has no wait with a deadline
                pause = min(2 * pause, _LONGEST_PAUSE)
        except RuntimeError as error:
            raise BackendError(f"CUDA: {first_line(error)}") from error
        if self._is_aborted():  # its kernel may have ended by that alone
            raise BackendError("the operation was aborted")
        return True

    def order(self, buffers: Sequence[Buffer]) -> None:
        for device in {device for buffer in buffers if (device := _device_of(buffer)) is not None}:
            gpu.wait(self._event, device)


def _device_of(buffer: Buffer) -> torch.device | None:
    return gpu.of(buffer.owner) if isinstance(buffer.owner, torch.Tensor) else None


class NcclBackend(ProcessGroupBackend):
    """One rank's membership in an NCCL process group.

    Args:
        store: of the rendezvous.
        prefix: of this group's keys in it, the same on all ranks and never used before.
        rank, size: within the group.
        device: the GPU, which no other rank has. Collectives are ordered on its stream that is current at the call.
        connect_timeout: seconds until the ranks are connected.

    Raises:
        ConnectError: at construction, if they are not.
    """

    name = "nccl"
    blocks = False
    in_rank_order = False

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        connect_timeout: float,
    ) -> None:
        super().__init__(rank, size)
        self._device = device
        self._aborted = False
        self._store = NcclStore(store, prefix, connect_timeout)
        try:
            self._group = gpu.nccl_group(self._store, rank, size)
            # Connect now, so that an unreachable peer is an error here and not in some later step.
            first = gpu.empty((1,), torch.float32, device).zero_()
            if not self._work("connect", self._group.allreduce([first]), first).completes_within(connect_timeout):
                raise BackendError(f"not connected within {connect_timeout:g} s")
        except (RendezvousError, AuthenticationError):
            self.abandon()
            raise
        except RuntimeError as error:
            self.abandon()
            raise ConnectError(
                f"rank {rank} could not connect its NCCL group on {device}: {first_line(error)}. NCCL_DEBUG=INFO makes "
                "NCCL say more; HVDGLOO_GPU_OPERATIONS=gloo sends CUDA tensors through host memory instead",
                rank=rank,
            ) from error

    def _work(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> Work:
        work.wait()  # the current stream waits for NCCL's own; this thread does not
        if finish is not None:
            finish()
        return _NcclWork(self._device, lambda: self._aborted, what, keep)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if len(set(nbytes)) == 1:
            return super().allgather(source, target, nbytes)
        # Blocks of unequal sizes: torch makes a group of broadcasts of it, straight into their places.
        blocks = list(torch.split(tensor_of(target, DType.UINT8), list(nbytes)))
        work = self._group.allgather([blocks], [tensor_of(source, DType.UINT8)])
        return self._work("allgather", work, (source, target))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        if len(set(nbytes)) > 1 or source.dtype in (DType.INT16, DType.UINT16):
            return super().reducescatter(source, target, nbytes, op)
        kind = DType.UINT8 if source.dtype is DType.BOOL else SIGNED.get(source.dtype)
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = (BOOL_OPS if source.dtype is DType.BOOL else OPS)[op]
        work = self._group._reduce_scatter_base(tensor_of(target, kind), tensor_of(source, kind), options)
        return self._work("reducescatter", work, (source, target))

    def scale(self, buffer: Buffer, factor: float) -> None:
        gpu.scale(tensor_of(buffer), factor)

    def abort(self) -> None:
        self._aborted = True
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def abandon(self) -> None:
        if self._group is not None:  # its destructor would wait for what never ends
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    def after_fork_in_child(self) -> None:
        """CUDA does not work in a forked child: the group is kept forever, untouched."""
        self.abandon()


class _NcclWork(Passed):
    """An operation on the stream."""

    def __init__(self, device: torch.device, is_aborted: Callable[[], bool], what: str, keep: object) -> None:
        super().__init__(device, is_aborted)
        self._what = what
        self._keep = keep

    def completes_within(self, timeout: float) -> bool:
        try:
            return super().completes_within(timeout)
        except BackendError as error:
            raise BackendError(f"NCCL {self._what}: {error}") from error
