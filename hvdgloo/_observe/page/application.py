"""The page's routes, as a Flask application behind the gate (``hvdgloo.rendezvous._page_server.gate``).

==============================  =======================================================================================
``GET /``, ``/static/<path>``   the page itself, from the package
``GET /v1/job``                 a Snapshot; ``?curves=0`` leaves ``series`` and ``heat`` out
``GET /v1/output``              OutputLines: ``?rank=&after=&before=&search=&limit=``
``GET /v1/ranks/<n>/series``    the Series of one rank
``GET /v1/traces``              whether this reader may have steps traced, and all traces
``POST /v1/traces``             ``{"steps": n}``: 202 has the next n steps traced, 403 not allowed, 409 not possible now
``GET /v1/traces/<n>``          a merged trace as a download; 409 not ready
``POST /v1/links``              with a token only: a new link
``GET /events``                 server-sent events (``hvdgloo._observe.page.feed``)
``GET /metrics``                Prometheus' text format
==============================  =======================================================================================

Values are ``hvdgloo._observe.view``'s as JSON; refusals are ``{"error": ..., "reason": ...}``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, overload

import msgspec
from flask import Flask, Response, request, send_file
from werkzeug.exceptions import HTTPException

from hvdgloo._observe.page.feed import Feed
from hvdgloo._observe.page.files import File, files
from hvdgloo._observe.trace_control import MOST_STEPS, BusyError, Trace, TraceControl
from hvdgloo._observe.view import Heat, Series, encode
from hvdgloo.rendezvous._page_server.access import Visitor
from hvdgloo.rendezvous._server.pages import reason_of
from hvdgloo.rendezvous._server.routes import WSGIApplication
from hvdgloo.rendezvous._server.service import Refusal

if TYPE_CHECKING:
    from hvdgloo._observe.observatory import Observatory

MOST_LINES = 2000
_LINES = 500
_JSON = "application/json"


class _TraceOrder(msgspec.Struct, forbid_unknown_fields=True):
    steps: int


class _Traces(msgspec.Struct):
    control: bool
    traces: list[Trace]


class _Link(msgspec.Struct):
    url: str


def create_application(
    observatory: Observatory, feed: Feed, control: TraceControl | None, link: Callable[[], str] | None
) -> WSGIApplication:
    """Make the WSGI application, to be put behind the gate.

    Args:
        control: has steps traced; None if that is not allowed.
        link: makes a new link; None if browsers cannot reach this server.
    """
    flask = Flask("hvdgloo.rendezvous", static_folder=None, template_folder=None)
    flask.url_map.merge_slashes = False
    flask.url_map.redirect_defaults = False
    routes = _Routes(observatory, feed, control, link)
    flask.add_url_rule("/", "page", partial(routes.file, "index.html"))
    flask.add_url_rule("/static/<path:path>", "static", routes.file)
    flask.add_url_rule("/v1/job", "job", routes.job)
    flask.add_url_rule("/v1/output", "output", routes.output)
    flask.add_url_rule("/v1/ranks/<int:rank>/series", "series", routes.series)
    flask.add_url_rule("/v1/traces", "traces", routes.traces)
    flask.add_url_rule("/v1/traces", "trace", routes.trace, methods=("POST",))
    flask.add_url_rule("/v1/traces/<int:number>", "traced", routes.traced)
    flask.add_url_rule("/v1/links", "links", routes.links, methods=("POST",))
    flask.add_url_rule("/events", "events", routes.events)
    flask.add_url_rule("/metrics", "metrics", routes.metrics)
    flask.register_error_handler(Refusal, _refused)
    flask.register_error_handler(HTTPException, lambda error: _refused(Refusal(error.code or 500, reason_of(error))))
    return flask.wsgi_app


class _Routes:
    """The routes' answers; see the module."""

    def __init__(
        self, observatory: Observatory, feed: Feed, control: TraceControl | None, link: Callable[[], str] | None
    ) -> None:
        self._observatory = observatory
        self._feed = feed
        self._control = control
        self._link = link

    def file(self, path: str) -> Response:
        found: File | None = files().get(path)
        if found is None:
            raise Refusal(404, f"the page has no file {path[:200]}")
        response = Response(found.data, content_type=found.content_type)
        response.headers["ETag"] = found.tag
        response.headers["Cache-Control"] = "no-cache"  # which means: ask whether it is still the same
        response.make_conditional(request.environ)
        return response

    def job(self) -> Response:
        snapshot = self._observatory.snapshot()
        job = msgspec.structs.replace(snapshot.job, control=self._controls)
        snapshot = msgspec.structs.replace(snapshot, job=job)
        if _number("curves", 1) == 0:
            snapshot = msgspec.structs.replace(snapshot, series=Series(), heat=Heat())
        return Response(encode(snapshot), content_type=_JSON)

    def output(self) -> Response:
        limit = _number("limit", _LINES)
        if not 1 <= limit <= MOST_LINES:
            raise Refusal(400, f"limit must be between 1 and {MOST_LINES}")
        lines = self._observatory.lines(
            rank=_number("rank", None),
            after=_number("after", 0),
            before=_number("before", None),
            search=request.args.get("search", ""),
            limit=limit,
        )
        return Response(encode(lines), content_type=_JSON)

    def series(self, rank: int) -> Response:
        try:
            series = self._observatory.series(rank)
        except KeyError:
            raise Refusal(404, f"there is no rank {rank}") from None
        return Response(encode(series), content_type=_JSON)

    def traces(self) -> Response:
        return _json(_Traces(self._controls, [] if self._control is None else self._control.traces()))

    def trace(self) -> Response:
        if self._control is None:
            raise Refusal(403, "steps can be traced from here only if the job was started with --page-control")
        if not self._controls:
            raise Refusal(
                403, "the status token may only read; to trace steps, use the control token or the page itself"
            )
        if request.mimetype != _JSON:
            raise Refusal(415, f"the body must be {_JSON}")
        try:
            order = msgspec.json.decode(request.environ["hvdgloo.body"], type=_TraceOrder)
        except msgspec.DecodeError:
            raise Refusal(400, 'the body must be {"steps": n}') from None
        if not 1 <= order.steps <= MOST_STEPS:
            raise Refusal(400, f"steps must be between 1 and {MOST_STEPS}")
        try:
            return _json(self._control.trace(order.steps), 202)
        except BusyError as error:
            raise Refusal(409, str(error)) from None

    def traced(self, number: int) -> Response:
        try:
            if self._control is None:
                raise KeyError(number)
            path = self._control.path(number)
        except KeyError:
            raise Refusal(404, f"there is no trace {number}") from None
        except BusyError as error:
            raise Refusal(409, str(error)) from None
        name = f"hvdgloo-trace-{number}.json"
        return send_file(os.path.abspath(path), mimetype=_JSON, as_attachment=True, download_name=name, etag=False)

    def links(self) -> Response:
        if not self._visitor.script:
            raise Refusal(403, "new links are made only for requests with a token")
        if self._link is None:
            raise Refusal(409, "the job has no page: it was started without --page")
        return _json(_Link(self._link()))

    def events(self) -> Response:
        response = Response(content_type="text/event-stream")
        # The feed writes what follows the head, until the connection ends.
        response.headers["Connection"] = "close"
        response.automatically_set_content_length = False
        if request.method == "HEAD":
            return response
        if not self._feed.reserve():
            raise Refusal(503, "the page already has as many readers as it can serve; try again in a moment")
        request.environ["hvdgloo.connection"].hand_over = partial(
            self._feed.join, controls=self._controls, last=request.headers.get("Last-Event-ID", "")
        )
        return response

    def metrics(self) -> Response:
        from hvdgloo._observe import metrics  # for Prometheus only

        text, content_type = metrics.text(self._observatory)
        return Response(text, content_type=content_type)

    @property
    def _visitor(self) -> Visitor:
        visitor: Visitor = request.environ["hvdgloo.visitor"]
        return visitor

    @property
    def _controls(self) -> bool:
        return self._control is not None and self._visitor.controls


@overload
def _number(name: str, default: int) -> int: ...
@overload
def _number(name: str, default: None) -> int | None: ...
def _number(name: str, default: int | None) -> int | None:
    """Read a number from the query.

    Raises:
        Refusal: it is not a number of at most 15 digits.
    """
    text = request.args.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise Refusal(400, f"{name} must be a whole number, 0 or more")
    return int(text)


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, content_type=_JSON)


def _refused(refusal: Refusal) -> Response:
    response = Response(refusal.body(), refusal.status, content_type=_JSON)
    if refusal.status == 503:
        response.headers["Retry-After"] = "5"
    return response
