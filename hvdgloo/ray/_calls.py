"""Messages between a Ray actor and its worker, which are two processes of one user on one machine.

The worker connects to its actor by an abstract Unix socket (``hvdgloo._net.abstract``): nothing is left on disk however
they end, and the kernel tells each side the other's user.

A message is a list of byte strings. Results may be large: arrays travel beside the pickle, not inside it.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Sequence

from hvdgloo._net import abstract

VARIABLE = "HVDGLOO_RAY_CALLS"
"""Tells a worker where its actor listens; removed from the environment before user code runs."""

_CONNECT_TIME = 30.0  # seconds

Part = bytes | bytearray | memoryview


class Listener:
    """Waits for one worker.

    Attributes:
        name: where it listens, for ``connect``.
    """

    def __init__(self) -> None:
        self.name = f"hvdgloo-ray-{secrets.token_hex(16)}"
        self._socket = abstract.OwnListener(self.name)

    def accept(self) -> Connection:
        """Wait for the worker's connection.

        Raises:
            OSError: the listener was closed meanwhile.
        """
        while True:
            try:
                return Connection(self._socket.accept()[0])
            except BlockingIOError:
                pass  # so many came from other users

    def close(self) -> None:
        """Stop listening; also ends ``accept`` in another thread."""
        _end(self._socket)


def connect(name: str) -> Connection:
    """Connect to the actor.

    Raises:
        OSError: nothing listens there, or another user's process.
    """
    return Connection(abstract.connect(name, time.monotonic() + _CONNECT_TIME))


class Connection:
    """One end of the connection between an actor and its worker; a context manager."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, parts: Sequence[Part]) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        views = [memoryview(part).cast("B") for part in parts]
        self._socket.sendall(struct.pack(f">I{len(views)}Q", len(views), *(view.nbytes for view in views)))
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> list[bytearray] | None:
        """Return the next message; None if the other end has closed the connection.

        Raises:
            OSError: the connection broke.
        """
        try:
            (count,) = struct.unpack(">I", self._read(4))
            return [self._read(length) for length in struct.unpack(f">{count}Q", self._read(8 * count))]
        except EOFError:
            return None

    def close(self) -> None:
        """Close it; also ends ``receive`` in another thread."""
        _end(self._socket)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        if self._reader.readinto(data) != length:
            raise EOFError
        return data


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # close() alone would leave another thread waiting
    except OSError:
        pass
    sock.close()
