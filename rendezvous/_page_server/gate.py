"""The gate in front of the page: plain WSGI, so that strangers do not get as far as a web framework.

It checks a request's destination and its visitor, reads its small body, and adds the headers that restrict the page to
what this server sends. The routes see only admitted requests.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from hvdgloo.rendezvous._page_server.access import Access, Visitor
from hvdgloo.rendezvous._server.pauses import Steps
from hvdgloo.rendezvous._server.routes import WSGIApplication
from hvdgloo.rendezvous._server.service import Environ, Refusal, StartResponse, body_length, read_body

MAX_BODY = 4096
_BODY_TIMEOUT = 10.0

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TITLE = "hvdgloo"
_HOW = "Open the link that the launcher printed; each link works once. hvdgloo-run top --link prints a new one."


class Gate:
    """WSGI middleware that admits visitors who may read the page, and opens links.

    Args:
        access: identifies visitors.
        application: answers admitted visitors, with ``environ["hvdgloo.visitor"]`` and ``environ["hvdgloo.body"]``.
    """

    def __init__(self, access: Access, application: WSGIApplication) -> None:
        self._access = access
        self._application = application

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request as WSGI has it."""

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            given = {name.lower() for name, _ in headers}
            more = [(name, value) for name, value in _HEADERS.items() if name.lower() not in given]
            return start_response(status, headers + more, exc_info)

        try:
            link = self._admit(environ)
            return self._application(environ, start) if link is None else _opened(link, self._access.place, start)
        except Refusal as refusal:
            return _refuse(refusal, environ, self._access.place, start)

    def steps(self, environ: Environ, start_response: StartResponse) -> Steps[Iterable[bytes]]:
        """Answer a request on the front's own thread. Nothing here waits."""
        yield from ()
        return self(environ, start_response)

    def _admit(self, environ: Environ) -> str | None:
        """Check a request, and prepare it for the routes; return the Set-Cookie header if it opens a link.

        Raises:
            Refusal: the request is a stranger's, or was meant for another server.
        """
        # Only what the client sent is routed: cheroot has decoded PATH_INFO once, which would lose "%2F".
        path = environ["REQUEST_URI"].partition("?")[0]
        self._check_origin(environ)
        below = path.startswith(self._access.place)
        visitor = self._access.visitor(
            authorization=environ.get("HTTP_AUTHORIZATION", ""),
            cookies=environ.get("HTTP_COOKIE", "") if below else "",
        )
        if visitor is None:
            if path == "/" and environ["REQUEST_METHOD"] == "GET":
                return self._open(environ)
            raise _stranger(environ)
        _check_site(environ, visitor)
        if below:
            environ["SCRIPT_NAME"] = self._access.place[:-1]
            path = path[len(self._access.place) - 1 :]
        environ["PATH_INFO"] = path
        environ["hvdgloo.visitor"] = visitor
        environ["hvdgloo.body"] = read_body(environ, body_length(environ), _BODY_TIMEOUT, int)  # nothing is noted
        return None

    def _check_origin(self, environ: Environ) -> None:
        host, origin = environ.get("HTTP_HOST", ""), environ.get("HTTP_ORIGIN")
        if not self._access.answers_to(host):
            raise Refusal(
                421,
                f"this server is not {host[:200] or 'named in the request'}: use an IP address, localhost "
                "(ssh -L) or the host's own name",
            )
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise Refusal(403, "the request comes from another site")

    def _open(self, environ: Environ) -> str:
        link = parse_qs(environ["QUERY_STRING"]).get("token", [""])[0]
        if link and environ.get("HTTP_SEC_PURPOSE"):
            raise Refusal(403, "a link that works once cannot be fetched beforehand")
        cookie = self._access.open(link) if link else None
        if cookie is None:
            raise _stranger(environ, wrong=bool(link))
        return cookie


def _stranger(environ: Environ, *, wrong: bool = False) -> Refusal:
    if environ.get("HTTP_AUTHORIZATION"):
        return Refusal(401, "the token is wrong: it is neither this job's status token nor its control token")
    return Refusal(401, f"{'This link is not (or no longer) valid' if wrong else 'This page needs a link'}. {_HOW}")


def _check_site(environ: Environ, visitor: Visitor) -> None:
    """Refuse requests that another site makes a browser send. SameSite cookies do not cover other ports of the host.

    Raises:
        Refusal: the request comes from another site.
    """
    if visitor.script:
        return
    site = environ.get("HTTP_SEC_FETCH_SITE", "same-origin")
    navigates = environ.get("HTTP_SEC_FETCH_MODE") == "navigate" and environ["REQUEST_METHOD"] == "GET"
    if site not in ("same-origin", "none") and not navigates:
        raise Refusal(403, "the request comes from another site")
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD") and environ.get("HTTP_ORIGIN") is None:
        raise Refusal(403, "the request does not say which site it comes from: with a cookie, it must have an Origin")


def _opened(cookie: str, place: str, start: StartResponse) -> list[bytes]:
    """Answer a browser that opens a link.

    The answer is a page that goes on to the place rather than a redirect: after a click on another site (a notebook, a
    mail), browsers attribute a redirect to that site, and withhold strict cookies.
    """
    if cookie:
        body = _document("The page opens.", f'<p><a href="{place}">Open the page</a>', refresh=place)
    else:
        # Only at the place can this browser be recognised. The reader decides whether to go there, since a stranger
        # would be refused without this explanation.
        content = (
            "<p>A link works for one browser. For another one, run hvdgloo-run top --link on the job's host, which "
            f'prints a new link.<p>If this browser used it: <a href="{place}">open the page</a>.'
        )
        body = _document("This link was already used.", content, refresh="")
    start("200 OK", [*_html(body), *([("Set-Cookie", cookie)] if cookie else [])])
    return [body]


def _refuse(refusal: Refusal, environ: Environ, place: str, start: StartResponse) -> list[bytes]:
    phrase = HTTPStatus(refusal.status).phrase
    if "text/html" in environ.get("HTTP_ACCEPT", ""):
        # The browser may have withheld the cookie after a click on another site: this page's own request has it.
        again = refusal.status == 401 and environ.get("HTTP_SEC_FETCH_SITE") in ("cross-site", "same-site")
        again = again and environ["REQUEST_URI"].startswith(place)
        body = _document(phrase, f"<p>{html.escape(refusal.reason)}", refresh=place if again else "")
        headers = _html(body)
    else:
        body = refusal.body()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if refusal.status == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    # A stranger gets one request per connection, so that many requests cost it as many connections.
    environ["hvdgloo.connection"].end_after_answer()
    start(f"{refusal.status} {phrase}", headers)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _document(heading: str, content: str, *, refresh: str) -> bytes:
    goes_on = f'<meta http-equiv="refresh" content="0; url={refresh}">' if refresh else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">{goes_on}'
        f"<title>{_TITLE}</title><main><h1>{heading}</h1>{content}</main></html>\n"
    ).encode()


def _html(body: bytes) -> list[tuple[str, str]]:
    return [("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body)))]
