"""Signals by which ranks tell each other how far they have got, and wait for each other.

Each rank counts two things, which only ever grow: the steps it has made (PROGRESS), and the rounds of the segment's
slots that it has done with (RELEASED). What a rank has written before it posts a number can be read by anyone who has
seen that number.

On x86 the numbers are in shared memory, and a waiter sleeps on the number that it waits for (futex(2)): the kernel
compares and goes to sleep in one step, so no wake is lost, and each number has one writer. A waiter announces what it
is going to sleep for (which number of which rank, and the value that it must reach) before it looks at the number for
the last time, and a poster checks for that after posting: so a post that no rank sleeps for, like most, needs no system
call and wakes none. On processors that reorder stores, a number could be seen
before the data that it announces; there it travels through a pipe, as through any system call that passes data on.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from hvdgloo._backends.shm import segment as layout
from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.segment import Segment
from hvdgloo.errors import BackendError

PROGRESS, RELEASED = 0, 1

_KIND_BITS = 24
_KIND_MASK = (1 << _KIND_BITS) - 1
"""An announced sleep is one word, so that it is read whole: the value above these bits, and below them 1 + 2 times the
rank + which of its numbers."""

_LOOK_SECONDS = 0.05
"""The longest sleep of a rank, in seconds, before it checks whether the operation was aborted: an abort between its
last look and its falling asleep wakes no rank."""


class Signals(Protocol):
    """One rank's side."""

    def post(self, which: int, value: int) -> None:
        """Tell all that this rank's number is ``value`` now."""
        ...

    def reached(self, which: int, peer: int, value: int) -> bool:
        """True if the peer's number is at least ``value``."""
        ...

    def wait(self, which: int, peer: int, value: int, deadline: float) -> bool:
        """Wait until ``reached``; False if it is not by ``deadline`` on the monotonic clock.

        Raises:
            BackendError: ``abort`` was called, here or by a rank that is waited for.
        """
        ...

    def late(self) -> list[int]:
        """Return the ranks that have made fewer steps than this one."""
        ...

    def check_peers(self) -> None:
        """Check that every rank still keeps the memory that it has shown.

        Raises:
            BackendError: some rank has given up.
        """
        ...

    def abort(self) -> None:
        """Give up: end every wait here, and others' waits for this rank. Callable from any thread, more than once."""
        ...

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that a forked child must not keep open."""
        ...

    def close(self) -> None:
        """Release everything but the segment."""
        ...


class FutexSignals:
    """Numbers in shared memory."""

    def __init__(self, segment: Segment) -> None:
        self._closing = threading.Lock()
        self._segment = segment
        self._rank = segment.rank
        self._aborted = False
        places = (layout.PROGRESS, layout.RELEASED)
        ranks = range(segment.size)
        self._words = [segment.words_of(rank) for rank in ranks]
        self._own = self._words[self._rank]
        self._places = places
        self._addresses = [[segment.word_address(rank, place) for rank in ranks] for place in places]
        self._peers = [words for words in self._words if words is not self._own]
        self._fence = threading.Lock()

    def post(self, which: int, value: int) -> None:
        own, place, kind = self._own, self._places[which], _kind(which, self._rank)
        before = own[place]
        own[place] = value
        self._order()
        for words in self._peers:
            announced = words[layout.ASLEEP]
            # Who sleeps for a value that was there before has been woken then, or is about to see it.
            if announced and announced & _KIND_MASK == kind and before < announced >> _KIND_BITS <= value:
                system.futex_wake(self._addresses[which][self._rank])
                return

    def reached(self, which: int, peer: int, value: int) -> bool:
        return self._words[peer][self._places[which]] >= value

    def wait(self, which: int, peer: int, value: int, deadline: float) -> bool:
        if self.reached(which, peer, value):
            return True
        self._own[layout.ASLEEP] = value << _KIND_BITS | _kind(which, peer)
        self._order()
        try:
            return self._sleep(which, peer, value, deadline)
        finally:
            self._own[layout.ASLEEP] = 0

    def _sleep(self, which: int, peer: int, value: int, deadline: float) -> bool:
        words, place, address = self._words[peer], self._places[which], self._addresses[which][peer]
        while True:
            # Whether the peer has given up is read before its number: it may have posted, and then given up.
            gone = words[layout.GONE]
            seen = words[place]
            if seen >= value:
                return True
            self._look()
            if gone:
                raise BackendError(_given_up(peer))
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            system.futex_wait(address, seen & 0xFFFFFFFF, min(left, _LOOK_SECONDS))

    def late(self) -> list[int]:
        own = self._own[layout.PROGRESS]
        return [rank for rank, words in enumerate(self._words) if words[layout.PROGRESS] < own]

    def check_peers(self) -> None:
        self._look()
        for peer, words in enumerate(self._words):
            if words[layout.GONE]:
                raise BackendError(_given_up(peer))

    def abort(self) -> None:
        self._aborted = True
        with self._closing:
            if self._words:
                self._own[layout.GONE] = 1
                for addresses in self._addresses:
                    for address in addresses:
                        system.futex_wake(address)

    @property
    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        with self._closing:  # the memory is unmapped after this
            self._words, self._peers = [], []

    def _order(self) -> None:
        """Make earlier writes visible to others before any later read. x86 keeps all other orders by
        itself; taking a lock is one of the instructions that keep this one, too (Intel SDM vol. 3, 9.2.2)."""
        self._fence.acquire()
        self._fence.release()

    def _look(self) -> None:
        if self._aborted:
            raise BackendError("the operation was aborted")


def _kind(which: int, rank: int) -> int:
    return 1 + 2 * rank + which


_MESSAGE = struct.Struct("=HHIQ")
_GAVE_UP = 2


class PipeSignals:
    """Numbers as messages: each rank has a pipe that all others write into.

    Args:
        inbox: the end of this rank's pipe to read from.
        outboxes: the ends of all ranks' pipes to write into, by rank.

    A message is shorter than PIPE_BUF, so it arrives whole (pipe(7)). A pipe holds thousands, and no rank gets more
    than a few steps ahead of the others, so it is never full for long.
    """

    def __init__(self, rank: int, size: int, inbox: int, outboxes: Sequence[int]) -> None:
        self._rank, self._size = rank, size
        self._inbox, self._outboxes = inbox, list(outboxes)
        os.set_blocking(inbox, False)
        self._seen = ([0] * size, [0] * size)
        self._gone: set[int] = set()
        self._closing = threading.Lock()
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)

    @property
    def descriptors(self) -> list[int]:
        return [self._inbox, *self._outboxes]

    def post(self, which: int, value: int) -> None:
        self._seen[which][self._rank] = value
        self._tell(_MESSAGE.pack(which, self._rank, 0, value))

    def reached(self, which: int, peer: int, value: int) -> bool:
        if self._seen[which][peer] < value:
            self._receive()
        return self._seen[which][peer] >= value

    def wait(self, which: int, peer: int, value: int, deadline: float) -> bool:
        while not self.reached(which, peer, value):
            if self._rank in self._gone:
                raise BackendError("the operation was aborted")
            if peer in self._gone:
                raise BackendError(_given_up(peer))
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._poll.poll(left * 1000)
        return True

    def late(self) -> list[int]:
        self._receive()
        seen = self._seen[PROGRESS]
        return [rank for rank in range(len(seen)) if seen[rank] < seen[self._rank]]

    def check_peers(self) -> None:
        self._receive()
        for peer in self._gone:
            raise BackendError("the operation was aborted" if peer == self._rank else _given_up(peer))

    def abort(self) -> None:
        with self._closing:
            self._tell(_MESSAGE.pack(_GAVE_UP, self._rank, 0, 0), also_self=True)

    def close(self) -> None:
        with self._closing:
            descriptors = self.descriptors
            self._inbox, self._outboxes = -1, []
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _tell(self, message: bytes, *, also_self: bool = False) -> None:
        for peer, outbox in enumerate(self._outboxes):
            if peer != self._rank or also_self:
                try:
                    os.write(outbox, message)
                except BrokenPipeError:
                    pass  # that rank is gone, as its control connection says more clearly

    def _receive(self) -> None:
        try:
            data = os.read(self._inbox, 1 << 16)
        except BlockingIOError:
            return
        for which, peer, _, value in _MESSAGE.iter_unpack(data):
            if which == _GAVE_UP:
                self._gone.add(peer)
            else:
                self._seen[which][peer] = value


def _given_up(peer: int) -> str:
    return f"rank {peer} of the set has given up this operation"
