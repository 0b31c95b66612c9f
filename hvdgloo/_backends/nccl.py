"""Collectives of CUDA tensors over NCCL, as torch carries it: ``ProcessGroupNCCL`` on the rendezvous store.

NCCL refuses two ranks on one GPU, and runs what it is given in order on a CUDA stream. Nothing here waits for the GPU:
an operation has completed when an event that follows it on the stream has happened.

torch's own watchdog would end the process when a peer is lost. It is switched off for this group: the engine notices a
lost peer by itself, and ``abort`` then makes NCCL give up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdgloo._backends import kernels
from hvdgloo._backends.base import RendezvousStore, Work, first_line
from hvdgloo._backends.process_group import SIGNED, ProcessGroupBackend, tensor_of
from hvdgloo.errors import AuthenticationError, BackendError, ConnectError, HvdglooError, RendezvousError
from hvdgloo.types import Buffer

_LONGEST_OPERATION = timedelta(days=1)

# What torch reads when a group is made. The names are torch's own; a user's groups keep what the user has set.
_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


def platform() -> str:
    """What this torch was built for: "cuda", "rocm" (whose RCCL goes by NCCL's name there), or "cpu"."""
    if torch.version.hip is not None:
        return "rocm"
    return "cuda" if torch.version.cuda is not None else "cpu"


def version() -> int:
    """The version code of the NCCL that comes with torch: 22105 for 2.21.5; 0 if there is none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


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
    """A Work that completes when a GPU has done everything given to its current stream so far."""

    def __init__(self, device: torch.device, is_aborted: Callable[[], bool] = lambda: False) -> None:
        self._event = torch.cuda.current_stream(device).record_event()
        self._is_aborted = is_aborted

    def completes_within(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        try:
            while not self._event.query():
                if self._is_aborted():
                    raise BackendError("the operation was aborted")
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)  # CUDA has no wait with a deadline
                pause = min(2 * pause, _LONGEST_PAUSE)
        except HvdglooError:
            raise  # which are RuntimeErrors, too
        except RuntimeError as error:
            raise BackendError(f"CUDA: {first_line(error)}") from error
        if self._is_aborted():  # its kernel may have ended by that alone
            raise BackendError("the operation was aborted")
        return True


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
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = _LONGEST_OPERATION  # the engine's deadlines rule
            with _settings(_OURS):
                self._group = dist.ProcessGroupNCCL(self._store, rank, size, options)
            # Connect now, so that an unreachable peer is an error here and not in some later step.
            first = torch.zeros(1, device=device)
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

    def scale(self, buffer: Buffer, factor: float) -> None:
        tensor = tensor_of(buffer)
        if buffer.dtype in SIGNED:
            _scale_unsigned(tensor, factor)
        elif buffer.dtype.is_floating:
            tensor.mul_(factor)
        elif divisor := kernels.divisor_of(factor):
            tensor.div_(divisor, rounding_mode="trunc")
        else:
            tensor.copy_(torch.trunc(tensor.double() * factor))

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


def _scale_unsigned(tensor: torch.Tensor, factor: float) -> None:
    """``Backend.scale`` of types that torch does not compute with."""
    divisor = kernels.divisor_of(factor)
    if not divisor:
        tensor.copy_(torch.trunc(tensor.double() * factor))
    elif tensor.dtype is torch.uint64:
        # Half of it is a signed integer of the same value; what that quotient lacks is at most one.
        bits = tensor.view(torch.int64)
        quotient = 2 * ((bits >> 1) & torch.iinfo(torch.int64).max).div(divisor, rounding_mode="trunc")
        bits.copy_(quotient + (bits - quotient * divisor >= divisor))
    else:
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


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


@contextlib.contextmanager
def _settings(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for as long as torch reads them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
