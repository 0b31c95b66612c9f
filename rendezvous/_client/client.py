"""The client of the rendezvous server: RendezvousClient, and HttpStore, a Store behind it.

Built on HTTP connections of its own (``hvdgloo.rendezvous._client.connection``) and not on ``requests``: they ignore
proxy variables (a proxy cannot reach a job's inner addresses, but is often configured where jobs run), cost far less,
and allow what a rendezvous needs: one deadline for a whole call, the local address of the connection, and control over
what may be repeated.

**Deadlines.** Every call has one, and it covers connecting, waiting and repeating. A wait is made of requests of at
most ``MAX_POLL`` seconds, which the server knows, so its answer names the missing workers or keys; an answer that is on
its way at the deadline is given a moment longer.

**Repeating.** Connecting is repeated while the server is not there yet. A request that was sent and got no answer is
repeated, under a signature of its own, only if it is idempotent: everything but ``delete``. A worker that is
registering survives a restart of the server, which has forgotten nothing that the worker still needs.

**Forks.** A forked child gets connections and an id of its own when it first calls.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

from hvdgloo._net.tls import Tls
from hvdgloo.config import format_endpoint, parse_endpoint
from hvdgloo.errors import (
    AuthenticationError,
    ConfigError,
    RendezvousError,
    RendezvousRefusedError,
    RendezvousTimeoutError,
)
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._client.connection import HttpConnection, NotHttpError
from hvdgloo.rendezvous._store import MAX_SCOPE_BYTES, check_key, describe_keys
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.topology import Topology

MAX_POLL = 45.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_HARDLY_ANY = 0.05  # seconds of a wait that are not worth another request
_OTHER_CERTIFICATE = json.dumps(
    {
        "reason": "it shows another certificate than before: it has been restarted since, or something else answers in "
        "its place",
        "restarted": True,
    }
).encode()


@dataclass(frozen=True)
class Registration:
    """A worker's rank, and the topology."""

    rank: int
    topology: Topology


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    signed: bool
    channel: bytes

    @property
    def details(self) -> dict[str, Any]:
        """Return the JSON object of a refusal; for anything else, one made from the body."""
        try:
            details = json.loads(self.body)
        except ValueError:
            details = None
        if not isinstance(details, dict):
            details = {"reason": self.body[:200].decode("latin-1").strip() or "no reason given"}
        return details

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", "no reason given"))


