"""Comparing small arrays, thousands of times.

numpy's own functions take as long as a collective of the arrays does, most of it to prepare what they say if the
comparison fails. Where all elements are equal nothing will be said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def assert_close(actual: npt.ArrayLike, expected: npt.ArrayLike, *, rtol: float = 1e-7, atol: float = 0.0) -> None:
    """``np.testing.assert_allclose``."""
    if not np.array_equal(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_same(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    """``np.testing.assert_array_equal``."""
    if not np.array_equal(actual, expected):
        np.testing.assert_array_equal(actual, expected)


def adasum(vectors: list[Any]) -> Any:
    """Combine arrays or tensors by the definition of Adasum, pair by pair."""
    while len(vectors) > 1:
        combined = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=False):
            dot = (a * b).sum()
            combined.append((1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b)
        vectors = combined + (vectors[-1:] if len(vectors) % 2 else [])
    return vectors[0]
