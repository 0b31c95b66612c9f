"""A Gloo group's sockets in this process, which Gloo does not name: found by what they are connected with.

Gloo closes a connection that has ended on its own thread, and takes it out of its epoll set before. While a group is
destroyed it leaves that out, since closing does the same; unless another process or thread uses the file at that
moment, be it for as long as getsockname(2) takes, or a forked child has it. Then an event comes for a connection that
Gloo has closed, and Gloo ends the process ("state_ <= CONNECTED. 5 vs 4"). Looking for sockets is such a use: of two
groups, one may be destroyed while the other one is made. So all of a group's own connections are ended, and out of the
epoll set, before the group is destroyed (``Connections.part``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from hvdgloo.errors import BackendError

logger = logging.getLogger(__name__)

_PARTING = 1.0
"""Seconds for Gloo to close connections that have ended: its thread does so at once, if the machine lets it."""

_WATCHED = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)", re.MULTILINE)

Ends: TypeAlias = "tuple[tuple[str, int] | None, tuple[str, int] | None]"
"""Local and remote address of an IP socket; None where something is no such socket or has no such address."""


def encode_address(address: tuple[str, int]) -> bytes:
    """The beginning of a sockaddr_in or sockaddr_in6 (without scope) in memory."""
    host, port = address
    if ":" in host:
        flow = bytes(4)
        return (
            struct.pack("=H", socket.AF_INET6)
            + struct.pack("!H", port)
            + flow
            + socket.inet_pton(socket.AF_INET6, host)
        )
    return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)


def decode_address(published: bytes, offset: int) -> tuple[str, int]:
    """The address and port of the sockaddr at ``offset``."""
    (family,) = struct.unpack_from("=H", published, offset)
    (port,) = struct.unpack_from("!H", published, offset + 2)
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, published[offset + 8 : offset + 24]), port
    return socket.inet_ntop(socket.AF_INET, published[offset + 4 : offset + 8]), port


def open_descriptors() -> list[int]:
    """This process's open descriptors."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return []


def ends(descriptor: int) -> Ends:
    """The ends of a connection."""
    local = _name(_libc.getsockname, descriptor)
    return local, local and _name(_libc.getpeername, descriptor)


# Python's socket objects will not do for looking at descriptors of others: constructing one may change the blocking
# mode (socket.setdefaulttimeout), and duplicates made by one thread are seen by another.
# These functions never wait: other threads need not run meanwhile.
_libc = ctypes.PyDLL(None, use_errno=True)


def _name(function: Any, descriptor: int) -> tuple[str, int] | None:
    storage = ctypes.create_string_buffer(128)
    length = ctypes.c_uint32(len(storage))
    if function(descriptor, storage, ctypes.byref(length)) != 0:
        return None
    family = int.from_bytes(storage.raw[:2], sys.byteorder)
    return decode_address(storage.raw, 0) if family in (socket.AF_INET, socket.AF_INET6) else None


def shut_down(descriptor: int, wanted: Callable[[Ends], bool]) -> None:
    """End a connection in both directions, for all its users, if ``wanted`` says so of its ends.

    Its owner may close it at any time, and the number may then be another file's: a listener's, say, whose accept()
    would fail. So it is looked at once more, just before, and no other thread of Python's runs in between. (A duplicate
    could not become another file. But it would keep the file in its owner's epoll set, and events would come for a
    connection that is closed.)
    """
    if wanted(ends(descriptor)):
        _libc.shutdown(descriptor, socket.SHUT_RDWR)


