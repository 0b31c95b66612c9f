"""The launcher's end of the connections that agents relay: each becomes a connection to the rendezvous server here."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from hvdgloo.runner.protocol.frames import Frame, RelayClose, RelayCredit, RelayData, Relaying, RelayOpen
from hvdgloo.runner.protocol.relay import MOST, Relays
from hvdgloo.runner.supervise.agent_link import AgentLink


class RelayedConnections:
    """The relayed connections of all agents.

    Args:
        selector: the supervisor's.
        listening: called with a link and its agent's answer to ``Relay``.

    Attributes:
        server: address and port of the rendezvous server, on this host; None before it listens.
        handlers: frame type to handler, in the supervisor's form.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listening: Callable[[AgentLink, Relaying], None],
    ) -> None:
        self._selector = selector
        self.server: tuple[str, int] | None = None
        self._relays: dict[AgentLink, Relays] = {}
        self.handlers: dict[type[Frame], Callable[[AgentLink, Any], None]] = {
            Relaying: listening,
            RelayOpen: self._on_open,
            **dict.fromkeys((RelayData, RelayCredit, RelayClose), self._on_relayed),
        }

    def forget(self, link: AgentLink) -> None:
        """Close the connections of an agent that has gone."""
        relays = self._relays.pop(link, None)
        if relays is not None:
            relays.close()

    def close(self) -> None:
        """Close all connections, and accept no others."""
        self.server = None
        for link in list(self._relays):
            self.forget(link)

    def _on_open(self, link: AgentLink, frame: RelayOpen) -> None:
        if link not in self._relays:
            self._relays[link] = Relays(self._selector, link.channel.send)
        relays = self._relays[link]
        sock = self._socket() if len(relays) < MOST else None
        if sock is None or self.server is None:
            link.channel.send(RelayClose(frame.connection))  # the worker tries again
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(self.server)  # a failure shows when the socket is first used
        relays.add(frame.connection, sock)

    def _socket(self) -> socket.socket | None:
        """Return a socket for another connection; None if there is no server yet, or this process may not open any
        more."""
        if self.server is None:
            return None
        try:
            return socket.socket(socket.AF_INET6 if ":" in self.server[0] else socket.AF_INET)
        except OSError:
            return None

    def _on_relayed(self, link: AgentLink, frame: Frame) -> None:
        if link in self._relays:
            self._relays[link].handlers[type(frame)](frame)
