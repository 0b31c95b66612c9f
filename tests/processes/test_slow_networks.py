"""benchmarks/slow_networks.py measures every way in one job; the figures themselves are for docs/slow-networks.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support.hosts import Bed
from tests.support.launching import run_command

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "slow_networks.py"


WIRES = {"full": 1.0, "bf16": 0.505, "int8": 0.26, "int4": 0.15}


@pytest.mark.extended
@pytest.mark.timeout(120)
@pytest.mark.skipif(gloo_provider("auto") != "torch", reason="torch's Gloo encodes")
@pytest.mark.parametrize(
    ("case", "others"),
    [
        ("reduction", {"torch": 1.51, "torch, bf16": 0.76, "torch, hvdgloo": 1.01}),
        ("pause", dict.fromkeys(("LocalSGD 8, int8", "fragments 4, overlap 1", "fragments 2, overlap 3"), 0.035)),
    ],
)
def test_each_way_has_its_turn_and_sends_as_many_bytes_as_it_should(
    make_bed: Callable[..., Bed], tmp_path: Path, case: str, others: dict[str, float]
) -> None:
    make_bed(["h1"])  # or this is skipped: the program makes hosts of its own
    found = tmp_path / "found.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--only", case, "--rates", "1gbit", "--json", str(found)]
    done = run_command(command, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = {row["way"]: row for row in json.loads(found.read_text())}
    full = min(rows["full"]["sent"])
    shares = {way: min(rows[way]["sent"]) / full for way in (*WIRES, *others)}
    for way, most in (WIRES | others).items():
        assert 0.9 * most < shares[way] <= most, shares
    assert min(rows["int8"]["codec"]) > 0
    assert max(rows["full"]["codec"]) == 0
    assert all(min(row["seconds"]) > (0.02 if case == "pause" else 0) for row in rows.values())
    if case == "pause":
        assert min(rows["alone"]["sent"]) < 100_000
        assert {"DDP", "DDP, bf16", "DDP, PowerSGD"} < set(rows)
        assert "% of the speed alone" in done.stdout


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_an_inner_step_is_measured_beside_the_plain_optimizer_s_and_sends_nothing(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    make_bed(["h1"])
    found = tmp_path / "found.json"
    only = ["--only", "inner,inner-small", "--rates", "10gbit", "--layout", "2x1"]
    command = [sys.executable, str(PROGRAM), "--quick", *only, "--json", str(found)]
    done = run_command(command, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())
    expected = [(case, way) for case in ("inner", "inner-small") for way in ("alone", "LocalSGD")]
    assert [(row["case"], row["way"]) for row in rows] == expected
    assert all(0 < min(row["sent"]) < 100_000 and min(row["processor"]) > 0 for row in rows)
    assert done.stdout.count("in brackets of alone") == 2
