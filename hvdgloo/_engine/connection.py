"""The connections of the control plane: signed messages between two ranks, and one rank's side of all that it has."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from hvdgloo._engine.messages import Message, decode
from hvdgloo._net.channel import Channel
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._net.framing import FrameDecoder
from hvdgloo._net.handshake import Link

logger = logging.getLogger(__name__)

MAX_FRAME = 256 << 20


class ControlConnection(Channel[Message]):
    """One control connection. Only its thread may use it, except for ``shutdown``.

    Args:
        read: turns a message's bytes into the message, as ``decode`` does.
    """

    def __init__(self, link: Link, read: Callable[[memoryview], Message] = decode) -> None:
        link.sock.setblocking(False)
        frames = FrameDecoder(MAX_FRAME, "a control message", link.receiving)
        super().__init__(link.sock, lambda data: list(map(read, frames.feed(data))), link.sending)
        self._socket = link.sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self) -> None:
        """End the connection for both sides, even if other processes hold the descriptor too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        self._socket.close()


class Peers:
    """The ranks that one rank has control connections with.

    One thread waits for them, and can be woken. While it sleeps, another may serve them in its place. Sending never
    blocks: the rest goes out when the connection takes more.

    Args:
        connections: by rank; a peer whose connection has ended is removed.
    """

    def __init__(self, connections: Mapping[int, ControlConnection]) -> None:
        self.connections = dict(connections)
        self._wake_up = WakeUp()
        self.wake = self._wake_up.wake
        self._unsent: set[int] = set()  # peers for whom bytes are left that the thread does not wait to write yet
        # The thread sleeps in the first, which watches the second; a waiting caller that does its work unregisters that
        # meanwhile.
        self._selector, self._sockets = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._selector.register(self._wake_up, selectors.EVENT_READ)
        self._selector.register(self._sockets, selectors.EVENT_READ)
        for peer, connection in self.connections.items():
            self._sockets.register(connection, selectors.EVENT_READ, peer)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must not keep open."""
        return [*self._wake_up.descriptors, *(c.fileno() for c in self.connections.values())]

    @property
    def has_unsent(self) -> bool:
        """True if bytes are left that the thread learns of only when it is woken."""
        return bool(self._unsent)

    def send(self, peer: int, framed: bytes | bytearray) -> None:
        """Send a framed message, unless the peer's connection has ended."""
        connection = self.connections.get(peer)
        if connection is None:
            return
        try:
            connection.send_frame(framed)
        except OSError as error:
            # The reading side will see its end too, and may hold the reason (an Abort) that was sent before.
            logger.debug("sending to rank %d failed: %s", peer, error)
        if connection.pending:
            self._unsent.add(peer)

    def watch_writes(self) -> None:
        """Have the next ``wait`` end when connections take what is left for them."""
        while self._unsent:
            peer = self._unsent.pop()
            self._sockets.modify(self.connections[peer], selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def wait(self, timeout: float | None) -> bool:
        """Wait for a peer, or to be woken; return whether ``serve`` has something to do."""
        ready = [key.fileobj for key, _ in self._selector.select(timeout)]
        if self._wake_up in ready:
            self._wake_up.clear()
        return self._sockets in ready

    def serve(self, receive: Callable[[int, Message, float], None], lose: Callable[[int, str], None]) -> bool:
        """Read and write whatever is possible now.

        Args:
            receive: called with a peer, its message and the present.
            lose: called with a peer whose connection has ended, and the reason.

        Returns:
            False if there was nothing to do.
        """
        ready = self._sockets.select(0)
        for key, events in ready:
            peer: int = key.data
            if peer not in self.connections:
                continue
            connection = self.connections[peer]
            try:
                # Read first: a peer that has gone cannot be written to, but may have said why (an Abort) before.
                if events & selectors.EVENT_READ:
                    for message in connection.receive():
                        receive(peer, message, time.monotonic())
                if events & selectors.EVENT_WRITE:
                    connection.flush()
                    if not connection.pending:
                        self._sockets.modify(connection, selectors.EVENT_READ, peer)
            except (OSError, EOFError, ValueError) as error:
                self._sockets.unregister(connection)
                self.connections.pop(peer).close()
                self._unsent.discard(peer)
                reason = str(error) or type(error).__name__
                if not isinstance(error, ValueError):  # which is about what the peer, or another process, sent
                    reason = f"{reason} (the process died or was killed; see its own output)"
                lose(peer, reason)
        return bool(ready)

    def take_over(self) -> None:
        """Let what arrives no longer end ``wait``: another thread serves the peers meanwhile."""
        self._selector.unregister(self._sockets)

    def hand_back(self) -> None:
        """Let ``wait`` end again when something arrives."""
        self._selector.register(self._sockets, selectors.EVENT_READ)

    def shutdown(self) -> None:
        """End all connections for both sides; callable from any thread."""
        for connection in list(self.connections.values()):  # the thread may be losing one just now
            connection.shutdown()

    def close(self, seconds: float) -> None:
        """Close everything, but let the last messages reach the peers, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        for connection in self.connections.values():
            try:
                while connection.pending and time.monotonic() < deadline:
                    with selectors.DefaultSelector() as selector:
                        selector.register(connection, selectors.EVENT_WRITE)
                        selector.select(max(0.0, deadline - time.monotonic()))
                    connection.flush()
            except OSError:
                pass  # the peer is gone
            connection.close()
        self.connections.clear()
        self._sockets.close()
        self._selector.close()
        self._wake_up.close()
