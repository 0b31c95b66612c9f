"""The Flask application: the redirect to the job's page, and answers to methods and paths that no worker uses."""

from __future__ import annotations

from collections.abc import Callable

from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from hvdgloo.rendezvous._server.routes import ROUTES, Call, Reply, Route, WSGIApplication, refused, signature_headers
from hvdgloo.rendezvous._server.service import Service


def create_pages(service: Service) -> WSGIApplication:
    """Create the WSGI application, to be put behind the gate."""
    flask = Flask("hvdgloo.rendezvous", static_folder=None, template_folder=None)
    flask.url_map.merge_slashes = False
    flask.url_map.redirect_defaults = False
    for route in ROUTES:
        flask.add_url_rule(route.rule, route.rule, _view(service, route), methods=route.methods)

    @flask.get("/")
    def page() -> Response:
        if service.page is None:
            return _response(
                refused(404, "this server has no page; /v1/status lists its workers, and --page serves one")
            )
        response = Response(status=303, headers={"Location": service.page()})
        response.headers["Cache-Control"] = "no-store"  # the link works once
        return response

    flask.register_error_handler(HTTPException, lambda error: _response(refused(error.code or 500, reason_of(error))))
    flask.after_request(lambda response: _finish(service, response))
    return flask.wsgi_app


def _view(service: Service, route: Route) -> Callable[..., Response]:
    return lambda **arguments: _response(
        route.answer(service, Call(request.environ), {name: str(value) for name, value in arguments.items()})
    )


def _response(answer: Reply) -> Response:
    return Response(answer.body, answer.status, content_type=answer.content_type)


def reason_of(error: HTTPException) -> str:
    """Return Flask's reason for refusing a request, in a sentence."""
    if error.code == 404:
        return f"there is no such route: {request.method} {request.environ['PATH_INFO'][:200]}"
    return error.description or error.name


def _finish(service: Service, response: Response) -> Response:
    rule = request.url_rule.rule if request.url_rule else "none"
    response.headers.update(
        signature_headers(service, request.environ, rule, response.status_code, response.get_data())
    )
    return response
