"""Messages between a Ray actor and its worker, which are two processes of one user on one machine.

The worker connects to its actor by a Unix socket without a name in the file system, so that nothing is left on disk
however they end. The kernel tells each side the other's user; connections from other users' processes are refused.

A message is a list of byte strings. Results may be large: arrays travel next to the pickle, not inside it.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from types import TracebackType

from hvdgloo.errors import AuthenticationError

VARIABLE = "HVDGLOO_RAY_CALLS"
"""Variable with the name at which a worker's actor listens; removed from the environment before user code runs."""

_COUNT = struct.Struct(">I")
_LENGTH = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PIECE = 16 * 1024 * 1024

Part = bytes | bytearray | memoryview


class Listener:
    """Listener for one worker.

    Attributes:
        name: the socket's name, for ``connect``.
    """

    def __init__(self) -> None:
        self.name = f"hvdgloo-ray-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(8)

    def accept(self) -> Connection:
        """Wait for the worker's connection and return it. Other users' processes are turned away.

        Raises:
            OSError: the listener was closed meanwhile.
        """
        while True:
            connection = Connection(self._socket.accept()[0])
            if connection.peer_is_ours():
                return connection
            connection.close()

    def close(self) -> None:
        """Stop listening; also ends ``accept`` in another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # close() alone would leave accept() waiting
        except OSError:
            pass
        self._socket.close()


def connect(name: str) -> Connection:
    """Connect a worker to its actor.

    Raises:
        OSError: no process listens at ``name``.
        AuthenticationError: another user's process listens there.
    """
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(f"\0{name}")
    connection = Connection(stream)
    if not connection.peer_is_ours():
        connection.close()
        raise AuthenticationError("another user's process listens in place of this worker's Ray actor")
    return connection


class Connection:
    """One end of the connection between an actor and its worker; a context manager."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def peer_is_ours(self) -> bool:
        """Return whether the process at the other end belongs to this process's user."""
        given = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(given)[1] == os.geteuid())

    def send(self, parts: Sequence[Part]) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        views = [memoryview(part).cast("B") for part in parts]
        lengths = b"".join(_LENGTH.pack(view.nbytes) for view in views)
        self._socket.sendall(_COUNT.pack(len(views)) + lengths)
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> list[bytearray] | None:
        """Return the next message; None if the other end closed the connection.

        Raises:
            OSError: the connection broke.
        """
        head = self._read(_COUNT.size)
        if head is None:
            return None
        (count,) = _COUNT.unpack(head)
        lengths = self._read(count * _LENGTH.size)
        if lengths is None:
            return None
        message = []
        for (length,) in _LENGTH.iter_unpack(lengths):
            part = self._read(length)
            if part is None:
                return None
            message.append(part)
        return message

    def close(self) -> None:
        """Close the connection; also ends ``receive`` in another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _read(self, length: int) -> bytearray | None:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view[:_PIECE])
            if not got:
                return None
            view = view[got:]
        return data
