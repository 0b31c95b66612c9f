"""Keras on each of its backends: one job for each, which runs all cases of ``tests/support/keras_cases.py``."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.launching import launcher_in, run_command

PATIENCE = 240.0
"""Seconds for a job of all cases, which takes about 30: it stands for a hundred tests, and machines may be busy."""
pytestmark = pytest.mark.timeout(PATIENCE)
PROGRAM = Path(__file__).resolve().parents[1] / "support" / "keras_cases.py"
RANKS = {"tensorflow": 2, "torch": 3, "jax": 2}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
EQUALITY = ("sgd_is_equal_to_one_process", "adam_is_equal_to_one_process")
CASES = [
    function.name
    for function in ast.parse(PROGRAM.read_text()).body
    if isinstance(function, ast.FunctionDef) and any(getattr(d, "id", "") == "case" for d in function.decorator_list)
]

Outcome = list[dict[str, Any]]


def _python(backend: str) -> str:
    """An interpreter that has imported the backend already."""
    if backend == "tensorflow":
        return warm.python(*warm.TENSORFLOW, **QUIET)
    if backend == "jax":
        return warm.python("hvdgloo.keras", KERAS_BACKEND="jax", **QUIET)
    return sys.executable  # where Keras has been imported on torch, a fork does not come to its end


def run_cases(backend: str, size: int, folder: Path, *cases: str) -> Outcome:
    """Return the result of every case, or of some, on every rank."""
    if importlib.util.find_spec(backend) is None:
        pytest.fail(f"{backend} is not installed; these tests have an environment of their own: make test-tensorflow")
    env = {"KERAS_BACKEND": backend, **QUIET}
    with launcher_in(folder) as launcher:
        arguments = ("-np", str(size), "--grace-period", "30", "--", _python(backend), str(PROGRAM), "results", *cases)
        done = launcher.run(*arguments, env=env, timeout=PATIENCE - 10)
    assert done.returncode == (0 if cases else 128 + signal.SIGKILL), done.stdout + done.stderr
    if not cases:  # the rest ended by itself: the launcher would have killed it after 30 s
        assert time.time() - float((folder / "results.died").read_text()) < 20
    return [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module", params=list(RANKS))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the result of every case on every rank; the last one is killed at the end."""
    return run_cases(request.param, RANKS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("case", CASES)
def test_case(outcome: Outcome, case: str) -> None:
    assert [rank.get(case, "did not come so far: an earlier case failed") for rank in outcome] == ["ok"] * len(outcome)


def test_a_killed_rank_ends_fit_and_everything_else_on_the_others_within_seconds(outcome: Outcome) -> None:
    *others, killed = outcome
    assert "seconds" not in killed
    for rank in others:
        assert {name: kind for name, kind in rank.items() if name.endswith(" after the loss")} == {
            "fit after the loss": "PeerLostError",
            "custom loop after the loss": "PeerLostError",
        }
        assert max(rank["seconds"].values()) < 10, rank


def test_three_ranks_on_jax_are_equal_to_one_process(tmp_path: Path) -> None:
    """On torch all cases have three ranks, and test_gradients.py trains with three in TensorFlow's functions."""
    assert run_cases("jax", 3, tmp_path, *EQUALITY) == [dict.fromkeys(EQUALITY, "ok")] * 3


@pytest.mark.parametrize("missing", list(RANKS))
def test_what_is_missing_is_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import hvdgloo.keras"
    env = os.environ | {"KERAS_BACKEND": missing}
    done = run_command([sys.executable, "-c", code], env=env)
    assert f"MissingDependencyError: Keras is set to use {missing}, which is not installed" in done.stderr


def test_keras_2_is_refused_at_import() -> None:
    code = "import sys, types; sys.modules['keras'] = types.SimpleNamespace(__version__='2.15.0'); import hvdgloo.keras"
    done = run_command([sys.executable, "-c", code])
    assert "MissingDependencyError: hvdgloo.keras needs Keras 3, and Keras 2.15.0 is installed" in done.stderr
