"""Collectives through the shared segment, in rounds: a payload of any size passes through room of a fixed size.

A rank's room is SLOTS slots; round n uses slot n modulo SLOTS. In each round a rank copies in what others need, tells
them, and takes out what it needs of theirs; it copies the next round in before it waits for this one's peers, so that
no rank waits while there is something to do. A slot is written again when every rank has released the round before.

Each collective is a generator that yields what it waits for, or None where it may be interrupted. All ranks count the
same steps for it, whatever their part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.shm.reduction import Array, Reducer, Reduction, divided, scale
from hvdgloo._backends.shm.segment import Segment, array_at
from hvdgloo._backends.shm.signals import PROGRESS, RELEASED, Signals
from hvdgloo._backends.shm.tensors import Tensors, cut
from hvdgloo.types import Buffer

Wait = tuple[int, int, int]
"""A condition: the number, the rank, and the value that it must have reached."""

Steps = Iterator[Wait | None]

SLOTS = 3
_GRAIN = 64

_AT_ONCE_BYTES = 1 << 14
"""The size up to which every rank computes an allreduce for itself: one wait instead of two."""


_MOST_ROUNDS = 1 << 11
"""The number of rounds of earlier allreduces that stay prepared: for 2 to 3 GB of tensors, in a few MB."""


@dataclass(slots=True)
class _Round:
    """The memory that one round of an allreduce works on. The arrays are views of the tensors' and the segment's
    memory.

    Attributes:
        copied: stretches that the others reduce, in parts, and this rank's room for each.
        own, out: the slice that this rank reduces, before and after, in parts.
        slices: where each rank has copied that slice in, in parts as long.
        combined: where its result goes for the others to take.
        taken: each peer, where its slice's result belongs, and where that is.
    """

    copied: list[tuple[list[Array], Array]]
    own: list[Array]
    out: list[Array]
    slices: list[list[Array]]
    combined: Array
    taken: list[tuple[int, list[Array], list[Array]]]


class Course:
    """The progress of the ranks, in numbers that are the same on all of them between two operations.

    Attributes:
        steps: that every rank has made.
        rounds: that every rank has taken part in.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rounds = 0


