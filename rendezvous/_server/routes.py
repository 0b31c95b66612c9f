"""The server's routes over stores and epochs, behind the gate (``hvdgloo.rendezvous._server.service``).

====================================  ==============================================================================
``GET /v1/hello``                     the run id; signed for the empty run
``POST /v1/epochs/<e>/workers``       a WorkerInfo as JSON, ``?timeout=s``; 200 rank and topology
                                      (``_messages``), 202 not yet, 404 no such epoch, 409 the place is taken, 504 the
                                      epoch failed
``POST /v1/elastic/next``             a worker of an elastic job asks for its next epoch (``_elastic.messages``),
                                      ``?timeout=s``; 200 the answer, 202 not yet, 404 the job is not elastic
``POST /v1/elastic/reports``          it reports its progress; 204
``POST /v1/elastic/news``             it asks for changes, ``?timeout=s``; 200 as soon as there is news for it
``POST /v1/observe``                  a rank's observation (``hvdgloo._observe.samples``); 204, 404 the job has no
                                      observer, 413 too long
``PUT /v1/kv/<scope>/<key>``          set a value; 204
``GET /v1/kv/<scope>/<key>``          ``?timeout=s`` waits; 200 the value, 404 no such key
``DELETE /v1/kv/<scope>/<key>``       200 ``{"deleted": true or false}``
``POST /v1/kv/<scope>?op=set``        several items (as above); 204
``POST /v1/kv/<scope>?op=get``        several keys, ``&timeout=s`` waits for all; 200 their values, 404 ``missing``
``GET /v1/status /metrics``           JSON, Prometheus; also with the status token
``GET /``                             303, a link to the job's page; also with the status token; 404 there is none
====================================  ==============================================================================

After the gate, answers are signed. Keys may contain slashes, and percent signs are unambiguous: routes match the
request target as it was sent, undecoded, and only the scope and key are decoded, once.

A job's own requests are answered here without importing a web framework, which would keep a launcher's workers waiting.
Everything else (the way to the page, and methods and paths that no worker uses) is left to Flask, which is imported
only then (``hvdgloo.rendezvous._server.pages``), over the same table.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl, unquote_to_bytes

from hvdgloo._net.codec import Codec
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._membership.admission import NotAcceptedError
from hvdgloo.rendezvous._server.epochs import EpochFailedError, NotYet, StoppingError
from hvdgloo.rendezvous._server.fixed import FixedEpochs
from hvdgloo.rendezvous._server.pauses import Pause, Steps, waited
from hvdgloo.rendezvous._server.service import Environ, Gate, Refusal, Service, StartResponse
from hvdgloo.rendezvous._store import MAX_SCOPE_BYTES, MemoryStore, StoreFullError, check_key
from hvdgloo.rendezvous._worker_info import WorkerInfo
from hvdgloo.version import __version__

if TYPE_CHECKING:
    from hvdgloo.rendezvous._server.elastic import ElasticEpochs

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_POLL = 50.0  # seconds; below the idle timeouts of common load balancers
_JSON, _BYTES = "application/json", "application/octet-stream"


@dataclass(frozen=True)
class Reply:
    """A response before it is signed."""

    body: bytes = b""
    status: int = 200
    content_type: str = _BYTES


class Call:
    """A request that the gate has admitted.

    Attributes:
        body: the whole body.
        connection: its client's connection, for waits.
        client: client id under which it was signed; empty if it carries the status token.
    """

    def __init__(self, environ: Environ) -> None:
        credentials = environ.get("hvdgloo.credentials")
        self.method: str = environ["REQUEST_METHOD"]
        self.body: bytes = environ["hvdgloo.body"]
        self.connection: Any = environ["hvdgloo.connection"]
        self.client: str = credentials.client if credentials is not None else ""
        self._query: str = environ["QUERY_STRING"]

    def argument(self, name: str, default: str) -> str:
        """Return the first value of this name in the query."""
        arguments = parse_qsl(self._query, keep_blank_values=True)
        return next((value for key, value in arguments if key == name), default)

    def timeout(self) -> float:
        """Return the seconds that the request may wait.

        Raises:
            Refusal: the query's ``timeout`` cannot be used.
        """
        try:
            timeout = float(self.argument("timeout", "0"))
        except ValueError:
            timeout = math.nan
        if not 0 <= timeout < math.inf:
            raise Refusal(400, "timeout must be a number of seconds, 0 or more")
        return min(timeout, MAX_POLL)


@dataclass(frozen=True)
class Route:
    """A path in Flask's notation, the methods that it takes, and what answers them."""

    rule: str
    methods: tuple[str, ...]
    handler: Callable[..., Reply | Steps[Reply]]

    def answer(self, service: Service, call: Call, arguments: Mapping[str, str]) -> Reply:
        """Run ``steps`` with all pauses on this thread, and return its reply."""
        return waited(self.steps(service, call, arguments), partial(service.watch, call.connection))

    def steps(self, service: Service, call: Call, arguments: Mapping[str, str]) -> Steps[Reply]:
        """Run the handler; return its reply, or the one for its exception."""
        try:
            answer = self.handler(service, call, **arguments)
            return (yield from answer) if isinstance(answer, Generator) else answer
        except Refusal as refusal:
            return Reply(refusal.body(), refusal.status, _JSON)
        except NotAcceptedError as error:
            return refused(409 if error.taken else 400, error)
        except EpochFailedError as error:
            return refused(504, error)
        except StoreFullError as error:
            return refused(507, error)
        except StoppingError as error:
            return refused(503, error)


