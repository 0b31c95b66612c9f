"""Who may see the page, and who may do more: links that work once, cookies and tokens. Nothing here opens a socket.

A printed link carries a token that works once. Whoever opens it gets a cookie, and a place: the path below which the
page lives for this server, which nobody else knows. Cookies do not know ports, so a browser would send this one to
every server of the host, another user's included, if only the host had to fit.

Scripts send one of two tokens that follow from the job's secret: the status token reads, the control token may also
have steps traced.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from hvdgloo.rendezvous import _auth as auth

_MOST_LINKS = 64  # that nobody has opened, and as many that were
_MOST_SESSIONS = 1024


@dataclass(frozen=True)
class Visitor:
    """Somebody who may read.

    Attributes:
        controls: may have steps traced, if the job allows it at all.
        script: has sent a token rather than a cookie. No other site can make a browser do that.
    """

    controls: bool
    script: bool


class Access:
    """The links and cookies of one server, and the tokens of its job. Any thread may use it.

    Args:
        secret: of the job.
        names: host names by which browsers reach the server, beside IP addresses, localhost and this host's name.
        secure: cookies travel over TLS only.

    Attributes:
        place: path below which cookies count; it begins and ends with a slash.
        cookie: the cookie's name.
    """

    def __init__(self, secret: bytes, *, names: Iterable[str] = (), secure: bool = False) -> None:
        self.place = f"/at/{secrets.token_urlsafe(12)}/"
        self.cookie = "__Secure-hvdgloo" if secure else "hvdgloo"
        self._attributes = f"Path={self.place}; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")
        self._status_token = auth.status_token(secret)
        self._control_token = auth.control_token(secret)
        own = socket.gethostname().lower()
        self._names = {own, own.partition(".")[0], *(name.lower() for name in names)}
        self._lock = threading.Lock()
        # Digests, so that how long a look-up takes says nothing about what is looked up.
        self._links: OrderedDict[bytes, None] = OrderedDict()
        self._opened: OrderedDict[bytes, None] = OrderedDict()
        self._sessions: OrderedDict[bytes, None] = OrderedDict()

    def link(self) -> str:
        """A token that works once. Of those that nobody uses, only the last 64 are kept."""
        with self._lock:
            return _fresh(self._links, _MOST_LINKS)

    def open(self, link: str) -> str | None:
        """The Set-Cookie header for whoever brings a link's token; empty if it was used, None if it is none.

        A browser that comes with a used one may have its cookie already, and needs to know the place.
        """
        digest = _digest(link)
        with self._lock:
            if digest in self._opened:
                return ""
            if digest not in self._links:
                return None
            del self._links[digest]
            _keep(self._opened, digest, _MOST_LINKS)
            return f"{self.cookie}={_fresh(self._sessions, _MOST_SESSIONS)}; {self._attributes}"

    def visitor(self, *, authorization: str, cookies: str) -> Visitor | None:
        """Whom a request's headers show to be; None for a stranger.

        Args:
            authorization: counts instead of the cookie if there is one.
            cookies: the Cookie header; empty where cookies do not count.
        """
        if authorization:
            if not authorization.lower().startswith("bearer "):
                return None  # what browsers send with Basic they add to other sites' requests, too
            controls = auth.bearer_matches(authorization, self._control_token)
            reads = auth.bearer_matches(authorization, self._status_token)
            return Visitor(controls, script=True) if controls or reads else None
        for pair in cookies.split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie:
                with self._lock:
                    if _digest(value) in self._sessions:
                        return Visitor(controls=True, script=False)
        return None

    def answers_to(self, host: str) -> bool:
        """Whether a Host header names this server.

        Another site's name that leads here (DNS rebinding) would make the browser believe that this server is part of
        that site. An IP address or localhost cannot be anybody's site, whatever the port; a forwarded one differs.
        """
        name = host_name(host)
        if name == "localhost" or name.endswith(".localhost") or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def host_name(host: str) -> str:
    """The name in a Host header, in lower case: without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().removesuffix(".")


def _fresh(table: OrderedDict[bytes, None], most: int) -> str:
    token = secrets.token_urlsafe(24)
    _keep(table, _digest(token), most)
    return token


def _keep(table: OrderedDict[bytes, None], digest: bytes, most: int) -> None:
    table[digest] = None
    if len(table) > most:
        table.popitem(last=False)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
