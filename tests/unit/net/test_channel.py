"""Channels over a stream that takes and gives what it likes; ``engine/test_connection`` has one over a socket."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from hvdgloo._net import framing
from hvdgloo._net.channel import Channel, Pipes
from hvdgloo._net.framing import FrameDecoder


class Ending:
    """A stream that gives pieces, and then breaks."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter(pieces)

    def recv_into(self, buffer: memoryview, /) -> int:
        piece = next(self._pieces, None)
        if piece is None:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        buffer[: len(piece)] = piece
        return len(piece)

    def send(self, data: bytearray, /) -> int:
        raise BrokenPipeError(errno.EPIPE, "no process reads")


def copies(data: memoryview, decoder: FrameDecoder) -> list[bytes]:
    return [bytes(message) for message in decoder.feed(data)]


def over(stream: Ending | Pipes) -> Channel[bytes]:
    decoder = FrameDecoder(1 << 20)
    return Channel(stream, lambda data: copies(data, decoder))


def frame(body: bytes) -> bytes:
    return framing.head(len(body)) + body


def test_what_came_before_the_stream_broke_is_received_first() -> None:
    """A full read is followed by another one at once, which finds the stream broken."""
    body = bytes((1 << 16) - framing.HEAD)
    channel = over(Ending(frame(body)))
    assert channel.receive() == [body]
    with pytest.raises(ConnectionResetError):
        channel.receive()


def test_a_message_that_breaks_off_is_none() -> None:
    channel = over(Ending(frame(b"ab")[:-1]))
    assert channel.receive() == []
    with pytest.raises(ConnectionResetError):
        channel.receive()


def test_sending_into_a_broken_stream_is_an_oserror() -> None:
    with pytest.raises(BrokenPipeError):
        over(Ending()).send_frame(frame(b"x"))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_full_pipe_takes_the_rest_later(pipe: tuple[int, int]) -> None:
    channel = over(Pipes(*pipe))
    bodies = [os.urandom(50_000) for _ in range(10)]
    for body in bodies:
        channel.send_frame(frame(body))
    assert channel.pending > 0
    received: list[bytes] = []
    while len(received) < len(bodies):
        received += channel.receive()
        channel.flush()
    assert received == bodies
    assert channel.pending == 0
    assert channel.receive() == []