def refused(status: int, reason: object) -> Reply:
    """Return a reply that says why a request is refused."""
    return Reply(Refusal(status, str(reason)).body(), status, _JSON)


def signature_headers(service: Service, environ: Environ, rule: str, status: int, body: bytes) -> dict[str, str]:
    """Return the headers of every answer, with its signature, and count the answer."""
    headers = {"Cache-Control": "no-store"}
    credentials = environ.get("hvdgloo.credentials")
    if credentials is not None:
        headers[auth.ANSWER_HEADER] = service.signer.sign_answer(
            credentials.run, credentials.client, credentials.counter, status, auth.digest(body)
        )
    service.note_served(environ["REQUEST_METHOD"], rule, status, time.perf_counter() - environ["hvdgloo.started"])
    return headers


def _hello(service: Service, _: Call) -> Reply:
    return _json({"run": service.run, "version": __version__, "elastic": not isinstance(service.epochs, FixedEpochs)})


def _register(service: Service, call: Call, epoch: str) -> Steps[Reply]:
    epochs = service.epochs
    if not isinstance(epochs, FixedEpochs):
        raise Refusal(
            409,
            "this job is elastic, and the worker has registered as one of a fixed number. Is an older version of "
            "hvdgloo installed where it runs?",
        )
    try:
        info = WorkerInfo.from_dict(json.loads(call.body))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not a worker: {error}") from None
    if int(epoch) != 0:
        raise Refusal(404, f"there is no epoch {epoch}; open: 0")
    return (yield from _poll(service, epochs.register(call.client, info, timeout=call.timeout())))


def _next_epoch(service: Service, call: Call) -> Steps[Reply]:
    from hvdgloo.rendezvous._elastic.messages import REGISTER  # which jobs of fixed size do without

    epochs, ask = _elastic(service), _read(REGISTER, call.body)
    return (yield from _poll(service, epochs.ask(call.client, ask, timeout=call.timeout())))


def _report(service: Service, call: Call) -> Reply:
    from hvdgloo.rendezvous._elastic.messages import REPORT

    _elastic(service).report(call.client, _read(REPORT, call.body))
    return Reply(status=204)


def _news(service: Service, call: Call) -> Steps[Reply]:
    from hvdgloo.rendezvous._elastic.messages import LISTEN

    epochs, listen = _elastic(service), _read(LISTEN, call.body)
    return (yield from _poll(service, epochs.news(call.client, listen, timeout=call.timeout())))


def _observe(service: Service, call: Call) -> Reply:
    if service.observed is None:
        raise Refusal(404, "this job has no observer: its server was started without --page")
    from hvdgloo._observe.samples import CODEC, LIMIT

    if len(call.body) > LIMIT:
        raise Refusal(413, f"an observation has at most {LIMIT} bytes")
    service.observed(_read(CODEC, call.body))
    return Reply(status=204)


def _poll(service: Service, waiting: Steps[bytes | NotYet]) -> Steps[Reply]:
    with service.polling():
        answer = yield from waiting
    return _json({"reason": answer.reason, **answer.details}, 202) if isinstance(answer, NotYet) else Reply(answer)


def _elastic(service: Service) -> ElasticEpochs:
    if isinstance(service.epochs, FixedEpochs):
        raise Refusal(404, "this job is not elastic: its workers are fixed")
    return cast("ElasticEpochs", service.epochs)


def _read(codec: Codec[T], body: bytes) -> T:
    try:
        return codec.decode(body)
    except ValueError as error:
        raise Refusal(400, str(error)) from None


def _many(service: Service, call: Call, scope: str) -> Steps[Reply]:
    store = service.store(_decoded(scope, "scope", MAX_SCOPE_BYTES))
    op = call.argument("op", "")
    try:
        if op == "set":
            store.set_many(messages.unpack_items(call.body), owner=call.client)
            return Reply(status=204)
        if op == "get":
            return Reply(
                messages.pack_values((yield from _wait(service, call, store, messages.unpack_keys(call.body))))
            )
    except StoreFullError:
        raise
    except ValueError as error:
        raise Refusal(400, str(error)) from None
    raise Refusal(400, "the query must say op=set or op=get")


def _one(service: Service, call: Call, scope: str, key: str) -> Steps[Reply]:
    store, name = service.store(_decoded(scope, "scope", MAX_SCOPE_BYTES)), _decoded(key, "key")
    if call.method == "PUT":
        store.set_many({name: call.body}, owner=call.client)
        return Reply(status=204)
    if call.method == "DELETE":
        return _json({"deleted": store.delete(name)})
    return Reply((yield from _wait(service, call, store, [name]))[0])


