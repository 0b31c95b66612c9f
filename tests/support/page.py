"""For tests of the page's server: requests as browsers and scripts make them, and live events as they arrive."""

from __future__ import annotations

import http.client
import json
import re
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from hvdgloo.rendezvous._page_server.server import PageServer

PATIENCE = 30.0


class Answer:
    """A response: ``json()`` is the decoded body."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """Makes requests of a page's server, each on a connection of its own.

    Args:
        server: that listens at an address.
        headers: of each request.
        place: path below which requests go.
    """

    def __init__(self, server: PageServer, headers: dict[str, str] | None = None, place: str = "/") -> None:
        self.netloc = urlsplit(server.address).netloc
        self.headers = headers or {}
        self.place = place

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, value: object, **headers: str) -> Answer:
        return self.request("POST", path, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """``path`` is relative to the place, unless it begins with a slash; underscores in headers are dashes."""
        connection = self._send(method, path, body, headers)
        try:
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def watch(self, **headers: str) -> Events:
        """The live events."""
        connection = self._send("GET", "events", None, headers)
        return Events(connection, connection.getresponse())

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.netloc, timeout=PATIENCE)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        target = path if path.startswith("/") else self.place + path
        connection.request(method, target, body, {**self.headers, **given})
        return connection


class Events:
    """Server-sent events of an answer, one after the other."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.id = ""
        self._connection = connection
        self._answer = answer

    def next(self) -> tuple[str, Any]:
        """The next event's kind and data, once it is here; ("", None) when the stream is over."""
        kind = ""
        while line := self._answer.readline():
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                self.id = value
            elif name == "data":
                return kind, json.loads(value)
        return "", None

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer.close()
        self._connection.close()


def script(server: PageServer, token: str) -> Caller:
    """A script that shows a token."""
    return Caller(server, {"Authorization": f"Bearer {token}"})


def browser(server: PageServer) -> Caller:
    """A browser in which a fresh link was opened; its requests are like the page's own."""
    link = urlsplit(server.link())
    stranger = Caller(server)
    opened = stranger.get(f"/?{link.query}")
    cookie, place = re.fullmatch(r"(.+?); Path=(.+?);.*", opened.headers["Set-Cookie"]).groups()  # type: ignore[union-attr]
    return Caller(server, {"Cookie": cookie, "Sec-Fetch-Site": "same-origin"}, place)