class RendezvousClient:
    """A client of one rendezvous server. Any thread may call; concurrent calls use a connection each.

    Args:
        server: ``host:port``, IPv6 addresses in brackets.
        secret: the job's secret.
        connect_timeout: seconds for which to retry a server that cannot be reached; it may start later than its
            workers.
        secret_source: origin of the secret, for messages.
        tls: encrypts all connections, if given; the server must do the same.

    Raises:
        ConfigError: ``server`` is malformed.
    """

    _idle: list[HttpConnection]
    _hello_lock: threading.Lock
    _run: str

    def __init__(
        self,
        server: str,
        secret: bytes,
        *,
        connect_timeout: float = 30.0,
        secret_source: str = "HVDGLOO_SECRET",
        tls: Tls | None = None,
    ) -> None:
        try:
            self._host, self._port = parse_endpoint(server)
        except ValueError as error:
            raise ConfigError(f"rendezvous server {server!r}: {error}") from None
        self.server = format_endpoint(self._host, self._port)
        self.connect_timeout = connect_timeout
        self._secret_source = secret_source
        self._secret = secret
        self._signer = auth.Signer(secret)
        self._tls = tls
        self._closed = False
        self._reset()

    # What a worker calls.

    def register(self, epoch: int, worker: WorkerInfo, *, timeout: float) -> Registration:
        """Take part in an epoch, and wait until all its workers have registered.

        The same client may call again, and gets the same answer.

        Args:
            epoch: the generation of the membership.
            worker: the calling worker.
            timeout: seconds, counted again from each further worker that registers.

        Raises:
            RendezvousTimeoutError: not all registered; the text says how many and which did.
            RendezvousRefusedError: there is no such epoch, or another worker has the place.
            AuthenticationError: server and worker have different secrets.
            RendezvousError: the server cannot be reached.
        """
        body = json.dumps(worker.to_dict(), separators=(",", ":")).encode()
        left = timeout
        while True:
            answer = self._wait("POST", f"/v1/epochs/{epoch}/workers", body, left, pending=202, follow=True)
            if answer.status != 202:
                break
            left = timeout - float(answer.details.get("idle", timeout))
            if left <= _HARDLY_ANY:
                raise self._timed_out(
                    f"/v1/epochs/{epoch}/workers",
                    f"epoch {epoch} did not start: no further worker came for {timeout:g} s, and {answer.reason}. Look "
                    "at what the missing workers printed; if they only need longer, raise the start timeout",
                )
        try:
            return Registration(*messages.unpack_placed(answer.body))
        except ValueError as error:
            raise RendezvousError(
                f"rendezvous server {self.server}, /v1/epochs/{epoch}/workers: {error} (check that hvdgloo of the same "
                "version is installed there)",
                server=self.server,
                route=f"/v1/epochs/{epoch}/workers",
            ) from error

    def store(self, scope: str, *, timeout: float = 30.0) -> HttpStore:
        """Return the store of a scope.

        Args:
            scope: a name; keys of different scopes never meet.
            timeout: seconds that calls without a timeout of their own may take.

        Raises:
            ValueError: the scope's name cannot be used.
        """
        return HttpStore(self, scope, timeout)

    def status(self, *, timeout: float = 10.0) -> dict[str, Any]:
        """Return the job's state at the server: the JSON of ``/v1/status``.

        Args:
            timeout: seconds.

        Raises:
            RendezvousTimeoutError: there was no answer within ``timeout``.
            AuthenticationError: server and client have different secrets.
            RendezvousError: the server cannot be reached.
        """
        status: dict[str, Any] = json.loads(self._call("GET", "/v1/status", b"", timeout).body)
        return status

    def local_address(self, *, timeout: float = 30.0) -> str:
        """Return the IP address of this end of a connection to the server, at which this host can be reached.

        Waits for the server for ``timeout`` seconds rather than ``connect_timeout``: it may be started much later.

        Raises:
            AuthenticationError: server and client have different secrets.
            RendezvousError: the server cannot be reached.
        """
        if not (self._local_address and self._run) or self._pid != os.getpid():
            self._run_id(time.monotonic() + timeout, patient=True)
        return self._local_address

    def is_elastic(self, *, timeout: float = 30.0) -> bool:
        """Return whether the server's job is elastic: workers then use ``ElasticClient`` rather than ``register``.

        Waits for the server for ``timeout`` seconds, and raises, as ``local_address`` does.
        """
        self._run_id(time.monotonic() + timeout, patient=True)
        return self._elastic

    def observe(self, observation: bytes, *, timeout: float = 10.0) -> bool:
        """Send a rank's observation, encoded by ``hvdgloo._observe.samples.CODEC``.

        Returns:
            False if the job has no observer.

        Raises:
            RendezvousTimeoutError: there was no answer in time.
            RendezvousError: the server cannot be reached, or refuses.
        """
        deadline = time.monotonic() + timeout
        answer = self._answer("POST", "/v1/observe", observation, deadline, patience=0.0, repeat=False)
        return self._checked(answer, "/v1/observe", allow=404).status != 404

    def close(self) -> None:
        """Close all connections. Calls raise RendezvousError, also those that are under way. May be repeated."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.shutdown()
        for connection in idle:
            connection.close()

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that a forked child must not keep open."""
        return [connection.fileno() for connection in [*self._idle, *self._busy]]

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What HttpStore calls.

    def _wait(
        self,
        method: str,
        path: str,
        body: bytes | Callable[[], bytes],
        timeout: float,
        *,
        pending: int,
        query: str = "",
        follow: bool = False,
        outlive: bool = False,
    ) -> _Answer:
        """Make a call that the server holds back until it has an answer.

        Args:
            body: the body, or a function that makes it for each request.
            follow: once the server was reached, wait for it until the deadline, and repeat the call to another one in
                its place that has the same secret.
            outlive: do so even if the server answers that it is being stopped.

        Returns:
            the answer; one with status ``pending`` if the deadline passed first.
        """
        deadline = time.monotonic() + timeout
        while True:
            poll = min(MAX_POLL, max(0.0, deadline - time.monotonic()))
            target = f"{path}?{query}timeout={poll:.3f}"
            patience = min(2.0, 0.25 + timeout / 10)
            patient = follow and bool(self._run)
            answer = self._answer(
                method, target, body, deadline, patience=patience, repeat=True, patient=patient, outlive=outlive
            )
            if follow and answer.status == 401 and answer.details.get("restarted"):
                with self._hello_lock:
                    self._run = ""
                if time.monotonic() >= deadline:
                    raise self._timed_out(path, "it was restarted, and did not answer before the deadline")
                time.sleep(_FIRST_PAUSE)
                continue
            if answer.status != pending or time.monotonic() >= deadline - 0.001:
                return self._checked(answer, path, allow=pending)

    def _call(self, method: str, target: str, body: bytes, timeout: float, *, repeat: bool = True) -> _Answer:
        answer = self._answer(method, target, body, time.monotonic() + timeout, patience=0.0, repeat=repeat)
        return self._checked(answer, target)

    def _timed_out(self, route: str, text: str) -> RendezvousTimeoutError:
        return RendezvousTimeoutError(f"rendezvous server {self.server}: {text}", server=self.server, route=route)

    # One request, repeated where that is safe.

    def _answer(
        self,
        method: str,
        target: str,
        body: bytes | Callable[[], bytes],
        deadline: float,
        *,
        patience: float,
        repeat: bool,
        patient: bool = False,
        outlive: bool = False,
    ) -> _Answer:
        def exchange() -> _Answer:
            run = self._run_id(deadline, patient=patient)
            content = body() if callable(body) else body
            return self._exchange(method, target, content, run, deadline, patience, patient=patient)

        return self._repeated(exchange, target, deadline, repeat=repeat, outlive=outlive)

    def _run_id(self, deadline: float, *, patient: bool = False) -> str:
        """Return the server's run id, from one hello at the first call, whichever thread makes it."""
        if self._pid != os.getpid():
            self._reset()
        with self._hello_lock:
            if not self._run:
                target = "/v1/hello"
                answer = self._repeated(
                    lambda: self._exchange("GET", target, b"", "", deadline, 0.0, patient=patient), target, deadline
                )
                hello = json.loads(self._checked(answer, target).body)
                self._run, self._elastic = str(hello["run"]), bool(hello.get("elastic"))
                self._channel = answer.channel
            return self._run  # in here: another thread may forget it, to ask again

    def _repeated(
        self,
        exchange: Callable[[], _Answer],
        target: str,
        deadline: float,
        *,
        repeat: bool = True,
        outlive: bool = False,
    ) -> _Answer:
        """Send a request again until there is an answer, and return it.

        Args:
            repeat: do so even if the connection failed before an answer arrived, and the server may have acted.
            outlive: do so even if the server is being stopped.
        """
        attempts = _Attempts(deadline)
        while True:
            try:
                answer = exchange()
            except _Unanswered as failure:
                if not repeat or not attempts.rest():
                    raise self._unreachable(target, failure.cause) from failure.cause
            else:
                busy = answer.status == 503 and (outlive or answer.details.get("busy"))  # too many wait already
                if not busy or not attempts.rest():
                    return answer

    def _exchange(
        self,
        method: str,
        target: str,
        body: bytes,
        run: str,
        deadline: float,
        patience: float,
        *,
        patient: bool = False,
    ) -> _Answer:
        """Send one request and read its answer.

        Args:
            patience: seconds after the deadline in which an answer that is on its way may arrive.
            patient: connecting may take until the deadline, and not only ``connect_timeout``.

        Returns:
            the server's answer; if its certificate differs from the last one, an answer in its stead that says so.

        Raises:
            _Unanswered: the connection failed on the way.
            RendezvousTimeoutError: nothing arrived before the deadline.
            RendezvousError: the server cannot be reached.
        """
        with self._lock:
            counter = next(self._counter)
        connection = self._take(deadline, target, patient)
        if run and connection.channel != self._channel:
            # Nothing is sent to it. A server that was restarted with the same certificate says as much itself.
            connection.close()
            return _Answer(401, _OTHER_CERTIFICATE, False, connection.channel)
        signer = auth.Signer(self._secret, connection.channel) if connection.channel else self._signer
        credentials = signer.sign(method, target, auth.digest(body), run, self._client, counter)
        keep = False
        try:
            with self._lock:
                self._check_open(target)  # ``close`` ends only those that are among the busy ones
                self._busy.add(connection)
            status, data, signature, keep = connection.request(
                method, target, credentials.header(), body, deadline + patience
            )
        except TimeoutError as error:
            raise self._timed_out(
                target, "no answer until the deadline; is the server's process stopped, or its host overloaded?"
            ) from error
        except (OSError, NotHttpError) as error:
            raise _Unanswered(error) from error
        finally:
            with self._lock:
                self._busy.discard(connection)
            if keep:
                self._give(connection)
            else:
                connection.close()
        signed = bool(signature) and signer.verify_answer(
            signature, run, self._client, counter, status, auth.digest(data)
        )
        return _Answer(status, data, signed, connection.channel)

    def _checked(self, answer: _Answer, target: str, *, allow: int = 0) -> _Answer:
        """Return an answer, if it is the server's own and a good one."""
        route = target.partition("?")[0]
        where = f"rendezvous server {self.server}, {route}"
        if answer.status == 401:
            restarted = bool(answer.details.get("restarted"))
            hint = "" if restarted else f" ({self._secret_source} must hold the server's own secret)"
            error = AuthenticationError(f"{where}: {answer.reason}{hint}")
            error.restarted = restarted
            raise error
        # What is refused before the signature could be read carries none itself; it can do no more than fail a call.
        if not answer.signed and (answer.status < 400 or answer.status in (allow, 404, 409, 504)):
            raise AuthenticationError(
                f"{where}: the answer (status {answer.status}) is not signed with this job's secret; "
                "something else may be listening there"
            )
        if answer.status in (200, 204, allow):
            return answer
        if answer.status == 503:
            raise RendezvousError(f"{where}: {answer.reason}", server=self.server, route=route)
        if answer.status == 504:
            raise self._timed_out(route, answer.reason)
        raise RendezvousRefusedError(
            f"{where}: refused with status {answer.status}: {answer.reason}",
            server=self.server,
            route=route,
            status=answer.status,
            reason=answer.reason,
        )

    # Connections.

    def _reset(self) -> None:
        """Begin as a new client. The parent process's connections are left alone."""
        self._pid = os.getpid()
        self._client = auth.generate_id()
        self._counter = itertools.count()
        self._idle = []
        self._busy: set[HttpConnection] = set()
        self._run = ""
        self._elastic = False
        self._channel = b""
        self._local_address = ""
        self._lock = threading.Lock()
        self._hello_lock = threading.Lock()

    def _take(self, deadline: float, target: str, patient: bool) -> HttpConnection:
        while True:
            with self._lock:
                self._check_open(target)
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                usual = time.monotonic() + self.connect_timeout
                return self._connect(deadline if patient else min(deadline, usual), target)
            if not connection.stale():
                return connection
            connection.close()

    def _check_open(self, target: str) -> None:
        if self._closed:
            raise RendezvousError("this rendezvous client is closed", server=self.server, route=target)

    def _give(self, connection: HttpConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, deadline: float, target: str) -> HttpConnection:
        """Make a new connection, trying until the deadline."""
        attempts = _Attempts(deadline)
        while True:
            try:
                connection = HttpConnection(self._host, self._port, deadline, self._tls)
            except AuthenticationError as error:
                raise AuthenticationError(f"rendezvous server {self.server}: {error}") from None
            except OSError as error:
                if self._closed or not attempts.rest():
                    raise self._unreachable(target, error) from error
            else:
                self._local_address = connection.local_address
                return connection

    def _unreachable(self, target: str, cause: BaseException) -> RendezvousError:
        what = "cannot be reached" if isinstance(cause, OSError) else "does not speak HTTP as expected"
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        route = target.partition("?")[0]
        return RendezvousError(
            f"rendezvous server {self.server} {what} ({route}): {reason}; check that it is running, that the address "
            "is right, and that no firewall is in the way",
            server=self.server,
            route=route,
        )


