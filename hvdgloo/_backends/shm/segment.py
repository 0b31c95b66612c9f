"""The memory that the ranks of a set share: for each of them a page of words, and room for data.

::

    rank 0: words     rank 1: words     ...     rank 0: data     rank 1: data     ...

Behind the data are the places of the ``Lane``, and then the arenas. Every rank writes its own part only, and reads the
others'; but one that wakes a rank writes into that rank's page (``Lane``). All of it is one memfd, as large as it may
ever become, and mapped once: nothing is remapped while it is in use. Memory is taken where it is first used: a rank's
room for data begins small and is made larger, up to a limit, by ``reserve``, which gets an error where memory is short;
simply writing there would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.shm import limits, system

PAGE = 4096
SMALLEST = 1 << 16
"""Bytes of data per rank that are reserved from the beginning, if the ranks are not many, and the least limit."""

# Words of 64 bits, each on a cache line of its own where a rank polls it.
PROGRESS, RELEASED, GONE, GRANTED, ASLEEP, PLACE, CALLS = 0, 8, 16, 32, 96, 104, 256
WORDS_OFFERED, TIMES_OFFERED, BELL, LISTENING = 112, 116, 120, 128

PLACES = 2
PLACE_BYTES = 1 << 16
"""Bytes of each of a rank's places in the ``Lane``."""

_MOST_GRANTS = 64


class Segment:
    """One rank's view of the shared memory.

    Args:
        descriptor: of the memory; the Segment owns it from now on.
        rank, size: in the set.
        limit: bytes of data per rank, a multiple of PAGE.
        arena: bytes per rank that may become tensors' memory (``Arena``), a multiple of PAGE.

    Raises:
        Unsupported, OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, rank: int, size: int, limit: int, arena: int = 0) -> None:
        self.descriptor = descriptor
        self.rank, self.size, self.limit, self.arena = rank, size, limit, arena
        self.smallest = smallest(size)
        self._nbytes = total_bytes(size, limit, arena)
        self._address = system.map_memory(descriptor, self._nbytes)
        memory = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
        view = memoryview(memory).cast("B")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8)
        self._words = [view[at : at + PAGE].cast("Q") for at in range(0, size * PAGE, PAGE)]
        self._grants = 0

    @staticmethod
    def create_memory(size: int, limit: int, arena: int = 0) -> int:
        """The descriptor of memory for ``size`` ranks, with what they need at the beginning.

        Raises:
            Unsupported, OSError: there is no such memory here, or no room or descriptor for it.
        """
        first = smallest(size)
        limits.check_room(size * (PAGE + first))
        descriptor = system.create_memory("hvdgloo", total_bytes(size, limit, arena))
        try:
            os.posix_fallocate(descriptor, 0, size * PAGE)
            for rank in range(size):
                os.posix_fallocate(descriptor, size * PAGE + rank * limit, first)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def word(self, rank: int, index: int) -> int:
        return self._words[rank][index]

    def set_word(self, index: int, value: int) -> None:
        """Write one of this rank's words."""
        self._words[self.rank][index] = value

    def words_of(self, rank: int) -> memoryview[int]:
        """A rank's page of words."""
        return self._words[rank]

    def word_address(self, rank: int, index: int) -> int:
        """Return the address of the word; its lower 32 bits begin there, too, on every machine that we know the futex
        number of."""
        return self._address + rank * PAGE + 8 * index

    def data(self, rank: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A stretch of a rank's room for data."""
        at = self.size * PAGE + rank * self.limit + offset
        return self.bytes[at : at + nbytes]

    def place(self, rank: int, place: int) -> int:
        """Return the offset in the memory's file of one of a rank's places in the ``Lane``."""
        return self.size * (PAGE + self.limit) + (rank * PLACES + place) * PLACE_BYTES

    def arena_at(self, rank: int, offset: int) -> int:
        """Return the offset in the memory's file of a place in a rank's arena."""
        return total_bytes(self.size, self.limit) + rank * self.arena + offset

    def in_arena(self, rank: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A stretch of a rank's arena."""
        at = self.arena_at(rank, offset)
        return self.bytes[at : at + nbytes]

    def reserve(self, nbytes: int) -> None:
        """Reserve memory for the first ``nbytes`` of this rank's room for data, and tell the others how much there is.

        The answer is 0 if there is no more; each call has a word of its own, so that a fast rank's next answer does not
        overwrite one that a slow rank has yet to read.
        """
        granted = self.back(self.size * PAGE + self.rank * self.limit, nbytes)
        self.set_word(GRANTED + self._grants % _MOST_GRANTS, nbytes if granted else 0)
        self._grants += 1

    def back(self, at: int, nbytes: int) -> bool:
        """Reserve real memory for a stretch of the memory's file; False if there is not enough left."""
        try:
            limits.check_room(nbytes)
            os.posix_fallocate(self.descriptor, at, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EINTR):
                raise
            return False
        return True

    def granted(self) -> int:
        """Return the bytes that the last ``reserve`` gave to every rank, once all have called it."""
        place = GRANTED + (self._grants - 1) % _MOST_GRANTS
        return min(words[place] for words in self._words)

    def close(self) -> None:
        """Give the memory back, which no thread uses any more."""
        if self._address:
            self._words.clear()
            self.bytes = np.empty(0, np.uint8)
            system.unmap_memory(self._address, self._nbytes)
            self._address = 0
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def total_bytes(size: int, limit: int, arena: int = 0) -> int:
    """Return the largest size of the memory of ``size`` ranks."""
    return size * (PAGE + limit + PLACES * PLACE_BYTES + arena)


def smallest(size: int) -> int:
    """Bytes of data that each of ``size`` ranks has from the beginning: a few hundred for each peer at least."""
    return max(SMALLEST, -(-size * 1024 // PAGE) * PAGE)


# All of this process's memory, of which slices are taken: ctypes would make a type for every size, which takes longer
# than copying a small tensor. No system gives out the first page.
_memory = (ctypes.c_ubyte * (min(sys.maxsize, 1 << 48) - PAGE)).from_address(PAGE)
_MEMORY: npt.NDArray[np.uint8] = np.frombuffer(memoryview(_memory).cast("B"), np.uint8)


def array_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes at an address as an array; the caller keeps them alive."""
    return _MEMORY[address - PAGE : address - PAGE + nbytes] if nbytes else _MEMORY[:0]
