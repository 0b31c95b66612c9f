"""Memory for tensors within the shared segment, so that the other ranks can read it in place.

Every rank has a range of the segment for this, of which only what is allocated becomes real memory. A block has a
mapping of its own, which lives as long as it is held: tensors in it outlive the job.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.shm import system
from hvdgloo._backends.shm.segment import PAGE, Segment


class Arena:
    """One rank's range, and its view of the others'."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._lock = threading.Lock()
        self._free = [(0, segment.arena)] if segment.arena else []
        # Blocks end wherever the garbage collector finds them, so what their end changes must need no lock.
        self._blocks: dict[int, tuple[int, int]] = {}  # address to offset and bytes
        self._ended: deque[tuple[int, int]] = deque()
        self._open = True

    def allocate(self, nbytes: int) -> Any | None:
        """Uninitialised memory as an object with a buffer, for as long as it is held; None if there is none left."""
        length = -(-nbytes // PAGE) * PAGE
        with self._lock:
            while self._ended:
                self._give_back(*self._ended.popleft())
            offset = self._take(length) if self._open and nbytes else None
            if offset is None:
                return None
            at = self._segment.arena_at(self._segment.rank, offset)
            if not self._segment.back(at, length):
                self._give_back(offset, length)
                return None
            try:
                address = system.map_memory(self._segment.descriptor, length, at)
            except OSError as error:
                system.free_memory(self._segment.descriptor, at, length)
                self._give_back(offset, length)
                if error.errno != errno.ENOMEM:
                    raise
                return None
            self._blocks[address] = offset, length
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        memory.block = _Block(self, address, offset, length)
        return memory

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return a tensor's place in this rank's arena; None if it is elsewhere."""
        # Copied in one operation, which garbage collection cannot interrupt.
        for begin, (offset, length) in self._blocks.copy().items():
            if begin <= address and address + nbytes <= begin + length:
                return offset + address - begin
        return None

    def view(self, rank: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes in a rank's arena."""
        return self._segment.in_arena(rank, offset, nbytes)

    def close(self) -> None:
        """Let go of the blocks, which no other rank reads any more; an object that holds one keeps it."""
        with self._lock:
            self._open = False
            self._blocks.clear()

    def release(self, address: int, offset: int, length: int) -> None:
        """Take a block back that is not held any more. Never waits, since this may interrupt what the same thread is
        doing here."""
        self._blocks.pop(address, None)
        if self._lock.acquire(blocking=False):
            try:
                if self._open:
                    at = self._segment.arena_at(self._segment.rank, offset)
                    system.free_memory(self._segment.descriptor, at, length)
            except OSError:
                pass  # it stays real memory, for the next block
            finally:
                self._lock.release()
        self._ended.append((offset, length))

    def _take(self, length: int) -> int | None:
        for index, (offset, free) in enumerate(self._free):
            if free >= length:
                self._free[index : index + 1] = [(offset + length, free - length)] if free > length else []
                return offset
        return None

    def _give_back(self, offset: int, length: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, free in sorted([*self._free, (offset, length)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + free
            else:
                merged.append((begin, free))
        self._free = merged


class _Block:
    """The object that keeps a block's memory alive."""

    def __init__(self, arena: Arena, address: int, offset: int, length: int) -> None:
        self._arena, self._place = arena, (address, offset, length)
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child's end is not the end of the memory
        self._arena.release(*self._place)
        system.unmap_memory(self._place[0], self._place[2])


def arena_bytes(size: int) -> int:
    """Return the largest size of each rank's range, of ``size`` ranks: all of this machine's memory together, none
    where the size of the address space or of files is limited, which a range counts for although it is empty."""
    limited = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    if any(limit != resource.RLIM_INFINITY for limit in limited):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // size // PAGE * PAGE
