"""Combining the ranks' elements, always in order of ranks, piece by piece so that temporaries stay in the cache.

Half types are accumulated in float32 and rounded once. numpy is slow at that, and so torch does it where the program
has imported it (importing it here would take seconds of a program that does not use it).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo.types import Buffer, DType, ReduceOp

Array = npt.NDArray[Any]

_HALVES_AT_ONCE = 1 << 15
"""Elements of half types handled at a time: torch keeps to the calling thread up to here."""


@dataclass(frozen=True)
class Reduction:
    """The computation on the elements: each rank's times ``prescale``, combined, times ``postscale``."""

    dtype: DType
    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0


class Reducer:
    """One rank's arithmetic, with its memory for temporaries.

    Args:
        chunk: bytes that are combined at a time at most.
    """

    def __init__(self, rank: int, size: int, chunk: int) -> None:
        self._rank, self._size = rank, size
        self._chunk = chunk
        self._scratch: list[npt.NDArray[np.uint8]] = []
        self._wide = np.empty(0, np.float32)

    def scratch(self, index: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory for a piece that comes from elsewhere; there are three such, and they are used again and again."""
        while len(self._scratch) <= index:
            self._scratch.append(np.empty(self._chunk, np.uint8))
        return self._scratch[index][:nbytes]

    def fold(
        self, fetch: Callable[[int], Sequence[Array]], own: Sequence[Array], out: Sequence[Array], reduction: Reduction
    ) -> None:
        """Combine one piece of all ranks.

        Args:
            fetch: gives a peer's piece, which for rank 0 may be in scratch 0, for others in scratch 1, and is prescaled
                already; in parts as long as ``own``'s (``divided``).
            own: this rank's piece, in parts.
            out: where the result goes, in parts that are as long; may be the same memory as ``own``.
        """
        dtype = reduction.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            if reduction.prescale != 1.0:
                own = self._scaled(own, reduction)
            if kernels.is_half(dtype):
                self._fold_halves(fetch, own, out, reduction)
            else:
                self._fold(fetch, own, out, kernels.ufunc(dtype, reduction.op))
            if reduction.postscale != 1.0:
                for part in out:
                    scale(part, dtype, reduction.postscale)

    def _scaled(self, own: Sequence[Array], reduction: Reduction) -> list[Array]:
        """A copy of what must not be written."""
        whole = self.scratch(2, sum(part.nbytes for part in own)).view(reduction.dtype.numpy_dtype)
        parts = divided(whole, own)
        for part, source in zip(parts, own, strict=True):
            np.copyto(part, source)
        scale(whole, reduction.dtype, reduction.prescale)
        return parts

    def _fold(
        self, fetch: Callable[[int], Sequence[Array]], own: Sequence[Array], out: Sequence[Array], ufunc: np.ufunc
    ) -> None:
        so_far: Sequence[Array] = ()
        for rank in range(self._size):
            theirs = own if rank == self._rank else fetch(rank)
            if rank:
                # The result's memory may be this rank's input, so it is written no sooner than that has been read.
                into = out if rank >= self._rank else self._between(own)
                for left, right, to in zip(so_far, theirs, into, strict=True):
                    ufunc(left, right, out=to)
                so_far = into
            else:
                so_far = theirs

    def _between(self, own: Sequence[Array]) -> list[Array]:
        """Return the memory for the sums of lower ranks."""
        return divided(self.scratch(0, sum(part.nbytes for part in own)).view(own[0].dtype), own)

    def _fold_halves(
        self, fetch: Callable[[int], Sequence[Array]], own: Sequence[Array], out: Sequence[Array], reduction: Reduction
    ) -> None:
        count = sum(part.size for part in own)
        if self._wide.size < count:
            self._wide = np.empty(count, np.float32)
        wide = divided(self._wide, own)
        halves = _halves()
        for rank in range(self._size):
            theirs = own if rank == self._rank else fetch(rank)
            for values, part in zip(wide, theirs, strict=True):
                for at in range(0, part.size, _HALVES_AT_ONCE):
                    stretch = slice(at, at + _HALVES_AT_ONCE)
                    halves.accumulate(values[stretch], part[stretch], reduction, first=rank == 0)
        for values, part in zip(wide, out, strict=True):
            for at in range(0, part.size, _HALVES_AT_ONCE):
                halves.narrow(values[at : at + _HALVES_AT_ONCE], part[at : at + _HALVES_AT_ONCE], reduction.dtype)


def scale(array: Array, dtype: DType, factor: float) -> None:
    """Multiply elements in place; see ``Backend.scale``."""
    if not kernels.is_half(dtype):
        kernels.scale(Buffer.of_array(array, dtype), factor)
        return
    halves = _halves()
    for at in range(0, array.size, _HALVES_AT_ONCE):
        halves.scale(array[at : at + _HALVES_AT_ONCE], dtype, factor)


def divided(whole: Array, like: Sequence[Array]) -> list[Array]:
    """One array in parts as long as others."""
    parts, at = [], 0
    for part in like:
        parts.append(whole[at : at + part.size])
        at += part.size
    return parts


class _NumpyHalves:
    """Half types by numpy."""

    def accumulate(self, wide: Array, part: Array, reduction: Reduction, *, first: bool) -> None:
        """Combine a part with what there is in float32, or put it there if it is the first."""
        if first:
            wide[...] = kernels.widen(part, reduction.dtype)
        else:
            kernels.ufunc(reduction.dtype, reduction.op)(wide, kernels.widen(part, reduction.dtype), out=wide)

    def narrow(self, wide: Array, part: Array, dtype: DType) -> None:
        """Round float32 to a half type."""
        part[...] = kernels.narrow(wide, dtype)

    def scale(self, part: Array, dtype: DType, factor: float) -> None:
        """Multiply in place."""
        kernels.scale(Buffer.of_array(part, dtype), factor)


class _TorchHalves:
    """Half types by torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._types = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}
        self._combine = {
            ReduceOp.SUM: torch.add,
            ReduceOp.MIN: torch.minimum,
            ReduceOp.MAX: torch.maximum,
            ReduceOp.PRODUCT: torch.mul,
        }

    def accumulate(self, wide: Array, part: Array, reduction: Reduction, *, first: bool) -> None:
        """As numpy's."""
        values, theirs = self._torch.from_numpy(wide), self._tensor(part, reduction.dtype)
        if first:
            values.copy_(theirs)
        else:
            self._combine[reduction.op](values, theirs.float(), out=values)

    def narrow(self, wide: Array, part: Array, dtype: DType) -> None:
        """As numpy's."""
        self._tensor(part, dtype).copy_(self._torch.from_numpy(wide))

    def scale(self, part: Array, dtype: DType, factor: float) -> None:
        """As numpy's."""
        divisor = kernels.float_divisor_of(factor)
        tensor = self._tensor(part, dtype)
        if divisor:
            tensor.div_(divisor)
        else:
            tensor.mul_(factor)

    def _tensor(self, part: Array, dtype: DType) -> Any:
        # The segment may be looked at, and torch warns of arrays that must not be written.
        return self._torch.from_numpy(part.view(np.int16)).view(self._types[dtype])


_torch_halves: _TorchHalves | None = None


def _halves() -> _NumpyHalves | _TorchHalves:
    global _torch_halves
    if _torch_halves is None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "maximum"):  # absent, or still being imported
            return _NumpyHalves()
        _torch_halves = _TorchHalves(torch)
    return _torch_halves
