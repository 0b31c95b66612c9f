"""Framed messages over a non-blocking socket: a 4-byte length in network order, then the message."""

from __future__ import annotations

import socket
import struct

from hvdgloo._engine.messages import Message, decode, encode

MAX_FRAME = 256 << 20
_LENGTH = struct.Struct("!I")


def frame(message: Message) -> bytes:
    """A message as it goes over the wire."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class ControlConnection:
    """One control connection. Only its thread may use it, save for ``shutdown``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._arrived = memoryview(bytearray(1 << 16))
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, framed: bytes) -> None:
        """Send what the kernel takes and keep the rest for ``flush``.

        Raises:
            OSError: the connection has ended.
        """
        self._unsent += framed
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the kernel takes it. Raises OSError as ``send`` does."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> list[Message]:
        """All messages that have arrived whole.

        Raises:
            EOFError: the peer has closed the connection, or its process has ended.
            OSError: the connection broke.
            ValueError: what arrived is not a message.
        """
        ended = False
        try:
            while True:
                count = self._socket.recv_into(self._arrived)
                if count > _LENGTH.size and not self._received:
                    (length,) = _LENGTH.unpack_from(self._arrived)
                    if count == _LENGTH.size + length:  # the usual case: one message, whole
                        return [decode(self._arrived[_LENGTH.size : count])]
                self._received += self._arrived[:count]
                ended = count == 0
                if count < len(self._arrived):
                    break
        except BlockingIOError:
            pass
        messages = self._whole_messages()
        if ended and not messages:
            raise EOFError("its connection ended")
        return messages

    def _whole_messages(self) -> list[Message]:
        messages = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > MAX_FRAME:
                raise ValueError(f"a control message of {length} bytes")
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(decode(bytes(self._received[start + _LENGTH.size : end])))
            start = end
        del self._received[:start]
        return messages

    def shutdown(self) -> None:
        """End the conversation for both sides, whoever else holds the descriptor."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already

    def close(self) -> None:
        self._socket.close()
