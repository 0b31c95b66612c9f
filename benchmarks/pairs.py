"""Two ways of doing the same, compared by turns: for benchmarks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 2000


def interval(ratios: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Within which the median of such ratios lies with a probability of ``share`` (percentile bootstrap)."""
    chance = random.Random(len(ratios))
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    cut = round((1 - share) / 2 * RESAMPLES)
    return medians[cut], medians[-cut - 1]


def described(ratios: Sequence[float]) -> str:
    """The median of some ratios, and how sure it is."""
    low, high = interval(ratios)
    middle = statistics.median(ratios)
    return f"{middle:.4f} (95 % of medians within {low:.4f} and {high:.4f}; {len(ratios)} pairs)"
