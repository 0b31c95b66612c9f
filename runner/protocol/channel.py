"""A stream of frames over two descriptors that never blocks its owner.

Launcher and agents each run one selector loop. A Channel reads what has arrived, and keeps what cannot be written yet;
its users bound that amount (by credit for output, and a low-water mark for results).
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
        preamble: the bytes that precede the first frame that arrives.
        mac: checks the tags that follow arriving frames; None if there are no tags.

    Attributes:
        ended: True once all data from the other side has been received.
        broken: True once the other side has stopped reading; frames are then dropped.
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
        """True if either of the two directions is closed."""
        return self.ended or self.broken

    def receive(self) -> list[Frame | Noise]:
        """Return the frames that have arrived; set ``ended`` at the end of the stream.

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
        """Send a heartbeat, unless other bytes are on their way."""
        if not self.pending:
            self.send(Beat())

    def unanswered(self) -> float:
        """Return the seconds for which the other side's kernel, which answers even if its process is busy, has owed an
        answer.

        The result is infinite if the stream does not tell, as is the case for pipes.
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
