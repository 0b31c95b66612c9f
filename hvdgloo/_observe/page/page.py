"""The page of one job, for a web server: its routes, and the live events of its readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported with the first visitor
    from hvdgloo._observe.observatory import Observatory
    from hvdgloo._observe.page.feed import Feed
    from hvdgloo._observe.trace_control import TraceControl
    from hvdgloo.rendezvous._server.http_connection import HttpConnection
    from hvdgloo.rendezvous._server.routes import WSGIApplication


class Page:
    """The page of one job, which ``hvdgloo.rendezvous._page_server.server.PageServer`` serves.

    Args:
        observatory: the job's observatory; a function that makes it is called once, when it is first needed.
        control: has steps traced; None if that is not allowed.
    """

    def __init__(
        self, observatory: Observatory | Callable[[], Observatory], control: TraceControl | None = None
    ) -> None:
        self._observatory = observatory
        self._control = control
        self._feed: Feed | None = None

    def application(self, close: Callable[[HttpConnection], None], link: Callable[[], str] | None) -> WSGIApplication:
        """Return the routes as a WSGI application, whose web framework is imported with the first request.

        Args:
            close: called for each connection that was handed over to the live events, when they end.
            link: makes a new link; None if browsers cannot reach the server.
        """
        from hvdgloo._observe.page.feed import Feed
        from hvdgloo.rendezvous._server.routes import Later

        observatory = self._observatory() if callable(self._observatory) else self._observatory
        self._feed = feed = Feed(observatory, close)
        return Later(lambda: _create(observatory, feed, self._control, link))

    def stop(self, reason: str) -> None:
        """Show readers of the live events that the job has ended, and end these."""
        if self._feed is not None:
            self._feed.stop(reason)

    @property
    def watchers(self) -> int:
        """Number of readers of the live events."""
        return 0 if self._feed is None else self._feed.watchers


def _create(
    observatory: Observatory, feed: Feed, control: TraceControl | None, link: Callable[[], str] | None
) -> WSGIApplication:
    from hvdgloo._observe.page.application import create_application  # and with it Flask

    return create_application(observatory, feed, control, link)
