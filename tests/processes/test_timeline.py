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
from tests.support.launching import Launcher

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


def test_horovods_flags_and_every_ranks_file(launcher: Launcher, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="several processes need the gloo backend, and that needs torch")
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


def test_the_summary_says_where_the_timeline_is_and_how_it_is_opened(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(
        """
        import sys
        import numpy as np
        import hvdgloo.numpy as hvd
        if len(sys.argv) == 1:
            hvd.init()
            hvd.allreduce(np.ones(2), name="a")
            if hvd.rank() == 0:
                print(hvd.size())
        """
    )
    flags = ("-np", "2", "--timeline-filename")
    done = launcher.run(*flags, "one.json", script)
    assert done.stderr == f"hvdgloo-run: the timeline is in {tmp_path}/one.json; open it in ui.perfetto.dev\n"
    done = launcher.run(*flags, "tl/{rank}.json", script)
    merged = f"hvdgloo-run timeline merge all.json {tmp_path}/tl/*.json"
    assert done.stderr == (
        f"hvdgloo-run: the timelines of 2 ranks are in {tmp_path}/tl/{{rank}}.json; put them into one file for "
        f"ui.perfetto.dev with {merged}\n"
    )
    os.utime(tmp_path / "one.json", (0, 0))
    assert launcher.run(*flags, "one.json", script, "no init").stderr == "", "it is another job's"


def test_a_timeline_that_is_incomplete_is_a_failure_of_the_launcher(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(
        """
        import errno
        import numpy as np
        import hvdgloo.numpy as hvd
        from hvdgloo._engine.timeline import Timeline
        hvd.init()
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        Timeline._put_down = full
        hvd.allreduce(np.ones(2), name="a")
        """
    )
    done = launcher.run("-np", "1", "--timeline-filename", "tl.json", script)
    assert done.returncode == 1
    what = f"the timeline {tmp_path}/tl.json: No space left on device"
    assert f"hvdgloo-run: all workers succeeded, but not all could be written: {what}" in done.stderr.splitlines()
