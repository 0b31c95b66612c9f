"""Where a message begins and ends in a stream of bytes: a length of 4 bytes in network order, then that many bytes.

Pure: nothing here reads or writes.
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("!I")
HEAD = _LENGTH.size
"""Bytes before each message."""


def head(length: int) -> bytes:
    """What precedes a message of ``length`` bytes."""
    return _LENGTH.pack(length)


def body_length(head: bytes | bytearray | memoryview) -> int:
    """How many bytes follow the first ``HEAD`` bytes of a frame."""
    length: int = _LENGTH.unpack_from(head)[0]
    return length


class FrameDecoder:
    """Turns bytes, however they were split, into whole messages.

    Args:
        limit: maximum bytes of a message; a stream that announces a longer one is something else, or hostile.
        what: a message's name in errors, with its article.
    """

    def __init__(self, limit: int, what: str = "a message") -> None:
        self._limit = limit
        self._what = what
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """True if the beginning of a message has arrived and its rest has not."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """All messages that these bytes complete, in order. They may be views of ``data``: read them before it changes.

        Raises:
            ValueError: a message is longer than the limit. This is detected at its beginning, and nothing is stored of
                it.
        """
        if not self._buffer:
            size = len(data)
            if size >= HEAD and _LENGTH.unpack_from(data)[0] == size - HEAD <= self._limit:
                return [data[HEAD:]]  # the usual case: one message, whole
        self._buffer += data
        messages: list[bytes | memoryview] = []
        buffer, start = self._buffer, 0
        while len(buffer) - start >= HEAD:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > self._limit:
                raise ValueError(f"{self._what} of {length} bytes, where {self._limit} are the most")
            end = start + HEAD + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                messages.append(bytes(view[start + HEAD : end]))
            start = end
        del buffer[:start]
        return messages
