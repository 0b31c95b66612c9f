"""benchmarks/scaling.py measures its pieces and steps in real jobs; that they are right is for docs/performance.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import run_command

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("case", "ranks", "finds"),
    [
        (
            "hosts",
            2,
            {"cube_small_used", "cube_large_used", "ring_small_used", "ring_large_used", "at_once_small_used"},
        ),
        ("memory", 2, {"slices_small_used", "slices_large_used"}),
    ],
)
def test_a_job_finds_what_its_pieces_cost(case: str, ranks: int, finds: set[str], tmp_path: Path) -> None:
    result, plane = tmp_path / "result.json", "gloo" if case == "hosts" else "auto"
    options = ["-np", str(ranks), "--cpu-operations", plane]
    command = [*warm.launcher(), *options, warm.python(), str(PROGRAMS / "scaling_pieces.py")]
    done = run_command([*command, case, str(result)], timeout=50)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    assert finds <= set(found)
    assert all(seconds > 0 for seconds in found.values())


@pytest.mark.extended
def test_steps_on_hosts_are_measured_beside_what_is_predicted(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    """The link is so slow that a step takes what its bytes do, however busy the machine is."""
    make_bed(["h1"])  # or this is skipped: the program makes hosts of its own
    known, found = tmp_path / "known.json", tmp_path / "found.json"
    names = ("agreement", "member", "message", "ring", "ring_byte", "exchange", "byte", "peer")
    bench = {"latency": 0.0, "memory": 1e10, "processors": 2}
    known.write_text(json.dumps({"measured between hosts": {"costs": dict.fromkeys(names, 0.0), "bench": bench}}))
    command = [sys.executable, str(PROGRAMS / "scaling.py"), "--validate", "--layouts", "2x1", "--rates", "100mbit"]
    options = ["--rounds", "1", "--runs", "2", "--measured", str(known), "--json", str(found)]
    done = run_command([*command, *options], timeout=55)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(found.read_text())["validated"]}
    assert {name: len(row["measured_s"]) for name, row in rows.items()} == {"wire": 2, "latency": 2}
    # 4 MiB from each host at 100 Mbit/s, less what may pass at once.
    least = ((4 << 20) / 0.956 - (256 << 10)) / (100e6 / 8)
    assert all(seconds > least for seconds in rows["wire"]["measured_s"])
    assert all(seconds >= 0.04 for seconds in rows["latency"]["measured_s"])
