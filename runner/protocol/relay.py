"""Connections that travel over the stream between an agent and its launcher.

If workers cannot reach the launcher (it may run on a laptop, and they in a cluster), they connect to the agent of their
own host instead, and their messages to the rendezvous server travel to the launcher in frames. So the server is always
in the launcher, and an elastic job depends on none of its hosts.

Both ends work alike: bytes of a connection become ``RelayData``, and vice versa. Neither end reads more of a connection
than WINDOW bytes ahead of what the other one has written, so a slow reader costs bounded memory, and other frames are
never far behind. Nothing here blocks.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from hvdgloo.runner.protocol.frames import CHUNK, Frame, RelayClose, RelayCredit, RelayData

WINDOW = 256 * 1024
"""Bytes of a connection that may be on their way in one direction."""

MOST = 1024
"""Maximum number of connections over one stream. Other users of a host can open some, too; the server closes these
after a while."""


class Relays:
    """All connections that travel over one stream of frames.

    Args:
        selector: its data are called when a descriptor is ready.
        send: sends a frame to the other end.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._relayed: dict[int, _Relayed] = {}
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {
            RelayData: self._on_data,
            RelayCredit: self._on_credit,
            RelayClose: self._on_close,
        }

    def __len__(self) -> int:
        return len(self._relayed)

    def add(self, connection: int, sock: socket.socket) -> None:
        """Relay a socket's data under a number that is never used again."""
        self._relayed[connection] = _Relayed(self._selector, self._send, connection, sock, self._over)

    def close(self) -> None:
        """Close all connections, without telling the other end."""
        for relayed in list(self._relayed.values()):
            relayed.close()

    def _over(self, connection: int) -> None:
        del self._relayed[connection]

    # Frames about a connection that has just been closed here may still arrive.

    def _on_data(self, frame: RelayData) -> None:
        relayed = self._relayed.get(frame.connection)
        if relayed is not None:
            relayed.write(frame.data)

    def _on_credit(self, frame: RelayCredit) -> None:
        relayed = self._relayed.get(frame.connection)
        if relayed is not None:
            relayed.give_credit(frame.amount)

    def _on_close(self, frame: RelayClose) -> None:
        relayed = self._relayed.get(frame.connection)
        if relayed is not None:
            relayed.end()


class _Relayed:
    """One end of one connection.

    Args:
        over: called with the connection's number once it is closed.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Frame], None],
        connection: int,
        sock: socket.socket,
        over: Callable[[int], None],
    ) -> None:
        self._selector = selector
        self._send = send
        self._connection = connection
        self._socket = sock
        self._over = over
        self._credit = WINDOW
        self._waiting: deque[memoryview] = deque()
        self._held = 0  # bytes that wait
        self._ended = False  # by the other end, so that what waits is all that will come
        self._events = 0
        self._closed = False
        sock.setblocking(False)
        self._watch()

    def write(self, data: bytes) -> None:
        """Write bytes from the other end."""
        if self._closed:
            return
        if self._held + len(data) > WINDOW:
            self._break()  # the protocol does not allow so much
            return
        self._waiting.append(memoryview(data))
        self._held += len(data)
        self._flush()

    def give_credit(self, amount: int) -> None:
        """Record that the other end has written this many bytes."""
        if self._closed:
            return
        self._credit += amount
        self._watch()

    def end(self) -> None:
        """Record that the other end has closed the connection."""
        if self._closed:
            return
        self._ended = True
        self._flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._events:
            self._selector.unregister(self._socket)
            self._events = 0
        self._socket.close()
        self._over(self._connection)

    def _ready(self) -> None:
        if self._closed:
            return  # by another callback, while this event was pending
        if self._waiting and not self._flush():
            return
        if self._credit > 0 and not self._ended:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(min(CHUNK, self._credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._break()
            return
        self._credit -= len(data)
        self._send(RelayData(self._connection, data))
        self._watch()

    def _flush(self) -> bool:
        """Write as much as the socket accepts; return False if it is closed afterwards."""
        written = 0
        while self._waiting:
            try:
                count = self._socket.send(self._waiting[0])
            except BlockingIOError:
                break
            except OSError:
                self._break()
                return False
            written += count
            if count == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][count:]
        self._held -= written
        if self._ended and not self._waiting:
            self.close()
            return False
        if written and not self._ended:
            self._send(RelayCredit(self._connection, written))
        self._watch()
        return True

    def _break(self) -> None:
        """Close this end of the connection, and report it."""
        if not self._ended:
            self._send(RelayClose(self._connection))
        self.close()

    def _watch(self) -> None:
        """Register for the events that can be handled now."""
        reads = selectors.EVENT_READ if self._credit > 0 and not self._ended else 0
        events = reads | (selectors.EVENT_WRITE if self._waiting else 0)
        if events == self._events:
            return
        if not self._events:
            self._selector.register(self._socket, events, self._ready)
        elif events:
            self._selector.modify(self._socket, events, self._ready)
        else:
            self._selector.unregister(self._socket)
        self._events = events
