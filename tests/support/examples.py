"""The programs in examples/ that learn to read digits, with any front-end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

from tests.support.launching import run_command
from tests.support.pages import ROOT


def check_learned(done: subprocess.CompletedProcess[str], ranks: str = "2") -> None:
    """So many ranks (a pattern) have learned to read, told so once, and have the same parameters."""
    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(rf"test accuracy averaged over {ranks} ranks: ([\d.]+)%", done.stdout)
    assert float(accuracy) >= 96.0
    assert len(re.findall("all ranks hold identical parameters", done.stdout)) == 1


def check_elastic_demo(training: str, python: str, env: Mapping[str, str], timeout: float = 60.0) -> None:
    """This is `make demo-elastic` with another example: it reaches the fixed job's accuracy all the same."""
    examples = ROOT / "examples"
    arguments = ("--python", python, "--training", str(examples / training), "--epochs", "12")
    done = run_command(
        [sys.executable, str(examples / "demo_elastic.py"), *arguments], timeout=timeout, env={**os.environ, **env}
    )
    check_learned(done, r"\d")
    assert len(re.findall(r"was killed by signal 9 \(SIGKILL\); 1 of 2 workers went on", done.stdout)) == 2
    assert re.search(r"workers? went on, with \d new one", done.stdout)
