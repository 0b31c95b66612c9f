"""Readiness of operations that are known by number: whether all their ranks have announced them, many at a time.

Operations that are known by number are bits. A number is a block and a bit of it, and a block belongs to one process
set, so that all its operations wait for the same sources: the ranks of the set, or leaders that speak for several of
them. How often each operation of a block has been announced is counted in *bit-sliced* counters: plane ``i`` is an
integer that holds bit ``i`` of every operation's counter, so adding an announcement to any number of counters takes a
few operations on integers. The counters begin so far below their limit that the last source makes them overflow: what
is carried out of the highest plane is the set of operations that have just become whole.

Pure, and without knowledge of messages; ``negotiation`` puts names to the numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeAlias

BLOCK_BITS = 10
"""A block has two to the power of this many numbers."""

_BLOCK = 1 << BLOCK_BITS

Masks: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers as pairs: a block, and the mask of its bits."""


def masks_of(numbers: tuple[int, ...]) -> Masks:
    """The inverse of ``numbers_of``, for numbers of any blocks in any order."""
    if not numbers:
        return ()
    first, count = numbers[0], len(numbers)
    block, bit = divmod(first, _BLOCK)
    if bit + count <= _BLOCK and numbers == tuple(range(first, first + count)):  # usually a part of a steady step
        return ((block, ((1 << count) - 1) << bit),)
    masks: dict[int, int] = {}
    for number in numbers:
        block, bit = divmod(number, _BLOCK)
        masks[block] = masks.get(block, 0) | 1 << bit
    return tuple(masks.items())


def numbers_of(block: int, mask: int) -> list[int]:
    """The numbers of a block's bits, ascending."""
    first = block * _BLOCK
    return [first + bit for bit in bits_of(mask)]


def bits_of(mask: int) -> list[int]:
    """The positions of the bits that are set, ascending."""
    if not mask:
        return []
    # From the lowest on: a high rank by itself is one step, not as many as there are ranks below it.
    lowest = (mask & -mask).bit_length() - 1
    return [position for position, bit in enumerate(bin(mask >> lowest)[:1:-1], lowest) if bit == "1"]


def mask_of(bits: Iterable[int]) -> int:
    """The inverse of ``bits_of``."""
    mask = 0
    for bit in bits:
        mask |= 1 << bit
    return mask


class Block:
    """Numbers of one process set: which of them are announced by whom, and since when.

    Args:
        first: its first number.
        sources: who has to announce a number before it is whole.

    Attributes:
        used: the numbers that stand for something, as a mask.
        open: those that are counted here. The owner opens a number, and ``withdraw`` closes it.
        begun: the numbers that some sources have announced and others have not.
        completed_since: of the numbers that have become whole last, when the first of them was announced first.
    """

    __slots__ = (
        "_announced",
        "_begins_at",
        "_planes",
        "_since",
        "begun",
        "completed_since",
        "first",
        "open",
        "process_set",
        "sources",
        "used",
    )

    def __init__(self, first: int, process_set: int, sources: Collection[int]) -> None:
        self.first = first
        self.process_set = process_set
        self.sources = frozenset(sources)
        self.used = self.open = self.begun = 0
        self.completed_since = 0.0
        count = len(self.sources)
        planes = count.bit_length()
        self._begins_at = [(1 << planes) - count >> plane & 1 for plane in range(planes)]
        self._planes = [0] * planes
        # By source, what it has announced of what has begun; and what has begun when.
        self._announced: dict[int, int] = {}
        self._since: list[tuple[float, int]] = []

    def announce(self, source: int, mask: int, since: float) -> int:
        """Count a source's announcement of open numbers, made at the time ``since`` in seconds. A repeated one does not
        count.

        Returns:
            the numbers that have now been announced by all sources; they may be announced again.
        """
        before = self._announced.get(source, 0)
        mask &= ~before
        if not mask:
            return 0
        self._announced[source] = before | mask
        planes = self._planes
        new = mask & ~self.begun
        if new:
            self.begun |= new
            self._since.append((since, new))
            for plane, bit in enumerate(self._begins_at):
                planes[plane] = planes[plane] | new if bit else planes[plane] & ~new
        carried = mask
        for plane, bits in enumerate(planes):
            planes[plane] = bits ^ carried
            carried &= bits
            if not carried:
                return 0
        begun = self._since
        self.completed_since = begun[0][0] if len(begun) == 1 else min([time for time, bits in begun if bits & carried])
        self._drop(carried)
        return carried

    @property
    def oldest(self) -> float | None:
        """The time at which the first of the pending numbers was announced; None if there is none."""
        return min([time for time, _ in self._since], default=None)

    def withdraw(self, mask: int) -> list[tuple[int, float, list[int]]]:
        """Close numbers, and hand over what is known of them.

        Returns:
            for each that has begun: the number, since when, and the sources that had announced it.
        """
        self.open &= ~mask
        if not mask & self.begun:
            return []
        taken = self._described(mask & self.begun)
        self._drop(mask)
        return taken

    def waiting(self) -> list[tuple[int, float, list[int]]]:
        """As ``withdraw`` of all that has begun, which goes on nevertheless."""
        return self._described(self.begun)

    def _described(self, mask: int) -> list[tuple[int, float, list[int]]]:
        described = []
        for bit in bits_of(mask):
            since = next(time for time, begun in self._since if begun >> bit & 1)
            announced = [source for source, announced in self._announced.items() if announced >> bit & 1]
            described.append((self.first + bit, since, announced))
        return described

    def _drop(self, mask: int) -> None:
        """Forget the announcements of these numbers. Counters are set when a number begins again."""
        keep = self.begun & ~mask
        if keep == self.begun:
            return
        self.begun = keep
        if keep:
            self._announced = {s: left for s, announced in self._announced.items() if (left := announced & keep)}
            self._since = [(time, left) for time, begun in self._since if (left := begun & keep)]
        else:
            self._announced.clear()
            self._since.clear()


