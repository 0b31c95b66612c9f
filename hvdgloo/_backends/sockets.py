"""Finding out what this process's sockets are connected with, and the form of addresses in memory.

Gloo does not say which sockets are its own.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

Ends: TypeAlias = "tuple[tuple[str, int] | None, tuple[str, int] | None]"
"""Local and remote address of an IP socket; None where something is no such socket or has no such address."""


def encode_address(address: tuple[str, int]) -> bytes:
    """How a sockaddr_in or sockaddr_in6 (without scope) begins in memory."""
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
    """What a descriptor is connected with."""
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
    """End a connection in both directions, whoever uses it, if ``wanted`` says so of its ends.

    Its owner may close it at any time, and the number may then be another file's: a listener's, say, whose accept()
    would fail. So it is looked at once more, just before, and no other thread of Python's runs in between. (A duplicate
    could not become another file. But it would keep the file in its owner's epoll set, and events would come for a
    connection that is closed.)
    """
    if wanted(ends(descriptor)):
        _libc.shutdown(descriptor, socket.SHUT_RDWR)
