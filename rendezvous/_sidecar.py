"""Messages to and from a rendezvous server that runs as an agent's sidecar. The agent passes them on to the launcher.

Pure: nothing here reads or writes. See ``hvdgloo.rendezvous._server.sidecar``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from hvdgloo._net import codec
from hvdgloo.config import TlsFiles

MAX_MESSAGE = 16 * 1024 * 1024
"""Most bytes of a message; far more than any job's list of hosts needs."""


class _Message(codec.Message, frozen=True, tag=True):
    """A message that begins with its name."""


class ServerRequest(_Message, frozen=True):
    """The first message to the server: the job to serve. The reply is ``Listening`` or ``ServerFailed``.

    Attributes:
        secret: the job's secret.
        hosts: name and slots of each host.
        bind: addresses to listen on.
        port_range: first and last port that may be used.
        start_timeout: seconds in which the next worker must register.
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
    """A question for the workers that have arrived. The ``Arrived`` that answers it has its number."""

    number: int


class Listening(_Message, frozen=True):
    """The addresses on which the server listens."""

    endpoints: Sequence[str]


class Arrived(_Message, frozen=True):
    """The state of a start.

    Attributes:
        arrived: number of workers that have registered.
        missing: ranks that have not.
        failure: why the start failed; empty if it has not.
        asked: number of the question that this answers, after which all of it was true; None if there was none.
    """

    arrived: int
    missing: Sequence[int]
    failure: str
    asked: int | None = None


class ServerFailed(_Message, frozen=True):
    """The last message of a server that no longer serves, with the reason."""

    error: str


FromServer: TypeAlias = Listening | Arrived | ServerFailed

TO_SERVER: codec.Codec[ServerRequest | AskArrivals] = codec.Codec(ServerRequest | AskArrivals, "order to a server")
FROM_SERVER: codec.Codec[FromServer] = codec.Codec(FromServer, "message of a server")
