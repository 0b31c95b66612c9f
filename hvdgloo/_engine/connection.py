"""Framed and signed messages over a non-blocking socket."""

from __future__ import annotations

import socket
from collections.abc import Callable

from hvdgloo._engine.messages import Message, decode
from hvdgloo._net.framing import HEAD, FrameDecoder
from hvdgloo._net.handshake import Link

MAX_FRAME = 256 << 20


class ControlConnection:
    """One control connection. Only its thread may use it, except for ``shutdown``.

    Args:
        read: turns a message's bytes into the message, as ``decode`` does.
    """

    def __init__(self, link: Link, read: Callable[[memoryview], Message] = decode) -> None:
        link.sock.setblocking(False)
        self._socket = link.sock
        self._sending = link.sending
        self._read = read
        self._arrived = memoryview(bytearray(1 << 16))
        self._frames = FrameDecoder(MAX_FRAME, "a control message", link.receiving)
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, framed: bytes | bytearray) -> None:
        """Sign a framed message, send as much as the kernel accepts and keep the rest for ``flush``.

        Raises:
            OSError: the connection has ended.
        """
        self._unsent += framed
        self._unsent += self._sending.tag(memoryview(framed)[HEAD:])
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the kernel accepts it. Raises OSError as ``send`` does."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Message]:
        """All messages that have arrived completely.

        Raises:
            EOFError: the peer has closed the connection, or its process has ended.
            OSError: the connection broke.
            ValueError: what arrived is not a message.
        """
        ended = False
        messages: list[Message] = []
        try:
            while not ended:
                count = self._socket.recv_into(self._arrived)
                ended = count == 0
                messages += map(self._read, self._frames.feed(self._arrived[:count]))
                if count < len(self._arrived):
                    break
        except BlockingIOError:
            pass
        if ended and not messages:
            raise EOFError("its connection ended")
        return messages

    def shutdown(self) -> None:
        """End the connection for both sides, even if other processes hold the descriptor too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        self._socket.close()
