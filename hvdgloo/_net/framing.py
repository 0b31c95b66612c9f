"""Messages in a stream of bytes: a length of 4 bytes in network order, then that many bytes, then a tag of 16 bytes
where messages are authenticated.

Pure: nothing here reads or writes.
"""

from __future__ import annotations

import struct
from typing import Protocol

_LENGTH = struct.Struct("!I")
HEAD = _LENGTH.size
"""Bytes before each message."""

TAG = 16
"""Bytes after each message that is authenticated."""


def head(length: int) -> bytes:
    """Return the bytes that precede a message of ``length`` bytes."""
    return _LENGTH.pack(length)


def body_length(head: bytes | bytearray | memoryview) -> int:
    """Return the number of bytes that follow the first ``HEAD`` bytes of a frame, without its tag."""
    length: int = _LENGTH.unpack_from(head)[0]
    return length


class Mac(Protocol):
    """The part of ``hvdgloo._net.frame_mac.FrameMac`` used here. Its imports are not needed where nothing is signed."""

    def check(self, message: memoryview, tag: memoryview, what: str) -> None: ...


class FrameDecoder:
    """Turns bytes, however they were split, into whole messages.

    Args:
        limit: maximum bytes of a message; a stream that announces a longer one is something else, or hostile.
        what: a message's name in errors, with its article.
        mac: checks the tags that follow the messages; None if none follow.
    """

    def __init__(self, limit: int, what: str = "a message", mac: Mac | None = None) -> None:
        self._limit = limit
        self._what = what
        self._mac = mac
        self._tag = 0 if mac is None else TAG
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """True if the beginning of a message has arrived and its rest has not."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        """Return all messages that these bytes complete. They may be views of ``data``: read them before it changes.

        Raises:
            ValueError: a message is longer than the limit, which is detected at its beginning, and nothing is stored of
                it; or its tag is wrong.
        """
        rest = memoryview(data)
        messages: list[memoryview] = []
        while self._buffer:  # a message has begun: take no more than it lacks, so that the others need no copy
            end = self._end(self._buffer)
            taken = rest[: end - len(self._buffer)]
            self._buffer += taken
            rest = rest[len(taken) :]
            if len(self._buffer) < end:
                return messages
            if end == self._end(self._buffer):  # and not its head alone
                messages.append(self._message(memoryview(self._buffer)))
                self._buffer = bytearray()
        while len(rest) >= HEAD and (end := self._end(rest)) <= len(rest):
            messages.append(self._message(rest[:end]))
            rest = rest[end:]
        self._buffer += rest
        return messages

    def _end(self, begun: bytearray | memoryview) -> int:
        """Return the size of a message that has begun, as far as it is known, with its head and tag."""
        if len(begun) < HEAD:
            return HEAD
        length = body_length(begun)
        if length > self._limit:
            raise ValueError(f"{self._what} of {length} bytes, where at most {self._limit} are allowed")
        return HEAD + length + self._tag

    def _message(self, frame: memoryview) -> memoryview:
        """Check a whole frame's tag; return its message."""
        if self._mac is None:
            return frame[HEAD:]
        message = frame[HEAD:-TAG]
        self._mac.check(message, frame[-TAG:], self._what)
        return message
