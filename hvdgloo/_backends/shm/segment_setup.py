"""The steps by which the ranks of a set come to share memory, and agree on its use.

Rank 0 of the set makes the memory and waits at an abstract Unix socket (``abstract``), which belongs to a network
namespace and leaves nothing behind; the others learn its random name from the rendezvous. Connections of other users
are closed unread. Both sides prove that they know the job's secret before anything is handed over. Then, step by step,
all members say whether they can, and rank 0 says what holds for all::

    rank 0 -> store    the socket's name, or why there is none
    member -> store    only if it cannot connect: why
    member -> rank 0   handshake (``_net.handshake``), then settings back
    rank 0 -> member   descriptors (SCM_RIGHTS): the memory, and pipes where numbers travel through them
    member -> rank 0   "it is mapped"                         rank 0 -> member   go on

Whatever one member cannot do, none does: it is ``Unsupported`` on all of them, with the same reason.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdgloo._backends.base import RendezvousStore, get_all, peek
from hvdgloo._backends.shm import segment as layout
from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.segment import Segment
from hvdgloo._backends.shm.signals import FutexSignals, PipeSignals, Signals
from hvdgloo._backends.shm.system import Unsupported
from hvdgloo._net import abstract
from hvdgloo._net.cancelling import TURN
from hvdgloo._net.handshake import CANCELLED, Handshake, receive_exactly
from hvdgloo.errors import AuthenticationError, BackendError, ConnectError

_MESSAGE_SECONDS = 5.0
"""The time that a message may take once it has begun."""

_MOST_PATIENCE = 5.0
"""Seconds after which a member that cannot connect says so, and all do without shared memory. Connecting takes none of
rank 0's time, so only a full backlog can be in the way."""

_LOOK = 1.0
"""Seconds between two checks of rank 0 whether a member has reported that."""

_MOST_DESCRIPTORS = 250
"""That one message carries (SCM_MAX_FD is 253)."""