class SegmentCollectives:
    """One rank's part in collectives through the segment.

    Attributes:
        at_once_bytes: the size up to which an allreduce or a reducescatter takes one round in which each rank shows all
            of its data, as in ``SmallCollectives``; the same on all ranks.
    """

    def __init__(self, segment: Segment, signals: Signals, reducer: Reducer, course: Course) -> None:
        self._rank, self._size = segment.rank, segment.size
        self._segment, self._signals, self._reducer, self.course = segment, signals, reducer, course
        # Beginning with the next rank: all of them reading from the same one would be slower.
        self._peers = [(self._rank + n) % self._size for n in range(1, self._size)]
        self._capacity = segment.smallest
        self._prepared: dict[tuple[Tensors, Tensors, int], list[_Round]] = {}  # used last, last
        self._prepared_rounds = 0
        self._may_grow = True
        self.at_once_bytes = _AT_ONCE_BYTES

    @property
    def capacity(self) -> int:
        """Bytes per rank that are in use."""
        return self._capacity

    @property
    def slot_bytes(self) -> int:
        """Bytes per rank that one round carries at most."""
        return self._capacity // SLOTS // _GRAIN * _GRAIN

    def allreduce(self, source: Tensors, target: Tensors, reduction: Reduction) -> Steps:
        """Combine all ranks' ``source`` into every rank's ``target``, which may be the same."""
        yield from self._grow(source.nbytes)
        slot, course = self.slot_bytes, self.course
        if source.nbytes <= min(slot, self.at_once_bytes):
            yield from self._allreduce_at_once(source, target, reduction)
            return
        self._begin_at_slot_0()
        base, first = course.steps, course.rounds
        rounds = self._allreduce_rounds(source, target, slot)
        # The steps of a round: copied in (2k, the first one 1), combined (2k + 3).
        yield from self._free(first)
        self._copy_in(rounds[0], reduction)
        self._signals.post(PROGRESS, base + 1)
        for k, this in enumerate(rounds):
            if k + 1 < len(rounds):
                yield from self._free(first + k + 1)
                self._copy_in(rounds[k + 1], reduction)
                self._signals.post(PROGRESS, base + 2 * k + 2)
            yield from self._all(PROGRESS, base + max(1, 2 * k))
            if this.own:
                self._reducer.fold(this.slices.__getitem__, this.own, this.out, reduction)
                _join(this.out, this.combined)
            self._signals.post(PROGRESS, base + 2 * k + 3)
            for peer, places, parts in this.taken:
                yield from self._peer(PROGRESS, peer, base + 2 * k + 3)
                for place, part in zip(places, parts):  # noqa: B905 - of equal length
                    np.copyto(place, part)
            self._signals.post(RELEASED, first + k + 1)
            yield None
        course.steps, course.rounds = base + 2 * len(rounds) + 1, first + len(rounds)

    def _copy_in(self, this: _Round, reduction: Reduction) -> None:
        """Copy in what the others reduce: all but this rank's own slice."""
        for parts, room in this.copied:
            _join(parts, room)
            if reduction.prescale != 1.0:
                scale(room, reduction.dtype, reduction.prescale)

    def _begin_at_slot_0(self) -> None:
        """Leave slots unused, so that tensors that come again find the rounds that were prepared for them."""
        course = self.course
        unused = -course.rounds % SLOTS
        if unused:
            course.rounds += unused
            self._signals.post(RELEASED, course.rounds)

    def _allreduce_rounds(self, source: Tensors, target: Tensors, slot: int) -> list[_Round]:
        """The rounds of an allreduce, kept for the next one of the same tensors."""
        key = source, target, slot
        rounds = self._prepared.pop(key, None)
        if rounds is None:
            rounds = [self._prepare(source, target, k, slot) for k in range(-(-source.nbytes // slot))]
            self._prepared_rounds += len(rounds)
        self._prepared[key] = rounds
        while self._prepared_rounds > _MOST_ROUNDS:
            self._prepared_rounds -= len(self._prepared.pop(next(iter(self._prepared))))
        return rounds

    def _prepare(self, source: Tensors, target: Tensors, k: int, slot: int) -> _Round:
        begin, end = k * slot, min((k + 1) * slot, source.nbytes)
        edges, at = cut(end - begin, self._size), self._slot(k)

        def room(rank: int, low: int, high: int) -> Array:
            return self._segment.data(rank, at + low, high - low).view(source.dtype)

        def parts(tensors: Tensors, low: int, high: int) -> list[Array]:
            return tensors.arrays(begin + low, begin + high)

        mine, behind = edges[self._rank], edges[self._rank + 1]
        own = parts(source, mine, behind)
        taken = []
        for peer in self._peers:
            low, high = edges[peer], edges[peer + 1]
            places = parts(target, low, high)
            taken.append((peer, places, divided(room(peer, low, high), places)))
        return _Round(
            [(parts(source, a, b), room(self._rank, a, b)) for a, b in ((0, mine), (behind, edges[-1])) if a < b],
            own,
            parts(target, mine, behind),
            [divided(room(rank, mine, behind), own) for rank in range(self._size)],
            room(self._rank, mine, behind),
            taken,
        )

    def _allreduce_at_once(self, source: Tensors, target: Tensors, reduction: Reduction) -> Steps:
        course = self.course
        yield from self._free(course.rounds)
        nbytes, at = source.nbytes, self._slot(course.rounds)
        mine = self._segment.data(self._rank, at, nbytes)
        source.copy_to(mine, 0, nbytes)
        if reduction.prescale != 1.0:
            scale(mine.view(reduction.dtype.numpy_dtype), reduction.dtype, reduction.prescale)
        course.steps += 1
        self._signals.post(PROGRESS, course.steps)
        yield from self._all(PROGRESS, course.steps)
        own, out = source.arrays(0, nbytes), target.arrays(0, nbytes)

        def fetch(rank: int) -> Sequence[Array]:
            return divided(self._segment.data(rank, at, nbytes).view(source.dtype), own)

        self._reducer.fold(fetch, own, out, reduction)
        course.rounds += 1
        self._signals.post(RELEASED, course.rounds)

    def reducescatter(self, source: Buffer, target: Buffer, nbytes: Sequence[int], reduction: Reduction) -> Steps:
        """Combine all ranks' ``source``; each gets its block of the result."""
        total = sum(nbytes)
        yield from self._grow(total)
        begins = list(accumulate(nbytes, initial=0))
        if total <= min(self.slot_bytes, self.at_once_bytes):
            piece, places = total, begins
        else:
            piece = self.slot_bytes // self._size // _GRAIN * _GRAIN
            places = [peer * piece for peer in range(self._size)]
        whole, result = Tensors([source]), Tensors([target])

        def copy_in(k: int, at: int) -> None:
            for peer in self._peers:
                low, high = _piece(k, piece, nbytes[peer])
                if low < high:
                    room = self._segment.data(self._rank, at + places[peer], high - low)
                    whole.copy_to(room, begins[peer] + low, begins[peer] + high)

        def take(k: int, at: int) -> Steps:
            low, high = _piece(k, piece, nbytes[self._rank])
            yield from self._all(PROGRESS, base + k + 1)
            if low < high:
                own = whole.arrays(begins[self._rank] + low, begins[self._rank] + high)
                out = result.arrays(low, high)
                place = at + places[self._rank]

                def fetch(rank: int) -> Sequence[Array]:
                    return [self._segment.data(rank, place, high - low).view(whole.dtype)]

                self._reducer.fold(fetch, own, out, reduction)

        base = self.course.steps
        yield from self._rounds(-(-max(nbytes) // piece), copy_in, take)

    def allgather(self, source: Buffer, target: Buffer, nbytes: Sequence[int]) -> Steps:
        """Put all ranks' ``source`` one after another into every rank's ``target``."""
        yield from self._grow(max(nbytes))
        piece = self.slot_bytes
        begins = list(accumulate(nbytes, initial=0))
        own, whole = _bytes(source), _bytes(target)
        in_place = source.address == target.address + begins[self._rank]

        def copy_in(k: int, at: int) -> None:
            low, high = _piece(k, piece, nbytes[self._rank])
            if low < high:
                np.copyto(self._segment.data(self._rank, at, high - low), own[low:high])

        def take(k: int, at: int) -> Steps:
            low, high = _piece(k, piece, nbytes[self._rank])
            begin = begins[self._rank]
            if not in_place:
                np.copyto(whole[begin + low : begin + high], own[low:high])
            for peer in self._peers:
                yield from self._peer(PROGRESS, peer, base + k + 1)
                low, high = _piece(k, piece, nbytes[peer])
                begin = begins[peer]
                np.copyto(whole[begin + low : begin + high], self._segment.data(peer, at, high - low))

        base = self.course.steps
        yield from self._rounds(-(-max(nbytes) // piece), copy_in, take)

    def broadcast(self, buffer: Buffer, root: int) -> Steps:
        """Fill every rank's buffer from the buffer of ``root``."""
        yield from self._grow(buffer.nbytes)
        piece = self.slot_bytes
        whole = _bytes(buffer)

        def copy_in(k: int, at: int) -> None:
            if self._rank == root:
                low, high = _piece(k, piece, whole.size)
                np.copyto(self._segment.data(root, at, high - low), whole[low:high])

        def take(k: int, at: int) -> Steps:
            if self._rank != root:
                yield from self._peer(PROGRESS, root, base + k + 1)
                low, high = _piece(k, piece, whole.size)
                np.copyto(whole[low:high], self._segment.data(root, at, high - low))

        base = self.course.steps
        yield from self._rounds(-(-whole.size // piece), copy_in, take)

    def alltoall(self, source: Buffer, target: Buffer, sent: Sequence[int], received: Sequence[int]) -> Steps:
        """Send every rank a block. Each knows only its own sizes, so the largest is agreed upon first."""
        largest = 0

        def show_size(k: int, at: int) -> None:
            self._segment.data(self._rank, at, 8).view(np.uint64)[0] = max(sent)

        def see_sizes(k: int, at: int) -> Steps:
            nonlocal largest
            yield from self._all(PROGRESS, base + k + 1)
            largest = max(int(self._segment.data(rank, at, 8).view(np.uint64)[0]) for rank in range(self._size))

        base = self.course.steps
        yield from self._rounds(1, show_size, see_sizes)
        yield from self._grow(largest * self._size)
        piece = self.slot_bytes // self._size // _GRAIN * _GRAIN
        starts, begins = list(accumulate(sent, initial=0)), list(accumulate(received, initial=0))
        own, whole = _bytes(source), _bytes(target)

        def copy_in(k: int, at: int) -> None:
            for peer in self._peers:
                low, high = _piece(k, piece, sent[peer])
                room = self._segment.data(self._rank, at + peer * piece, high - low)
                np.copyto(room, own[starts[peer] + low : starts[peer] + high])

        def take(k: int, at: int) -> Steps:
            low, high = _piece(k, piece, sent[self._rank])
            start, begin = starts[self._rank], begins[self._rank]
            np.copyto(whole[begin + low : begin + high], own[start + low : start + high])
            for peer in self._peers:
                yield from self._peer(PROGRESS, peer, base + k + 1)
                low, high = _piece(k, piece, received[peer])
                theirs = self._segment.data(peer, at + self._rank * piece, high - low)
                np.copyto(whole[begins[peer] + low : begins[peer] + high], theirs)

        base = self.course.steps
        yield from self._rounds(-(-largest // piece), copy_in, take)

    def _rounds(self, count: int, copy_in: Callable[[int, int], None], take: Callable[[int, int], Steps]) -> Steps:
        """Rounds of one step each. ``copy_in`` and ``take`` get the round's number and the slot's offset."""
        course = self.course
        base, first = course.steps, course.rounds
        for k in range(count + 1):
            if k < count:
                yield from self._free(first + k)
                copy_in(k, self._slot(first + k))
                self._signals.post(PROGRESS, base + k + 1)
            if k:
                yield from take(k - 1, self._slot(first + k - 1))
                self._signals.post(RELEASED, first + k)
                yield None
        course.steps, course.rounds = base + count, first + count

    def _grow(self, payload: int) -> Steps:
        """Get more room if a payload asks for it, as much as all ranks can have."""
        wanted = min(self._segment.limit, 1 << (max(1, SLOTS * payload) - 1).bit_length())
        if wanted <= self._capacity or not self._may_grow:
            return
        # A rank that makes this step has finished all earlier rounds: no rank reads a slot any more.
        self._segment.reserve(wanted)
        self.course.steps += 1
        self._signals.post(PROGRESS, self.course.steps)
        yield from self._all(PROGRESS, self.course.steps)
        granted = self._segment.granted()
        self._may_grow = granted >= wanted
        self._capacity = max(self._capacity, granted)

    def _slot(self, number: int) -> int:
        """The offset of a round's slot."""
        return number % SLOTS * self.slot_bytes

    def _free(self, number: int) -> Steps:
        """Wait until a round's slot may be written."""
        return self._all(RELEASED, number - SLOTS + 1)

    def _all(self, which: int, value: int) -> Steps:
        for peer in self._peers:
            if not self._signals.reached(which, peer, value):
                yield which, peer, value

    def _peer(self, which: int, peer: int, value: int) -> Steps:
        if not self._signals.reached(which, peer, value):
            yield which, peer, value


def _join(parts: Sequence[Array], whole: Array) -> None:
    """Copy parts one after another."""
    if len(parts) == 1:
        np.copyto(whole, parts[0])
    else:
        np.concatenate(parts, out=whole)


def _piece(k: int, piece: int, nbytes: int) -> tuple[int, int]:
    """Begin and end of the ``k``-th piece of a block."""
    return min(k * piece, nbytes), min((k + 1) * piece, nbytes)


def _bytes(buffer: Buffer) -> npt.NDArray[np.uint8]:
    return array_at(buffer.address, buffer.nbytes)
