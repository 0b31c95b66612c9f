"""Frames over a real socket pair: cut anywhere, ended anywhere, oversized, malformed, or slow to be read."""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Iterator

import pytest

from hvdgloo._engine.connection import MAX_FRAME, ControlConnection
from hvdgloo._engine.messages import Bye, Execute, Failed, Message, Ping, Request, Stacks, Submit, frame
from hvdgloo.types import Collective, DType, TensorSpec
from tests.support.links import Signing, link_of, link_pair

MESSAGES: list[Message] = [
    Ping(),
    Submit((1, 2, 3), (Request("x", Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (2,)),)),)),
    Bye(),
    Execute((4,)),
]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, ControlConnection]]:
    """A plain socket and the Connection at its other end."""
    left, right = socket.socketpair()
    connection = ControlConnection(link_of(right, far_end=True))
    left.settimeout(10)
    yield left, connection
    left.close()
    connection.close()


def wait_readable(connection: ControlConnection) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        assert selector.select(10)


def test_nothing_has_arrived(pair: tuple[socket.socket, ControlConnection]) -> None:
    assert pair[1].receive() == []


def test_frames_are_whole_wherever_they_are_cut(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    ends = [len(b"".join(map(Signing(), map(frame, MESSAGES[:n])))) for n in range(len(MESSAGES) + 1)]
    signed = Signing()
    for cut in range(1, ends[-1]):
        stream = b"".join(map(signed, map(frame, MESSAGES)))
        sock.sendall(stream[:cut])
        arrived = connection.receive()
        assert arrived == MESSAGES[: sum(end <= cut for end in ends[1:])]
        sock.sendall(stream[cut:])
        assert arrived + connection.receive() == MESSAGES


def test_byte_by_byte(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    arrived: list[Message] = []
    for byte in b"".join(map(Signing(), map(frame, MESSAGES))):
        sock.sendall(bytes([byte]))
        arrived += connection.receive()
    assert arrived == MESSAGES


def test_the_end_comes_after_what_was_said_before_it(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    sock.sendall(Signing()(frame(Bye())))
    sock.close()
    assert connection.receive() == [Bye()]
    with pytest.raises(EOFError):
        connection.receive()


@pytest.mark.parametrize(
    "rest",
    [b"", frame(Bye())[:3], frame(Bye())[:-1], frame(Bye())],
    ids=["clean", "in length", "in message", "before the tag"],
)
def test_the_end_of_the_stream(pair: tuple[socket.socket, ControlConnection], rest: bytes) -> None:
    sock, connection = pair
    sock.sendall(rest)
    assert connection.receive() == []
    sock.close()
    with pytest.raises(EOFError, match="its connection ended"):
        connection.receive()


def test_exactly_one_full_read_and_then_the_end(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    size = (1 << 16) - len(Signing()(frame(Failed("a" * 40000)))) + 40000
    message = Failed("a" * size)
    signed = Signing()(frame(message))
    assert len(signed) == 1 << 16
    sock.sendall(signed)
    sock.close()
    assert connection.receive() == [message]
    with pytest.raises(EOFError):
        connection.receive()


def test_an_oversized_frame_is_refused_before_it_arrives(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    sock.sendall(struct.pack("!I", MAX_FRAME + 1))
    with pytest.raises(ValueError, match=f"{MAX_FRAME + 1} bytes"):
        connection.receive()


@pytest.mark.parametrize("body", [b"", b"\xc1", b"GET / HTTP/1.1"])
def test_a_malformed_message_is_a_value_error(pair: tuple[socket.socket, ControlConnection], body: bytes) -> None:
    sock, connection = pair
    sock.sendall(Signing()(struct.pack("!I", len(body)) + body))
    with pytest.raises(ValueError, match="not a control message"):
        connection.receive()


def test_another_protocol_is_a_value_error(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="a control message of"):
        connection.receive()


def test_what_the_kernel_does_not_take_is_kept_and_sent_in_order(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    messages = [Stacks(str(number) * 300_000) for number in range(5)]
    for message in messages:
        connection.send_frame(frame(message))  # the other end does not read, and yet it returns
    assert connection.pending
    reader = ControlConnection(link_of(sock))
    arrived: list[Message] = []
    while len(arrived) < len(messages):
        connection.flush()
        wait_readable(reader)
        arrived += reader.receive()
    assert arrived == messages
    assert not connection.pending


def test_sending_to_a_closed_end_is_an_oserror(pair: tuple[socket.socket, ControlConnection]) -> None:
    sock, connection = pair
    sock.close()
    with pytest.raises(OSError, match=r"."):
        connection.send_frame(frame(Ping()))


def test_shutdown_ends_it_for_both_no_matter_which_process_holds_the_descriptor(
    pair: tuple[socket.socket, ControlConnection],
) -> None:
    sock, connection = pair
    copy = sock.dup()
    connection.shutdown()
    assert copy.recv(1) == b""
    with pytest.raises(EOFError):
        connection.receive()
    connection.shutdown()  # twice does no harm
    copy.close()


class TestForgeries:
    """Changes, repetitions, omissions and additions on the way are noticed, and nothing of them is processed."""

    def refuse(self, connection: ControlConnection) -> None:
        with pytest.raises(ValueError, match="a control message has a wrong signature"):
            connection.receive()

    def test_one_without_a_good_tag(self, pair: tuple[socket.socket, ControlConnection]) -> None:
        sock, connection = pair
        sock.sendall(frame(Bye()) + bytes(16))
        self.refuse(connection)

    @pytest.mark.parametrize("place", [4, -20, -1], ids=["message", "its end", "tag"])
    def test_one_that_was_changed(self, pair: tuple[socket.socket, ControlConnection], place: int) -> None:
        sock, connection = pair
        changed = bytearray(Signing()(frame(Failed("it is all over"))))
        changed[place] ^= 1
        sock.sendall(changed)
        self.refuse(connection)

    def test_one_that_is_repeated(self, pair: tuple[socket.socket, ControlConnection]) -> None:
        sock, connection = pair
        heard = Signing()(frame(Ping()))
        sock.sendall(heard)
        assert connection.receive() == [Ping()]
        sock.sendall(heard)
        self.refuse(connection)

    def test_one_that_is_left_out(self, pair: tuple[socket.socket, ControlConnection]) -> None:
        sock, connection = pair
        signed = Signing()
        signed(frame(Execute((1,))))
        sock.sendall(signed(frame(Execute((2,)))))
        self.refuse(connection)

    def test_one_that_is_sent_back(self) -> None:
        """Each direction has a key of its own."""
        left, right = link_pair()
        one, other = ControlConnection(left), ControlConnection(right)
        one.send_frame(frame(Ping()))
        heard = right.sock.recv(1000)
        right.sock.send(heard)
        self.refuse(one)
        one.close()
        other.close()
