"""Trials of benchmarks/chaos_elastic.py: at random moments workers are killed, stopped, removed and added, and hosts
are cut off."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_elastic import one_trial, one_trial_on_hosts
from tests.support import warm
from tests.support.hosts import Bed

pytestmark = pytest.mark.extended


@pytest.mark.timeout(150)  # mostly a tenth of it
@pytest.mark.parametrize("seed", ["1.3"])
def test_a_job_trains_to_its_end_whatever_happens_to_its_workers(tmp_path: Path, seed: str) -> None:
    """Slots go and come, and two workers are killed at once; ``--seed 1 --trials 3`` has the same as its last trial."""
    trial = one_trial(3, tmp_path / "job", random.Random(seed), warm.python(*warm.NUMPY))
    assert not trial.problem, trial.line()
    assert any("SIGKILL" in accident for accident in trial.accidents), trial.line()


@pytest.mark.timeout(150)  # mostly a tenth of it
def test_a_job_trains_to_its_end_whatever_happens_to_its_networks(tmp_path: Path, bed: Bed) -> None:
    class Chance(random.Random):
        """Two hosts are cut off from each other, and then one from both others."""

        happens = iter(["part", "cut"])

        def choice(self, choices: Any) -> Any:
            if isinstance(choices[0], str):
                return "h2"
            name = next(self.happens)
            return next(kind for kind in choices if kind.__name__ == name)

        def randint(self, least: int, most: int) -> int:
            return 2

    trial = one_trial_on_hosts(3, tmp_path / "job", Chance(1), bed, warm.python())
    assert not trial.problem, trial.line()
    assert ["cut off from each other" in accident for accident in trial.accidents] == [True, False], trial.line()
    assert trial.status == 0, trial.said
