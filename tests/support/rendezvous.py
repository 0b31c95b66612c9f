"""For tests of the rendezvous: workers, raw requests with or without a good signature, and waiting for a condition."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdgloo.config import parse_endpoint
from hvdgloo.rendezvous import MemoryStore, WorkerInfo
from hvdgloo.rendezvous import _auth as auth

T = TypeVar("T")
SECRET = bytes(range(32))


def info(**changes: Any) -> WorkerInfo:
    """A worker of host ``h`` that brings neither rank nor index, unless told otherwise."""
    values: dict[str, Any] = {
        "rank": None,
        "index": None,
        "host_name": "h",
        "host_identity": "id",
        "address": "127.0.0.1",
        "port": 1,
        "pid": 2,
    }
    return WorkerInfo(**(values | changes))


def until(condition: Callable[[], T], what: str, timeout: float = 10.0) -> T:
    """The condition's first true value; fails after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s for: {what}"
        time.sleep(0.005)
    return value


class InProcess:
    """The rendezvous service, in this process."""

    def __init__(self) -> None:
        self.kept = MemoryStore()

    def store(self, scope: str, *, timeout: float) -> MemoryStore:
        return self.kept


class RawClient:
    """Speaks the protocol by hand, so that each part of a request can be wrong on purpose."""

    def __init__(self, endpoint: str, run: str, secret: bytes = SECRET) -> None:
        self.host, self.port = parse_endpoint(endpoint)
        self.run = run
        self.client = auth.generate_id()
        self.counter = itertools.count()
        self.signer = auth.Signer(secret)

    def sign(self, method: str, target: str, body: bytes = b"", **changes: Any) -> str:
        """An Authorization header; ``changes`` replace run, client, counter or digest before signing."""
        parts: dict[str, Any] = {
            "body_digest": auth.digest(body),
            "run": self.run,
            "client": self.client,
            "counter": next(self.counter),
        }
        return self.signer.sign(method, target, **(parts | changes)).header()

    def head(
        self, method: str, target: str, body: bytes = b"", *, authorization: str | None = None, **headers: str
    ) -> bytes:
        """The head of a request, ready to send."""
        lines = [f"{method} {target} HTTP/1.1", "Host: test"]
        authorization = self.sign(method, target, body) if authorization is None else authorization
        if authorization:
            lines.append(f"Authorization: {authorization}")
        headers = {"Content-Length": str(len(body))} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        lines += [f"{name}: {value}" for name, value in headers.items() if value]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def request(self, method: str, target: str, body: bytes = b"", **options: Any) -> tuple[int, Any]:
        """Status and body of the answer; the body decoded if it is JSON."""
        return self.send(self.head(method, target, body, **options) + body)

    def send(self, data: bytes) -> tuple[int, Any]:
        """Send bytes on a new connection and read one answer."""
        with socket.create_connection((self.host, self.port), timeout=20) as sock:
            sock.sendall(data)
            return read_answer(sock)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)


def read_answer(sock: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    body = answer.read()
    if answer.headers.get("Content-Type") == "application/json":
        return answer.status, json.loads(body)
    return answer.status, body


@contextmanager
def unreachable_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which no process listens, and which no other process gets meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
