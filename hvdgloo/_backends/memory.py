"""Plain CPU memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np

from hvdgloo._backends.base import Done, Mark
from hvdgloo.types import Buffer


class HostMemory:
    """The ``Memory`` of backends that use any CPU memory."""

    in_order = False

    def holds(self, buffer: Buffer) -> bool:
        return buffer.device == "cpu"

    def empty(self, nbytes: int) -> Buffer:
        # The system provides real memory only for the part that is used.
        return Buffer.of_array(np.empty(nbytes, np.uint8))

    def pack(self, target: Buffer, sources: Sequence[Buffer]) -> None:
        at = target.address
        for source in sources:
            nbytes = source.nbytes
            ctypes.memmove(at, source.address, nbytes)
            at += nbytes

    def unpack(self, source: Buffer, pieces: Iterable[tuple[Buffer, int, int]]) -> None:
        at = source.address
        for target, offset, nbytes in pieces:
            ctypes.memmove(target.address + offset, at, nbytes)
            at += nbytes

    def mark(self) -> Mark:
        return Done()