def _status(service: Service, _: Call) -> Reply:
    return _json(service.status())


def _metrics(service: Service, _: Call) -> Reply:
    text, content_type = service.metrics.text()
    return Reply(text, content_type=content_type)


ROUTES = (
    Route("/v1/hello", ("GET",), _hello),
    Route("/v1/epochs/<int:epoch>/workers", ("POST",), _register),
    Route("/v1/elastic/next", ("POST",), _next_epoch),
    Route("/v1/elastic/reports", ("POST",), _report),
    Route("/v1/elastic/news", ("POST",), _news),
    Route("/v1/observe", ("POST",), _observe),
    Route("/v1/kv/<scope>", ("POST",), _many),
    Route("/v1/kv/<scope>/<path:key>", ("GET", "PUT", "DELETE"), _one),
    Route("/v1/status", ("GET",), _status),
    Route("/metrics", ("GET",), _metrics),
)


WSGIApplication = Callable[[Environ, StartResponse], Any]


def create_app(service: Service, create_rest: Callable[[Service], WSGIApplication]) -> Gate:
    """Create the WSGI application: the gate, and the routes behind it.

    Args:
        create_rest: creates the application for everything that is not in the table, when it is first needed.
    """
    return Gate(service, Router(service, create_rest))


class Router:
    """An application behind the gate: the table above, and another application for what is not in it."""

    def __init__(self, service: Service, create_rest: Callable[[Service], WSGIApplication]) -> None:
        self._service = service
        self._patterns = [(re.compile(_pattern(route.rule)), route) for route in ROUTES]
        self._rest = Later(lambda: create_rest(service))

    def steps(self, environ: Environ, start_response: StartResponse) -> Steps[Any]:
        """Answer a request that the gate has admitted."""
        for pattern, route in self._patterns:
            found = pattern.fullmatch(environ["PATH_INFO"])
            if found is not None and environ["REQUEST_METHOD"] in route.methods:
                return (yield from self._answer(route, found.groupdict(), environ, start_response))
        return self._rest(environ, start_response)

    def _answer(
        self, route: Route, arguments: Mapping[str, str], environ: Environ, start_response: StartResponse
    ) -> Steps[list[bytes]]:
        try:
            answer = yield from route.steps(self._service, Call(environ), arguments)
        except Exception:
            logger.exception("%s %s", environ["REQUEST_METHOD"], route.rule)
            answer = refused(500, "the server failed; its log says more")
        headers = signature_headers(self._service, environ, route.rule, answer.status, answer.body)
        if answer.status != 204:
            headers |= {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body))}
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", list(headers.items()))
        return [answer.body]


class Later:
    """An application that is created for its first request: most jobs end without one."""

    def __init__(self, create: Callable[[], WSGIApplication]) -> None:
        self._lock = threading.Lock()
        self._create = create
        self._created: WSGIApplication | None = None

    def __call__(self, environ: Environ, start_response: StartResponse) -> Any:
        with self._lock:
            if self._created is None:
                self._created = self._create()
        return self._created(environ, start_response)


def _pattern(rule: str) -> str:
    """Return a rule as a regular expression that accepts the same as werkzeug's converters."""
    pattern = re.sub(r"<int:(\w+)>", r"(?P<\1>[0-9]+)", rule)
    pattern = re.sub(r"<path:(\w+)>", r"(?P<\1>[^/].*)", pattern)
    return re.sub(r"(?<!P)<(\w+)>", r"(?P<\1>[^/]+)", pattern)


def _wait(service: Service, call: Call, store: MemoryStore, keys: Sequence[str]) -> Steps[list[bytes]]:
    """Return the values of all keys, after waiting as long as the query allows; ValueError for an invalid key."""
    deadline = time.monotonic() + call.timeout()
    while True:
        values = store.peek_many(keys)
        if values is not None:
            return values
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            missing = store.missing(keys)
            raise Refusal(404, f"{len(missing)} of {len(keys)} keys are not there", missing=missing[:8])
        waiter = store.waiter(keys)
        try:
            with service.polling():
                if not (yield Pause(waiter, remaining, waiter.release)):
                    continue
        finally:
            store.forget(waiter)
        if service.stopping:
            raise StoppingError(service.stopping)
        if waiter.position < len(keys):
            raise Refusal(400, "the client hung up")  # so this is never read


def _decoded(text: str, what: str, limit: int | None = None) -> str:
    try:
        decoded = unquote_to_bytes(text.encode("latin-1")).decode("utf-8")
        return check_key(decoded, what) if limit is None else check_key(decoded, what, limit)
    except UnicodeError:
        raise Refusal(400, f"the {what} is not UTF-8") from None
    except ValueError as error:
        raise Refusal(400, str(error)) from None


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode(), status, _JSON)
