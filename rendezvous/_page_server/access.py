"""Access to the page, by links that work once, cookies and tokens. Nothing here opens a socket.

A printed link carries a token that works once. The browser that opens it gets a cookie, and a place: the secret path
below which this server's page lives. Cookies are not bound to ports, so without the path a browser would send this one
to every server of the host, another user's included.

Scripts send one of two tokens that are derived from the job's secret: the status token reads, the control token may
also have steps traced.
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

_MOST_LINKS = 64  # unopened ones, and as many opened ones
_MOST_SESSIONS = 1024


@dataclass(frozen=True)
class Visitor:
    """A visitor who may read.

    Attributes:
        controls: True if the visitor may have steps traced, where the job allows it.
        script: True if the visitor sent a token rather than a cookie, which no other site can make a browser do.
    """

    controls: bool
    script: bool


class Access:
    """The links and cookies of one server, and the tokens of its job. Any thread may use it.

    Args:
        secret: the job's secret.
        names: host names by which browsers reach the server, in addition to IP addresses, localhost and its own name.
        secure: True if cookies travel over TLS only.

    Attributes:
        place: path below which cookies are valid; it begins and ends with a slash.
        cookie: name of the cookie.
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
        # Digests, so that the duration of a look-up reveals nothing about the token.
        self._links: OrderedDict[bytes, None] = OrderedDict()
        self._opened: OrderedDict[bytes, None] = OrderedDict()
        self._sessions: OrderedDict[bytes, None] = OrderedDict()

    def link(self) -> str:
        """Create a token that works once. Of unused ones, only the last 64 are kept."""
        with self._lock:
            return _fresh(self._links, _MOST_LINKS)

    def open(self, link: str) -> str | None:
        """Use a link's token; return the Set-Cookie header, empty if the token was used before, None if it is invalid.

        A browser with a used token may have its cookie already, and needs to know the place.
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
        """Return the visitor that a request's headers identify; None for a stranger.

        Args:
            authorization: the Authorization header, which replaces the cookie if there is one.
            cookies: the Cookie header; empty where cookies are not valid.
        """
        if authorization:
            if not authorization.lower().startswith("bearer "):
                return None  # browsers add Basic credentials to other sites' requests, too
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
        """Return whether a Host header names this server.

        Another site's name that leads here (DNS rebinding) would make the browser believe that this server is part of
        that site. An IP address or localhost is never another site's name; the port may be a forwarded one.
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
    """Return the name in a Host header, in lower case: without its port, and an IPv6 address without its brackets."""
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
