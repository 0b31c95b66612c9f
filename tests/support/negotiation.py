"""The ranks' real Members and rank 0's real Negotiator, without a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hvdgloo._engine.member import Member
from hvdgloo._engine.messages import Execute, Resend, Submit, decode, encode
from hvdgloo._engine.negotiation import Negotiator


class Negotiation:
    """Members and a Negotiator, joined by queues that keep order on each link and deliver in any order otherwise.

    Every message goes through its bytes.

    Attributes:
        resends: how often a rank was asked to spell a request out again.
        inlined: results that have travelled with the orders.
    """

    def __init__(self, size: int, capacity: int, inline: int = 0) -> None:
        everyone = {0: tuple(range(size))}
        self.size = size
        self.members = [Member(rank, everyone, inline) for rank in range(size)]
        self.negotiator = Negotiator(everyone, capacity)
        self.up: list[deque[bytes]] = [deque() for _ in range(size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(size)]
        self.resends = self.inlined = 0

    def actions(self) -> list[Callable[[], None]]:
        """Return what can happen next."""
        found: list[Callable[[], None]] = []
        for rank in range(self.size):
            if self.members[rank]._new:
                found.append(lambda rank=rank: self._drain(rank))  # type: ignore[misc]
            if self.up[rank]:
                found.append(lambda rank=rank: self._absorb(rank))  # type: ignore[misc]
            if self.down[rank]:
                found.append(lambda rank=rank: self._deliver(rank))  # type: ignore[misc]
        if self.negotiator.has_ready:
            found.append(self._release)
        return found

    def execute(self, rank: int, message: Execute) -> None:
        """Have a rank carry out what was ordered."""
        raise NotImplementedError

    def _drain(self, rank: int) -> None:
        submission = self.members[rank].drain()
        assert submission is not None
        self.up[rank].append(encode(submission))

    def _absorb(self, rank: int) -> None:
        submission = decode(self.up[rank].popleft())
        assert isinstance(submission, Submit)
        unknown = self.negotiator.absorb(rank, submission, 0.0)
        if unknown:
            self.down[rank].append(encode(Resend(tuple(unknown))))

    def _release(self) -> None:
        message = self.negotiator.take()
        self.inlined += len(message.results)
        for queue in self.down:
            queue.append(encode(message))

    def _deliver(self, rank: int) -> None:
        message = decode(self.down[rank].popleft())
        if isinstance(message, Resend):
            self.resends += 1
            self.up[rank].append(encode(self.members[rank].resend(message.signatures)))
            return
        assert isinstance(message, Execute)
        self.execute(rank, message)
