"""What is said to and by a rendezvous server beside an agent. The launcher takes part through the agent's frames.

Pure: nothing here reads or writes. See ``hvdgloo.rendezvous._server.sidecar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hvdgloo._net import codec
from hvdgloo.config import TlsFiles

MAX_MESSAGE = 16 * 1024 * 1024
"""Bytes; far beyond any job's list of hosts."""


class _Message(codec.Message, frozen=True, tag=True):
    """On the wire a message's name comes first."""


class ServerRequest(_Message, frozen=True):
    """The first message to it: what to serve. The answer is ``Listening`` or ``ServerFailed``.

    Attributes:
        secret: of the job.
        hosts: name and slots of each.
        bind: addresses to listen on.
        port_range: first and last port that may be used.
        start_timeout: seconds that workers have for coming.
        tls: files with which connections are encrypted; None if they are not.
    """

    secret: bytes
    hosts: Sequence[tuple[str, int]]
    bind: Sequence[str]
    port_range: tuple[int, int] | None
    start_timeout: float
    tls: TlsFiles | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(bind={self.bind!r})"  # nothing secret in a traceback


class AskArrivals(_Message, frozen=True):
    """Who has come? The ``Arrived`` that answers has the question's number in it."""

    number: int


class Listening(_Message, frozen=True):
    """Where it listens."""

    endpoints: Sequence[str]


class Arrived(_Message, frozen=True):
    """What a launcher wants to know of a start.

    Attributes:
        arrived: how many workers have come.
        missing: the ranks that have not.
        failure: why the start has failed, if it has.
        asked: the question that this answers: all of it was true after that. None if nobody asked.
    """

    arrived: int
    missing: Sequence[int]
    failure: str
    asked: int | None = None


class ServerFailed(_Message, frozen=True):
    """It does not serve any more, and this is why: the last message."""

    error: str


FromServer: TypeAlias = Listening | Arrived | ServerFailed

TO_SERVER: codec.Codec[ServerRequest | AskArrivals] = codec.Codec(ServerRequest | AskArrivals, "order to a server")
FROM_SERVER: codec.Codec[FromServer] = codec.Codec(FromServer, "message of a server")
