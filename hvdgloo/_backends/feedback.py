"""Error feedback: what an encoding leaves out of a value is added to that value of the next sum.

Codes of 4 bits round whatever is less than half a scale to zero, and a gradient that stays so small would never be
applied. With feedback it adds up until it is (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et
al. 2019, arXiv 1901.09847). Both roundings are compensated, of terms and of sums (DoubleSqueeze, Tang et al. 2019,
arXiv 1905.05957): a rank encodes each value at most once in a sum, as a term for the value's owner or as the sum.
"""

from __future__ import annotations

import numpy as np

from hvdgloo._backends.codec import Bytes, Codec, Values


class Compensating:
    """A codec for one sum, with error feedback.

    Args:
        codec: encodes.
        values: the buffer that is summed, of which parts are encoded.
        residual: what encoding has left out of each so far, in an array of the same size.
    """

    def __init__(self, codec: Codec, values: Values, residual: Values) -> None:
        self.block = codec.block
        self._codec = codec
        self._residual = residual
        self._begin = values.ctypes.data

    def nbytes(self, count: int) -> int:
        """See ``Codec``."""
        return self._codec.nbytes(count)

    def encode(self, values: Values, data: Bytes) -> None:
        """See ``Codec``; ``values`` is a part of the buffer."""
        begin = (values.ctypes.data - self._begin) // values.itemsize
        residual = self._residual[begin : begin + values.size]
        with np.errstate(over="ignore", invalid="ignore"):
            residual += values
            self._codec.encode(residual, data)
            decoded = np.empty_like(residual)
            self._codec.decode(data, decoded)
            residual -= decoded
        finite = np.isfinite(residual)
        if not finite.all():
            residual[~finite] = 0.0  # its block arrives as NaN, and the step is lost anyway

    def decode(self, data: Bytes, values: Values, *, add: bool = False) -> None:
        """See ``Codec``."""
        self._codec.decode(data, values, add=add)
