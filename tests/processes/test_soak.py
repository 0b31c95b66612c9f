"""A short piece of benchmarks/soak.py: random collectives from several threads, every result checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import clean_environment

pytest.importorskip("torch", reason="several processes need the gloo backend, and that needs torch")

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


def test_twenty_seconds_of_random_collectives_are_right() -> None:
    done = subprocess.run(
        # So short a time does not show leaks: buffers and allocators are still filling.
        [sys.executable, str(SOAK), "--seconds", "20", "--seed", "7", "--growth", "200"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all results right\n")
