"""The state of the rendezvous server, and the gate in front of it, which knows the job's secret.

The gate is plain WSGI and comes first: it verifies a request's signature from its head alone, takes the counter, reads
the body within a deadline and a size limit, and checks the digest. The routes see only admitted requests. A refused
request gets a 4xx and a JSON object ``{"error": ..., "reason": ...}``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

from hvdgloo.errors import AuthenticationError
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._server.epochs import Epochs, StoppingError
from hvdgloo.rendezvous._server.metrics import Metrics
from hvdgloo.rendezvous._server.pauses import Steps, waited
from hvdgloo.rendezvous._server.streams import SLOWEST_RATE
from hvdgloo.rendezvous._store import Limits, MemoryStore, Quota, epoch_of
from hvdgloo.version import __version__

if TYPE_CHECKING:
    from hvdgloo._observe.samples import Observation

MAX_CLIENTS = 1 << 17
_MAX_GREETED = 1 << 12
_READ_ONLY = frozenset({"/", "/v1/status", "/metrics"})
_BROWSER_CHALLENGE = 'Basic realm="hvdgloo: the status token is the password", charset="UTF-8"'

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class Refusal(Exception):  # noqa: N818 - an answer rather than an error
    """The status and reason with which a request is refused."""

    def __init__(self, status: int, reason: str, **facts: Any) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.facts = facts

    def body(self) -> bytes:
        return json.dumps({"error": HTTPStatus(self.status).phrase, "reason": self.reason, **self.facts}).encode()


@dataclass(frozen=True)
class Refused:
    """Requests that were refused because no member of the job had signed them.

    Attributes:
        count: number of such requests.
        address, reason: address and reason of the last one.
    """

    count: int = 0
    address: str = ""
    reason: str = ""


class Service:
    """One server's stores, epochs and clients, on which the routes work.

    Args:
        secret: the job's secret.
        epochs: epochs of the job, which is elastic if they are.
        observed: receives ranks' observations, on any thread; None if the job has no observer.
        page: makes a link to the job's page, on any thread; None if there is none.
        max_polls: returns the number of requests that may wait at a time; further ones are told to try again.
        watch: makes a context manager for waiting on this thread, that calls back when a connection's client hangs up.
        body_timeout: seconds that a request's body may take, beyond its time at the slowest acceptable rate.
        limits: limits on memory.
        channel: SHA-256 of the server's certificate; empty without TLS.
    """

    def __init__(
        self,
        secret: bytes,
        epochs: Epochs,
        *,
        max_polls: Callable[[], int],
        watch: Callable[[Any, Callable[[], None]], AbstractContextManager[None]],
        body_timeout: float,
        limits: Limits,
        channel: bytes = b"",
        observed: Callable[[Observation], None] | None = None,
        page: Callable[[], str] | None = None,
    ) -> None:
        self.observed = observed
        self.page = page
        self.signer = auth.Signer(secret, channel)
        self.token = auth.status_token(secret)
        self.run = auth.generate_id()
        self.epochs = epochs
        self.metrics = Metrics(lambda: epochs.status()["epochs"], self.counts)
        self._max_polls = max_polls
        self.watch = watch
        self.body_timeout = body_timeout
        self._lock = threading.Lock()
        self._stores: dict[str, MemoryStore] = {}
        self._windows: dict[str, auth.ReplayWindow] = {}
        # Of clients that have said hello and nothing else. A hello is the same in every run of the server, so old ones
        # can be played again; what they leave behind is bounded.
        self._greeted: OrderedDict[str, auth.ReplayWindow] = OrderedDict()
        self._limits = limits
        self._quota = Quota(limits)
        self._in_flight = 0
        self._polls = 0
        self._stopping = ""
        self.requests_served = 0
        self.refused = Refused()
        self._started = time.monotonic()
        epochs.on_formed = self._forget_epochs

    def store(self, scope: str) -> MemoryStore:
        """Return the store of a scope; scopes are created when they are first used."""
        with self._lock:
            if self._stopping:
                raise StoppingError(self._stopping)
            store = self._stores.get(scope)
            if store is None:
                store = self._stores[scope] = MemoryStore(self._quota)
            return store

    def _forget_epochs(self, formed: int) -> None:
        """Drop the stores of epochs before the last one; see ``epoch_scope``."""
        with self._lock:
            old = [scope for scope in self._stores if 0 <= epoch_of(scope) < formed - 1]
            stores = [self._stores.pop(scope) for scope in old]
        for store in stores:
            store.close("this epoch of the job is over")
            store.clear()

    def take_counter(self, client: str, counter: int, *, hello: bool = False) -> None:
        """Note that a client has used a counter.

        Raises:
            Refusal: the counter was used before; or there are more clients than any job would have.
        """
        with self._lock:
            window = self._windows.get(client)
            if window is None:
                window = self._greeted.pop(client, None) or auth.ReplayWindow()
                if hello:
                    self._greeted[client] = window
                    if len(self._greeted) > _MAX_GREETED:
                        self._greeted.popitem(last=False)
                elif len(self._windows) >= MAX_CLIENTS:
                    raise Refusal(503, f"this server has seen {MAX_CLIENTS} clients and can tell no more apart")
                else:
                    self._windows[client] = window
            if not window.use(counter):
                raise Refusal(401, "this request was received before: a repetition needs a signature of its own")

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Account for a request's bytes while it is read and answered; yield a function that counts arrived bytes.

        The function raises Refusal if all requests together would exceed the limit.
        """
        mine = 0

        def arrived(count: int) -> None:
            nonlocal mine
            with self._lock:
                if self._in_flight + count > self._limits.in_flight:
                    raise Refusal(
                        503,
                        f"requests with {self._in_flight} bytes are already under way, and at most "
                        f"{self._limits.in_flight} may be at a time; ask again in a moment",
                        busy=True,
                    )
                self._in_flight += count
                mine += count

        try:
            yield arrived
        finally:
            with self._lock:
                self._in_flight -= mine

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Count a waiting request.

        Raises:
            Refusal: so many requests already wait that others might find no thread.
        """
        with self._lock:
            if self._polls >= self._max_polls():
                raise Refusal(503, f"{self._polls} requests are waiting already; ask again in a moment", busy=True)
            self._polls += 1
        try:
            yield
        finally:
            with self._lock:
                self._polls -= 1

    def note_served(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was admitted."""
        with self._lock:
            self.requests_served += 1
        self.metrics.served(method, route, status, seconds)

    def note_refused(self, address: str, reason: str) -> None:
        """Count a request that was not signed with the job's secret, or with an old one."""
        with self._lock:
            self.refused = Refused(self.refused.count + 1, address, reason)
        self.epochs.wake()

    def note_client(self, connection: Any, client: str) -> None:
        """Bind a connection to its client, which is present until its last connection ends."""
        if connection.on_close is None:
            self.epochs.connected(client)
            connection.on_close = lambda: self.epochs.disconnected(client)

    def close(self, reason: str) -> None:
        """End every waiting request with a clear error."""
        with self._lock:
            self._stopping = reason
            stores = list(self._stores.values())
        self.epochs.close(reason)
        for store in stores:
            store.close(reason)

    @property
    def stopping(self) -> str:
        return self._stopping

    def counts(self) -> dict[str, int]:
        """Return the present numbers of scopes, keys, bytes, clients and waiting requests."""
        with self._lock:
            sizes = [store.size() for store in self._stores.values()]
            return {
                "scopes": len(sizes),
                "keys": sum(keys for keys, _ in sizes),
                "bytes": sum(size for _, size in sizes),
                "clients": len(self._windows),
                "connected_clients": self.epochs.connected_clients,
                "waiting_requests": self._polls,
            }

    def status(self) -> dict[str, Any]:
        """Return the job as JSON values, as ``/v1/status`` shows it."""
        return {
            "version": __version__,
            "run": self.run,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "start_timeout_s": self.epochs.start_timeout,
            "store": self.counts(),
            **self.epochs.status(),
        }


