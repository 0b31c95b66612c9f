"""Frames over a TCP connection: each carries a tag, and none carries the job's secret.

The tag covers the frame and its number, under a key of this direction of this connection (``hvdgloo._net.frame_mac``):
frames cannot be forged, changed, repeated, left out or moved. What is in them can be read on the way, so the launcher
leaves out the secret, and what would give it away; the agent, which has the secret from elsewhere, puts it in again.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

import msgspec

from hvdgloo._net.frame_mac import FrameMac
from hvdgloo.runner.network.probe import probe_key
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import Frame, Noise, Spawn, Start, Survey

SECRET = "HVDGLOO_SECRET"
_ACKNOWLEDGED = struct.Struct("@2xBB52xI")
"""The kernel's ``struct tcp_info`` up to ``tcpi_last_ack_recv``, with ``tcpi_retransmits`` and ``tcpi_probes``."""


class SealedChannel(FrameChannel):
    """A ``FrameChannel`` over a socket.

    Args:
        receive, send: descriptors of the socket. They differ: each is registered with a selector for its direction.
        sending, receiving: authenticate the frames of each direction.
        secret: of the job.
    """

    def __init__(self, receive: int, send: int, *, sending: FrameMac, receiving: FrameMac, secret: bytes) -> None:
        super().__init__(receive, send, sending=sending, receiving=receiving)
        self._secret = secret

    def send(self, frame: Frame) -> None:
        super().send(withheld(frame))

    def unanswered(self) -> float:
        if sys.platform != "linux":
            return super().unanswered()
        try:
            with socket.socket(fileno=os.dup(self.send_fd)) as sock:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
        except OSError:
            return super().unanswered()
        retransmitted, probed, milliseconds = _ACKNOWLEDGED.unpack(info)
        # Where the other process does not read, its kernel is asked ever more seldom whether it does by now.
        return float(milliseconds) / 1000 if retransmitted or probed else 0.0

    def receive(self) -> list[Frame | Noise]:
        return [item if isinstance(item, Noise) else restored(item, self._secret) for item in super().receive()]


def withheld(frame: Frame) -> Frame:
    """Return a frame without the secret and without keys that follow from it."""
    if isinstance(frame, (Start, Spawn)):
        return msgspec.structs.replace(frame, env={k: v for k, v in frame.env.items() if k != SECRET})
    if isinstance(frame, Survey):
        return msgspec.structs.replace(frame, key=b"")
    return frame


def restored(frame: Frame, secret: bytes) -> Frame:
    """Return the frame as it was before ``withheld``."""
    if isinstance(frame, Spawn):
        return msgspec.structs.replace(frame, env={**frame.env, SECRET: secret.hex()})
    if isinstance(frame, Survey):
        return msgspec.structs.replace(frame, key=probe_key(secret))
    return frame
