"""A stream of frames over two descriptors that never blocks its owner.

Launcher and agents each run one selector loop. A Channel reads what has arrived, and keeps what cannot be written yet;
how much that may become is bounded by its users (credit for output, a low-water mark for results).
"""

from __future__ import annotations

import math
import os
from collections import deque

from hvdgloo._net.framing import Mac
from hvdgloo.runner.protocol.frames import Beat, Decoder, Frame, Noise, encode

_READ = 256 * 1024


class Channel:
    """Frames over ``receive`` and ``send``, which become non-blocking.

    Args:
        preamble: what precedes the first frame that arrives.
        mac: checks the tags that follow frames that arrive; None if none follow.

    Attributes:
        ended: whether everything that the other side ever sent has been received.
        broken: whether the other side has stopped reading; what is sent is dropped.
        pending: bytes that wait to be written.
    """

    def __init__(self, receive: int, send: int, *, preamble: bytes = b"", mac: Mac | None = None) -> None:
        self.receive_fd = receive
        self.send_fd = send
        self.decoder = Decoder(preamble, mac)
        self.ended = False
        self.broken = False
        self.pending = 0
        self._out: deque[memoryview] = deque()
        os.set_blocking(receive, False)
        os.set_blocking(send, False)

    @property
    def lost(self) -> bool:
        """Whether one of the two directions is closed."""
        return self.ended or self.broken

    def receive(self) -> list[Frame | Noise]:
        """What has arrived; sets ``ended`` at the end of the stream.

        Raises:
            LaunchError: the bytes are not frames.
        """
        try:
            data = os.read(self.receive_fd, _READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if data:
            return self.decoder.feed(data)
        self.ended = True
        return []

    def send(self, frame: Frame) -> None:
        """Write the frame, or keep it until ``flush``."""
        self.send_bytes(encode(frame))

    def send_bytes(self, data: bytes | bytearray) -> None:
        if self.broken:
            return
        self._out.append(memoryview(data))
        self.pending += len(data)
        if len(self._out) == 1:
            self.flush()

    def beat(self) -> None:
        """Show life; unnecessary while other bytes are on their way."""
        if not self.pending:
            self.send(Beat())

    def unanswered(self) -> float:
        """Seconds for which the other side's kernel, which answers whatever its process is doing, has owed an answer.

        Infinite where the stream does not tell, as pipes do not.
        """
        return math.inf

    def flush(self) -> None:
        """Write as much as the stream accepts now."""
        while self._out:
            try:
                written = os.write(self.send_fd, self._out[0])
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                self._out.clear()
                self.pending = 0
                return
            self.pending -= written
            if written == len(self._out[0]):
                self._out.popleft()
            else:
                self._out[0] = self._out[0][written:]
