"""Keras on each of its backends: one job for each, which runs all cases of ``tests/support/keras_cases.py``."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import launcher_in

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "keras_cases.py"
RANKS = {"tensorflow": 2, "torch": 3, "jax": 2}
CASES = [
    function.name
    for function in ast.parse(PROGRAM.read_text()).body
    if isinstance(function, ast.FunctionDef) and any(getattr(d, "id", "") == "case" for d in function.decorator_list)
]

Outcome = list[dict[str, str]]


@pytest.fixture(scope="module", params=list(RANKS))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What became of every case on every rank."""
    if importlib.util.find_spec(request.param) is None:
        pytest.fail(f"{request.param} is not installed; these tests have an environment of their own: make test")
    folder, size = tmp_path_factory.mktemp(request.param), RANKS[request.param]
    env = {"KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with launcher_in(folder) as launcher:
        arguments = ("-np", str(size), "--grace-period", "30", "--", str(PROGRAM), "results")
        done = launcher.run(*arguments, env=env, timeout=58)
    assert done.returncode == 3, done.stdout + done.stderr  # the status of the rank that is lost at the end
    return [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("case", CASES)
def test_case(outcome: Outcome, case: str) -> None:
    assert [rank.get(case, "did not come so far: an earlier case failed") for rank in outcome] == ["ok"] * len(outcome)


def test_a_dead_rank_ends_fit_on_the_others(outcome: Outcome) -> None:
    assert [rank.get("lose_a_rank") for rank in outcome] == [*["PeerLostError"] * (len(outcome) - 1), None]


@pytest.mark.parametrize("missing", list(RANKS))
def test_what_is_missing_is_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import hvdgloo.keras"
    env = os.environ | {"KERAS_BACKEND": missing}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert f"MissingDependencyError: Keras is set to use {missing}, which is not installed" in done.stderr
