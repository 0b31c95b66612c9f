"""Record of the collectives that each rank of a segment has begun, for programs in which nothing else compares them.

Each rank writes a number, a description of its call and the time into a ring in its page of words before it makes the
call's first step. A rank that has seen that step can compare the descriptions: ranks that call different collectives
get an error that names both, instead of waiting for each other or combining what does not belong together. From the
times every rank knows which of them was the last, and for how long it waited.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdgloo._backends.shm.segment import CALLS, Segment
from hvdgloo.types import DType

_RING = 64
"""Calls that are kept. No rank is further ahead of another: there are fewer slots, and each call uses one."""

_NUMBER_BITS = 16
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_ENTRY = 3
"""Words of a call: two that describe it, and the time in microseconds of the host's monotonic clock."""

_DTYPES = list(DType)
_NONE = 255


@dataclass(frozen=True)
class Call:
    """A collective as all ranks must call it.

    Attributes:
        kind: one of ``KINDS``.
        dtype, op: of a reduction, the op one of ``OPS``; None and "" where elements are only moved.
        root: rank that sends or receives; 0 for calls without one.
        count: elements of a reduction, bytes of what is moved; 0 where ranks may give different sizes.
    """

    kind: str
    dtype: DType | None = None
    op: str = ""
    root: int = 0
    count: int = 0

    KINDS = (
        "?", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
        "barrier", "all_reduce_coalesced", "message",
    )  # fmt: skip
    OPS = ("", "SUM", "AVG", "PREMUL_SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")

    def packed(self, number: int) -> tuple[int, int]:
        """Return the two words that describe the call, each with its number."""
        dtype = _NONE if self.dtype is None else _DTYPES.index(self.dtype)
        first = self.KINDS.index(self.kind) | dtype << 8 | self.OPS.index(self.op) << 16 | self.root << 24
        return first << _NUMBER_BITS | number, (self.count & (1 << 48) - 1) << _NUMBER_BITS | number

    @classmethod
    def unpacked(cls, first: int, second: int) -> Call:
        """Return the call that two words describe."""
        first >>= _NUMBER_BITS
        dtype, op = first >> 8 & 255, first >> 16 & 255
        return cls(
            cls.KINDS[first & 255],
            None if dtype == _NONE else _DTYPES[dtype],
            cls.OPS[op],
            first >> 24,
            second >> _NUMBER_BITS,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that each rank gives; 0 where ranks may give different sizes."""
        return self.count if self.dtype is None else self.count * self.dtype.itemsize

    def __str__(self) -> str:
        if self.kind == "barrier":
            return "barrier"
        parts = [self.op] if self.op else []
        if self.count:
            parts.append(f"{self.count} {'bytes' if self.dtype is None else f'x {self.dtype}'}")
        if self.kind in ("broadcast", "reduce", "gather", "scatter"):
            parts.append(f"root {self.root}")
        return f"{self.kind}({', '.join(parts)})"


def different(rank: int, call: Call, other: int, theirs: Call) -> str:
    """Return the names of two ranks' calls that differ."""
    return f"rank {rank} called {call}, but rank {other} called {theirs}"


class Calls:
    """One rank's record, and its view of the others'.

    Args:
        first_rank: number in messages of the segment's first rank.
    """

    def __init__(self, segment: Segment, first_rank: int = 0) -> None:
        self._first_rank = first_rank
        self._rank, self._words = segment.rank, [segment.words_of(rank) for rank in range(segment.size)]
        self._own = self._words[segment.rank]
        self._others = [(rank, words) for rank, words in enumerate(self._words) if rank != segment.rank]
        self._number = 0
        self._first = self._second = self._at = self._time = 0
        self._known: dict[Call, tuple[int, int]] = {}
        self._call, self._packed = Call("?"), (0, 0)  # of the last call: a program often repeats it

    def begin(self, call: Call, now: float) -> None:
        """Record a call, before its first step.

        Args:
            now: time on the monotonic clock.
        """
        if call is not self._call:
            known = self._known.get(call)
            if known is None:
                known = self._known[call] = call.packed(0)
            self._call, self._packed = call, known
        known = self._packed
        number = self._number = self._number + 1 & _NUMBER_MASK
        at = self._at = CALLS + _ENTRY * (number % _RING)
        own = self._own
        own[at] = self._first = known[0] | number
        own[at + 1] = self._second = known[1] | number
        own[at + 2] = self._time = int(now * 1e6) << _NUMBER_BITS | number

    def mismatch(self) -> str | None:
        """Return the names of this rank's call and of another rank's, if the two differ; a rank that has not come as
        far agrees."""
        at, first, second = self._at, self._first, self._second
        number = first & _NUMBER_MASK
        if not first:
            return None  # this rank has made no call
        for rank, words in self._others:
            theirs = words[at], words[at + 1]
            if theirs == (first, second):
                continue
            if theirs[0] & _NUMBER_MASK == number == theirs[1] & _NUMBER_MASK:
                return self._difference(self._rank, (first, second), rank, theirs)
        return None

    def earlier_mismatch(self) -> str | None:
        """Return the names of the first two calls that differ among those that are still recorded, of any two ranks.

        A rank that need not wait for others, such as the root of a broadcast, may be ahead of the call that differs,
        and another rank may be behind it.
        """
        found: list[tuple[int, str]] = []
        for place in range(_RING):
            at = CALLS + _ENTRY * place
            known: dict[int, tuple[int, tuple[int, int]]] = {}
            for rank in (self._rank, *(rank for rank, _ in self._others)):
                theirs = self._words[rank][at], self._words[rank][at + 1]
                number = theirs[0] & _NUMBER_MASK
                if not theirs[0] or theirs[1] & _NUMBER_MASK != number:
                    continue  # none yet, or one that is being written
                other, call = known.setdefault(number, (rank, theirs))
                if call != theirs:
                    ahead = (number - self._number + _NUMBER_MASK // 2) & _NUMBER_MASK
                    found.append((ahead, self._difference(other, call, rank, theirs)))
                    break
        return min(found)[1] if found else None

    def _difference(self, rank: int, call: tuple[int, int], other: int, theirs: tuple[int, int]) -> str:
        return different(
            self._first_rank + rank, Call.unpacked(*call), self._first_rank + other, Call.unpacked(*theirs)
        )

    def latest(self, rank: int) -> tuple[Call | None, bool, float]:
        """Return a rank's latest call and the time at which it began, for messages.

        Returns:
            the call, None before the first; whether it is this rank's current one, or a later one; and its time on the
            monotonic clock.
        """
        words = self._words[rank]
        current, latest = -1, (0, 0, 0)
        for place in range(_RING):
            at = CALLS + _ENTRY * place
            entry = words[at], words[at + 1], words[at + 2]
            number = entry[0] & _NUMBER_MASK
            if not entry[0] or any(word & _NUMBER_MASK != number for word in entry):
                continue
            ahead = (number - self._number + _NUMBER_MASK // 2) & _NUMBER_MASK
            if ahead > current:
                current, latest = ahead, entry
        if current < 0:
            return None, False, 0.0
        call = Call.unpacked(latest[0], latest[1])
        return call, current >= _NUMBER_MASK // 2, (latest[2] >> _NUMBER_BITS) * 1e-6

    def arrivals(self) -> tuple[int, int, int] | None:
        """Return the rank that was the last to begin this rank's call, and for how many microseconds this rank and the
        first one had waited for it; None if some rank has not begun it.
        """
        own = first = last = self._time
        number, at, late = self._number, self._at + 2, self._rank
        for rank, words in self._others:
            time = words[at]
            if time & _NUMBER_MASK != number:
                return None
            if time > last:
                last, late = time, rank
            elif time < first:
                first = time
        return late, last - own >> _NUMBER_BITS, last - first >> _NUMBER_BITS

    def absent(self) -> list[int]:
        """Return the ranks that have not begun this rank's call."""
        number, at = self._number, self._at + 2
        return [rank for rank, words in self._others if words[at] & _NUMBER_MASK != number]
