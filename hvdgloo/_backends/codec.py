"""Encodings of float32 values in fewer bytes, for sums that cross a network.

``int8`` and ``int4`` quantise blocks of values: a block's scale is its greatest magnitude divided by the greatest code,
and each value becomes the nearest multiple of the scale. One outlier then costs precision in its own block only
(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861; the idea of quantised gradients is
older: Alistarh et al., "QSGD", arXiv 1610.02132). ``bf16`` rounds each value to bfloat16.

Encoded values are all scales, then all codes. A last block that is not full is filled up with zeros. A block that holds
an infinity or a NaN is NaN as a whole when it has been decoded, so that no rank steps on it; a block whose magnitudes
are all below ``LEAST`` is zeros.

Scales have 16 significant bits. A product of scale and code is then exact, and adding one to a value rounds once,
whether or not the processor fuses the two operations. So numpy and torch (``codec_torch``) yield the same bits, on any
processor, except for the payload of a NaN in bfloat16.

Pure: nothing here communicates.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdgloo._backends import kernels
from hvdgloo.types import DType, WireFormat

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

PIECE = 1 << 17
"""Values that are converted at a time, so that temporaries stay in the cache: 512 KiB of them. With torch, half as many
take 1.2 times as long, since each call costs a few microseconds, twice as many 1.6 times, and whole tensors 4 times."""

LEAST = np.float32(1e-30)
"""The magnitude below which a block counts as zeros; its scale would have too small a reciprocal."""

# Arrays, since numpy takes four times as long for a few values and a scalar.
_ONE = np.ones(1, np.float32)
_LEAST_BITS = np.array([LEAST]).view(np.uint32)
_FINITE = int(np.finfo(np.float32).max.view(np.uint32) - _LEAST_BITS[0])
"""The difference between the bits of the greatest float32 and of ``LEAST``."""

_SCALE_BITS = np.array([0xFF], np.uint32)
"""The bits of a float32 that a scale does not have."""

_KEPT_BITS = ~_SCALE_BITS


class Codec(Protocol):
    """An encoding. An instance keeps its temporaries, so only one thread may use it at a time.

    Attributes:
        block: values that are encoded together. What is divided at a multiple of it is encoded as if it were whole.
    """

    block: int

    def nbytes(self, count: int) -> int:
        """Return the size of ``count`` encoded values, a multiple of 4."""
        ...

    def encode(self, values: Values, data: Bytes) -> None:
        """Write ``values`` into ``data``, which has exactly as many bytes as they need."""
        ...

    def decode(self, data: Bytes, values: Values, *, add: bool = False) -> None:
        """Read ``values`` from ``data``, or add what is read to them."""
        ...


class Blocks:
    """Codes of a few bits, and a scale for each block.

    Args:
        block: values in a block.
        bits: of a code: 8, or 4. In the latter case a byte has a value of the block's first half in its low bits, and
            one of the second half in its high bits, each increased by 8.
    """

    def __init__(self, block: int, bits: int) -> None:
        self.block, self.bits = block, bits
        self.top = np.array([2 ** (bits - 1) - 1], np.float32)
        self.rows = PIECE // block
        self._inverse = np.empty((self.rows, 1), np.float32)
        self._distance = np.empty((self.rows, 1), np.uint32)
        self._last = np.zeros((1, block), np.float32)
        self._room = np.empty((self.rows, block), np.float32)

    def nbytes(self, count: int) -> int:
        """See ``Codec``."""
        return _size(count, self.block, self.bits)

    def encode(self, values: Values, data: Bytes) -> None:
        """See ``Codec``."""
        scales, codes = self._parts(data, values.size)
        whole = values[: values.size // self.block * self.block].reshape(-1, self.block)
        for begin in range(0, len(whole), self.rows):
            piece = slice(begin, min(begin + self.rows, len(whole)))
            self._encode(whole[piece], scales[piece], codes[piece])
        if whole.size < values.size:
            last = self._last
            last[0, values.size - whole.size :] = 0.0
            last[0, : values.size - whole.size] = values[whole.size :]
            self._encode(last, scales[-1:], codes[-1:])

    def decode(self, data: Bytes, values: Values, *, add: bool = False) -> None:
        """See ``Codec``."""
        scales, codes = self._parts(data, values.size)
        whole = values[: values.size // self.block * self.block].reshape(-1, self.block)
        for begin in range(0, len(whole), self.rows):
            piece = slice(begin, min(begin + self.rows, len(whole)))
            self._decode(scales[piece], codes[piece], whole[piece], add=add)
        if whole.size < values.size:
            rest = values[whole.size :]
            self._decode(scales[-1:], codes[-1:], self._last, add=False)
            np.add(rest, self._last[0, : rest.size], out=rest) if add else np.copyto(rest, self._last[0, : rest.size])

    def _count(self, count: int) -> int:
        """Return the number of blocks."""
        return -(-count // self.block)

    def _parts(self, data: Bytes, count: int) -> tuple[Values, Bytes]:
        """Return the scales and the codes, a row for each block."""
        blocks = self._count(count)
        return data[: 4 * blocks].view(np.float32).reshape(-1, 1), data[4 * blocks :].reshape(
            blocks, self.block * self.bits // 8
        )

    def _set_scales(self, scales: Values) -> tuple[Values, npt.NDArray[np.bool_] | None]:
        """Make scales of greatest magnitudes, in place.

        Returns:
            the scales' reciprocals, and a mask of the blocks that must get the code 0; None if there are none.
        """
        inverse, bits = self._inverse[: len(scales)], scales.view(np.uint32)
        # Magnitudes are in the order of their bits, and infinities and NaNs above all others. Whatever is below LEAST
        # becomes a large number here.
        distance = np.subtract(bits, _LEAST_BITS, out=self._distance[: len(scales)])
        unusable = None
        if np.maximum.reduce(distance, axis=None) > _FINITE:
            unusable = distance[:, 0] > _FINITE
            scales[unusable] = np.where(scales[unusable] < LEAST, np.float32(0), np.float32(np.nan))
        np.divide(scales, self.top, out=scales)
        bits += _SCALE_BITS  # rounded up, so that no code exceeds the greatest one
        bits &= _KEPT_BITS
        if unusable is None:
            np.divide(_ONE, scales, out=inverse)
        else:
            with np.errstate(divide="ignore"):
                np.divide(_ONE, scales, out=inverse)
            inverse[unusable] = 0.0
        return inverse, unusable

    def _encode(self, rows: Values, scales: Values, codes: Bytes) -> None:
        room = self._room[: len(rows)]
        with np.errstate(invalid="ignore"):
            np.abs(rows, out=room)
            np.max(room, axis=1, keepdims=True, out=scales)
            inverse, unusable = self._set_scales(scales)
            np.multiply(rows, inverse, out=room)
        if unusable is not None:
            room[unusable] = 0.0
        np.rint(room, out=room)
        if self.bits == 8:
            np.copyto(codes.view(np.int8), room, casting="unsafe")
            return
        low, high = room[:, : self.block // 2], room[:, self.block // 2 :]
        high *= 16.0
        high += low
        high += 136.0
        np.copyto(codes, high, casting="unsafe")

    def _decode(self, scales: Values, codes: Bytes, rows: Values, *, add: bool) -> None:
        room = self._room[: len(rows)] if add else rows
        if self.bits == 8:
            np.copyto(room, codes.view(np.int8))
        else:
            np.copyto(room[:, : self.block // 2], codes & 15)
            np.copyto(room[:, self.block // 2 :], codes >> 4)
            room -= 8.0
        room *= scales
        if add:
            with np.errstate(over="ignore", invalid="ignore"):
                rows += room


class BFloat16:
    """Values rounded to bfloat16, an even number of them."""

    block = 2

    def nbytes(self, count: int) -> int:
        """See ``Codec``."""
        return -(-count // 2) * 4

    def encode(self, values: Values, data: Bytes) -> None:
        """See ``Codec``."""
        narrow: npt.NDArray[Any] = data.view(DType.BFLOAT16.numpy_dtype)
        data[2 * values.size :] = 0
        for begin in range(0, values.size, PIECE):
            piece = values[begin : begin + PIECE]
            narrow[begin : begin + piece.size] = kernels.narrow_bfloat16(piece)

    def decode(self, data: Bytes, values: Values, *, add: bool = False) -> None:
        """See ``Codec``."""
        for begin in range(0, values.size, PIECE):
            piece = values[begin : begin + PIECE]
            wide = kernels.widen_bfloat16(data[2 * begin : 2 * (begin + piece.size)])
            if add:
                with np.errstate(over="ignore", invalid="ignore"):
                    piece += wide
            else:
                piece[:] = wide


BLOCKS = {WireFormat.INT8: (256, 8), WireFormat.INT4: (64, 4), WireFormat.INT4_FEEDBACK: (64, 4)}
"""Values in a block, and bits of a code."""


def encoded_size(form: WireFormat, count: int) -> int:
    """Return the size of ``count`` encoded values; ``form`` is not FULL."""
    return BFloat16().nbytes(count) if form is WireFormat.BF16 else _size(count, *BLOCKS[form])


def _size(count: int, block: int, bits: int) -> int:
    return -(-count // block) * (4 + block * bits // 8)


def codec_of(form: WireFormat) -> Codec:
    """Return a new codec in numpy; ``form`` is not FULL."""
    return BFloat16() if form is WireFormat.BF16 else Blocks(*BLOCKS[form])
