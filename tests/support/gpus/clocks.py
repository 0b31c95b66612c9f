"""A vector-clock checker: the order of operations, and accesses to one memory that have no order.

A stream is a sequence of numbered operations. A *clock* says how far its owner knows each stream to be: an operation
comes after another if its clock has reached that one's number. Clocks travel with events, and through the host once it
has seen an event.

torch has a checker of this kind (``torch.cuda._sanitizer``). It takes an address for a tensor, so parts of a bucket and
blocks that are used again are strangers to it; it has one host and one current stream. Here there are several processes
(ranks) with several threads each, and memory is compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class Clock(dict[int, int]):
    """The number of the last operation that is known of each stream, by the stream's id."""

    def join(self, other: Mapping[int, int]) -> None:
        """Know what another clock's owner knows, too."""
        for stream, number in other.items():
            if self.get(stream, 0) < number:
                self[stream] = number


@dataclass(frozen=True)
class Access:
    """An operation's access to a range of bytes.

    Attributes:
        begin, end: addresses.
        writes: it changes them.
        stream, number: of the operation.
        what: the operation, for messages.
    """

    begin: int
    end: int
    writes: bool
    stream: int
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on stream {self.stream} {'writes' if self.writes else 'reads'}"


@dataclass
class History:
    """The accesses to one block of memory that later ones must be compared with."""

    accesses: list[Access] = field(default_factory=list)

    def conflicts(self, new: Access, clock: Mapping[int, int]) -> list[Access]:
        """Earlier accesses to the same bytes, one of the two a write, that an operation does not come after.

        Args:
            clock: the operation's.
        """
        return [
            old
            for old in self.accesses
            if old.begin < new.end
            and new.begin < old.end
            and (old.writes or new.writes)
            and clock.get(old.stream, 0) < old.number
        ]

    def add(self, new: Access, clock: Mapping[int, int]) -> None:
        """Remember an access, and forget earlier ones of which it tells as much."""
        self.accesses = [old for old in self.accesses if not _tells_as_much(new, old, clock)]
        self.accesses.append(new)


def _tells_as_much(new: Access, old: Access, clock: Mapping[int, int]) -> bool:
    covers = new.begin <= old.begin and old.end <= new.end
    return covers and clock.get(old.stream, 0) >= old.number and (new.writes or not old.writes)


def races(history: History, clock: Mapping[int, int], new: Iterable[Access]) -> list[str]:
    """Return the unordered accesses of an operation to a block, and add its accesses to the block's history."""
    found = []
    for access in new:
        found += [f"{access}, and nothing orders it after: {old}" for old in history.conflicts(access, clock)]
        history.add(access, clock)
    return found
