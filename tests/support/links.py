"""Control connections between two ends in one process, without a handshake."""

from __future__ import annotations

import socket

from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.handshake import Link

_ONE, _OTHER = bytes(range(32)), bytes(range(32, 64))


def link_pair() -> tuple[Link, Link]:
    """Both ends of a connection whose frames are signed."""
    left, right = socket.socketpair()
    return link_of(left), link_of(right, far_end=True)


def link_of(sock: socket.socket, *, far_end: bool = False) -> Link:
    """One end of such a connection, over a socket."""
    one, other = FrameMac(_ONE), FrameMac(_OTHER)
    return Link(sock, other, one) if far_end else Link(sock, one, other)


class Signing:
    """Frames as an end of such a connection sends them, in order."""

    def __init__(self) -> None:
        self._mac = FrameMac(_ONE)

    def __call__(self, frame: bytes | bytearray) -> bytes:
        """A frame with its tag."""
        return bytes(frame) + self._mac.tag(frame[4:])
