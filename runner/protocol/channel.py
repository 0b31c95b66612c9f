"""The stream of frames between the launcher and an agent.

Launcher and agents each run one event loop, which no stream may block. How much waits to be written is bounded by the
users of the channel (credit for output, a low-water mark for results).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hvdgloo._net.channel import Channel, Pipes
from hvdgloo.runner.protocol.frames import Beat, Decoder, Frame, Noise, encode

if TYPE_CHECKING:
    from hvdgloo._net.frame_mac import FrameMac


class FrameChannel(Channel[Frame | Noise]):
    """Frames over ``receive_fd`` and ``send_fd``, which become non-blocking.

    Args:
        receive, send: the descriptors.
        preamble: the bytes that precede the first frame that arrives.
        sending, receiving: make and check the tags of frames; None if there are no tags.

    Attributes:
        ended: True if everything that the other side ever sent has been received.
        broken: True if the other side has stopped reading; what is sent is dropped.
    """

    def __init__(
        self,
        receive: int,
        send: int,
        *,
        preamble: bytes = b"",
        sending: FrameMac | None = None,
        receiving: FrameMac | None = None,
    ) -> None:
        self.receive_fd = receive
        self.send_fd = send
        self.decoder = Decoder(preamble, receiving)
        self.ended = False
        self.broken = False
        super().__init__(Pipes(receive, send), self.decoder.feed, sending)

    @property
    def lost(self) -> bool:
        """True if one of the two directions is closed."""
        return self.ended or self.broken

    def receive(self) -> list[Frame | Noise]:
        """Return what has arrived; set ``ended`` at the end of the stream.

        Raises:
            LaunchError: the bytes are not frames.
        """
        try:
            return super().receive()
        except (EOFError, OSError):
            self.ended = True
            return []

    def send(self, frame: Frame) -> None:
        """Write the frame, or keep it until ``flush``."""
        if not self.broken:
            self.send_frame(encode(frame))

    def send_bytes(self, data: bytes) -> None:
        """Write bytes that are no frame, as ``send`` does."""
        if not self.broken:
            self._unsent += data
            self.flush()

    def beat(self) -> None:
        """Show life; unnecessary while other bytes are on their way."""
        if not self.pending:
            self.send(Beat())

    def unanswered(self) -> float:
        """Return the seconds for which the other side's kernel has owed an answer, which it gives whatever its process
        is doing. Infinite where the stream does not tell, as pipes do not.
        """
        return math.inf

    def flush(self) -> None:
        """Write as much as the stream accepts now."""
        try:
            super().flush()
        except OSError:
            self.broken = True
            self._unsent.clear()
