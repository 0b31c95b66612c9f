"""CPU collectives over Gloo, as torch carries it: ``ProcessGroupGloo`` built directly on the rendezvous store.

The group never becomes torch's default group, so a user's own torch.distributed is untouched. It is bound to an
explicit address, and connects pairs lazily: each rank publishes 170 bytes whatever the job's size, where an eager mesh
publishes a slot for every other rank.

Gloo tells only a ring's neighbours of a dead peer, and ``wait`` cannot be interrupted otherwise; so ``abort`` ends the
group's connected sockets by shutdown(2), which makes everything that is under way fail at once. Every Gloo connection
has one end at a listener that some rank has published: that is how its sockets are told from the user's.

Gloo believes whoever connects to its port first and names a rank. So once the ranks are connected they prove to each
other, over these very connections, that they know the job's secret; and if that fails on some rank, or does not come to
an end, all of them try once more at other ports.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdgloo._backends import kernels
from hvdgloo._backends.base import CANCELLED, RendezvousStore, Work, first_line, get_all, gloo_unconnected, peek
from hvdgloo._backends.process_group import ProcessGroupBackend, tensor_of
from hvdgloo._net.descriptors import bury
from hvdgloo.errors import AuthenticationError, BackendError, HvdglooError, RendezvousError
from hvdgloo.types import Buffer, ReduceOp

logger = logging.getLogger(__name__)

_TURN = 0.5
"""How often, in seconds, a wait that may be cancelled checks whether it was."""

AT_ONCE_FROM, AT_ONCE_BYTES, AT_ONCE_RANKS = 64, 1 << 19, 16
"""Bytes of a tensor, bytes of all ranks' together, and number of ranks between which all send everything to all. On 2
hosts with 2 ranks each, which share 2 cores, an allreduce of 8 KiB takes 1.3 ms so and 5 in a ring. A few bytes are as
fast in Gloo's own way, and among many ranks there would be too many connections."""

_NONCE_BYTES, _PROOF_BYTES, _MET = 16, 16, b"ok"

_SHORTEST_WAIT = 0.001
"""Seconds: torch waits whole milliseconds, and takes none for no deadline at all."""

_LONGEST_OPERATION = timedelta(days=1)
"""Gloo's own timeout is set at construction and knows nothing of a payload's size: the engine's deadlines rule."""


