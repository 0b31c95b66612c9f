"""Abstract Unix sockets (unix(7)): they belong to a network namespace, as ports do, and vanish with their owner.

No permissions protect them. Every user of the host can read their names in /proc/net/unix, connect to them, and take a
free name. So a listener asks the kernel which user made a connection before it reads a byte, and a name that is taken
means nothing until it is known whether one of this user's processes has it. Only Linux has such sockets.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvdgloo._net.cancelling import LONGEST_TURN

_BACKLOG = 4096
"""Connections that wait to be accepted; the system's own limit (net.core.somaxconn) is often this, too."""

_REFUSED_AT_ONCE = 256
"""Strangers that are turned away before other things get their turn."""

_CREDENTIALS = struct.Struct("=iII")
_TIMEVAL = struct.Struct("@ll")


class OwnListener(socket.socket):
    """A listening stream socket that only this user's processes, and root's, get past.

    Others' connections are closed as they are accepted, unread. However many they open, and however silent they are,
    there is room again in the backlog as fast as this process takes them out of it.

    Args:
        name: without the leading zero byte.
    """

    def __init__(self, name: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.bind(f"\0{name}")
            self.listen(_BACKLOG)
        except BaseException:
            self.close()
            raise

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept as ``socket.accept`` does.

        Raises:
            BlockingIOError: no connection waits that may be accepted.
        """
        for _ in range(_REFUSED_AT_ONCE):
            sock, address = super().accept()
            try:
                welcome = user_of_peer(sock) in (os.geteuid(), 0)
            except BaseException:
                sock.close()
                raise
            if welcome:
                return sock, address
            sock.close()
        raise BlockingIOError


def user_of_peer(sock: socket.socket) -> int:
    """Return the id of the user whose process made the other end of a connection."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def lets_in(sock: socket.socket) -> bool:
    """Tell whether the ``OwnListener`` at the other end of a connection accepts this process."""
    return os.geteuid() in (user_of_peer(sock), 0)


def connect(name: str, deadline: float, cancelled: Callable[[], bool] = lambda: False) -> socket.socket:
    """Connect to an ``OwnListener``, which may have a full backlog until the deadline.

    Args:
        deadline: on the monotonic clock.
        cancelled: polled to see whether to give up.

    Raises:
        BlockingIOError: there was no room until then, or it was cancelled.
        PermissionError: the listener is another user's process, or would not accept this one.
        OSError: nothing listens there.
    """
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Blocking, for at most a turn: the kernel serves waiting processes in order, while one that polls may miss
            # every free place.
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, int(LONGEST_TURN * 1e6)))
            sock.connect(f"\0{name}")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
            if not lets_in(sock):
                raise PermissionError("they are processes of different users")
            return sock
        except BlockingIOError:
            sock.close()
            if time.monotonic() >= deadline or cancelled():
                raise
        except BaseException:
            sock.close()
            raise


def inode_of(name: str) -> str:
    """Return the inode of the socket with a name; empty if there is none, or if that cannot be seen."""
    shown = f"@{name}"
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
            return next((fields[6] for fields in map(str.split, file) if fields[-1] == shown), "")
    except OSError:
        return ""


def holders(name: str) -> set[int]:
    """Return the processes of this user that have the socket with that name open, as far as they can be seen."""
    number = inode_of(name)
    return set(_processes_with(f"socket:[{number}]")) if number else set()


def _processes_with(thing: str) -> Iterator[int]:
    user = os.geteuid()  # whose /proc/PID is
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        folder = f"/proc/{pid}/fd"
        try:
            if os.stat(f"/proc/{pid}").st_uid == user and any(
                _target(f"{folder}/{descriptor}") == thing for descriptor in os.listdir(folder)
            ):
                yield pid
        except OSError:
            continue  # ended meanwhile, or protected


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""  # closed meanwhile
