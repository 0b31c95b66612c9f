"""The timeline of real processes: a file that survives a kill at any moment, switched on by variables and flags."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.launching import launcher_in

BUSY = """
import numpy as np
import hvdgloo.numpy as hvd

hvd.init()
step = 0
while True:
    hvd.allreduce(np.ones(3), name=f"t{step % 50}")
    step += 1
"""


@pytest.mark.parametrize("size", [1_000, 50_000, 150_000])
def test_a_process_that_is_killed_leaves_valid_json(tmp_path: Path, size: int) -> None:
    path = tmp_path / "trace.json"
    worker = subprocess.Popen(
        [sys.executable, "-c", BUSY], env={**os.environ, "HVDGLOO_TIMELINE": str(path)}, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while not path.exists() or len(path.read_bytes().replace(b" ", b"")) < size:  # space is left in it
            assert worker.poll() is None, worker.stderr and worker.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=10)
    events = json.loads(path.read_text())
    assert len(events) > 2
    assert events[0]["name"] == "process_name"


def test_horovods_flags_and_every_ranks_file(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="several processes need the gloo backend, and that needs torch")
    with launcher_in(tmp_path) as launcher:
        script = launcher.script(
            """
            import numpy as np
            import hvdgloo.numpy as hvd
            hvd.init()
            hvd.allreduce(np.ones(100_000), name="x")
            """
        )
        flags = ("--timeline-filename", "trace.{rank}.json", "--timeline-mark-cycles")
        done = launcher.run("-np", "2", *flags, warm.python(*warm.NUMPY), script)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = {event["name"] for event in json.loads((tmp_path / f"trace.{rank}.json").read_text())}
        assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "SHM_ALLREDUCE"} <= names
        assert ("CYCLE_START" in names) is (rank == 0)
