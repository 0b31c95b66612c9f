"""The residual of an operation: what encoding has left out of its tensors on this rank, for error feedback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo.types import Buffer

Values: TypeAlias = npt.NDArray[np.float32]
Span: TypeAlias = tuple[int, int]
"""First element, and number of elements."""


class Residual:
    """The residual of one operation.

    Args:
        filed: what is to be added to gradients before they are reduced next, by their names.
        names: of the operation's gradients.
        spans: the gradients' places, if they are parts of one tensor.
    """

    def __init__(self, filed: dict[str, Values], names: Sequence[str], spans: Sequence[Span]) -> None:
        self._filed = filed
        self.spans = tuple(spans)
        self._names = tuple(names)
        self._arrays: dict[tuple[Span, ...], Values] = {}  # by the tensors in a buffer, and their sizes

    def beside(self, buffer: Buffer, tensors: Sequence[Span]) -> Values:
        """Return an array for a buffer that is about to be reduced, after what was filed has been added to it.

        Args:
            tensors: the number of each tensor in the buffer within its operation, and its number of elements.
        """
        key = tuple(tensors)
        array = self._arrays.get(key)
        if array is None or array.size != buffer.count:
            numbers = {number for number, _ in key}
            for other in [other for other in self._arrays if numbers.intersection(number for number, _ in other)]:
                del self._arrays[other]  # of tensors that have other shapes now, or share a buffer with others
            array = self._arrays[key] = np.zeros(buffer.count, np.float32)  # memory only where something is written
        if self._filed:
            self._add_filed(buffer, key)
        return array

    def by_name(self) -> Iterator[tuple[str, Values]]:
        """Yield what was left out of each gradient."""
        for tensors, array in self._arrays.items():
            for name, (begin, count) in self._places(tensors).items():
                yield name, array[begin : begin + count]

    def clear(self) -> None:
        """Forget everything."""
        self._arrays.clear()

    def _places(self, tensors: Sequence[Span]) -> Mapping[str, Span]:
        if self.spans:
            return dict(zip(self._names, self.spans, strict=True))
        places, begin = {}, 0
        for number, count in tensors:
            places[self._names[number]] = begin, count
            begin += count
        return places

    def _add_filed(self, buffer: Buffer, tensors: Sequence[Span]) -> None:
        array = buffer.array()
        for name, (begin, count) in self._places(tensors).items():
            filed = self._filed.pop(name, None)
            if filed is None or filed.size != count:
                continue  # the gradient has another shape now
            part = array[begin : begin + count]
            if kernels.is_half(buffer.dtype):
                part[:] = kernels.narrow(kernels.widen(part, buffer.dtype) + filed, buffer.dtype)
            else:
                part += filed
