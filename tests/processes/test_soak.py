"""A moment of what ``make soak`` does for long: random collectives from several threads, every result checked, and
processes that agree in a tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import clean_environment, run_command

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not gloo_provider("auto"), reason="several processes need torch or pygloo"),
]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SOAK, TREE = BENCHMARKS / "soak.py", BENCHMARKS / "tree.py"


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(SOAK, "--python", warm.python(), *arguments)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, str(program), *arguments], env=clean_environment(), timeout=55)


def test_some_seconds_of_random_collectives_are_right() -> None:
    # So short a time does not show leaks: buffers and allocators are still filling.
    done = soak("--seconds", "2", "--seed", "7", "--growth", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all results right\n")


SHORT = ["--seconds", "1", "--seed", "11", "--growth", "200"]


def test_a_moment_over_shared_memory() -> None:
    done = soak(*SHORT, "--np", "3", "--plane", "shm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all results right\n")


def test_a_moment_over_hosts_with_several_ranks(bed: Bed) -> None:
    """Hosts with unequal numbers of ranks."""
    plane = ["--plane", "hierarchical", "--hosts", "h1:2,h2:1"]
    done = bed["h1"].run(
        [sys.executable, str(SOAK), "--python", warm.python(), *SHORT, "--np", "3", *plane], timeout=55
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all results right\n")


def test_a_moment_of_processes_that_agree_in_a_tree() -> None:
    """12 of them; ``make soak`` has 256."""
    arguments = ["--processes", "12", "--hosts", "4", "--fanin", "2", "--seconds", "1"]
    done = run(TREE, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"12 processes as on 4 hosts, fan-in 2: [1-9]\d* operations, all right\n", done.stdout)


def test_threads_that_wait_in_turn_do_not_starve_each_other() -> None:
    """Each has one operation under way and does the engine's work while it waits."""
    done = soak("--seconds", "1", "--np", "2", "--alternating", "3", "--longest", "5", "--growth", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all results right\n")
    assert done.stdout.count("longest wait") == 2


def test_a_plane_that_cannot_be_had_is_no_success() -> None:
    """One host has no other to form a hierarchy with."""
    done = soak(*SHORT, "--np", "2", "--plane", "hierarchical")
    assert done.returncode != 0
    assert "not hierarchical" in done.stdout + done.stderr


@pytest.mark.parametrize("fanin", ["2", "0"])
def test_a_moment_of_one_node_of_a_tree(fanin: str) -> None:
    done = run(TREE, "--hosts", "3", "--slots", "2", "--rounds", "1", "--fanin", fanin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"161 tensors in  161:", done.stdout)) == (3 if fanin == "2" else 1)
