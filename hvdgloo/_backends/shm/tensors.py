"""Several tensors as one stretch of bytes, without copying them together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends.shm.segment import array_at
from hvdgloo.types import Buffer

Array = npt.NDArray[Any]


class Tensors:
    """Tensors of one dtype, one after another, none of them empty.

    Attributes:
        nbytes: of all.
        count: how many they are.
        dtype: numpy's.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        # Not the buffers themselves, which would keep their owners alive.
        self.dtype = buffers[0].dtype.numpy_dtype if buffers else np.dtype(np.uint8)
        self.addresses = [buffer.address for buffer in buffers]
        self.count = len(buffers)
        # Where each begins, and where the last ends.
        self._edges = list(accumulate((buffer.nbytes for buffer in buffers), initial=0))
        self.nbytes = self._edges[-1]
        self._arrays: list[Array] | None = None
        self._stretches: dict[tuple[int, int], list[Array]] = {}

    def spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The tensors that a stretch touches: index, offset in it, and number of bytes for each."""
        if self.count == 1:
            return [(0, begin, end - begin)] if end > begin else []
        edges = self._edges
        index = bisect_right(edges, begin) - 1
        found = []
        while begin < end:
            stop = min(end, edges[index + 1])
            found.append((index, begin - edges[index], stop - begin))
            begin = stop
            index += 1
        return found

    def arrays(self, begin: int, end: int) -> list[Array]:
        """The elements of a stretch, which begins and ends between elements."""
        if self.count == 1:
            return self._cut(begin, end)
        stretch = self._stretches.get((begin, end))
        if stretch is None:
            stretch = self._stretches[begin, end] = self._cut(begin, end)
        return stretch

    def _cut(self, begin: int, end: int) -> list[Array]:
        if self._arrays is None:
            sizes = [high - low for low, high in pairwise(self._edges)]
            places = zip(self.addresses, sizes, strict=True)
            self._arrays = [array_at(address, nbytes).view(self.dtype) for address, nbytes in places]
        size = self.dtype.itemsize
        return [
            self._arrays[index][offset // size : (offset + nbytes) // size]
            for index, offset, nbytes in self.spans(begin, end)
        ]

    def copy_to(self, target: Array, begin: int, end: int) -> None:
        """Copy a stretch into bytes."""
        arrays = self.arrays(begin, end)
        whole = target.view(arrays[0].dtype)
        if len(arrays) == 1:
            np.copyto(whole, arrays[0])
        else:
            np.concatenate(arrays, out=whole)

    def copy_from(self, source: Array, begin: int, end: int) -> None:
        """Fill a stretch from bytes."""
        whole, at = source.view(self.dtype), 0
        for array in self.arrays(begin, end):
            np.copyto(array, whole[at : at + array.size])
            at += array.size


def cut(nbytes: int, size: int, grain: int = 64) -> list[int]:
    """The edges of ``size`` nearly equal slices, between which no element and no cache line is divided.

    Returns:
        size + 1 numbers from 0 to ``nbytes``.
    """
    return [min(nbytes, -(-(nbytes * rank) // (size * grain)) * grain) for rank in range(size)] + [nbytes]
