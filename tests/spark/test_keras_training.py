"""The ranks of a KerasEstimator: one job for each library and backend, of all cases of the program.

The program is ``tests/support/spark_keras_cases.py``; it needs no Spark.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.launching import launcher_in

PATIENCE = 600.0
"""Seconds for a job of all cases, which takes about 20: it stands for a dozen tests, and machines may be busy."""
PROGRAM = Path(__file__).resolve().parents[1] / "support" / "spark_keras_cases.py"
RANKS = {"tensorflow": 2, "torch": 3, "jax": 2, "tf_keras": 2}
CASES = [
    function.name
    for function in ast.parse(PROGRAM.read_text()).body
    if isinstance(function, ast.FunctionDef) and any(getattr(d, "id", "") == "case" for d in function.decorator_list)
]


def _python(name: str, **environ: str) -> str:
    """An interpreter that has imported the library already."""
    if name == "torch":
        return sys.executable  # where Keras has been imported on torch, a fork does not come to its end
    # The program itself keeps Keras from importing TensorFlow beside JAX.
    library = {"tensorflow": "keras", "jax": "jax", "tf_keras": "tf_keras"}[name]
    return warm.python("pyarrow.parquet", "hvdgloo.spark.keras", library, **environ)


@pytest.fixture(scope="module", params=list(RANKS))
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the result of every case on every rank."""
    name = request.param
    need_installed(name)
    env = {"KERAS_BACKEND": name if name != "tf_keras" else "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with launcher_in(tmp_path_factory.mktemp(name)) as launcher:
        ranks = RANKS[name]
        (launcher.folder / "work").mkdir()
        arguments = ("-np", str(ranks), "--grace-period", "30", "--", _python(name, **env), str(PROGRAM), name, "work")
        done = launcher.run(*arguments, env=env, timeout=PATIENCE)
        files = [launcher.folder / "work" / f"results.{rank}.json" for rank in range(ranks)]
        assert all(file.exists() for file in files), done.stdout + done.stderr
        return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", CASES)
def test_case(outcome: list[dict[str, str]], case: str) -> None:
    assert [rank.get(case, "did not come so far: an earlier case failed") for rank in outcome] == ["ok"] * len(outcome)