class Connections:
    """The sockets of one group. Every connection has one end at a listener that some rank has published.

    Args:
        published: this rank's address, in Gloo's form. The layout of those bytes is private to Gloo, so the position of
            the address in them is found by looking for the address of a listener of this process.

    Attributes:
        listener: this rank's address and port.

    Raises:
        BackendError: there is no such listener.
    """

    def __init__(self, published: bytes) -> None:
        descriptor, self.listener, self._offset = _find_listener(published)
        self._listeners = frozenset([self.listener])
        self._epoll = _find_epoll(descriptor)

    def learn(self, published: Iterable[bytes]) -> None:
        """Some other ranks' addresses, in Gloo's form."""
        self._listeners |= {decode_address(address, self._offset) for address in published}

    def descriptors(self, *, connected: bool) -> Iterator[int]:
        """Yield the descriptors of the group's sockets; its listener's too unless only ``connected`` ones are wanted.

        One at a time, for immediate use: once it is closed, a number may be given to any other file (``shut_down``).
        """
        for descriptor in open_descriptors():
            found = ends(descriptor)
            if self._connects(found) or (not connected and found[0] in self._listeners):
                yield descriptor

    def incoming(self) -> int:
        """Return the number of connections that arrived at this rank's listener."""
        return sum(ends(descriptor)[0] == self.listener for descriptor in self.descriptors(connected=True))

    def keep_to_this_process(self) -> None:
        """Gloo leaves them inheritable: a program that a rank starts would keep its connections open."""
        for descriptor in self.descriptors(connected=False):
            with suppress(OSError):  # a peer has gone, and Gloo has closed it meanwhile
                os.set_inheritable(descriptor, False)

    def end_when_silent(self, seconds: float) -> None:
        """Have the system end a connection whose other host answers nothing for some time, with or without data on the
        way: a host that has lost its power does not close its connections."""
        if not hasattr(socket, "TCP_USER_TIMEOUT"):
            return
        probing = max(1, round(seconds / 4))
        for descriptor in self.descriptors(connected=True):
            for level, option, value in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probing),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probing),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
            ):
                number = ctypes.c_int(value)
                # It may have ended, and its number may be another file's meanwhile; an error leaves that as it is.
                if self._connects(ends(descriptor)):
                    _libc.setsockopt(descriptor, level, option, ctypes.byref(number), ctypes.sizeof(number))

    def end(self) -> None:
        """Make everything that is under way fail."""
        for descriptor in self.descriptors(connected=True):
            shut_down(descriptor, self._connects)

    def part(self) -> None:
        """End this rank's own connections, and wait until no more events of them can come. Nothing may be under way.

        Which ones are its own, and not of other ranks in this process, is seen from the epoll set of the thread
        that this rank's listener belongs to.
        """
        deadline, pause = time.monotonic() + _PARTING, 0.0002
        while own := [descriptor for descriptor in _watched(self._epoll) if self._connects(ends(descriptor))]:
            if time.monotonic() >= deadline:
                logger.debug("%d of Gloo's connections have ended, and are still open after %g s", len(own), _PARTING)
                return
            for descriptor in own:
                shut_down(descriptor, self._connects)
            time.sleep(pause)
            pause = min(0.01, 2 * pause)

    def _connects(self, found: Ends) -> bool:
        """Return whether a socket with these ends is a connection of the group's."""
        local, peer = found
        return peer is not None and (local in self._listeners or peer in self._listeners)


def _find_listener(published: bytes) -> tuple[int, tuple[str, int], int]:
    """The descriptor and the address of what listens where ``published`` says, and at which offset that is said."""
    for descriptor in open_descriptors():
        local, peer = ends(descriptor)
        if local is not None and peer is None and local[1]:
            offset = published.find(encode_address(local))
            if offset >= 0:
                return descriptor, local, offset
    raise BackendError(
        "this version of torch publishes Gloo addresses in an unknown form, without which a dead rank could not be "
        "noticed in time; use a version of torch that the compatibility table lists"
    )


def _find_epoll(watched: int) -> int:
    """The descriptor of the epoll set that has ``watched`` in it; -1 if this cannot be seen."""
    for descriptor in open_descriptors():
        try:
            link = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if link == "anon_inode:[eventpoll]" and watched in _watched(descriptor):
            return descriptor
    return -1


def _watched(epoll: int) -> list[int]:
    """The descriptors in an epoll set of which events may still come; see proc_pid_fdinfo(5)."""
    try:
        with open(f"/proc/self/fdinfo/{epoll}", encoding="ascii") as file:
            entries = _WATCHED.findall(file.read())
    except OSError:
        return []
    # One that was wanted once (EPOLLONESHOT) stays in the set, without these.
    return [int(number) for number, events in entries if int(events, 16) & (select.EPOLLIN | select.EPOLLOUT)]
