"""Many agents under one launcher, which is no larger than it must be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.launching import Launcher

pytestmark = pytest.mark.extended

AGENTS = 34
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMITED = ("sh", "-c", 'ulimit -Sn 100; exec "$@"', "sh")


def test_many_agents_where_few_files_may_be_open(launcher: Launcher) -> None:
    """More than connect at a time, and more than the shell's limit on open files would allow."""
    hosts = ",".join(f"n{number}:1" for number in range(AGENTS))
    launcher.script("import os, resource; print(os.environ['HVDGLOO_HOSTNAME'], os.environ['PLACE'])")
    done = launcher.run("--agent-command", "env PLACE={host}", "-H", hosts, "worker.py", timeout=50, wrapper=LIMITED)
    assert done.returncode == 0, done.stderr
    places = Counter(line.partition(">:")[2] for line in done.stdout.splitlines())
    assert places == {f"n{number} n{number}": 1 for number in range(AGENTS)}
    launcher.assert_nothing_left()


def test_an_agent_costs_its_launcher_three_open_files(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "launch.py"), "--agents", "24", "--rounds", "1", "--json", str(result)]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    (case,) = json.loads(result.read_text())["launcher"]
    assert 3 * 24 < case["descriptors"] <= 3 * 24 + 20
