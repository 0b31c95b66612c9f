"""Noticing that ranks train from different weights, as they do where nobody has broadcast them: nothing else shows it,
since gradients are averaged all the same.

Each rank makes one checksum. It travels, together with its complement, in an exchange that takes the maximum of each
byte and takes place anyway; so all ranks learn from the result whether all checksums are equal, without another
message. Only if they are not, ranks ask each other who has which.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SAMPLE = 32
"""The number of elements that are sampled from each tensor: where initial weights differ, nearly all of them do."""

_BYTES = 4

LENGTH = 2 * _BYTES
"""The number of bytes that travel."""


def checksum(samples: npt.NDArray[np.generic]) -> int:
    """The checksum of this rank's weights, or of what is taken from them."""
    return zlib.crc32(np.ascontiguousarray(samples).tobytes())


def to_send(own: int | None) -> npt.NDArray[np.uint8]:
    """A rank's part of the exchange; without a checksum, what has no influence on the result."""
    if own is None:
        return np.zeros(LENGTH, np.uint8)
    digits = np.frombuffer(own.to_bytes(_BYTES, "big"), np.uint8)
    return np.concatenate([digits, 255 - digits])


def all_equal(received: npt.NDArray[np.uint8]) -> bool:
    """Tell whether the greatest bytes of all ranks mean that all checksums are equal; also if there are none."""
    greatest, complements = received[:_BYTES].astype(int), received[_BYTES:].astype(int)
    nobody = not received.any()
    return nobody or bool((greatest == 255 - complements).all())


def warning(ranks: Sequence[int], checksums: Sequence[int], remedy: str) -> str:
    """The sentence for the user.

    Args:
        ranks: global ranks.
        checksums: theirs, in order; -1 for a rank that has made none. At least two differ.
        remedy: the call that makes weights equal.
    """
    known = [(rank, value) for rank, value in zip(ranks, checksums, strict=True) if value >= 0]
    first, expected = known[0]
    others = [rank for rank, value in known if value != expected]
    more = f" (nor do {len(others) - 1} more)" if len(others) > 1 else ""
    return (
        f"rank {others[0]} does not start from the same weights as rank {first}{more}, and they stay different, since "
        f"only gradients are averaged. Call {remedy} on all ranks before the first step. If this is intended, "
        "HVDGLOO_CHECK_WEIGHTS=0 turns the check off"
    )
