"""Ranks with different weights are noticed by one checksum each."""

from __future__ import annotations

import numpy as np
import pytest

from hvdgloo._training import weights


def together(*own: int | None) -> np.ndarray:
    """Return the results of all ranks."""
    greatest: np.ndarray = np.max([weights.to_send(each) for each in own], axis=0)
    return greatest


@pytest.mark.parametrize(
    ("own", "equal"),
    [
        ((5, 5, 5), True),
        ((0, 0), True),
        ((0xFFFFFFFF, 0xFFFFFFFF), True),
        ((5, 6, 5), False),
        ((0, 0xFFFFFFFF), False),
        ((0x00FF, 0xFF00), False),
        ((None, 7, 7), True),  # one rank does not compare
        ((None, 7, 8), False),
        ((None, None), True),
    ],
)
def test_equal_checksums_are_told_from_different_ones(own: tuple[int | None, ...], equal: bool) -> None:
    assert weights.all_equal(together(*own)) is equal


def test_what_is_equal_in_each_element_has_the_same_checksum() -> None:
    values = np.arange(6.0)
    assert weights.checksum(values) == weights.checksum(np.repeat(values, 2)[::2])
    assert weights.checksum(values) != weights.checksum(values[::-1])


def test_two_ranks_are_named_and_what_to_call() -> None:
    text = weights.warning([1, 4, 6, 7], [-1, 9, 8, 7], "Call hvd.broadcast_variables(...) on all ranks")
    assert text.startswith("rank 6 does not start from the same weights as rank 4 (nor do 1 more)")
    assert "Call hvd.broadcast_variables(...) on all ranks" in text
    assert "HVDGLOO_CHECK_WEIGHTS=0" in text
