"""One HTTP connection of the client, with no more of HTTP/1.1 than a client of a single server needs.

``http.client`` would import the standard library's mail and TLS packages into every worker, which takes longer than
all requests of a start; it sends head and body apart, so a server under load wakes twice for each request; and its
timeout starts again with every packet. Here a request is one write, and everything keeps one deadline.
"""

from __future__ import annotations

import re
import select
import socket
import time
from contextlib import suppress

from hvdgloo._net.tls import Tls
from hvdgloo.rendezvous._auth import ANSWER_HEADER
from hvdgloo.rendezvous._http import LENGTH, NAME, ONCE

_CONNECT_ATTEMPT = 5.0  # seconds; a host name may have several addresses, and the first may lead nowhere
_PIECE = 1 << 20
_LONGEST_HEAD = 1 << 16
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")


class NotHttpError(Exception):
    """The received bytes are not HTTP, or not a whole answer."""


class HttpConnection:
    """A connected socket on which one request at a time is made.

    Args:
        host, port: address of the server.
        deadline: in seconds, on the monotonic clock.
        tls: encrypts the connection, if given.

    Attributes:
        channel: SHA-256 of the server's certificate; empty without TLS.

    Raises:
        OSError: it cannot connect.
        AuthenticationError: the server does not speak TLS, or has the wrong certificate.
        ConfigError: the authority's file cannot be used.
    """

    def __init__(self, host: str, port: int, deadline: float, tls: Tls | None = None) -> None:
        # As bytes, which need not be encoded: for text, Python loads its tables of international names.
        name = host.encode("ascii") if host.isascii() else host
        timeout = min(_CONNECT_ATTEMPT, _until(deadline))
        self._socket = socket.create_connection((name, port), timeout)  # type: ignore[arg-type]  # takes bytes, too
        self.channel = b""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.local_address = str(self._socket.getsockname()[0])
            if tls is not None:
                self._socket, self.channel = tls.connected(self._socket, min(deadline, time.monotonic() + timeout))
        except BaseException:
            self._socket.close()
            raise
        self._host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def request(
        self, method: str, target: str, authorization: str, body: bytes, deadline: float
    ) -> tuple[int, bytes, str, bool]:
        """Send a request (other than HEAD) and read its answer.

        Returns:
            status, body, the answer's signature, and whether the connection may be used again.

        Raises:
            TimeoutError: the deadline passed.
            OSError, NotHttpError: the connection broke, or the answer is not HTTP.
        """
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: {authorization}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._socket.settimeout(_until(deadline))
        try:
            self._socket.sendall(head.encode("ascii") + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses a body does not read all of it, and has said why
        incoming = _Incoming(self._socket, deadline)
        while True:
            status, headers = incoming.head()
            if status >= 200:
                break  # what comes before only announces that more will come
        data, whole = incoming.body(status, headers)
        again = whole and headers.get("connection", "keep-alive").lower() != "close" and incoming.empty
        return status, data, headers.get(ANSWER_HEADER.lower(), ""), again

    def stale(self) -> bool:
        """True if the server closed the idle connection; otherwise there is nothing to read."""
        poller = select.poll()  # select() cannot watch descriptors above 1023
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self) -> None:
        """End a request that is under way on another thread, which gets an OSError or NotHttpError."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Incoming:
    """An answer as it arrives."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._deadline = deadline
        self._buffer = b""

    @property
    def empty(self) -> bool:
        """True if nothing arrived beyond the answer."""
        return not self._buffer

    def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers, by their lower-case names; "connection: close" is added for HTTP/1.0."""
        while b"\n" not in self._buffer:
            # Something other than an HTTP server may wait for more after its first words.
            if not self._buffer.startswith(b"HTTP/1."[: len(self._buffer)]) or len(self._buffer) > _LONGEST_HEAD:
                raise NotHttpError(self._said())
            self._more("the connection was closed without an answer")
        first = _STATUS_LINE.match(self._buffer)
        if first is None:
            raise NotHttpError(self._said())
        headers = {} if first[1] != b"0" else {"connection": "close"}
        self._buffer = self._buffer[first.end() :]
        while (line := self._line()).strip():
            word, colon, content = line.partition(b":")
            if not colon or not NAME.fullmatch(word):
                raise NotHttpError(f"a header without a name and a colon: {word[:80]!r}")
            name, value = word.decode().lower(), content.decode("latin-1")
            if name in headers and name in ONCE:
                raise NotHttpError(f"a second {name}")
            headers[name] = value.strip()
        return int(first[2]), headers

    def body(self, status: int, headers: dict[str, str]) -> tuple[bytes, bool]:
        """Read the body; return it, and whether its end was marked rather than the connection's end."""
        if status in (204, 304):
            return b"", True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._chunks(), True
        length = headers.get("content-length")
        if length is None:
            return self._rest(), False
        if not LENGTH.fullmatch(length):
            raise NotHttpError(f"a body of length {length[:80]!r}")
        return self._take(int(length)), True

    def _chunks(self) -> bytes:
        """Read a body in chunks: hvdgloo's server sends none, but a proxy may make them."""
        chunks: list[bytes] = []
        while True:
            found = _CHUNK_LINE.fullmatch(self._line())
            if found is None:
                raise NotHttpError("a chunk without its length")
            size = int(found[1], 16)
            if size == 0:
                while self._line().strip():
                    pass
                return b"".join(chunks)
            chunks.append(self._take(size))
            if self._line().strip():
                raise NotHttpError("a chunk longer than it says")

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _LONGEST_HEAD:
                raise NotHttpError("a line without an end")
            self._more()
        line, self._buffer = self._buffer[: end + 1], self._buffer[end + 1 :]
        return line

    def _take(self, size: int) -> bytes:
        pieces, missing = [self._buffer[:size]], size - len(self._buffer)
        self._buffer = self._buffer[size:]
        while missing > 0:
            pieces.append(self._receive(missing))
            if not pieces[-1]:
                raise NotHttpError(f"the answer ended {missing} bytes early")
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _rest(self) -> bytes:
        pieces, self._buffer = [self._buffer], b""
        while piece := self._receive(_PIECE):
            pieces.append(piece)
        return b"".join(pieces)

    def _more(self, nothing: str = "the answer ended early") -> None:
        data = self._receive(_LONGEST_HEAD)
        if not data:
            if self._buffer:
                raise NotHttpError("the answer ended early")
            raise ConnectionResetError(nothing)
        self._buffer += data

    def _receive(self, most: int) -> bytes:
        self._socket.settimeout(_until(self._deadline))
        return self._socket.recv(min(most, _PIECE))

    def _said(self) -> str:
        return self._buffer[:80].split(b"\n")[0].decode("latin-1").strip() or "an empty line"


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
