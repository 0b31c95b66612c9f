"""The example of ``hvdgloo.spark.run`` learns to read."""

from __future__ import annotations

import re
import runpy
import sys
from typing import Any

import pytest

from tests.support.pages import ROOT

pytest.importorskip("torch", reason="the example is one for torch")


def test_two_ranks_learn_to_read(
    spark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spark_run_digits.py", "--num-proc", "2", "--epochs", "12"])
    runpy.run_path(str(ROOT / "examples/spark_run_digits.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "[0]<stdout>:epoch 12/12: loss " in said
    first, last = re.findall(r"([\d.]+) after the", said)
    assert float(last) < float(first) / 10
    accuracy = re.search(r"test accuracy on 2 ranks: ([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) >= 96
