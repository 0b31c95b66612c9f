"""RendezvousServer: the service with its sockets and threads, as a context manager.

Listening comes before serving: a launcher tells its workers the port and starts them, then imports the web server
(which takes longer than everything else that a launcher does) while they import their frameworks. Workers that connect
earlier wait in the listener's queue.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvdgloo._net import ports
from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo._net.tls import Tls
from hvdgloo.config import format_endpoint
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._server.epochs import Epochs
from hvdgloo.rendezvous._server.fixed import FixedEpochs
from hvdgloo.rendezvous._store import Limits

if TYPE_CHECKING:
    from hvdgloo._observe.samples import Observation
    from hvdgloo.rendezvous._server.elastic import ElasticEpochs
    from hvdgloo.rendezvous._server.http_front import Front
    from hvdgloo.rendezvous._server.routes import WSGIApplication
    from hvdgloo.rendezvous._server.service import Refused, Service

logger = logging.getLogger(__name__)

MAX_BODY = 256 * 1024 * 1024
_ELASTIC_WORKERS = 1024  # of an elastic job without --max-np
_CUT_OFF = 5.0  # seconds after which a worker of an elastic job without agents counts as lost if its host has vanished
_SPARE_THREADS = 32  # for requests that do not wait


class RendezvousServer:
    """Hands out ranks and topology, and keeps the store through which workers find each other.

    Use it as a context manager, or call ``start`` and ``stop``; call ``listen`` first if the endpoint is needed early.
    Epoch 0 is open from the start.

    Args:
        secret: the job's secret, which admits clients.
        size: number of workers, if their hosts are not known: ranks then follow hosts in order of first arrival, or
            ``WorkerInfo.index`` if workers have one.
        hosts: (name, slots) in order, if a launcher knows them: ranks fill hosts in this order, and workers bring their
            ranks.
        elastic: epochs of an elastic job. Exactly one of ``size``, ``hosts`` and ``elastic`` is given.
        bind: IP addresses to listen on, all on one port.
        port: port to listen on; 0 takes any free one.
        port_range: (first, last): the first free port of these, instead of ``port``.
        start_timeout: seconds without a further worker after which all waiting workers are told which are missing.
        request_timeout: seconds for a request's head, and again for its body, plus the time that a large body takes.
        limits: limits on the memory that clients may take.
        tls: encrypts all connections, if given.
        observed: receives ranks' observations, on any thread; None if the job has no observer.
        page: makes a link to the job's page, on any thread; None if there is none.

    Raises:
        ConfigError: no such address here, the port is taken, or no worker is expected.
        MissingDependencyError: certificates cannot be made.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        size: int | None = None,
        hosts: Sequence[tuple[str, int]] | None = None,
        elastic: ElasticEpochs | None = None,
        bind: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        port_range: tuple[int, int] | None = None,
        start_timeout: float = 120.0,
        request_timeout: float = 10.0,
        limits: Limits = Limits(),  # noqa: B008 - it never changes
        tls: Tls | None = None,
        observed: Callable[[Observation], None] | None = None,
        page: Callable[[], str] | None = None,
    ) -> None:
        if not bind:
            raise ConfigError("a rendezvous server needs at least one address to listen on")
        self._secret = secret
        self._request_timeout = request_timeout
        self._limits = limits
        self._tls = tls
        self._observed = observed
        self._page = page
        if tls is not None:
            tls.check_listener()
        self._bind = tuple(dict.fromkeys(bind))
        self._port_range = (port, port) if port_range is None and port else port_range
        self._listeners: list[socket.socket] = []
        self._bound: list[Any] = []
        self._service: Service | None = None
        self._front: Front | None = None
        self._elastic = elastic
        self._epochs: Epochs
        if elastic is None:
            try:
                self._epochs = FixedEpochs(start_timeout, size=size, hosts=hosts)
            except ValueError as error:
                raise ConfigError(f"rendezvous: {error}") from None
            self._workers = size if size is not None else sum(slots for _, slots in hosts or ())
            # Each worker may wait in one request, and in one more that repeats it.
            self._threads = 2 * self._workers + _SPARE_THREADS
        elif size is not None or hosts is not None:
            raise ConfigError("rendezvous: the workers of an elastic job are not fixed by size or hosts")
        else:
            self._epochs = elastic
            self._workers = elastic.rules.size
            self._threads = 2 * (elastic.rules.largest or _ELASTIC_WORKERS) + _SPARE_THREADS

    def listen(self) -> RendezvousServer:
        """Bind and listen. Returns itself.

        ``endpoint`` is known from now on, and clients that connect wait for ``start``.

        Raises:
            RuntimeError: it was called before.
            ConfigError: there is no such address here, the port is taken, or this process may not have as many open
                files as there will be workers.
        """
        if self._bound:
            raise RuntimeError("this rendezvous server listens already, or has done so")
        self._room()
        self._listeners = ports.listen(self._bind, self._port_range)
        self._bound = [listener.getsockname() for listener in self._listeners]
        return self

    def descriptors(self) -> tuple[int, ...]:
        """Return the listening sockets' descriptors: readable while a connected client waits for ``start``."""
        return tuple(listener.fileno() for listener in self._listeners)

    def start(self) -> RendezvousServer:
        """Listen, unless it does so already, and serve on daemon threads. Returns itself.

        Raises:
            RuntimeError: it has been started before.
            ConfigError: as ``listen`` does.
        """
        if self._front is not None:
            raise RuntimeError("this rendezvous server has been started before")
        if not self._bound:
            self.listen()
        from hvdgloo.rendezvous._server.http_front import Front
        from hvdgloo.rendezvous._server.routes import create_app
        from hvdgloo.rendezvous._server.service import Service

        self._service = Service(
            self._secret,
            self._epochs,
            max_polls=self._most_polls,
            watch=self._watch,
            body_timeout=self._request_timeout,
            limits=self._limits,
            channel=b"" if self._tls is None else self._tls.fingerprint,
            observed=self._observed,
            page=self._page,
        )
        self._epochs.start()
        self._front = Front(
            create_app(self._service, _create_pages),
            self._listeners,
            threads=self._threads,
            max_connections=self._room(),
            max_body=MAX_BODY,
            head_timeout=self._request_timeout,
            tls=self._tls,
            dead_after=_CUT_OFF if self._elastic is not None and not self._elastic.rules.launched else None,
        )
        self._front.start()
        logger.info("the rendezvous server listens on %s", ", ".join(self.endpoints))
        return self

    def stop(self) -> None:
        """End within a second: waiting workers get a clear error, then everything is closed. May be repeated."""
        if self._service is not None:
            self._service.close("the rendezvous server is being stopped")
        if self._front is not None:
            self._front.stop()
        for listener in self._listeners:
            listener.close()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """``host:port`` of each address that it listens on; IPv6 addresses in brackets.

        Raises:
            RuntimeError: it does not listen yet.
        """
        if not self._bound:
            raise RuntimeError("this rendezvous server does not listen yet")
        return tuple(format_endpoint(*listener[:2]) for listener in self._bound)

    @property
    def endpoint(self) -> str:
        """The first of ``endpoints``; raises as it does."""
        return self.endpoints[0]

    @property
    def token(self) -> str:
        """The bearer token that reads status, metrics and page, and does nothing else. Not for logs."""
        return auth.status_token(self._secret)

    def status(self) -> dict[str, Any]:
        """Return the same as ``GET /v1/status``.

        Raises:
            RuntimeError: the server has not been started.
        """
        return self._serving.status()

    @property
    def requests_served(self) -> int:
        """Number of requests admitted since the start, including the clients' hellos."""
        return self._serving.requests_served

    @property
    def refused(self) -> Refused:
        """Requests that were turned away at the gate because of their signature."""
        return self._serving.refused

    def wait_for_change(self, seen: int = -1, *, timeout: float) -> int:
        """Wait up to ``timeout`` seconds until workers arrive or leave, or an epoch changes in another way.

        See ``Epochs.wait_for_change``.
        """
        return self._epochs.wait_for_change(seen, timeout)

    @property
    def last_failure(self) -> str:
        """Reason of the last failed start, as its workers were told; empty if none has failed."""
        return self._epochs.last_failure

    def __enter__(self) -> RendezvousServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _serving(self) -> Service:
        if self._service is None:
            raise RuntimeError("this rendezvous server has not been started")
        return self._service

    def _most_polls(self) -> int:
        """Return the number of requests that may wait, so that others find a thread."""
        assert self._front is not None, "no request is served before the server was started"
        return self._front.pool.limit - _SPARE_THREADS // 2

    def _room(self) -> int:
        """Return the number of allowed connections; raise ConfigError if not even all workers can have one."""
        # A worker of a job of fixed size needs one. A worker of an elastic job has another one, for news.
        least = self._workers if self._elastic is None else 2 * self._workers
        return reserve_descriptors(
            least, "the rendezvous server", "its workers' connections", wanted=2 * self._threads + 256
        )

    def _watch(self, connection: Any, on_hang_up: Callable[[], None]) -> AbstractContextManager[None]:
        if self._front is None:
            raise RuntimeError("no request is served before the server was started")
        return self._front.watch(connection, on_hang_up)


def _create_pages(service: Service) -> WSGIApplication:
    from hvdgloo.rendezvous._server.pages import create_pages  # and with it Flask

    return create_pages(service)
