"""PageServer: the page with its sockets and threads, as a context manager.

Listening comes before serving, as with the rendezvous server: the link can be printed at once, and the web server is
imported while workers import their frameworks. Without ``--page`` there is only a Unix socket, and one sleeping thread,
until ``hvdgloo-run top`` connects.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from hvdgloo._net import ports
from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo._net.event_loop import WakeUp
from hvdgloo._net.tls import Tls
from hvdgloo.config import format_endpoint
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._host_identity import host_name
from hvdgloo.rendezvous._page_server.access import Access

if TYPE_CHECKING:
    from hvdgloo.rendezvous._server.http_connection import HttpConnection
    from hvdgloo.rendezvous._server.http_front import Front
    from hvdgloo.rendezvous._server.routes import WSGIApplication

logger = logging.getLogger(__name__)

_NAME = "hvdgloo-page"
_THREADS = 16  # that answer requests; events need none
_MOST_CONNECTIONS = 512
_REQUEST_TIMEOUT = 10.0


class Page(Protocol):
    """The page to be served; ``hvdgloo._observe.page.page.Page`` documents its methods."""

    def application(
        self, close: Callable[[HttpConnection], None], link: Callable[[], str] | None
    ) -> WSGIApplication: ...
    def stop(self, reason: str) -> None: ...
    @property
    def watchers(self) -> int: ...


class PageServer:
    """Server of the page of one job.

    Use it as a context manager, or call ``start`` and ``stop``; call ``listen`` first if links are needed early.

    Args:
        page: the job's page; asked for its application once, when that is first needed.
        secret: the job's secret, from which the tokens for scripts are derived.
        addresses: IP addresses to listen on, or names of this host, all on one port; none for the Unix socket alone.
        port: port to listen on; 0 takes any free one.
        unix: path of a Unix socket to listen on, too, in a directory of the user's own; empty for none. Tokens are
            required there as everywhere.
        names: host names by which browsers reach the server, in addition to those that ``Access`` knows.
        tls: encrypts all connections but the Unix socket's, if given.

    Raises:
        ConfigError: there is nothing to listen on, or TLS files cannot be used.
        MissingDependencyError: certificates cannot be made.
    """

    def __init__(
        self,
        page: Page,
        *,
        secret: bytes,
        addresses: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
        unix: str = "",
        names: Sequence[str] = (),
        tls: Tls | None = None,
    ) -> None:
        if not addresses and not unix:
            raise ConfigError("a page needs an address to listen on")
        if tls is not None:
            tls.check_listener()
        self._page = page
        self._addresses = tuple(dict.fromkeys(addresses))
        self._port = port
        self._unix = unix
        self._tls = tls
        self._access = Access(secret, names=(*names, *addresses), secure=tls is not None)
        self._listeners: list[socket.socket] = []
        self._bound: tuple[str, int] | None = None
        self._socket_made = False
        self._lock = threading.Lock()
        self._front: Front | None = None
        self._waiting: threading.Thread | None = None
        self._wake_up: WakeUp | None = None
        self._stopped = False

    def listen(self) -> PageServer:
        """Bind and listen. Returns itself.

        Links are known from now on, and a browser that opens one waits for ``start``.

        Raises:
            RuntimeError: it was called before.
            ConfigError: there is no such address here, the port is taken, or the Unix socket cannot be made.
        """
        if self._listeners:
            raise RuntimeError("this page's server listens already")
        if self._addresses:
            try:
                self._listeners = ports.listen(self._addresses, (self._port, self._port) if self._port else None)
            except ConfigError as error:
                raise ConfigError(
                    f"the job's page: {error}"
                ) from None  # named, as the process may listen elsewhere, too
            self._bound = self._listeners[0].getsockname()[:2]
        if self._unix:
            try:
                self._listeners.append(_unix_listener(self._unix))
                self._socket_made = True
            except OSError as error:
                self._close_listeners()
                raise ConfigError(f"cannot listen on {self._unix}: {error.strerror or error}") from None
        return self

    def start(self) -> PageServer:
        """Listen, unless it does so already, and serve on daemon threads. Returns itself. May be repeated.

        Raises:
            ConfigError: as ``listen`` does.
        """
        if self._stopped:
            return self
        if not self._listeners:
            self.listen()
        from hvdgloo.rendezvous._page_server.gate import MAX_BODY, Gate
        from hvdgloo.rendezvous._server.http_front import Front

        with self._lock:
            if self._front is not None or self._stopped:
                return self
            link = None if self._bound is None else self.link
            application = self._page.application(lambda connection: front.close_connection(connection), link)
            self._front = front = Front(
                Gate(self._access, application),
                self._listeners,
                threads=_THREADS,
                max_connections=reserve_descriptors(1, "the job's page", "its readers", wanted=_MOST_CONNECTIONS),
                max_body=MAX_BODY,
                head_timeout=_REQUEST_TIMEOUT,
                tls=self._tls,
                name=_NAME,
            )
            front.start()
        return self

    def start_on_demand(self) -> PageServer:
        """Listen, unless it does so already, and ``start`` at the first connection. One thread sleeps until then.

        Raises:
            ConfigError: as ``listen`` does.
        """
        if not self._listeners:
            self.listen()
        self._wake_up = WakeUp()
        self._waiting = threading.Thread(target=self._wait, name=f"{_NAME}-wait", daemon=True)
        self._waiting.start()
        return self

    def stop(self, reason: str = "the job is over") -> None:
        """Show the end to readers, and close everything, within a second. May be repeated."""
        with self._lock:
            self._stopped = True
        if self._wake_up is not None:
            self._wake_up.wake()
        if self._waiting is not None and self._waiting is not threading.current_thread():
            self._waiting.join()
        self._page.stop(reason)
        if self._front is not None:
            self._front.stop()
        self._close_listeners()

    def link(self) -> str:
        """Return a new URL that works once. Its visitor may read, and have steps traced if the page allows that.

        Raises:
            RuntimeError: it has no address yet, or none at all.
        """
        return f"{self._url}?token={quote(self._access.link())}"

    @property
    def address(self) -> str:
        """URL without a token; empty if the server listens on a Unix socket alone."""
        return "" if self._bound is None else self._url

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the listening sockets, which a forked child must not keep open."""
        return tuple(listener.fileno() for listener in self._listeners)

    @property
    def watchers(self) -> int:
        """Number of readers of the live events."""
        return self._page.watchers

    def __enter__(self) -> PageServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _url(self) -> str:
        if self._bound is None:
            raise RuntimeError("this page has no address")
        host, port = self._bound
        if host in ("0.0.0.0", "::"):
            host = host_name()
        return f"{'http' if self._tls is None else 'https'}://{format_endpoint(host, port)}/"

    def _wait(self) -> None:
        """Wait for the first visitor; then start, unless the server is being stopped."""
        assert self._wake_up is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_up, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            selector.select()
        self._wake_up.close()
        try:
            self.start()
        except Exception:  # the job goes on without
            logger.exception("the page could not be served")
            self._close_listeners()  # so that visitors are refused rather than left waiting

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        if self._socket_made:
            self._socket_made = False
            try:
                os.unlink(self._unix)
            except OSError:
                pass  # it was removed already


def _unix_listener(path: str) -> socket.socket:
    """Create a listening Unix socket at a path, in place of a stale one of an earlier process with this id.

    Raises:
        OSError: it cannot be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener
