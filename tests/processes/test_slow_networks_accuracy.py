"""Accuracy with encoded gradients and with steps between which nothing is sent, beside full precision in every step.

A small model, few steps, three seeds: see benchmarks/slow_networks_accuracy.py, which also makes the table in
docs/slow-networks.md.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import run_command

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "slow_networks_accuracy.py"
SEEDS = 3

Results = list[dict[str, Any]]

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]  # seconds; most of it waiting for each other


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """``train(way)``: one result for each seed. Processes of pytest share results, and train one after another: each
    training has four ranks."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    shared = shared / "accuracy"
    shared.mkdir(exist_ok=True)

    def train(way: str) -> Results:
        file = shared / f"{way}.json"
        with (shared / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                options = ["--only", way, "--steps", "160", "--seeds", ",".join(map(str, range(SEEDS)))]
                command = [sys.executable, PROGRAM, *options, "--json", file]
                done = run_command(command, timeout=120)
                assert done.returncode == 0, done.stderr
        results: Results = json.loads(file.read_text())
        assert [(each["way"], each["seed"]) for each in results] == [(way, seed) for seed in range(SEEDS)]
        return results

    return train


def mean_loss(results: Results) -> float:
    return statistics.fmean(each["loss"] for each in results)


@pytest.mark.parametrize(
    ("way", "bound", "share"),
    [
        ("int8", 0.005, 0.26),
        ("int4", 0.03, 0.15),
        ("int4-feedback", 0.03, 0.15),
        ("LocalSGD 8", 0.12, 0.14),
    ],
)
def test_a_model_learns_nearly_as_much_from_fewer_bytes(
    train: Callable[[str], Results], way: str, bound: float, share: float
) -> None:
    full, results = train("full"), train(way)
    assert mean_loss(results) < mean_loss(full) + bound
    for each, exact in zip(results, full, strict=True):
        assert len(set(each["digests"])) == 1
        assert each["digests"] != exact["digests"]
        assert 0 < each["megabytes"] < share * exact["megabytes"]


@pytest.mark.parametrize(("way", "bound"), [("int4, a scale for 65536", 0.03), ("apart", 0.12)])
def test_the_bounds_tell_bad_training_from_good(train: Callable[[str], Results], way: str, bound: float) -> None:
    assert mean_loss(train(way)) > mean_loss(train("full")) + bound
