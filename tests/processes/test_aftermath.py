"""When one rank fails and others with it, one traceback is printed: the one that says why (pain 22)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import Launcher, launcher_in

PROGRAM = """
import numpy as np
import hvdgloo.numpy as hvd

def step(number):
    if hvd.rank() == 1 and number == 3:
        raise ValueError("the reason")
    hvd.allreduce(np.ones(3), name=f"step{number}")

hvd.init()
for number in range(10):
    step(number)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as launcher:
        yield launcher
        launcher.assert_nothing_left()


@pytest.mark.parametrize(("level", "tracebacks"), [("WARNING", 1), ("DEBUG", 2)])
def test_one_traceback(launcher: Launcher, level: str, tracebacks: int) -> None:
    pytest.importorskip("torch")
    script = launcher.script(PROGRAM)
    done = launcher.run("-np", "2", "--log-level", level, script, timeout=50)
    assert done.returncode == 1
    workers = [line for line in done.stderr.splitlines() if not line.startswith("hvdgloo-run:")]
    assert sum("Traceback" in line for line in workers) == tracebacks, done.stderr
    assert "[1]<stderr>:ValueError: the reason" in workers
    if tracebacks == 1:
        echo = next(line for line in workers if line.startswith("[0]<stderr>:Stopped with another rank"))
        assert "worker.py:8 in step, " in echo
    assert "the job failed: rank 1 on host localhost exited with status 1" in done.stderr
