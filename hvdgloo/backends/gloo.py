"""CPU collectives over Gloo, as torch carries it: ``ProcessGroupGloo`` built directly on the rendezvous store.

The group never becomes torch's default group, so a user's own torch.distributed is untouched. It is bound to an
explicit address, and connects pairs lazily: each rank publishes 154 bytes whatever the job's size, where an eager mesh
publishes a slot for every other rank.

Gloo tells only a ring's neighbours of a dead peer, and ``wait`` cannot be interrupted otherwise; so ``abort`` ends the
group's connected sockets by shutdown(2), which makes everything that is under way fail at once. Every Gloo connection
has one end at a listener that some rank has published: that is how its sockets are told from the user's.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hvdgloo.backends import kernels
from hvdgloo.backends.base import Work
from hvdgloo.engine.engine import bury
from hvdgloo.errors import BackendError, ConnectError, RendezvousError, RendezvousTimeoutError
from hvdgloo.types import Buffer, DType, ReduceOp, TensorSpec

_TORCH_DTYPES = {
    DType.UINT8: torch.uint8,
    DType.INT8: torch.int8,
    DType.INT16: torch.int16,
    DType.INT32: torch.int32,
    DType.INT64: torch.int64,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.BOOL: torch.bool,
}
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
# Bools are 0 and 1: their "or" is a maximum, their "and" a minimum.
_BOOL_OPS = {
    ReduceOp.SUM: dist.ReduceOp.MAX,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PRODUCT: dist.ReduceOp.MIN,
}

_TURN = 0.5
"""Seconds after which a wait that may be cancelled looks whether it was."""

_LONGEST_OPERATION = timedelta(days=1)
"""Gloo's own timeout is set at construction and knows nothing of a payload's size: the engine's deadlines rule."""


class Store(Protocol):
    """What the backend needs of a rendezvous store."""

    def set(self, key: str, value: bytes) -> None: ...

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]: ...


