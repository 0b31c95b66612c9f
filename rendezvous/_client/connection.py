"""One HTTP connection of the client: what ``http.client`` reads answers with, less what it does around that.

``http.client.HTTPConnection`` sends head and body apart, so a server under load wakes twice for each request; and its
timeout starts anew with every packet. Here a request is one write, and everything keeps one deadline.
"""

from __future__ import annotations

import http.client
import select
import socket
import time

from hvdgloo.rendezvous._auth import ANSWER_HEADER

_CONNECT_ATTEMPT = 5.0  # seconds; a host name may have several addresses, and the first may lead nowhere
_CHUNK = 1 << 20


class HttpConnection:
    """A connected socket on which one request at a time is made.

    Args:
        host, port: of the server.
        deadline: monotonic seconds.

    Raises:
        OSError: it cannot be connected.
    """

    def __init__(self, host: str, port: int, deadline: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=min(_CONNECT_ATTEMPT, _until(deadline)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.local_address = str(self._socket.getsockname()[0])
        self._host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def request(
        self, method: str, target: str, authorization: str, body: bytes, deadline: float
    ) -> tuple[int, bytes, str, bool]:
        """Send a request and read its answer.

        Returns:
            status, body, the answer's signature, and whether the connection may be used again.

        Raises:
            TimeoutError: the deadline passed.
            OSError, http.client.HTTPException: the connection broke, or what came is not HTTP.
        """
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: {authorization}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket.settimeout(_until(deadline))
        try:
            self._socket.sendall(head.encode("ascii") + body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # a server that refuses a body does not take all of it, and has said why
        answer = http.client.HTTPResponse(self._socket, method=method)
        try:
            self._socket.settimeout(_until(deadline))
            answer.begin()
            data = self._read(answer, deadline)
            return answer.status, data, answer.headers.get(ANSWER_HEADER, ""), not answer.will_close
        finally:
            answer.close()

    def stale(self) -> bool:
        """Whether the server has closed it while it was idle; there is nothing to read on a good one."""
        poller = select.poll()  # select() cannot watch descriptors above 1023
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self._socket.close()

    def _read(self, answer: http.client.HTTPResponse, deadline: float) -> bytes:
        parts: list[bytes] = []
        while answer.length != 0:
            self._socket.settimeout(_until(deadline))
            part = answer.read1(_CHUNK)
            if not part:
                if answer.length is not None:
                    raise http.client.IncompleteRead(b"".join(parts), answer.length)
                break
            parts.append(part)
        return b"".join(parts)


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
