"""Trials of benchmarks/chaos_elastic.py: workers that are killed, stopped, removed and added at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos_elastic import one_trial


@pytest.mark.parametrize("seed", [2])
def test_a_job_trains_to_its_end_whatever_happens_to_its_workers(tmp_path: Path, seed: int) -> None:
    trial = one_trial(seed, tmp_path / "job", random.Random(seed))
    assert not trial.problem, trial.line()
