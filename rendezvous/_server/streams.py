"""The two ends of a server's connection as cheroot's parser and gateway see them, with deadlines.

cheroot's own file objects restart their timeout with every packet, copy an answer several times, and send its head and
body separately.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

MAX_HEAD = 16 * 1024
WRITE_TIMEOUT = 10.0
_PIECE = 1 << 20
SLOWEST_RATE = 256 * 1024  # bytes a second; a slower body or answer is abandoned

# What the routes answer without Flask, which is imported when it is first needed.
_OF_A_START = re.compile(
    rb"(?:GET /v1/hello[ ?]|(?:GET|PUT|DELETE) /v1/kv/[^/ ?]+/[^/ ?]"
    rb"|POST /v1/(?:kv/[^/ ?]+|epochs/[0-9]+/workers|elastic/(?:next|news|reports))[ ?])"
)
_NOT_PLAIN = re.compile(rb"\n(?:transfer-encoding|expect)|\n[ \t]", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,5})(?=\r\n|\Z)", re.IGNORECASE)

Waiting = Callable[[], AbstractContextManager[None]]
"""Makes a context to be entered while a thread waits for the client."""


class Reader:
    """The source of a request for cheroot: bytes that have arrived, then the socket, until a deadline."""

    def __init__(self, sock: socket.socket, flush: Callable[[], object], waiting: Waiting) -> None:
        self._socket = sock
        self._flush = flush
        self._waiting = waiting
        self._buffer = bytearray()
        self._searched = 0
        self._arrived: Callable[[int], object] = int  # which does nothing with it
        self.deadline = 0.0
        self.bytes_read = 0
        self.closed = False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if self._buffer.startswith(b"\r\n"):  # empty lines before a request mean nothing, but hide where a head ends
            del self._buffer[: len(self._buffer) - len(self._buffer.lstrip(b"\r\n"))]

    def has_data(self) -> bool:
        return bool(self._buffer)

    def starts_with(self, words: bytes) -> bool:
        return self._buffer.startswith(words)

    def has_small_request(self) -> bool:
        """Return whether a request of a worker's start has arrived completely, so that no wait is needed."""
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or not _OF_A_START.match(head) or _NOT_PLAIN.search(head):
            return False
        lengths = _LENGTH.findall(head)
        return len(lengths) == head.lower().count(b"content-length") <= 1 and len(body) >= sum(map(int, lengths))

    def has_head(self) -> bool:
        """Return whether parsing can begin: the head is complete, or longer than any head may be."""
        end = self._buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        self._searched = len(self._buffer)
        return end >= 0 or len(self._buffer) > MAX_HEAD

    def allow(self, seconds: float, arrived: Callable[[int], object]) -> None:
        """Let reads wait for the client, for this long in total.

        Args:
            arrived: called with the number of bytes of each piece before it is kept; may raise.
        """
        self.deadline = time.monotonic() + seconds
        self._arrived = arrived

    def readline(self, size: int) -> bytes:
        """Read one line of the head, which has arrived already: a missing end is never waited for."""
        end = self._buffer.find(b"\n", 0, size) + 1
        return self._take(end if end else size)

    def read(self, size: int) -> bytes:
        """Read exactly ``size`` bytes, or fewer if the client ends its side.

        Raises:
            TimeoutError: the deadline passed first.
        """
        data = self._take(size)
        self._arrived(len(data))
        if len(data) == size:
            return data
        self._flush()
        with self._waiting():
            return self._receive(data, size)

    def close(self) -> None:
        self.closed = True
        self._buffer.clear()

    def _receive(self, begun: bytes, size: int) -> bytes:
        # What a request announces is no reason to reserve it.
        pieces, missing = [begun], size - len(begun)
        while missing:
            self._socket.settimeout(max(0.001, self.deadline - time.monotonic()))
            piece = self._socket.recv(min(missing, _PIECE))
            if not piece:
                break
            self._arrived(len(piece))
            pieces.append(piece)
            missing -= len(piece)
            self.bytes_read += len(piece)
        return b"".join(pieces)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._searched = 0
        self.bytes_read += len(data)
        return data


class Writer:
    """The sink of an answer for cheroot: head and body are sent together, within a deadline.

    Attributes:
        patient: True if this thread may wait for a client that does not read yet.
    """

    _HELD_BACK = 64 * 1024

    def __init__(self, sock: socket.socket, waiting: Waiting) -> None:
        self._socket = sock
        self._waiting = waiting
        self._pending: list[bytes] = []
        self.patient = True
        self._size = 0
        self.bytes_written = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self._pending.append(data)
        self._size += len(data)
        if self._size > self._HELD_BACK and self.patient:
            self.flush()

    def flush(self) -> bool:
        """Send what has been written, within the deadline.

        Returns:
            whether all of it was sent; always, if this is patient.

        Raises:
            OSError: the client disconnected, or does not read.
        """
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._size = 0
            self.bytes_written += len(data)
            rest = memoryview(data)[self._at_once(data) :]
            if rest and not self.patient:
                self._pending.append(bytes(rest))
                self.bytes_written -= len(rest)
                return False
            if rest:
                with self._waiting():
                    self._socket.settimeout(WRITE_TIMEOUT + len(rest) / SLOWEST_RATE)
                    self._socket.sendall(rest)
        return True

    def _at_once(self, data: bytes) -> int:
        """Send without waiting for the client; return the number of bytes, which TLS cannot tell beforehand."""
        if type(self._socket) is not socket.socket:
            return 0
        self._socket.setblocking(False)  # with a timeout, Python waits before each call, whatever its flags say
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self.closed = True