class GlooStore(dist.Store):  # type: ignore[name-defined,misc] # absent from torch's own annotations
    """A rendezvous store as Gloo sees it.

    Gloo publishes this rank's address when the group is made, and asks for its neighbours' one by one when it first
    connects to them. ``fetch`` gets everybody's in one request before that: no wait, and no error, happens inside of
    Gloo, where neither could be given up safely.
    """

    def __init__(
        self, store: RendezvousStore, prefix: str, size: int, timeout: float, cancelled: Callable[[], bool] | None
    ) -> None:
        super().__init__()
        self._cancelled = cancelled
        self._store = store
        self._prefix = prefix
        self._nonce = os.urandom(_NONCE_BYTES)
        self._size = size
        self._timeout = timeout
        self.published = b""
        self._base = ""
        self.addresses: dict[str, bytes] = {}
        self.nonces = b""

    def set(self, key: str, value: bytes | str) -> None:
        self._base = key.rpartition("/")[0]  # its keys are "<counter>/<rank>"
        self.published = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(self._prefix + key, self._nonce + self.published)

    def get(self, key: str) -> bytes:
        return self.addresses[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def fetch(self) -> None:
        """Wait until every rank has published its address, and with it a number that it uses only once.

        Raises:
            RendezvousError: some did not do so in time, or the server cannot be reached.
            BackendError: it was cancelled.
        """
        names = [f"{self._base}/{rank}" for rank in range(self._size)]
        values = get_all(self._store, [self._prefix + name for name in names], self._timeout, self._cancelled)
        self.addresses.update((name, value[_NONCE_BYTES:]) for name, value in zip(names, values, strict=True))
        self.nonces = b"".join(value[:_NONCE_BYTES] for value in values)


class _GlooWork:
    """A torch Work, and what must happen after it."""

    def __init__(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> None:
        self._what = what
        self._work = work
        self._keep = keep
        self._finish = finish

    def completes_within(self, timeout: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=max(timeout, _SHORTEST_WAIT)))
        except HvdglooError:
            raise  # a RuntimeError of ours comes from the store, not from the operation
        except RuntimeError:
            # Either the operation failed, or only the wait has ended, and the operation perhaps since.
            if not self._work.is_completed():
                return False
            self._raise_failure()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def _raise_failure(self) -> None:
        """Raise what a completed operation failed with; do nothing if it succeeded."""
        try:
            self._work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            raise BackendError(f"Gloo {self._what}: {first_line(error)}") from error


class GlooBackend(ProcessGroupBackend):
    """One rank's membership in a Gloo process group.

    Args:
        store: of the rendezvous.
        prefix: of this group's keys in it, the same on all ranks and never used before.
        rank, size: within the group.
        address: this host's IP address that the other ranks can reach.
        connect_timeout: seconds until all neighbours are connected.
        cancelled: polled to see whether to give up connecting.
        secret: of the job, which ranks prove to know.

    Raises:
        ConnectError: at construction, if they cannot be connected.
        BackendError: connecting was cancelled.
    """

    name = "gloo"
    blocks = False
    in_rank_order = False

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        address: str,
        connect_timeout: float,
        cancelled: Callable[[], bool] | None = None,
        secret: bytes = b"",
    ) -> None:
        self._cancelled = cancelled or (lambda: False)
        self._secret = secret
        # Read by Gloo at construction. It is torch's own setting and harmless to a user's groups.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        super().__init__(rank, size)
        self._listeners: frozenset[tuple[str, int]] = frozenset()
        deadline = time.monotonic() + connect_timeout
        try:
            problem = self._try(store, prefix, address, deadline, last=False)
            if problem:
                logger.info("connecting Gloo once more, at other ports: %s", problem)
                problem = self._try(store, f"{prefix}again/", address, deadline, last=True)
            if problem:
                raise BackendError(problem)
        except (RendezvousError, AuthenticationError):
            self.close()
            raise
        except RuntimeError as error:
            self.close()
            raise gloo_unconnected(rank, address, first_line(error)) from error
        self._group._set_default_timeout(_LONGEST_OPERATION)
        for descriptor in self._sockets(connected=False):
            # Gloo leaves them inheritable: a program that a rank starts would keep its connections open.
            os.set_inheritable(descriptor, False)

    def _try(self, store: RendezvousStore, prefix: str, address: str, deadline: float, *, last: bool) -> str:
        """Make a group, and connect all who will talk to each other, so that what cannot work is an error in init().

        Args:
            last: take all the time that there is, rather than half of it.

        Returns:
            why it cannot be used, the same on all ranks; empty if it can.
        """
        left = (deadline - time.monotonic()) / (1 if last else 2)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=left)
        self._store = GlooStore(store, prefix, self._size, deadline - time.monotonic(), self._cancelled)
        self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        self._store.fetch()
        self._listener, self._listeners = self._find_listeners()
        # Numbers of all ranks' choice: what was heard of another try, or of another start, proves nothing in this one.
        text = b"hvdgloo gloo connections " + prefix.encode() + self._store.nonces
        self._key = hmac.digest(self._secret, text, "sha256")
        left = deadline - time.monotonic()
        try:
            self._connect(left if last else left / 2, lambda: peek(store, f"{prefix}failed").decode())
            problem = ""
        except RuntimeError as error:
            self.abandon()
            if self._cancelled():
                raise
            problem = first_line(error)
        return self._agreed(store, prefix, problem, deadline)

    def _agreed(self, store: RendezvousStore, prefix: str, problem: str, deadline: float) -> str:
        """The problem of the lowest rank that has one: what one rank cannot use, no rank uses."""
        if problem:
            store.set(f"{prefix}failed", problem.encode())
        store.set(f"{prefix}met/{self._rank}", problem.encode() or _MET)
        keys = [f"{prefix}met/{rank}" for rank in range(self._size)]
        try:
            told = get_all(store, keys, max(_TURN, deadline - time.monotonic()), self._cancelled)
        except RendezvousError:
            if problem:
                raise BackendError(problem) from None
            raise
        return next((text.decode() for text in told if text != _MET), "")

    def _connect(self, timeout: float, failed: Callable[[], str]) -> None:
        """Connect with others.

        Args:
            timeout: in seconds.
            failed: asked now and then why another rank has given up; empty if none has.

        Raises:
            BackendError, RuntimeError: it failed.
        """
        few, many = torch.zeros(1), torch.zeros(1 << 16)  # which take different algorithms
        deadline = time.monotonic() + timeout
        self._check_peers(deadline, failed)
        for tensor in (few, many):
            self._connected(self._group.allreduce([tensor]), tensor, deadline, failed)

    def _check_peers(self, deadline: float, failed: Callable[[], str]) -> None:
        """Exchange proofs with all whom this rank is to be connected with now: everybody, or if they are many its
        neighbours in a ring."""
        ranks = range(self._size)
        if self._size <= AT_ONCE_RANKS:
            peers = [rank for rank in ranks if rank != self._rank]
            sent = b"".join(self._proof(self._rank, peer) for peer in ranks)
            received = torch.zeros(len(sent), dtype=torch.uint8)
            own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            self._connected(self._group.alltoall_base(received, own, [], []), (received, own), deadline, failed)
            rows = received.view(self._size, -1)
        else:
            peers = sorted({(self._rank - 1) % self._size, (self._rank + 1) % self._size})
            rows = torch.zeros((self._size, _PROOF_BYTES), dtype=torch.uint8)
            proofs = [torch.frombuffer(bytearray(self._proof(self._rank, peer)), dtype=torch.uint8) for peer in peers]
            works = [self._group.recv([rows[peer]], peer, 0) for peer in peers]
            works += [self._group.send([proof], peer, 0) for proof, peer in zip(proofs, peers, strict=True)]
            for work in works:
                self._connected(work, (rows, proofs), deadline, failed)
        for peer in peers:
            if not hmac.compare_digest(rows[peer].numpy().tobytes(), self._proof(peer, self._rank)):
                raise BackendError(f"whoever is connected as rank {peer} of the group does not know this job's secret")

    def _proof(self, of: int, to: int) -> bytes:
        return hmac.digest(self._key, struct.pack("!II", of, to), "sha256")[:_PROOF_BYTES]

    def _connected(self, begun: Any, keep: object, deadline: float, failed: Callable[[], str]) -> None:
        """Wait for an operation that connects ranks."""
        work, timeout = _GlooWork("connect", begun, keep), deadline - time.monotonic()
        while not work.completes_within(min(_TURN, timeout)):
            if self._cancelled():
                raise BackendError(CANCELLED)
            if reason := failed():
                raise BackendError(reason)
            came = sum(_ends(descriptor)[0] == self._listener for descriptor in self._sockets(connected=True))
            if came >= self._size:
                raise BackendError(
                    f"{came} connections have come to port {self._listener[1]}, and there are {self._size - 1} other "
                    "ranks: something that is not part of this job connects to Gloo's ports"
                )
            if time.monotonic() >= deadline:
                raise BackendError(f"not connected within {max(timeout, 0.0):.0f} s")

    def allreduce(self, buffer: Buffer, op: ReduceOp) -> Work:
        if not self._goes_at_once(buffer.nbytes, buffer.nbytes * self._size):
            return super().allreduce(buffer, op)
        received = np.empty((self._size, buffer.count), buffer.dtype.numpy_dtype)

        def finish() -> None:
            np.copyto(buffer.array(), kernels.reduce(list(received), buffer.dtype, op))

        return self._tell_all(
            buffer, Buffer.of_array(received, buffer.dtype), [buffer.nbytes] * self._size, finish=finish
        )

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Work:
        if not self._goes_at_once(max(nbytes), sum(nbytes)):
            return super().allgather(source, target, nbytes)
        return self._tell_all(source, target, nbytes)

    def _goes_at_once(self, largest: int, total: int) -> bool:
        return largest >= AT_ONCE_FROM and total <= AT_ONCE_BYTES and 1 < self._size <= AT_ONCE_RANKS

    def _tell_all(
        self, source: Buffer, target: Buffer, nbytes: Sequence[int], *, finish: Callable[[], object] | None = None
    ) -> Work:
        """Send everybody everything: one step, where a ring has twice as many as ranks and each wakes two threads."""
        sent = Buffer.of_array(np.tile(source.array().view(np.uint8), self._size))
        return self.alltoall(sent, target, [source.nbytes] * self._size, nbytes, finish=finish)

    def _work(self, what: str, work: Any, keep: object, finish: Callable[[], object] | None = None) -> Work:
        return _GlooWork(what, work, keep, finish)

    def scale(self, buffer: Buffer, factor: float) -> None:
        if kernels.is_half(buffer.dtype):
            tensor_of(buffer).mul_(factor)  # torch computes half types in float32, and faster than numpy
        else:
            kernels.scale(buffer, factor)

    def abort(self) -> None:
        for descriptor in self._sockets(connected=True):
            _libc.shutdown(descriptor, socket.SHUT_RDWR)

    def close(self) -> None:
        self._group = None

    def abandon(self) -> None:
        # The destructor would wait for an operation that never ends, even if only at the interpreter's exit.
        if self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))

    def after_fork_in_child(self) -> None:
        """Let go of the connections in a forked child, whose copies would hide this rank's death from its peers.

        The group itself is kept forever: its threads do not exist here, and its destructor would wait for them.
        """
        if self._group is not None:
            self.abandon()
            bury(self._sockets(connected=False))

    def _find_listeners(self) -> tuple[tuple[str, int], frozenset[tuple[str, int]]]:
        """This rank's listening address, and every rank's, taken from what Gloo published.

        The layout of those bytes is private to Gloo, so the position of the address in them is found by looking for
        that of this rank's own listener.
        """
        published = self._store.published
        for descriptor in _open_descriptors():
            local, peer = _ends(descriptor)
            if local is not None and peer is None and local[1]:
                offset = published.find(_encode_address(local))
                if offset >= 0:
                    return local, frozenset(_decode_address(value, offset) for value in self._store.addresses.values())
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
    """Local and remote address of an IP socket; None where the descriptor is no such socket or has no such address."""
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
