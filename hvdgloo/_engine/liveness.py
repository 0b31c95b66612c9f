"""Liveness of the ranks at the other ends of connections. They are asked only while some rank waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hvdgloo._engine.conventions import ping_interval
from hvdgloo._engine.readiness import mask_of


class Liveness:
    """The heartbeats of some peers.

    Args:
        peers: their ranks.
        timeout: seconds after which a silent one counts as lost.
        at_once: ping as soon as some rank waits, not an interval later. So it is in a tree, where a ping has others
            ping in turn: their intervals would add up.

    Attributes:
        deadline: when ``tick`` has something to do next; None while no rank waits.
    """

    def __init__(self, peers: Iterable[int], timeout: float, *, at_once: bool = False) -> None:
        self.deadline: float | None = None
        self._timeout = timeout
        self._at_once = at_once
        self._heard = dict.fromkeys(peers, float("-inf"))
        self._since = float("-inf")
        self._asked = float("-inf")

    def heard(self, peer: int, now: float) -> None:
        """Note that a message arrived, from a peer or another rank."""
        if peer in self._heard:
            self._heard[peer] = now

    def rests(self, now: float) -> bool:
        """Return whether ``tick`` has nothing to do yet, so that there is no need to find out if any rank waits."""
        return self.deadline is not None and now < self.deadline

    def tick(self, now: float, *, active: bool) -> tuple[bool, list[tuple[int, str]]]:
        """Let time pass.

        Args:
            active: some rank waits for the peers, or for what they pass on.

        Returns:
            whether to ping them all now, and those that are lost, with the reason.
        """
        if self.deadline is None:
            if active and self._heard:
                self._since = self._asked = now
                self.deadline = now + ping_interval(self._timeout)
                return self._at_once, []
            return False, []
        if now < self.deadline:
            return False, []
        if not active:
            # Only now: disarmed after each operation, the next one would have to wake the control thread to arm it.
            self.deadline = None
            return False, []
        lost = []
        for peer, heard in self._heard.items():
            silence = now - max(heard, self._since)
            if silence >= self._timeout:
                reason = (
                    f"it has not answered for {silence:.0f} s (stopped, swapping, or cut off from the network); "
                    "HVDGLOO_OPERATION_TIMEOUT sets this limit"
                )
                lost.append((peer, reason))
        ping = now >= self._asked + ping_interval(self._timeout)
        if ping:
            self._asked = now
        self.deadline = self._asked + ping_interval(self._timeout)
        if not lost:
            self.deadline = min(self.deadline, max(self._since, min(self._heard.values())) + self._timeout)
        return ping, lost


class RollCall:
    """A question to all ranks for a sign of life, and the ranks that have given one.

    Args:
        asked: those who answer for themselves, or for others as well.
        deadline: when those who have not answered count as silent.
    """

    def __init__(self, asked: Iterable[int], deadline: float) -> None:
        self.deadline = deadline
        self._awaited = set(asked)
        self._reported = 0

    def answered(self, rank: int, silent: int) -> bool:
        """A rank has answered, and for others whether they are silent, as a mask; True if all have."""
        self._awaited.discard(rank)
        self._reported |= silent
        return not self._awaited

    @property
    def silent(self) -> int:
        """The silent ones, as a mask."""
        return self._reported | mask_of(self._awaited)