class SegmentSetup:
    """One rank's part in it.

    Args:
        store, prefix: where the socket's name is put; the prefix is this set's, and was never used before.
        rank, size: within the set.
        handshake: of connections with this purpose.
        describe: names a rank of the set.
        timeout: seconds that the others have to come.
        limit: bytes of data per rank that the segment has at most; rank 0's word counts.
        arena: bytes per rank for tensors that live in the segment; rank 0's word counts.
        pipes: True if numbers travel through pipes; rank 0's word counts.
        cancelled: asked now and then whether to give up, if that may be.
    """

    def __init__(
        self,
        store: RendezvousStore,
        prefix: str,
        rank: int,
        size: int,
        handshake: Handshake,
        describe: Callable[[int], str],
        *,
        timeout: float,
        limit: int,
        arena: int,
        pipes: bool,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        self._store, self._key, self._barred_key = store, f"{prefix}shm", f"{prefix}shm/barred"
        self._rank, self._size = rank, size
        self._handshake, self._describe = handshake, describe
        self._timeout, self._may_cancel, self._cancelled = timeout, cancelled, cancelled or _never
        self._settings: dict[str, Any] = {
            "limit": limit,
            "arena": arena,
            "pipes": pipes,
        }
        self._socks: dict[int, socket.socket] = {}
        self._opened: list[int] = []
        self._segment: Segment | None = None
        self._signals: FutexSignals | PipeSignals | None = None

    def meet(self) -> tuple[Segment, Signals]:
        """Take part.

        Returns:
            what this rank shares with all members.

        Raises:
            Unsupported: some member cannot share memory; raised on all of them.
            ConnectError: some member did not come, or went away.
            BackendError: it was cancelled.
        """
        try:
            return self._meet()
        except BaseException:
            self._undo()
            raise
        finally:
            for sock in self._socks.values():
                sock.close()

    def _meet(self) -> tuple[Segment, Signals]:
        descriptors = self._lead() if self._rank == 0 else self._join()
        pipes = bool(self._settings["pipes"])
        problem = self._attempt(lambda: self._map(descriptors, pipes))
        self._agree(problem)
        assert self._segment is not None
        assert self._signals is not None
        return self._segment, self._signals

    def _lead(self) -> list[int]:
        """Rank 0: make everything, and hand it to all."""
        try:
            segment_descriptors = self._create()
            name = f"hvdgloo-{secrets.token_hex(16)}"
            listener = abstract.OwnListener(name)
        except (OSError, Unsupported, AttributeError) as error:
            reason = f"{self._describe(0)}: {_text(error)}"
            self._store.set(self._key, json.dumps({"reason": reason}).encode())
            raise Unsupported(reason) from error
        with listener:
            self._store.set(self._key, json.dumps({"name": name}).encode())
            barred = _Glance(self._why_barred, min(_LOOK, self._timeout / 6))
            try:
                links = self._handshake.accept_all(
                    listener,
                    range(1, self._size),
                    self._settings,
                    self._timeout,
                    self._describe,
                    lambda: self._cancelled() or bool(barred.look()),
                )
            except BackendError:
                if barred.seen:
                    raise Unsupported(barred.seen) from None
                raise
            self._socks = {rank: link.sock for rank, link in links.items()}
        memory, inboxes, outboxes = segment_descriptors
        for rank, sock in self._socks.items():
            try:
                _send_descriptors(sock, [memory, *inboxes[rank : rank + 1], *outboxes])
            except OSError as error:
                raise self._lost(rank, _text(error)) from error
        for index, inbox in enumerate(inboxes):
            if index:
                self._close(inbox)
        return [memory, *inboxes[:1], *outboxes]

    def _create(self) -> tuple[int, list[int], list[int]]:
        """The descriptors of the memory, and of the pipes' ends to read from and to write into."""
        limit, arena = int(self._settings["limit"]), int(self._settings["arena"])
        memory = Segment.create_memory(self._size, limit, arena)
        self._opened.append(memory)
        inboxes, outboxes = [], []
        if self._settings["pipes"]:
            for _ in range(self._size):
                inbox, outbox = os.pipe()
                self._opened += [inbox, outbox]
                inboxes.append(inbox)
                outboxes.append(outbox)
        return memory, inboxes, outboxes

    def _join(self) -> list[int]:
        """Another rank: get everything from rank 0."""
        told = json.loads(self._read_store())
        if "reason" in told:
            raise Unsupported(told["reason"])
        deadline = time.monotonic() + self._timeout
        sock = self._socks[0] = self._knock(told["name"])
        try:
            self._settings.update(self._handshake.introduce(sock, self._rank, deadline, cancelled=self._cancelled)[1])
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise self._unmet(error) from error
        count = 1 + (1 + self._size if self._settings["pipes"] else 0)
        self._wait(sock, 0)
        try:
            descriptors = _receive_descriptors(sock, count)
        except OSError as error:
            raise self._unmet(error) from error
        if not descriptors and (barred := self._why_barred()):
            raise Unsupported(barred)
        self._opened += descriptors
        return descriptors

    def _knock(self, name: str) -> socket.socket:
        """A connection to rank 0.

        Raises:
            Unsupported: it cannot be had; the others are told.
        """
        deadline = time.monotonic() + min(_MOST_PATIENCE, self._timeout / 3)
        try:
            return abstract.connect(name, deadline, self._cancelled)
        except ConnectionRefusedError as error:
            raise self._unmet(error) from error
        except OSError as error:
            if self._cancelled():
                raise BackendError(CANCELLED) from None
            why = _text(error)
        reason = f"{self._describe(self._rank)} could not connect to {self._describe(0)}: {why}"
        self._store.set(self._barred_key, reason.encode())
        raise Unsupported(reason)

    def _unmet(self, error: BaseException) -> Exception:
        """Return the error of a failed connection to rank 0, which ends them all when a member could not connect."""
        barred = self._why_barred()
        return Unsupported(barred) if barred else self._lost(0, _text(error))

    def _why_barred(self) -> str:
        """The reason why some member could not connect; empty if none has reported any."""
        return peek(self._store, self._barred_key).decode()

    def _map(self, descriptors: Sequence[int], pipes: bool) -> None:
        expected = 2 + self._size if pipes else 1
        if len(descriptors) != expected:
            raise Unsupported("too few descriptors arrived (the limit on open files is too low: ulimit -n)")
        limit, arena = int(self._settings["limit"]), int(self._settings["arena"])
        self._segment = Segment(descriptors[0], self._rank, self._size, limit, arena)
        self._opened.remove(descriptors[0])
        if pipes:
            self._signals = PipeSignals(self._rank, self._size, descriptors[1], descriptors[2:])
            self._opened = [descriptor for descriptor in self._opened if descriptor not in descriptors]
        else:
            self._signals = FutexSignals(self._segment)
            system.futex_wake(self._segment.word_address(self._rank, layout.PROGRESS))  # is it permitted?

    def _attempt(self, action: Callable[[], None]) -> str | None:
        """Do something; why it could not be done."""
        try:
            action()
        except (OSError, Unsupported) as error:
            return f"{self._describe(self._rank)}: {_text(error)}"
        return None

    def _agree(self, problem: str | None) -> None:
        """Wait until all members have got as far.

        Raises:
            Unsupported: some member has a problem; the same text on all of them.
        """
        if self._rank:
            self._say(0, problem)
            problem = self._hear(0)
        else:
            heard = [self._hear(rank) for rank in sorted(self._socks)]
            problem = next((text for text in (problem, *heard) if text is not None), None)
            for rank in self._socks:
                self._say(rank, problem)
        if problem is not None:
            raise Unsupported(problem)

    def _say(self, rank: int, problem: str | None) -> None:
        body = json.dumps(problem).encode()
        try:
            self._socks[rank].settimeout(_MESSAGE_SECONDS)
            self._socks[rank].sendall(struct.pack("!I", len(body)) + body)
        except OSError as error:
            raise self._lost(rank, _text(error)) from error

    def _hear(self, rank: int) -> str | None:
        sock = self._socks[rank]
        self._wait(sock, rank)
        deadline = time.monotonic() + _MESSAGE_SECONDS
        try:
            (length,) = struct.unpack("!I", receive_exactly(sock, 4, deadline))
            told = json.loads(receive_exactly(sock, length, deadline))
        except (OSError, EOFError, ValueError) as error:
            raise self._lost(rank, _text(error)) from error
        return None if told is None else str(told)

    def _wait(self, sock: socket.socket, rank: int) -> None:
        """Wait until a peer says something."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        deadline = time.monotonic() + self._timeout
        while not poll.poll(TURN * 1000):
            if self._cancelled():
                raise BackendError(CANCELLED)
            if time.monotonic() >= deadline:
                raise self._lost(rank, f"it said nothing for {self._timeout:g} s")

    def _read_store(self) -> bytes:
        return get_all(self._store, [self._key], self._timeout, self._may_cancel)[0]

    def _lost(self, rank: int, why: str) -> ConnectError:
        return ConnectError(
            f"{self._describe(self._rank)} lost {self._describe(rank)} while they were about to share memory: {why}. "
            "HVDGLOO_CPU_OPERATIONS=gloo does without shared memory",
            rank=rank,
        )

    def _close(self, descriptor: int) -> None:
        os.close(descriptor)
        self._opened.remove(descriptor)

    def _undo(self) -> None:
        if self._signals is not None:
            self._signals.close()
        if self._segment is not None:
            self._segment.close()
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()


def _never() -> bool:
    return False


class _Glance:
    """Something that is read now and then.

    Args:
        read: returns a text, or an empty one.
        interval: seconds from one time to the next.
    """

    def __init__(self, read: Callable[[], str], interval: float) -> None:
        self._read, self._interval = read, interval
        self._next = time.monotonic() + interval
        self.seen = ""

    def look(self) -> str:
        """The value that was read last."""
        now = time.monotonic()
        if not self.seen and now >= self._next:
            self._next = now + self._interval
            self.seen = self._read()
        return self.seen


def _send_descriptors(sock: socket.socket, descriptors: Sequence[int]) -> None:
    for at in range(0, len(descriptors), _MOST_DESCRIPTORS):
        socket.send_fds(sock, [b"f"], descriptors[at : at + _MOST_DESCRIPTORS])


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    """Up to ``count`` descriptors, none inheritable; fewer if this process may not have so many."""
    found: list[int] = []
    for at in range(0, count, _MOST_DESCRIPTORS):
        sock.settimeout(_MESSAGE_SECONDS)
        data, descriptors, _, _ = socket.recv_fds(
            sock, 1, min(_MOST_DESCRIPTORS, count - at), getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        )
        found += descriptors
        if not data:
            break
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    return found


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