class Ledger:
    """All blocks that hold a number in use, by the upper part of their numbers.

    Attributes:
        blocks: by that upper part.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._next: dict[int, int] = {}
        self._next_block = 0

    @property
    def busy(self) -> bool:
        """True if some number is pending."""
        for block in self.blocks.values():  # noqa: SIM110 - asked in every turn, and any() takes three times as long
            if block.begun:
                return True
        return False

    def announce(self, source: int, masks: Masks, now: float) -> Masks | None:
        """A source announces numbers, all or none of them.

        Returns:
            those that the other sources had announced before; None if some number is not open, or not this source's.
        """
        blocks = self.blocks
        for at, mask in masks:
            block = blocks.get(at)
            if block is None or mask & ~block.open or source not in block.sources:
                return None
        return tuple([(at, blocks[at].announce(source, mask, now)) for at, mask in masks])

    def waiting(self) -> Iterator[tuple[int, float, list[int], list[int]]]:
        """Yield the numbers that some sources have announced, since when, by which, and by which not."""
        for block in self.blocks.values():
            for number, since, announced in block.waiting():
                yield number, since, sorted(announced), sorted(block.sources.difference(announced))

    def issue(self, process_set: int) -> int:
        """A number that has never been used, for an operation of a process set; ``learn`` takes it into use. All ranks
        see the numbers of the one ledger that issues them."""
        number = self._next.get(process_set, 0)
        if number % _BLOCK == 0:  # the block is full, or there is none yet
            number = self._next_block * _BLOCK
            self._next_block += 1
        self._next[process_set] = number + 1
        return number

    def learn(self, number: int, process_set: int, sources: Collection[int]) -> tuple[Block, int]:
        """A number is in use from now on, and open; all ``sources`` have to announce it. Returns its place."""
        at, bit = divmod(number, _BLOCK)
        block = self.blocks.get(at)
        if block is None:
            block = self.blocks[at] = Block(at * _BLOCK, process_set, sources)
        block.used |= 1 << bit
        block.open |= 1 << bit
        return block, 1 << bit

    def place(self, number: int) -> tuple[Block, int]:
        """The block of a number in use, and the mask of its bit."""
        at, bit = divmod(number, _BLOCK)
        return self.blocks[at], 1 << bit

    def reopen(self, number: int) -> None:
        """A number that was withdrawn is counted again."""
        block, bit = self.place(number)
        block.open |= bit

    def forget(self, number: int) -> None:
        """A number stands for nothing any more."""
        at, bit = divmod(number, _BLOCK)
        block = self.blocks[at]
        block.withdraw(1 << bit)
        block.used &= ~(1 << bit)
        if not block.used:
            del self.blocks[at]

    def drop_set(self, process_set: int) -> None:
        """A process set has been removed: none of its numbers stands for anything."""
        self.blocks = {at: block for at, block in self.blocks.items() if block.process_set != process_set}
        self._next.pop(process_set, None)
