"""Framed messages over a stream that never blocks its owner, with tags where a handshake has given both sides keys.

The one implementation for control connections between ranks, for pipes between launcher and agents, and for the
connections that stand in for such pipes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hvdgloo._net.framing import HEAD

if TYPE_CHECKING:
    from hvdgloo._net.frame_mac import FrameMac  # which imports more than those need who authenticate nothing

T = TypeVar("T")


class Stream(Protocol):
    """The part of a non-blocking socket that a channel uses."""

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def send(self, data: bytearray, /) -> int: ...


class Pipes:
    """Two descriptors as a ``Stream``. They become non-blocking."""

    def __init__(self, receive: int, send: int) -> None:
        self.receive_fd = receive
        self.send_fd = send
        os.set_blocking(receive, False)
        os.set_blocking(send, False)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Read as a socket does."""
        return os.readv(self.receive_fd, [buffer])

    def send(self, data: bytearray, /) -> int:
        """Write as a socket does."""
        return os.write(self.send_fd, data)


class Channel(Generic[T]):
    """One end of a stream of messages. Not locked.

    Args:
        stream: non-blocking.
        feed: turns received bytes, however they were split, into the messages that they complete, as a
            ``FrameDecoder`` does; it keeps no view of the bytes.
        sending: makes the tags of messages that are sent; None if they have none.
    """

    def __init__(self, stream: Stream, feed: Callable[[memoryview], list[T]], sending: FrameMac | None = None) -> None:
        self._stream = stream
        self._feed = feed
        self._sending = sending
        self._arrived = memoryview(bytearray(1 << 16))
        self._unsent = bytearray()

    @property
    def pending(self) -> int:
        """The number of bytes that wait to be sent."""
        return len(self._unsent)

    def send_frame(self, framed: bytes | bytearray) -> None:
        """Sign a framed message, send as much as the kernel accepts and keep the rest for ``flush``.

        Raises:
            OSError: the stream has ended.
        """
        self._unsent += framed
        if self._sending is not None:
            self._unsent += self._sending.tag(memoryview(framed)[HEAD:])
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the kernel accepts it. Raises OSError as ``send_frame`` does."""
        try:
            while self._unsent:
                del self._unsent[: self._stream.send(self._unsent)]
        except BlockingIOError:
            pass

    def receive(self) -> list[T]:
        """Return all messages that have arrived completely.

        Raises:
            EOFError: the peer has closed the stream, or its process has ended.
            OSError: the stream broke.
            ValueError, LaunchError: what arrived is not a message, as ``feed`` has it.
        """
        messages: list[T] = []
        count = len(self._arrived)
        while count == len(self._arrived):
            try:
                count = self._stream.recv_into(self._arrived)
            except BlockingIOError:
                break
            except OSError:
                if messages:
                    break  # the next call raises it, or finds the end
                raise
            if count == 0 and not messages:
                raise EOFError("its connection ended")
            messages += self._feed(self._arrived[:count])
        return messages
