"""Hosts connected by pygloo, launched by the runner over real ssh."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.hosts import Bed

pytest.importorskip("pygloo", reason="pygloo is not installed; it has wheels for Python 3.8 to 3.10 only")

WORKER = """
import sys
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._job.process import current

hvd.init()
rank, size = hvd.rank(), hvd.size()
large = np.full(3_000_000, float(rank + 1))
assert (hvd.allreduce(large, op=hvd.Sum) == size * (size + 1) / 2).all()
backend = current().engine._groups[0].host.backend
flat = getattr(backend, "_flat", backend)
print("FOUND", type(backend).__name__, type(flat).__name__, "torch" in sys.modules, flush=True)
hvd.shutdown()
"""


@pytest.mark.parametrize(("hosts", "plane"), [("h1:1,h2:1", "PyglooBackend"), ("h1:2,h2:2", "HierarchicalBackend")])
def test_a_job_without_torch(bed: Bed, tmp_path: Path, hosts: str, plane: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "hvdgloo.runner", "-H", hosts, "--gloo-provider", "pygloo", str(script)]
    done = bed["h1"].run(command, timeout=50)
    assert done.returncode == 0, done.stderr
    found = [line.partition(":")[2] for line in done.stdout.splitlines() if "FOUND" in line]
    assert found == [f"FOUND {plane} PyglooBackend False"] * len(found)
    assert len(found) == (4 if plane == "HierarchicalBackend" else 2)
