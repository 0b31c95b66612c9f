"""Error feedback: what encoding leaves out of a value comes with a later sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdgloo._backends.codec import Values, codec_of
from hvdgloo._backends.feedback import Compensating
from hvdgloo.types import WireFormat
from tests.unit.backends.test_narrow import Flat, vectors

ROUNDS = 40
COUNT = 5000
FORM = WireFormat.INT4_FEEDBACK
GROUPS = pytest.mark.parametrize(("size", "cube"), [(2, False), (3, False), (6, True)], ids=str)


def zeros(size: int) -> list[Values]:
    return [np.zeros(COUNT, np.float32) for _ in range(size)]


def mean_of_rounds(ranks: Flat, arrays: list[Values], residuals: list[Values] | None) -> Any:
    """Return the mean of many sums of the same values."""
    total = np.zeros(COUNT)
    for _ in range(ROUNDS):
        results = ranks.sum(arrays, FORM, residuals=residuals)
        assert {each.tobytes() for each in results} == {results[0].tobytes()}
        total += results[0]
    return total / ROUNDS


@GROUPS
def test_the_mean_of_many_sums_is_exact_to_the_scale_over_their_number(size: int, cube: bool) -> None:
    arrays = vectors(size, COUNT)
    exact = np.sum(arrays, 0, np.float64)
    scales = size * max(np.abs(each).max() for each in arrays) / 7
    ranks = Flat(size, cube=cube)
    with_feedback = np.abs(mean_of_rounds(ranks, arrays, zeros(size)) - exact).max()
    assert with_feedback < 2 * scales / ROUNDS
    assert np.abs(mean_of_rounds(ranks, arrays, None) - exact).max() > 4 * with_feedback


@GROUPS
def test_what_is_missing_from_all_sums_is_what_ranks_keep(size: int, cube: bool) -> None:
    arrays, residuals = vectors(size, COUNT), zeros(size)
    missing = ROUNDS * (np.sum(arrays, 0, np.float64) - mean_of_rounds(Flat(size, cube=cube), arrays, residuals))
    np.testing.assert_allclose(np.sum(residuals, 0, np.float64), missing, atol=1e-2)


def test_small_values_beside_a_large_one_arrive_in_the_end() -> None:
    values = np.full(64, 0.01, np.float32)
    values[0] = 1.0
    residual, codec = np.zeros(64, np.float32), codec_of(FORM)
    data, received = np.empty(codec.nbytes(64), np.uint8), np.zeros(64, np.float32)
    for _ in range(100):
        Compensating(codec, values, residual).encode(values, data)
        codec.decode(data, received, add=True)
    assert received[1:] == pytest.approx(1.0, abs=0.08)
    codec.encode(values, data)
    codec.decode(data, received)
    assert not received[1:].any()


def test_a_part_of_the_buffer_has_that_part_of_the_residual() -> None:
    values, residual = vectors(1, 640)[0], np.zeros(640, np.float32)
    codec = Compensating(codec_of(FORM), values, residual)
    codec.encode(values[128:256], np.empty(codec.nbytes(128), np.uint8))
    assert residual[128:256].any()
    assert not residual[:128].any()
    assert not residual[256:].any()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_lost_step_leaves_nothing_behind(odd: float) -> None:
    arrays, ranks, residuals = vectors(2, COUNT), Flat(2, cube=False), zeros(2)
    broken = [each.copy() for each in arrays]
    broken[1][77] = odd
    assert np.isnan(ranks.sum(broken, FORM, residuals=residuals)[0][77])
    assert all(np.isfinite(each).all() for each in residuals)
    assert np.isfinite(ranks.sum(arrays, FORM, residuals=residuals)[0]).all()