def body_length(environ: Environ) -> int:
    """Return the length of a request's body. The front has already refused lengths that are invalid or too large.

    Raises:
        Refusal: the body is sent in chunks.
    """
    if environ["wsgi.input_terminated"]:
        raise Refusal(411, "chunked bodies are not accepted: send a Content-Length")
    return int(environ.get("CONTENT_LENGTH") or 0)


def read_body(environ: Environ, length: int, timeout: float, arrived: Callable[[int], object]) -> bytes:
    """Wait for a request's body, and return it.

    Args:
        length: length in bytes.
        timeout: seconds that the body may take, beyond its time at the slowest acceptable rate.
        arrived: called with the number of bytes of each piece before it is kept; may raise.

    Raises:
        Refusal: the body did not arrive, or not all of it.
    """
    if not length:
        return b""
    patience = timeout + length / SLOWEST_RATE
    environ["hvdgloo.connection"].rfile.allow(patience, arrived)
    try:
        body: bytes = environ["wsgi.input"].read(length)
    except TimeoutError:
        raise Refusal(408, f"the body's {length} bytes did not arrive within {patience:.0f} s") from None
    if len(body) != length:
        raise Refusal(400, f"the body ended after {len(body)} of {length} bytes")
    return body


class Application(Protocol):
    """A WSGI application whose requests pause."""

    def steps(self, environ: Environ, start_response: StartResponse) -> Steps[Any]:
        """Answer a request, as WSGI has it."""


