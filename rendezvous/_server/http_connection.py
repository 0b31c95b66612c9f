"""One client's connection to the server, and its requests: cheroot's HTTP parser and WSGI gateway, made stricter.

A request is served by a thread that may wait, or by the front's own, which may not: then it is put aside whenever it
must wait for other workers.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from typing import Any

from cheroot import server as cheroot_server
from cheroot import wsgi

from hvdgloo.rendezvous._http import LENGTH, NAME, ONCE
from hvdgloo.rendezvous._server.pauses import Pause
from hvdgloo.rendezvous._server.streams import Reader, Waiting, Writer

logger = logging.getLogger(__name__)


def refusal(status: str, reason: str) -> bytes:
    """Return a whole answer, as JSON, after which the connection ends."""
    body = json.dumps({"error": status[4:], "reason": reason}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n".encode("latin-1") + body


class _Headers(dict[bytes, bytes]):
    """Headers that refuse a second value where there must be only one, and lengths that are not plain numbers."""

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if name in self and name.decode("latin-1").lower() in ONCE:
            raise ValueError(f"{name.decode()} has more than one value")
        if name == b"Content-Length" and not LENGTH.fullmatch(value.decode("latin-1")):
            raise ValueError("the Content-Length is not a plain decimal number")
        super().__setitem__(name, value)


class _Unfolded:
    """A reader that refuses a header continued on the next line, which readers treat differently."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readline(self) -> bytes:
        line: bytes = self._file.readline()
        if line[:1] in (b" ", b"\t"):
            raise ValueError("a header goes on in the next line")
        return line


class _HeaderReader(cheroot_server.HeaderReader):
    """A strict reader of headers. It drops headers with underscores, which WSGI could not distinguish from dashes."""

    def __call__(self, rfile: Any, hdict: Any = None) -> Any:
        headers = {} if hdict is None else hdict
        headers.update(super().__call__(_Unfolded(rfile), _Headers()))
        return headers

    def _transform_key(self, key_name: bytes) -> bytes:
        if not NAME.fullmatch(key_name):
            raise ValueError("a header's name is not a word that its colon follows at once")
        return key_name.title()

    def _allow_header(self, key_name: bytes) -> bool:
        return b"_" not in key_name


class _Request(cheroot_server.HTTPRequest):
    """A request; refusals by cheroot itself are answered as JSON, like all others."""

    header_reader = _HeaderReader()

    def simple_response(self, status: str, msg: str = "") -> None:
        status = str(status)
        self.close_connection = True
        self.conn.must_linger = True
        self.conn.wfile.write(refusal(status, msg or status[4:]))

    def send_headers(self) -> None:
        if self.conn.hand_over is not None:
            self.response_protocol = "HTTP/1.0"  # no chunks: the answer is not ours, and ends with the connection
        if self.conn.ending or self.chunked_read or getattr(self.rfile, "remaining", 0) != 0:
            # cheroot would read the rest of an unwanted body, and wait for it.
            self.close_connection = True
            self.conn.must_linger = True
        super().send_headers()

    def ensure_headers_sent(self) -> None:
        if self.conn.pause is None:  # or cheroot would answer a request that was put aside
            super().ensure_headers_sent()


class HttpConnection(cheroot_server.HTTPConnection):
    """One client's connection. It belongs to the front's thread while quiet, and to a pool thread while that serves it.

    Attributes:
        pause: present pause of its request, if the front has put it aside.
        hand_over: takes the connection once the head of an answer without an end was sent; from then on the front only
            closes it.
    """

    RequestHandlerClass = _Request

    def __init__(self, front: cheroot_server.HTTPServer, waiting: Waiting, sock: socket.socket, address: Any) -> None:
        self._waiting = waiting
        self._writer = Writer(sock, self._waiting)
        super().__init__(front, sock, self._make_file)
        self.remote_addr, self.remote_port = address[:2]
        self.ssl_env = {}
        self.must_linger = False
        self.ending = False
        self.registered = False
        self.greeted = True
        self.on_hang_up: Callable[[], None] | None = None
        self.on_close: Callable[[], None] | None = None
        self.discarded = 0
        self.pause: Pause | None = None
        self.go_on: Callable[[bool], None] | None = None
        self.hand_over: Callable[[HttpConnection], None] | None = None
        self.keep = False

    def _make_file(self, sock: socket.socket, mode: str, _size: int) -> Reader | Writer:
        return Reader(sock, self._writer.flush, self._waiting) if "r" in mode else self._writer

    def end_after_answer(self) -> None:
        """Serve no further request on this connection."""
        self.ending = True

    @property
    def patient(self) -> bool:
        """True if the thread that serves it may wait."""
        return self._writer.patient

    def communicate(self) -> bool:
        self._writer.patient = True
        keep = bool(super().communicate())  # type: ignore[no-untyped-call]
        self.wfile.flush()
        return keep

    def begin(self) -> None:
        """Serve one request without waiting for anything; it is finished unless it has a ``pause``."""
        self._writer.patient = False
        self.keep = bool(super().communicate())  # type: ignore[no-untyped-call]

    def resume(self, released: bool) -> None:
        """Resume a request after its pause; ``released`` is True if the awaited event happened."""
        assert self.go_on is not None, "only a request that has begun has a pause"
        self.keep = False
        try:
            self.go_on(released)
        except Exception:
            logger.exception("a request could not be served")

    def flush_patiently(self) -> None:
        """Send the rest of an answer.

        Raises:
            OSError: the client disconnected, or does not read.
        """
        self._writer.patient = True
        self._writer.flush()

    def close(self) -> None:
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()
        self.rfile.close()
        self.wfile.close()
        try:
            # Tells the peer even if a forked child holds a copy of the descriptor.
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self.socket.close()


class Gateway(wsgi.Gateway_10):
    """cheroot's WSGI gateway, plus the connection for ``Front.watch``, and requests that can be put aside."""

    def get_environ(self) -> dict[str, Any]:  # type: ignore[override]
        environ: dict[str, Any] = super().get_environ()  # type: ignore[no-untyped-call]
        environ["hvdgloo.connection"] = self.req.conn
        return environ

    def respond(self) -> None:
        if self.req.conn.patient:
            super().respond()
            return
        steps = self.req.server.wsgi_app.steps(self.env, self.start_response)
        self.req.conn.go_on = lambda released: self._advance(lambda: steps.send(released))
        self._advance(lambda: next(steps))

    def _advance(self, step: Callable[[], Pause]) -> None:
        """Take one step of a request: to its next pause, or to its answer, which is written."""
        connection = self.req.conn
        try:
            connection.pause = step()
        except StopIteration as end:
            connection.pause = None
            connection.go_on = None
            for chunk in filter(None, end.value):
                self.write(chunk)
            self.req.ensure_headers_sent()
            connection.keep = not self.req.close_connection
        except BaseException:
            connection.pause = connection.go_on = None
            raise
