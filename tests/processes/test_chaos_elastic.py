"""Trials of benchmarks/chaos_elastic.py: workers that are killed, stopped, removed and added at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos_elastic import one_trial


@pytest.mark.timeout(150)  # mostly a tenth of it
@pytest.mark.parametrize("seed", ["1.3"])
def test_a_job_trains_to_its_end_whatever_happens_to_its_workers(tmp_path: Path, seed: str) -> None:
    """Slots go and come, and two workers are killed at once; ``--seed 1 --trials 3`` has the same as its last trial."""
    trial = one_trial(3, tmp_path / "job", random.Random(seed))
    assert not trial.problem, trial.line()
    assert any("SIGKILL" in accident for accident in trial.accidents), trial.line()
