"""The training for the tests of failures: it lasts until a test ends it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

LONG_S = 300.0
"""No test waits for so long: one that got its end instead of the failure's cause would exceed its deadline."""


def train(marks: Path, fate: str = "") -> int:
    """Reduce until ``marks/end`` is there. Rank 1 meets its fate after the first steps.

    Each rank leaves a file with its process's id when it begins: ``<rank>-<pid>``.
    """
    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    rank = hvd.rank()
    (marks / f"{rank}-{os.getpid()}").touch()
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < LONG_S:
        over = hvd.allreduce(np.array([float((marks / "end").exists())]), name="over", op=hvd.Sum)
        if over[0]:
            return rank
        step += 1
        if rank == 1 and step == 3:
            meet(fate)
        time.sleep(0.02)
    return -1


def meet(fate: str) -> None:
    if fate == "raises":
        raise ValueError("a batch that is no good")
    if fate == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "exits":
        os._exit(7)


def train_elastic(marks: Path) -> tuple[int, int]:
    """The same where ranks come and go. Each leaves ``size<n>-<pid>`` when so many are together."""
    import numpy as np

    import hvdgloo.numpy as hvd
    from hvdgloo.common.elastic import ObjectState, run_fn

    hvd.init()

    def loop(state: ObjectState) -> tuple[int, int]:
        (marks / f"size{hvd.size()}-{os.getpid()}").touch()
        began = time.monotonic()
        while time.monotonic() - began < LONG_S:
            over = hvd.allreduce(np.array([float((marks / "end").exists())]), name="over", op=hvd.Sum)
            if over[0]:
                return hvd.rank(), hvd.size()
            state.commit()
            time.sleep(0.02)
        return -1, -1

    found: tuple[int, int] = run_fn(loop)(ObjectState(hvd.broadcast_object, hvd.rank))
    return found
