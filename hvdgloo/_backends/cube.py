"""The exchanges between ranks where there are too many for a ring: with neighbours in a hypercube.

Ranks are the corners of a cube with as many dimensions as log2 of their number. In an allreduce a rank halves what it
is responsible for with one neighbour after another, the farthest first, until it has one slice, to which all have
contributed; the same exchanges backwards double what it has, until it has everything (Rabenseifner's algorithm, in
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005). As many bytes
travel as in a ring, in 2 log2(n) steps instead of 2(n - 1). The second half alone is an allgather, the first half alone
a reducescatter, and a broadcast passes its slices along the same edges.

Where the number of ranks is no power of two, the first ones stand on corners in pairs: the even rank speaks for both,
and the odd one has no other neighbour. So what belongs to consecutive corners belongs to consecutive ranks, too.

Pure: nothing here sends anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BYTES_PER_RANK, BYTES_PER_STEP = 1 << 19, 1 << 14
"""A tensor goes through the cube rather than round the ring up to as many bytes for each rank of the group. Where their
number is no power of two, up to as many for each step that is saved: some ranks then receive and send everything once
more, which takes longer than the steps where the network is slow. 8 ranks on 2 cores: 0.8 ms of each rank's processor
time instead of 2.2 for 1 MiB, equal at 4 MiB, 16 instead of 14 at 16 MiB. 128 ranks: 14 instead of 34 for 4 MiB."""


@dataclass(frozen=True)
class Exchange:
    """An exchange between a rank and a neighbour.

    Attributes:
        peer: the neighbour's rank.
        mine, theirs: the slices that are this rank's and the neighbour's, after this exchange in a halving, and before
            it in a doubling: their first corner, and the one after their last.
    """

    peer: int
    mine: tuple[int, int]
    theirs: tuple[int, int]

    @property
    def leads(self) -> bool:
        """True if this rank's values come before the neighbour's where they are combined."""
        return self.mine < self.theirs


@dataclass(frozen=True)
class Cube:
    """One rank's view of the cube of ``size`` ranks."""

    rank: int
    size: int

    @cached_property
    def corners(self) -> int:
        """Their number, a power of two."""
        return 1 << (self.size.bit_length() - 1)

    @cached_property
    def corner(self) -> int:
        """The one on which this rank stands."""
        return self.corner_of(self.rank)

    @cached_property
    def speaker(self) -> int | None:
        """The rank that speaks for this one; None if it speaks for itself."""
        first = self.first_rank(self.corner)
        return None if first == self.rank else first

    @cached_property
    def ward(self) -> int | None:
        """The rank that this one speaks for, besides itself."""
        other = self.rank + 1
        return other if self.speaker is None and other < self.first_rank(self.corner + 1) else None

    @cached_property
    def halvings(self) -> tuple[Exchange, ...]:
        """This rank's exchanges, the farthest neighbour first; none if another rank speaks for it."""
        if self.speaker is not None:
            return ()
        found = []
        distance = self.corners // 2
        while distance:
            mine = self.corner // distance * distance
            theirs = mine ^ distance
            peer = self.first_rank(self.corner ^ distance)
            found.append(Exchange(peer, (mine, mine + distance), (theirs, theirs + distance)))
            distance //= 2
        return tuple(found)

    @property
    def steps(self) -> int:
        """The number of exchanges in an allreduce, one after another."""
        in_pairs = 2 if self.corners < self.size else 0
        return 2 * (self.corners.bit_length() - 1) + in_pairs

    @cached_property
    def most_bytes(self) -> int:
        """Up to how many bytes a tensor goes through the cube."""
        if self.corners == self.size:
            return self.size * BYTES_PER_RANK
        return BYTES_PER_STEP * (2 * (self.size - 1) - self.steps)

    @property
    def neighbours(self) -> list[int]:
        """All ranks with which this one is to be connected: in the cube, and in a ring, which large tensors take."""
        if self.size == 1:
            return []
        found = {(self.rank - 1) % self.size, (self.rank + 1) % self.size}
        found.update(exchange.peer for exchange in self.halvings)
        found.update(rank for rank in (self.speaker, self.ward) if rank is not None)
        return sorted(found)

    def corner_of(self, rank: int) -> int:
        """The corner on which a rank stands."""
        paired = 2 * (self.size - self.corners)
        return rank // 2 if rank < paired else rank - paired // 2

    def first_rank(self, corner: int) -> int:
        """The first rank on a corner: the one that speaks for it. For the number of corners, the number of ranks."""
        return min(2 * corner, corner + self.size - self.corners)

    def passes_on(self, exchange: Exchange, root: int) -> bool | None:
        """Return whether a rank passes something on in one of a broadcast's exchanges, which go in the order of a
        halving.

        Args:
            root: the corner from which the broadcast comes.

        Returns:
            True if it sends, False if it receives; None if it has nothing yet, and gets nothing.
        """
        distance = exchange.mine[1] - exchange.mine[0]
        place = (self.corner ^ root) % (2 * distance)
        return True if place == 0 else False if place == distance else None
