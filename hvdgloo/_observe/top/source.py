"""Source of what ``top`` shows: the HTTP server of a job's launcher, by its Unix socket or by a link to its page."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from hvdgloo._observe.jobs import JobFile
from hvdgloo._observe.trace_control import Trace
from hvdgloo._observe.view import SCHEMA, STATES, Snapshot
from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import ConfigError, HvdglooError

PATIENCE = 20.0
"""Seconds that a launcher may take to answer; the first answer takes longest, since the launcher imports its server."""


_MOST = 64 << 20
"""Most bytes of an answer, which may come from any server: a snapshot of 100,000 ranks is smaller."""
_MOST_OF_A_TRACE = 4 << 30
_PIECE = 1 << 20
_LONGEST_REFUSAL = 500

T = TypeVar("T")


class _Schema(msgspec.Struct):
    schema: int = 0


class _Link(msgspec.Struct):
    url: str


class _Traces(msgspec.Struct):
    traces: list[Trace]


class GoneError(HvdglooError):
    """The job's launcher no longer answers: most likely the job is over."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the Unix socket at a path."""

    def __init__(self, path: str, timeout: float = PATIENCE) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Source:
    """Reads from one job's server.

    Args:
        connect: makes a connection that is not open yet.
        headers: headers that admit this reader.
        place: path below which the job is read.
    """

    def __init__(
        self, connect: Callable[[], http.client.HTTPConnection], headers: dict[str, str], place: str = "/"
    ) -> None:
        self._connection = connect()
        self._headers = headers
        self._place = place

    def snapshot(self, *, curves: bool = False) -> bytes:
        """Return the job's present state as JSON.

        Args:
            curves: include the curves over the job's life.

        Raises:
            GoneError: the launcher does not answer.
            ConfigError: the answer is a refusal.
        """
        return self._request("GET", f"v1/job?curves={int(curves)}")

    def link(self) -> str:
        """Return a new link to the job's page; raises as ``snapshot`` does."""
        return in_one_line(_read(self._request("POST", "v1/links"), _Link).url)

    def trace(self, steps: int) -> Trace:
        """Have the next steps traced; raises as ``snapshot`` does."""
        order = json.dumps({"steps": steps}).encode()
        return _shown(_read(self._request("POST", "v1/traces", order), Trace))

    def state_of(self, number: int) -> Trace:
        """Return the state of a trace; raises as ``snapshot`` does."""
        traces = _read(self._request("GET", "v1/traces"), _Traces).traces
        found = [trace for trace in traces if trace.number == number]
        if not found:
            raise ConfigError(OTHER_VERSION)
        return _shown(found[0])

    def traced(self, number: int) -> bytes:
        """Return a merged trace; raises as ``snapshot`` does."""
        return self._request("GET", f"v1/traces/{number}", most=_MOST_OF_A_TRACE)

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, body: bytes | None = None, *, most: int | None = None) -> bytes:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            self._connection.request(method, self._place + path, body, headers)
            answer = self._connection.getresponse()
            body = _received(answer, most or _MOST)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise GoneError(f"the job's launcher does not answer ({_reason(error)}); most likely it is over") from None
        if answer.status >= 300:
            raise ConfigError(f"the job's launcher refuses: {_refusal(body)}")
        return body


def of_job(job: JobFile) -> Source:
    """Return the source of a job of this user on this host."""
    return Source(lambda: UnixConnection(job.unix), {"Authorization": f"Bearer {job.control or job.token}"})


def of_link(link: str) -> Source:
    """Return the source of a job by a link to its page, which is used up as if a browser had opened it.

    Raises:
        ConfigError: it is no such link, or was used before.
        GoneError: no server answers there.
    """
    parts = urlsplit(link)
    if parts.scheme not in ("http", "https") or not parts.netloc or not parts.query.startswith("token="):
        raise ConfigError(f"{link}: a link to a job's page looks like http://HOST:PORT/?token=...")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=PATIENCE)
    try:
        connection.request("GET", f"/?{parts.query}")
        answer = connection.getresponse()
        _received(answer, _MOST)
    except (OSError, http.client.HTTPException) as error:
        raise GoneError(f"{in_one_line(parts.netloc)} does not answer: {_reason(error)}") from None
    finally:
        connection.close()
    cookie, _, attributes = answer.headers.get("Set-Cookie", "").partition(";")
    place = next((a.strip()[5:] for a in attributes.split(";") if a.strip().startswith("Path=")), "")
    if answer.status != 200 or not place:
        raise ConfigError(f"{link}: the link was used before, or belongs to another job; each works once")
    return Source(lambda: kind(parts.netloc, timeout=PATIENCE), {"Cookie": cookie}, place)


def decoded(data: bytes) -> Snapshot:
    """Decode a snapshot from JSON.

    Raises:
        ConfigError: it comes from another version of hvdgloo.
    """
    if _read(data, _Schema).schema == SCHEMA:
        snapshot = _read(data, Snapshot)
        ranks, hosts = snapshot.ranks, len(snapshot.hosts)
        whole = {len(getattr(ranks, name)) for name in ranks.__struct_fields__} == {len(ranks.rank)}
        if whole and all(0 <= n < hosts for n in ranks.host) and all(0 <= n < len(STATES) for n in ranks.state):
            return snapshot
    raise ConfigError(OTHER_VERSION)


OTHER_VERSION = "the job runs another version of hvdgloo; use the version that it was started with"


def _received(answer: http.client.HTTPResponse, most: int) -> bytes:
    """Read all of an answer.

    Raises:
        HTTPException: it is longer than ``most``.
        OSError: nothing arrived in time.
    """
    pieces, left = [], most
    while piece := answer.read(_PIECE):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise http.client.HTTPException(f"its answer is longer than {most >> 20} MiB")
    return b"".join(pieces)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        raise ConfigError(OTHER_VERSION) from None


def _shown(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, text=in_one_line(trace.text))


def _reason(error: Exception) -> str:
    return in_one_line(str(getattr(error, "strerror", None) or error))[:_LONGEST_REFUSAL] or type(error).__name__


def _refusal(body: bytes) -> str:
    try:
        text = str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body[:_LONGEST_REFUSAL].decode("utf-8", "replace")
    return in_one_line(text)[:_LONGEST_REFUSAL]
