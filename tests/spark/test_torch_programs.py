"""Whole programs with a TorchEstimator on ranks in Spark's tasks: the example, and one written for Horovod.

They run in this process, so that they find the session that is there.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support import estimators
from tests.support.pages import ROOT


@pytest.fixture
def program(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a file as a program, with arguments; the session outlives it."""
    monkeypatch.setattr(SparkSession, "stop", lambda self: None)

    def run(path: Path, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")

    return run


def test_the_example_recognises_digits(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(ROOT / "examples/spark_torch_digits.py", "--num-proc", "2", "--work-dir", str(tmp_path))
    output = capsys.readouterr().out
    found = re.search(r"test accuracy with 2 ranks: ([0-9.]+)%", output)
    assert found, output
    assert float(found[1]) >= 96


def test_horovod_s_program_runs_unchanged(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of scikit-learn's digits, enlarged to MNIST's size: nothing is downloaded."""
    estimators.write_mnist(tmp_path / "mnist.bz2", 600)
    monkeypatch.syspath_prepend(str(ROOT / "hvdgloo/as_horovod"))
    before = set(sys.modules)
    try:
        program(
            ROOT / "tests/spark/programs/pytorch_spark_mnist.py",
            "--num-proc", "2", "--batch-size", "16", "--epochs", "3", "--work-dir", str(tmp_path / "work"),
            "--data-dir", str(tmp_path), "--backward-passes-per-step", "2",
        )  # fmt: skip
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "horovod":
                del sys.modules[name]
    output = capsys.readouterr().out
    found = re.search(r"Test accuracy: ([0-9.]+)", output)
    assert found, output
    assert 0 <= float(found[1]) <= 1
    assert re.search(r"\[0\]<stdout>:.*epoch 3/3: loss", output), output