class _Attempts:
    """Pauses between attempts: each twice as long as the last, and randomly different between clients.

    Args:
        deadline: deadline of all attempts, on the monotonic clock.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._pause = _FIRST_PAUSE

    def rest(self) -> bool:
        """Wait for the next attempt; return False at once if there is no time left for one."""
        if time.monotonic() + self._pause >= self._deadline:
            return False
        time.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True


class _Unanswered(Exception):  # noqa: N818 - never leaves this module
    """The connection failed before an answer arrived."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class HttpStore:
    """A Store on the server; made by ``RendezvousClient.store``. Any thread may call."""

    def __init__(self, client: RendezvousClient, scope: str, timeout: float) -> None:
        check_key(scope, "scope", MAX_SCOPE_BYTES)
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"a store's timeout must be a number of seconds greater than 0, not {timeout}")
        self.scope = scope
        self.timeout = timeout
        self._client = client
        self._path = f"/v1/kv/{quote(scope, safe='')}"

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """Put ``value`` under ``key``, within ``timeout`` seconds.

        Raises:
            ValueError: the key cannot be used.
            RendezvousRefusedError: the value is too large.
            RendezvousTimeoutError: there was no answer in time.
            RendezvousError: the server cannot be reached, or refuses.
        """
        self._client._call("PUT", self._of(key), bytes(value), self._seconds(timeout))

    def set_many(self, items: Mapping[str, bytes], *, timeout: float | None = None) -> None:
        """Set several keys in one request. Raises as ``set``."""
        for key in items:
            check_key(key)
        if items:
            self._client._call("POST", f"{self._path}?op=set", messages.pack_items(items), self._seconds(timeout))

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of ``key``, as soon as it exists.

        Raises:
            ValueError: the key cannot be used.
            RendezvousTimeoutError: it was not set within ``timeout`` seconds.
            RendezvousError: the server cannot be reached, or refuses.
        """
        target, seconds = self._of(key), self._seconds(timeout)
        answer = self._client._wait("GET", target, b"", seconds, pending=404)
        if answer.status == 404:
            raise self._missing([key], seconds)
        return answer.body

    def get_many(self, keys: Sequence[str], *, timeout: float | None = None) -> list[bytes]:
        """Return the values of all ``keys`` in their order, as soon as all exist, in one request. Raises as ``get``."""
        for key in keys:
            check_key(key)
        if not keys:
            return []
        seconds = self._seconds(timeout)
        answer = self._client._wait("POST", self._path, messages.pack_keys(keys), seconds, pending=404, query="op=get&")
        if answer.status == 404:
            raise self._missing(list(answer.details.get("missing", keys)), seconds)
        values = messages.unpack_values(answer.body)
        if len(values) != len(keys):
            raise RendezvousError(
                f"rendezvous server {self._client.server} gave {len(values)} values for {len(keys)} keys",
                server=self._client.server,
                route=self._path,
            )
        return values

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove ``key``; return True if it existed. Not repeated automatically if the connection breaks.

        Raises:
            ValueError: the key cannot be used.
            RendezvousTimeoutError: there was no answer within ``timeout`` seconds.
            RendezvousError: the server cannot be reached, or refuses.
        """
        answer = self._client._call("DELETE", self._of(key), b"", self._seconds(timeout), repeat=False)
        return bool(json.loads(answer.body)["deleted"])

    def _of(self, key: str) -> str:
        return f"{self._path}/{quote(check_key(key), safe='')}"

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _missing(self, keys: Sequence[str], seconds: float) -> RendezvousTimeoutError:
        return self._client._timed_out(
            self._path, f"{describe_keys(keys)} not set within {seconds:g} s in scope {self.scope!r}"
        )
