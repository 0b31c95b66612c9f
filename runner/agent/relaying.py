"""The agent's end of relayed connections: its workers reach the rendezvous server at their own loopback."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable
from typing import IO, Any

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError
from hvdgloo.runner.protocol.frames import Frame, Relay, Relaying, RelayOpen
from hvdgloo.runner.protocol.relay import MOST, Relays


class RelayListener:
    """A listener for this host's workers, opened at the launcher's request.

    Args:
        selector: the agent's.
        send: to the launcher.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._relays = Relays(selector, send)
        self._listener: socket.socket | None = None
        self._next = 0
        self._spare: IO[bytes] | None = None  # a descriptor to be given up when there is no other
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {Relay: self._on_relay, **self._relays.handlers}

    def close(self) -> None:
        """Close the listener and all connections. May be called again."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        self._relays.close()

    def _on_relay(self, relay: Relay) -> None:
        try:
            (self._listener,) = ports.listen([ports.LOOPBACK], relay.port_range)
        except ConfigError as error:
            self._send(Relaying(0, str(error)))
            return
        self._hold_spare()
        self._listener.setblocking(False)
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._send(Relaying(self._listener.getsockname()[1]))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return  # otherwise it has gone already
        if len(self._relays) >= MOST:
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(RelayOpen(self._next))
        self._relays.add(self._next, sock)
        self._next += 1

    def _turn_away(self) -> None:
        """Close a connection for which no descriptor is left; the worker tries again. If it were left waiting, the
        selector would report it again and again."""
        assert self._listener is not None
        if self._spare is not None:
            self._spare.close()
        try:
            sock, _ = self._listener.accept()
            sock.close()
        except OSError:
            pass
        self._hold_spare()

    def _hold_spare(self) -> None:
        try:
            self._spare = open(os.devnull, "rb")  # noqa: SIM115 - closed by close() and _turn_away()
        except OSError:
            self._spare = None
