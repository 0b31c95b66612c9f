"""The connection of an agent that came by itself, in the form in which supervision expects a command."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import IO

from hvdgloo._net.handshake import Link
from hvdgloo.runner.inbound.sealed import SealedChannel
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import LAST_WORDS, Beat

_LINGER = 2.0
"""Seconds after the end of the stream for which its cause may still become known."""


class InboundStream:
    """The launcher's end of one agent's connection.

    Args:
        link: the connection.
        secret: of the job.
        why: what is known from outside of the agent's end; empty if nothing is.
        closed: called when the connection is closed here.
    """

    def __init__(self, link: Link, secret: bytes, why: Callable[[], str], closed: Callable[[], None]) -> None:
        self._closed = closed
        self._sock = sock = link.sock
        self._link = link
        self._secret = secret
        self._why = why
        self._explained = False
        self._over = False
        self._ended_at: float | None = None
        sock.setblocking(False)
        self.stdin: IO[bytes] = os.fdopen(os.dup(sock.fileno()), "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(os.dup(sock.fileno()), "rb", 0)
        reading, self._writing = os.pipe()
        self.stderr: IO[bytes] = os.fdopen(reading, "rb", 0)

    def channel(self) -> FrameChannel:
        """Frames, which begin now: the agent waits for the first one."""
        receive, send, link = self.stdout.fileno(), self.stdin.fileno(), self._link
        channel = SealedChannel(receive, send, sending=link.sending, receiving=link.receiving, secret=self._secret)
        channel.send(Beat())
        return channel

    def poll(self) -> int | None:
        """0 once the connection has ended and nothing more will be known about it."""
        if self._over:
            return 0
        if self._ended_at is None and self._at_end():
            self._ended_at = time.monotonic()
        if self._ended_at is None:
            return None
        self._explain()
        return 0 if time.monotonic() - self._ended_at >= _LINGER else None

    def starved(self) -> bool:
        return False

    def kill(self) -> None:
        """End the connection, on which the agent ends what it has started."""
        self._end()

    def wait(self, timeout: float) -> int:
        """End the connection, which is all that there is here; its other end is up to the agent's task."""
        self._end()
        return 0

    def _at_end(self) -> bool:
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _explain(self) -> None:
        """Say why the agent has ended, where supervision looks for it."""
        why = self._why()
        if why and not self._explained:
            self._explained = True
            os.write(self._writing, f"{LAST_WORDS}{why}\n".encode())

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
        os.close(self._writing)
        self._closed()