class Entrance(Application, Protocol):
    """An application that can also answer a request on this thread, with all its pauses."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Any:
        """Answer a request, as WSGI has it."""


class Gate:
    """Admits only requests made by the job's members or, for reading its state, by holders of the token."""

    def __init__(self, service: Service, application: Application) -> None:
        self._service = service
        self._application = application

    def __call__(self, environ: Environ, start_response: StartResponse) -> Any:
        """Answer a request as WSGI has it, on this thread."""
        watch = partial(self._service.watch, environ["hvdgloo.connection"])
        return waited(self.steps(environ, start_response), watch)

    def steps(self, environ: Environ, start_response: StartResponse) -> Steps[Any]:
        """Answer a request, pausing where it waits for something other than its own client."""
        started = time.perf_counter()
        try:
            with self._service.receiving() as arrived:
                self._admit(environ, arrived)
                # Only what the client sent is routed: cheroot has decoded PATH_INFO once, which would lose "%2F".
                environ["PATH_INFO"] = environ["REQUEST_URI"].partition("?")[0]
                environ["hvdgloo.started"] = started
                return (yield from self._application.steps(environ, start_response))
        except Refusal as refusal:
            return self._refuse(refusal, environ, start_response)

    def _admit(self, environ: Environ, arrived: Callable[[int], None]) -> None:
        length = body_length(environ)
        method, target = environ["REQUEST_METHOD"], environ["REQUEST_URI"]
        header = environ.get("HTTP_AUTHORIZATION", "")
        path = target.partition("?")[0]
        if path in _READ_ONLY and not header.startswith(auth.SCHEME):
            if method not in ("GET", "HEAD") or not auth.bearer_matches(header, self._service.token):
                raise Refusal(401, "the job's state is shown to its members and to those who have the status token")
            environ["hvdgloo.body"] = self._body(environ, length, arrived)
            return
        try:
            credentials = auth.Credentials.parse(header)
            self._service.signer.verify(method, target, credentials)
        except AuthenticationError as error:
            raise Refusal(401, str(error)) from None
        hello = path == "/v1/hello"
        if credentials.run != ("" if hello else self._service.run):
            raise Refusal(
                401, "the request was signed for another run of the server; it has been restarted since", restarted=True
            )
        if hello and length:
            raise Refusal(400, "a hello has no body")
        self._service.take_counter(credentials.client, credentials.counter, hello=hello)
        if not hello:  # which may have been recorded in an earlier run
            self._service.note_client(environ["hvdgloo.connection"], credentials.client)
        environ["hvdgloo.credentials"] = credentials
        body = self._body(environ, length, arrived)
        if auth.digest(body) != credentials.digest:
            raise Refusal(401, "the body is not the one that was signed")
        environ["hvdgloo.body"] = body

    def _body(self, environ: Environ, length: int, arrived: Callable[[int], None]) -> bytes:
        return read_body(environ, length, self._service.body_timeout, arrived)

    def _refuse(self, refusal: Refusal, environ: Environ, start_response: StartResponse) -> list[bytes]:
        self._service.metrics.refused(refusal.status)
        body = refusal.body()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        if refusal.status == 401:
            browser = environ["REQUEST_URI"].partition("?")[0] in _READ_ONLY
            if not browser or environ.get("HTTP_AUTHORIZATION"):  # a browser first asks what credentials to send
                self._service.note_refused(environ.get("REMOTE_ADDR", ""), refusal.reason)
            headers.append(("WWW-Authenticate", _BROWSER_CHALLENGE if browser else auth.SCHEME))
        # A stranger gets one request per connection, so that many requests cost it as many connections.
        environ["hvdgloo.connection"].end_after_answer()
        start_response(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
