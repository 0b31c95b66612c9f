"""The places of ranks in the tree (``tree``): by arithmetic, from the number of ranks on each host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdgloo._engine.conventions import ATTRIBUTION_SECONDS

_ATTRIBUTION_STEP = 0.25
"""Seconds more for each level of leaders when a failure is attributed: a leader waits longer than those that it
asks."""

_ATTRIBUTION_STEPS = 1.5
"""Seconds more for all levels together, however many there are: a rank does not wait for a verdict for ever."""


@dataclass(frozen=True)
class TreePosition:
    """One rank's place in the tree.

    Attributes:
        rank: whose it is.
        parent: the rank that it reports to; -1 for the root.
        below: by child, the ranks that it speaks for, as a mask; a leader is a child of itself.
        leaders: the children that are leaders, of other hosts.
        height: how many levels of leaders are below.
        levels: how many levels of leaders there are below the root.
    """

    rank: int
    parent: int
    below: Mapping[int, int]
    leaders: frozenset[int]
    height: int
    levels: int

    @property
    def everyone(self) -> int:
        """All ranks that it speaks for, as a mask."""
        ranks = 0
        for below in self.below.values():
            ranks |= below
        return ranks

    @property
    def children(self) -> tuple[int, ...]:
        """Those that have a connection with this rank and report to it."""
        return tuple([child for child in self.below if child != self.rank])

    @property
    def members(self) -> frozenset[int]:
        """The children on the same host."""
        return frozenset(self.children) - self.leaders

    @property
    def attribution_seconds(self) -> float:
        """The seconds that the ranks below have to give a sign of life."""
        return ATTRIBUTION_SECONDS + self.height * min(_ATTRIBUTION_STEP, _ATTRIBUTION_STEPS / max(1, self.levels))


def position_of(rank: int, slots: Sequence[int], fanin: int) -> TreePosition:
    """A rank's place.

    Args:
        slots: the number of ranks on each host, which are numbered in order of hosts.
        fanin: how many leaders report to one.
    """
    firsts = list(accumulate(slots, initial=0))[:-1]
    masks = [((1 << count) - 1) << first for first, count in zip(firsts, slots, strict=True)]
    heights = [0] * len(slots)
    for host in range(len(slots) - 1, 0, -1):
        above = (host - 1) // fanin
        masks[above] |= masks[host]
        heights[above] = max(heights[above], heights[host] + 1)
    host = bisect_right(firsts, rank) - 1
    leader = firsts[host]
    if rank != leader:
        return TreePosition(rank, leader, {}, frozenset(), 0, heights[0])
    hosts = range(host * fanin + 1, min(len(slots), host * fanin + fanin + 1))
    below = {member: 1 << member for member in range(leader, leader + slots[host])}
    below.update({firsts[child]: masks[child] for child in hosts})
    parent = firsts[(host - 1) // fanin] if host else -1
    return TreePosition(rank, parent, below, frozenset(firsts[child] for child in hosts), heights[host], heights[0])
