"""Tracebacks when one rank fails and others with it: only the one with the reason is printed (pain 22). The program's
own line is in the launcher's summary of it."""

from __future__ import annotations

import pytest

from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher

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


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(("level", "tracebacks"), [("WARNING", 1), ("DEBUG", 2)])
def test_one_traceback(launcher: Launcher, level: str, tracebacks: int) -> None:
    need_installed("torch")
    script = launcher.script(PROGRAM)
    done = launcher.run("-np", "2", "--log-level", level, script, timeout=50)
    assert done.returncode == 1
    workers = [line for line in done.stderr.splitlines() if not line.startswith("hvdgloo-run:")]
    assert sum("Traceback" in line for line in workers) == tracebacks, done.stderr
    assert "[1]<stderr>:ValueError: the reason" in workers
    if tracebacks == 1:
        echo = next(line for line in workers if line.startswith("[0]<stderr>:Stopped because rank 1 ended, at "))
        assert "worker.py:8 in step, " in echo
    assert "the job failed: rank 1 on host localhost exited with status 1" in done.stderr


CLOSES = """
import atexit, sys
atexit.register(lambda: [print("closing", i, file=sys.stderr) for i in range(25)])
"""
"""So much follows the error that the summary has to repeat it."""

MISMATCH = f"""{CLOSES}
import numpy as np
import hvdgloo.numpy as hvd

hvd.init()
hvd.allreduce(np.ones(3 + hvd.rank()), name="uneven")
"""


def test_the_summary_has_the_error_and_the_program_s_own_line(launcher: Launcher) -> None:
    done = launcher.run("-np", "2", warm.python(*warm.NUMPY), launcher.script(MISMATCH), timeout=50)
    assert done.returncode == 1
    _, _, summary = done.stderr.partition("hvdgloo-run: Its last lines were:\n")
    assert 'hvd.allreduce(np.ones(3 + hvd.rank()), name="uneven")' in summary, done.stderr
    assert "hvdgloo.errors.MismatchError: allreduce.uneven: ranks disagree about its shape" in summary


STALL = f"""{CLOSES}
import signal
import numpy as np
import hvdgloo.numpy as hvd

hvd.init()
if hvd.rank() == 1:
    signal.pause()
hvd.allreduce(np.ones(3), name="once.more")
"""


def test_the_summary_of_a_stall_names_the_tensor_and_who_is_missing(launcher: Launcher) -> None:
    times = ("--stall-check-warning-time-seconds", "0.2", "--stall-check-shutdown-time-seconds", "0.4")
    done = launcher.run("-np", "2", *times, warm.python(*warm.NUMPY), launcher.script(STALL), timeout=50)
    assert done.returncode == 1
    _, _, summary = done.stderr.partition("hvdgloo-run: Its last lines were:\n")
    last = next((line for line in summary.splitlines() if "hvdgloo.errors.StallError: " in line), "")
    assert "StallError: stalled for longer than the stall shutdown time" in last, done.stderr
    assert "allreduce.once.more: for " in last
    assert "missing on rank 1 (host localhost, pid " in last
    assert 'hvd.allreduce(np.ones(3), name="once.more")' in summary
