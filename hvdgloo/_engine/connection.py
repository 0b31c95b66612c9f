"""A channel of the control plane: signed messages between two ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable

from hvdgloo._engine.messages import Message, decode
from hvdgloo._net.channel import Channel
from hvdgloo._net.framing import FrameDecoder
from hvdgloo._net.handshake import Link

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
