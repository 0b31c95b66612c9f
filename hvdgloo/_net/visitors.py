"""Connections to a listener that have proved nothing yet: each has a limited time, and their number is limited.

A silent visitor costs the others nothing: all are served by one thread, and when there are too many, or no descriptors
are left, the one that has been silent longest is closed.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from hvdgloo.errors import AuthenticationError

PAUSE = 0.02
"""Seconds until the next attempt where not even one more descriptor can be had, or where no process listens yet."""

Steps: TypeAlias = Generator[int, None, None]
"""A conversation with a visitor, which yields the selector's events that it waits for."""

_NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class _Visitor:
    """A connection whose conversation is under way.

    Attributes:
        steps: the rest of it.
        deadline: when it must have ended.
        since: when it came.
        silent: it has said nothing of use yet.
    """

    sock: socket.socket
    peer: object
    steps: Steps
    since: float
    deadline: float
    silent: bool = True


class Visitors:
    """The connections to some listeners with which a conversation is under way.

    Args:
        selector: whose registered data are called when a descriptor is ready.
        listeners: they become non-blocking.
        converse: returns the conversation with a new visitor, given its non-blocking socket and the listener. If
            it raises OSError, EOFError or AuthenticationError, the visitor is refused.
        refused: called with the socket, its address and the reason; returns whether the connection is to be closed.
        patience: seconds that a visitor has in all.
        most: visitors at a time; the kernel keeps further ones in the listener's queue.
        grace: seconds that every visitor has, however many are waiting.
        deadline: of all visits, on the monotonic clock.
        wrapped: makes what is to be talked to out of a connection, e.g. what encrypts it. Raises OSError if it cannot.

    Attributes:
        exhausted: no connection could be accepted when that was last tried, for want of descriptors.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Iterable[socket.socket],
        converse: Callable[[socket.socket, socket.socket], Steps],
        refused: Callable[[socket.socket, object, Exception], bool],
        *,
        patience: float,
        most: int,
        grace: float,
        deadline: float = float("inf"),
        wrapped: Callable[[socket.socket, socket.socket], socket.socket] = lambda sock, _: sock,
    ) -> None:
        self.exhausted = False
        self._selector = selector
        self._listeners = tuple(listeners)
        self._converse = converse
        self._refused = refused
        self._patience = patience
        self._most = most
        self._grace = grace
        self._deadline = deadline
        self._wrapped = wrapped
        self._visitors: dict[socket.socket, _Visitor] = {}  # the first to come first
        self._listens = False
        for listener in self._listeners:
            listener.setblocking(False)

    def __contains__(self, sock: socket.socket) -> bool:
        return sock in self._visitors

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(list(self._visitors))

    def keep_time(self, now: float) -> None:
        """Close visitors whose time is over, and listen if there is room. To be called before each wait."""
        for visitor in list(self._visitors.values()):
            if now >= visitor.deadline:
                self._refuse(visitor, TimeoutError("timed out"))
        self._listen(len(self._visitors) < self._most or self._superfluous(now) is not None)

    @property
    def next(self) -> float:
        """The time at which ``keep_time`` has something to do."""
        changes = [visitor.deadline for visitor in self._visitors.values()]
        if not self._listens:
            changes += [visitor.since + self._grace for visitor in self._visitors.values()]
        return min(changes, default=float("inf"))

    def close(self) -> None:
        """Stop listening, and forget all visitors. Close no socket."""
        self._listen(False)
        for visitor in list(self._visitors.values()):
            self._take_leave(visitor)

    def _listen(self, wanted: bool) -> None:
        for listener in self._listeners if wanted != self._listens else ():
            if wanted:
                self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
            else:
                self._selector.unregister(listener)
        self._listens = wanted

    def _superfluous(self, now: float) -> _Visitor | None:
        """Return the visitor to close for another one: the first silent one, if there is one."""
        had_time = [visitor for visitor in self._visitors.values() if now - visitor.since >= self._grace]
        return next((visitor for visitor in had_time if visitor.silent), had_time[0] if had_time else None)

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        if len(self._visitors) >= self._most:
            leaver = self._superfluous(now)
            if leaver is None:
                return
            self._refuse(leaver, TimeoutError("others came, and it had said nothing for the longest time"))
        try:
            sock, peer = listener.accept()
        except OSError as error:
            if error.errno in _NO_MORE:
                self.exhausted = True
                self._most = max(1, len(self._visitors))  # there is no room for more until one leaves
                if not self._visitors:
                    time.sleep(PAUSE)  # no visitor can be closed, and nothing waits for this thread
            return  # or the visitor has left
        self.exhausted = False
        self._most = max(self._most, len(self._visitors) + 1)
        sock.setblocking(False)
        try:
            sock = self._wrapped(sock, listener)
        except OSError:
            sock.close()
            return
        deadline = min(self._deadline, now + self._patience)
        visitor = self._visitors[sock] = _Visitor(sock, peer, self._converse(sock, listener), now, deadline)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_ready, visitor))
        self._hear(visitor)

    def _on_ready(self, visitor: _Visitor) -> None:
        if self._visitors.get(visitor.sock) is visitor:  # it may have been sent away while this event was pending
            visitor.silent = False
            self._hear(visitor)

    def _hear(self, visitor: _Visitor) -> None:
        """Go on with a visitor until it must be waited for again."""
        try:
            self._selector.modify(visitor.sock, next(visitor.steps), partial(self._on_ready, visitor))
        except StopIteration:
            self._take_leave(visitor)
        except (OSError, EOFError, AuthenticationError) as error:
            self._refuse(visitor, error)

    def _refuse(self, visitor: _Visitor, error: Exception) -> None:
        self._take_leave(visitor)
        if self._refused(visitor.sock, visitor.peer, error):
            visitor.sock.close()

    def _take_leave(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor.sock]


def received(sock: socket.socket, count: int) -> Generator[int, None, bytes]:
    """Return ``count`` bytes from a non-blocking socket.

    Raises:
        EOFError: the peer closed the connection earlier.
        OSError: the connection broke.
    """
    data = b""
    while len(data) < count:
        try:
            piece = sock.recv(count - len(data))
        except BlockingIOError:
            yield selectors.EVENT_READ
            continue
        if not piece:
            raise EOFError("the connection was closed during the handshake")
        data += piece
    return data


def sent(sock: socket.socket, data: bytes | bytearray) -> Steps:
    """Send all of it through a non-blocking socket."""
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            yield selectors.EVENT_WRITE
