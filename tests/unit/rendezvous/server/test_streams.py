"""Requests that the server's front may answer itself: complete and unambiguous ones."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from hvdgloo.rendezvous._server.streams import Reader, Writer


def is_small(data: bytes) -> bool:
    with socket.socket() as sock:
        reader = Reader(sock, lambda: None, nullcontext)
        reader.feed(data)
        return reader.has_small_request()


def request(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join((f"{line} HTTP/1.1", "Host: h", *headers, "", "")).encode() + body


@pytest.mark.parametrize(
    "data",
    [
        request("GET /v1/hello"),
        request("GET /v1/hello?x", "Content-Length: 0"),
        request("GET /v1/kv/gloo/agreed?timeout=45.000", "Content-Length: 0"),
        request("PUT /v1/kv/gloo/0%2F3", "content-length:3", body=b"abc"),
        request("PUT /v1/kv/gloo/0/3", "Content-Length: 3", "Authorization: x", body=b"abcGET /"),
        request("DELETE /v1/kv/gloo/a"),
        request("POST /v1/kv/gloo?op=get", "Content-Length: 1", body=b"x"),
        request("POST /v1/epochs/12/workers?timeout=1", "Content-Length: 1", body=b"x"),
    ],
)
def test_small_requests_of_a_start(data: bytes) -> None:
    assert is_small(data)
    assert not is_small(data[: data.index(b"\r\n\r\n") + 3]), "its head is not whole"


@pytest.mark.parametrize(
    "data",
    [
        request("GET /"),
        request("GET /metrics"),
        request("GET /v1/status"),
        request("GET /v1/hellos"),
        request("HEAD /v1/kv/gloo/agreed"),
        request("POST /v1/hello"),
        request("GET /v1/kv/gloo"),
        request("GET /v1/kv/gloo//a"),
        request("POST /v1/kv/gloo/a"),
        request("POST /v1/epochs/-1/workers"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 4", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 100000", body=b"abc" * 50000),
        request("PUT /v1/kv/gloo/a", "Content-Length : 3", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length: +3", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length:  3", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 3", "Content-Length: 3", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 3", " 4", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 3\n4", body=b"abc"),
        request("PUT /v1/kv/gloo/a", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        request("PUT /v1/kv/gloo/a", "Content-Length: 3", "Expect: 100-continue", body=b"abc"),
    ],
)
def test_all_others_are_left_to_the_pool(data: bytes) -> None:
    assert not is_small(data)


def test_who_may_not_wait_keeps_what_could_not_be_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = Writer(ours, nullcontext)
        writer.patient = False
        data = bytes(range(256)) * (1 << 14)
        writer.write(data)
        assert not writer.flush()
        received = b""
        while len(received) < len(data):
            received += theirs.recv(1 << 20)
            sent = writer.flush()
        assert sent
        assert received == data
        assert writer.bytes_written == len(data)


def test_who_may_wait_says_so_before_waiting_for_the_client() -> None:
    """Others take its turn meanwhile; the timeout that the socket had before does not matter."""
    waiting = threading.Event()

    @contextmanager
    def wait() -> Iterator[None]:
        waiting.set()
        yield

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        filling = 0
        try:
            while True:
                filling += ours.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        ours.settimeout(30)
        writer = Writer(ours, wait)
        writer.write(b"answer")
        sending = threading.Thread(target=writer.flush, daemon=True)
        sending.start()
        assert waiting.wait(5), "it waits, and no other thread knows"
        received = b""
        while len(received) < filling + 6:
            received += theirs.recv(1 << 20)
        sending.join(10)
        assert received[filling:] == b"answer"
