"""Outlets for a worker's observations: the agent of its host, in datagrams, or without one the rendezvous server."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

from hvdgloo._observe import samples
from hvdgloo.errors import RendezvousError

_ASK_AGAIN_SECONDS = 60.0
"""Seconds until a server that has no page, or cannot be reached, is asked again."""

_NO_LISTENER = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ENOTCONN, errno.ECONNRESET})
"""Errors that mean that no process listens: the socket does not exist, or its owner has ended."""


class Outlet(Protocol):
    """Takes encoded observations. No method raises. An observation that cannot be sent is dropped: a later sample
    repeats all totals."""

    def is_open(self) -> bool:
        """Return whether the job is being observed. Cheap, since it is called before each sample is made."""
        ...

    @property
    def listener(self) -> object:
        """Identity of the receiver: equal as long as it is the same one."""
        ...

    def send(self, data: bytes) -> bool:
        """Send an observation; return False if it was not taken."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are orders; -1 if there never are any."""
        ...

    def orders(self) -> list[samples.TraceOrder]:
        """Return the orders that arrived since the last call."""
        ...

    def close(self) -> None:
        """Close the outlet; no observation follows."""
        ...


class AgentOutlet:
    """The agent that started this worker, through its Unix socket, which exists only while the job is observed. Orders
    arrive at a socket next to it, named after this process's id.

    Args:
        path: path of the agent's socket, in a directory of the agent's own.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._own = os.path.join(os.path.dirname(path), str(os.getpid()))
        self._socket: socket.socket | None = None
        self._identity = (0, 0)  # of the agent's socket; another one may take its place
        self._bound = (0, 0)  # device and inode of our own

    def is_open(self) -> bool:
        try:
            status = os.stat(self._path)
        except OSError:
            self.close()
            return False
        identity = status.st_ino, status.st_ctime_ns
        if self._socket is not None and identity == self._identity:
            return True
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._own)  # of this process's last job
            sock.bind(self._own)
            own = os.stat(self._own)
        except OSError:
            sock.close()
            return False
        self._socket, self._identity, self._bound = sock, identity, (own.st_dev, own.st_ino)
        return True

    @property
    def listener(self) -> object:
        return self._identity

    def send(self, data: bytes) -> bool:
        sock = self._socket
        if sock is None:
            return False
        try:
            sock.send(data)
        except OSError as error:
            if error.errno in _NO_LISTENER:
                self.close()
            return False  # or the agent is busy, and this one is dropped
        return True

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def orders(self) -> list[samples.TraceOrder]:
        received: list[samples.TraceOrder] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(samples.LIMIT)
            except OSError:
                break
            with contextlib.suppress(ValueError):  # not ours
                received.append(samples.ORDERS.decode(data))
        return received

    def close(self) -> None:
        if self._socket is not None:
            sock, self._socket = self._socket, None
            with contextlib.suppress(OSError):
                own = os.stat(self._own)
                if (own.st_dev, own.st_ino) == self._bound:  # not the socket of this process's next job
                    os.unlink(self._own)
            sock.close()  # last: until then, no other file can have its inode


class ServerOutlet:
    """The rendezvous server, for workers that no agent started.

    Args:
        observe: ``RendezvousClient.observe``: returns whether the server took the observation; raises RendezvousError.
    """

    def __init__(self, observe: Callable[[bytes], bool]) -> None:
        self._observe = observe
        self._closed_until = 0.0

    def is_open(self) -> bool:
        return time.monotonic() >= self._closed_until

    @property
    def listener(self) -> object:
        return None

    def send(self, data: bytes) -> bool:
        try:
            if self._observe(data):
                return True
        except RendezvousError:
            pass
        self._closed_until = time.monotonic() + _ASK_AGAIN_SECONDS
        return False

    def fileno(self) -> int:
        return -1

    def orders(self) -> list[samples.TraceOrder]:
        return []

    def close(self) -> None:
        """Do nothing: the job closes its client."""