class GlooStore(dist.Store):  # type: ignore[name-defined,misc] # absent from torch's own annotations
    """A rendezvous store as Gloo sees it.

    Gloo publishes this rank's address when the group is made, and asks for its neighbours' one by one when it first
    connects to them. ``fetch`` gets everybody's in one request before that: no wait, and no error, happens inside of
    Gloo, where neither could be given up safely.
    """

    def __init__(
        self, store: Store, prefix: str, size: int, timeout: float, cancelled: Callable[[], bool] | None
    ) -> None:
        super().__init__()
        self._cancelled = cancelled
        self._store = store
        self._prefix = prefix
        self._size = size
        self._timeout = timeout
        self.published = b""
        self._base = ""
        self.addresses: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._base = key.rpartition("/")[0]  # its keys are "<counter>/<rank>"
        self.published = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._prefix + key, self.published)

    def get(self, key: str) -> bytes:
        return self.addresses[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def fetch(self) -> None:
        """Wait until every rank has published its address.

        Raises:
            RendezvousError: some did not in time, or the server cannot be reached.
            BackendError: it was cancelled.
        """
        names = [f"{self._base}/{rank}" for rank in range(self._size)]
        values = self._read([self._prefix + name for name in names])
        self.addresses.update(zip(names, values, strict=True))

    def _read(self, keys: list[str]) -> list[bytes]:
        """Wait for all values: in one request, or in several if the wait may be given up meanwhile."""
        if self._cancelled is None:
            return self._store.get_many(keys, timeout=self._timeout)
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return self._store.get_many(keys, timeout=max(0.0, min(_TURN, left)))
            except RendezvousTimeoutError:
                if left <= _TURN:
                    raise
            if self._cancelled():
                raise BackendError("the job ended while a process group was being connected")


class _GlooWork:
    """A torch Work with what must happen after it."""

    def __init__(self, what: str, work: Any, keep: Sequence[object]) -> None:
        self._what = what
        self._work = work
        self._keep = keep

    def completes_within(self, timeout: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError:
            # Either the operation failed, or only the wait has ended, and the operation perhaps since.
            if not self._work.is_completed():
                return False
            self._raise_failure()
        self.finish()
        return True

    def _raise_failure(self) -> None:
        """Raise what a completed operation failed with; do nothing if it succeeded."""
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise BackendError(f"Gloo {self._what}: {_first_line(error)}") from error

    def finish(self) -> None:
        """Nothing more to do."""


class _NarrowingWork(_GlooWork):
    """Puts a result that was computed in a wider type back where it belongs."""

    def __init__(self, what: str, work: Any, wide: torch.Tensor, narrow: torch.Tensor) -> None:
        super().__init__(what, work, (wide, narrow))
        self._wide, self._narrow = wide, narrow

    def finish(self) -> None:
        self._narrow.copy_(self._wide)


class _PaddedGather(_GlooWork):
    """Takes the padding out of an allgather of unequal blocks."""

    def __init__(self, work: Any, padded: torch.Tensor, source: torch.Tensor, target: Buffer, sizes: Sequence[int]):
        super().__init__("allgather", work, (padded, source))
        self._padded, self._target, self._sizes = padded, target, sizes

    def finish(self) -> None:
        at, stride = self._target.address, max(self._sizes)
        for rank, size in enumerate(self._sizes):
            ctypes.memmove(at, self._padded.data_ptr() + rank * stride, size)
            at += size


class _ReducingWork(_GlooWork):
    """Combines the blocks that an alltoall has brought, in order of ranks."""

    def __init__(self, what: str, work: Any, blocks: torch.Tensor, target: Buffer, op: ReduceOp, keep: object) -> None:
        super().__init__(what, work, (blocks, target, keep))
        self._blocks, self._target, self._op = blocks, target, op

    def finish(self) -> None:
        if self._target.nbytes:
            arrays = self._blocks.numpy().view(self._target.dtype.numpy_dtype).reshape(-1, self._target.count)
            np.copyto(self._target.array(), kernels.reduce(list(arrays), self._target.dtype, self._op))


class _Several:
    """Operations that were started one after another."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def completes_within(self, timeout: float) -> bool:
        return all(work.completes_within(timeout) for work in self._works)


class GlooBackend:
    """One rank's membership in a Gloo process group.

    Args:
        store: of the rendezvous.
        prefix: of this group's keys in it, the same on all ranks and never used before.
        rank, size: within the group.
        address: this host's IP address that the other ranks can reach.
        connect_timeout: seconds until all neighbours are connected.
        cancelled: asked now and then whether to give up connecting.

    Raises:
        ConnectError: at construction, if they are not.
        BackendError: it was cancelled.
    """

    name = "gloo"
    blocks = False

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        address: str,
        connect_timeout: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._cancelled = cancelled or _never
        # Read by Gloo at construction. It is torch's own setting and harmless to a user's groups.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        self._rank, self._size = rank, size
        self._store = GlooStore(store, prefix, size, connect_timeout, cancelled)
        self._group: Any = None
        self._options: dict[Any, Any] = {}
        self._listeners: frozenset[tuple[str, int]] = frozenset()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=connect_timeout)
            self._group = dist.ProcessGroupGloo(self._store, rank, size, options)
            self._store.fetch()
            self._connect(connect_timeout)
        except RendezvousError:
            self.close()
            raise
        except (RuntimeError, BackendError) as error:
            self.close()
            raise ConnectError(
                f"rank {rank} could not connect its Gloo group from {address}: {_first_line(error)}. Gloo listens on a "
                "port that the system chooses, on that address; check that the other hosts reach it (firewall, wrong "
                "network interface)",
                rank=rank,
                address=address,
            ) from error

    def _connect(self, timeout: float) -> None:
        """Connect the ring now, so that an unreachable address is an error of init() and not of some later step."""
        for kind in (torch.zeros(1), torch.zeros(1 << 16)):  # small and large payloads use different algorithms
            work = _GlooWork("connect", self._group.allreduce([kind]), (kind,))
            deadline = time.monotonic() + timeout
            while not work.completes_within(min(_TURN, timeout)):
                if time.monotonic() >= deadline:
                    raise BackendError(f"not connected within {timeout:g} s")
                if self._cancelled():
                    self.abandon()
                    raise BackendError("the job ended while a process group was being connected")
        self._group._set_default_timeout(_LONGEST_OPERATION)
        self._listeners = self._find_listeners()
        for descriptor in self._sockets(connected=False):
            # Gloo leaves them inheritable: a program that a rank starts would keep its connections open.
            os.set_inheritable(descriptor, False)

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        what = f"allreduce of {buffer.nbytes} bytes"
        if buffer.dtype is DType.INT16:  # Gloo has no 16-bit integers
            narrow = _tensor(buffer)
            wide = narrow.to(torch.int32)
            return _NarrowingWork(what, self._allreduce(wide, _OPS[op]), wide, narrow)
        if buffer.dtype is DType.BOOL:
            tensor = _tensor(buffer).view(torch.uint8)
            return _GlooWork(what, self._allreduce(tensor, _BOOL_OPS[op]), (tensor, buffer))
        tensor = _tensor(buffer)
        return _GlooWork(what, self._allreduce(tensor, _OPS[op]), (tensor, buffer))

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        largest, total = max(nbytes), sum(nbytes)
        if all(size == largest for size in nbytes):
            own, whole = _bytes(source), _bytes(target)
            return _GlooWork("allgather", self._group._allgather_base(whole, own), (own, whole, source, target))
        if largest * self._size > 2 * total:
            return self._gather_by_broadcasts(source, target, nbytes)
        own = torch.empty(largest, dtype=torch.uint8)
        ctypes.memmove(own.data_ptr(), source.address, nbytes[self._rank])
        padded = torch.empty(largest * self._size, dtype=torch.uint8)
        return _PaddedGather(self._group._allgather_base(padded, own), padded, own, target, nbytes)

    def broadcast(self, buffer: Buffer, root: int) -> Work:
        tensor = _bytes(buffer)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        what = f"broadcast of {buffer.nbytes} bytes"
        return _GlooWork(what, self._group.broadcast([tensor], options), (tensor, buffer))

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Work:
        own, whole = _bytes(source)[: sum(sent)], _bytes(target)
        work = self._group.alltoall_base(whole, own, list(received), list(sent))
        return _GlooWork("alltoall", work, (own, whole, source, target))

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], op: ReduceOp) -> Work:
        # Gloo's own would move all of it to all ranks. In rank order, so that results do not depend on the timing.
        own = _bytes(source)
        blocks = torch.empty(nbytes[self._rank] * self._size, dtype=torch.uint8)
        work = self._group.alltoall_base(blocks, own, [nbytes[self._rank]] * self._size, list(nbytes))
        return _ReducingWork("reducescatter", work, blocks, target, op, (own, source))

    def scale(self, buffer: Buffer, factor: float) -> None:
        if kernels.is_half(buffer.dtype):
            _tensor(buffer).mul_(factor)  # torch computes half types in float32, and faster than numpy
        else:
            kernels.scale(buffer, factor)

    def abort(self) -> None:
        for descriptor in self._sockets(connected=True):
            _libc.shutdown(descriptor, socket.SHUT_RDWR)

    def close(self) -> None:
        self._group = None

    def abandon(self) -> None:
        # The destructor would wait for an operation that never ends, be it at the interpreter's exit.
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    def after_fork_in_child(self) -> None:
        """Let go of the connections in a forked child, whose copies would hide this rank's death from its peers.

        The group itself is kept for ever: its threads do not exist here, and its destructor would wait for them.
        """
        if self._group is not None:
            self.abandon()
            bury(self._sockets(connected=False))

    def _allreduce(self, tensor: torch.Tensor, op: Any) -> Any:
        options = self._options.get(op)
        if options is None:
            options = self._options[op] = dist.AllreduceOptions()
            options.reduceOp = op
        return self._group.allreduce([tensor], options)

    def _gather_by_broadcasts(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        """One broadcast per rank that has anything: padding to the largest block would more than double the bytes."""
        works: list[Work] = []
        at = target.address
        for root, size in enumerate(nbytes):
            if size:
                block = Buffer(at, TensorSpec(DType.UINT8, (size,)), target)
                if root == self._rank:
                    ctypes.memmove(at, source.address, size)
                works.append(self.broadcast(block, root))
                at += size
        return _Several(works)

    def _find_listeners(self) -> frozenset[tuple[str, int]]:
        """Every rank's listening address, out of what Gloo published.

        The layout of those bytes is Gloo's own affair, so the place of the address in them is found by looking for
        that of this rank's own listener.
        """
        published = self._store.published
        for descriptor in _open_descriptors():
            local, peer = _ends(descriptor)
            if local is not None and peer is None and local[1]:
                offset = published.find(_encode_address(local))
                if offset >= 0:
                    return frozenset(_decode_address(value, offset) for value in self._store.addresses.values())
        raise BackendError(
            "this version of torch publishes Gloo addresses in an unknown form, without which a dead rank could not be "
            "noticed in time; use a version of torch that the compatibility table lists"
        )

    def _sockets(self, *, connected: bool) -> list[int]:
        """Descriptors of the group's sockets; its listener too unless only ``connected`` ones are wanted."""
        found = []
        for descriptor in _open_descriptors():
            local, peer = _ends(descriptor)
            if local in self._listeners:
                if peer is not None or not connected:
                    found.append(descriptor)
            elif peer in self._listeners:
                found.append(descriptor)
        return found


def _never() -> bool:
    return False


def _tensor(buffer: Buffer) -> torch.Tensor:
    """A flat tensor over the same memory."""
    if buffer.dtype is DType.BFLOAT16:
        return _bytes(buffer).view(torch.bfloat16)
    return torch.from_numpy(buffer.array())


def _bytes(buffer: Buffer) -> torch.Tensor:
    """A flat uint8 tensor over the same memory."""
    if not buffer.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(buffer.array().view(np.uint8))


def _first_line(error: BaseException) -> str:
    """Gloo's message without the place in its source and its advice."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text.partition(" This is typically caused by")[0].rstrip(".!")


def _encode_address(address: tuple[str, int]) -> bytes:
    """How a sockaddr_in or sockaddr_in6 (without scope) begins in memory."""
    host, port = address
    if ":" in host:
        flow = bytes(4)
        return (
            struct.pack("=H", socket.AF_INET6)
            + struct.pack("!H", port)
            + flow
            + socket.inet_pton(socket.AF_INET6, host)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)


def _decode_address(published: bytes, offset: int) -> tuple[str, int]:
    """The address and port of the sockaddr at ``offset``."""
    (family,) = struct.unpack_from("=H", published, offset)
    (port,) = struct.unpack_from("!H", published, offset + 2)
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, published[offset + 8 : offset + 24]), port
    return socket.inet_ntop(socket.AF_INET, published[offset + 4 : offset + 8]), port


def _open_descriptors() -> list[int]:
    """This process's open descriptors."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return []


def _ends(descriptor: int) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Local and remote address of an IP socket; None for what it is not or has not."""
    local = _name(_libc.getsockname, descriptor)
    return local, local and _name(_libc.getpeername, descriptor)


# Python's socket objects will not do for looking at descriptors of others: constructing one may change the blocking
# mode (socket.setdefaulttimeout), and duplicates made by one thread are seen by another.
_libc = ctypes.CDLL(None, use_errno=True)


def _name(function: Any, descriptor: int) -> tuple[str, int] | None:
    storage = ctypes.create_string_buffer(128)
    length = ctypes.c_uint32(len(storage))
    if function(descriptor, storage, ctypes.byref(length)) != 0:
        return None
    family = int.from_bytes(storage.raw[:2], sys.byteorder)
    return _decode_address(storage.raw, 0) if family in (socket.AF_INET, socket.AF_INET6) else None
