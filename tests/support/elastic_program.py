"""A program for tests of elastic launches: it trains until it is told to stop, and says in which epochs it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.launching import wait_for

DEADLINE = 30.0
"""Seconds that anything may take on a busy machine."""

TRAIN = """
import os, time
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo import elastic

hvd.init()

def say(what, step):
    print(what, hvd.rank(), hvd.size(), hvd.local_rank(), step, os.getpid(), os.environ["HVDGLOO_WORKER"], flush=True)

@elastic.run_fn
def train(state):
    say("epoch", state.step)
    while True:
        told = np.array([float(os.path.exists("over")), 1.0])
        over, size = hvd.allreduce(told, name="told", op=hvd.Sum)
        assert size == hvd.size()
        if over:
            return state.step
        state.step += 1
        state.commit()
        time.sleep(0.005)

state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
say("over", train(state))
"""


@dataclass(frozen=True)
class Said:
    """A line of the program: it has entered an epoch, or reached its end.

    Attributes:
        label: the rank before the line, by the launcher.
        worker: host, slot and number.
    """

    label: int
    what: str
    rank: int
    size: int
    local_rank: int
    step: int
    pid: int
    worker: str


class Training:
    """The output of a job with ``TRAIN`` so far.

    Args:
        folder: of the job, with the launcher's streams in ``out`` and ``err``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def said(self) -> list[Said]:
        found = []
        for line in (self.folder / "out").read_text().splitlines(keepends=True):
            label, _, text = line.partition("]<stdout>:")
            words = text.split()
            if line.endswith("\n") and words and words[0] in ("epoch", "over"):
                what, rank, size, local_rank, step, pid, worker = words
                places = int(rank), int(size), int(local_rank), int(step), int(pid)
                found.append(Said(int(label.removeprefix("[")), what, *places, worker))
        return found

    @property
    def error(self) -> str:
        return (self.folder / "err").read_text()

    def members(self, number: int, size: int, what: str = "epoch") -> list[Said]:
        """The members of the ``number``-th epoch (from 1) of this size, by rank, once all have entered it."""

        def found() -> list[Said] | None:
            groups: list[dict[int, Said]] = [{}]
            for line in self.said:
                if line.what == what and line.size == size:
                    if line.rank in groups[-1]:
                        groups.append({})
                    groups[-1][line.rank] = line
            complete = [group for group in groups if len(group) == size]
            return [complete[number - 1][rank] for rank in range(size)] if len(complete) >= number else None

        try:
            return wait_for(found, DEADLINE, f"epoch {number} of {size} workers")
        except AssertionError as late:
            raise AssertionError(f"{late}: {self.said}, {self.error}") from None

    def says(self, text: str) -> None:
        """Wait until the launcher has said this."""
        wait_for(lambda: text in self.error, DEADLINE, f"{text!r}")

    def finish(self) -> None:
        """Have the workers come to their end."""
        (self.folder / "over").write_text("")

    def end(self) -> int:
        """Wait for the end of the job; return its exit status."""
        raise NotImplementedError

    def finished(self) -> int:
        """Have the workers come to their end; return the job's exit status."""
        self.finish()
        return self.end()
