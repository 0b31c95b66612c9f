"""A handful of benchmarks/chaos_launch.py's trials: pain 24 (orphans), at random moments."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos_launch import one_trial
from tests.support.hosts import Bed
from tests.support.selection import extended


@pytest.mark.parametrize("seed", [0, *extended(*range(1, 6))])
def test_pain_24_nothing_is_left_after_a_random_accident(
    make_bed: Callable[..., Bed], tmp_path: Path, seed: int
) -> None:
    trial = one_trial(seed, make_bed(["h1", "h2", "h3"]), tmp_path / "job", random.Random(seed))
    assert trial.clean, f"{trial.line()}\n{trial.left}"
