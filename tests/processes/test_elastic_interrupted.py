"""A worker is killed at a chosen point: in the middle of a commit, or while workers are given the state."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.support import warm
from tests.support.elastic_launch import Job
from tests.support.elastic_program import DEADLINE, TRAIN, Said
from tests.support.launching import Launcher, wait_for

pytestmark = pytest.mark.extended

DYING = """
class Dying(elastic.ObjectState):
    def _may_die(self, where, rank):
        if where == os.environ["WHERE"] and hvd.rank() == rank and not os.path.exists("died"):
            with open("died", "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), 9)

    def _may_die_saving(self, where):
        if hvd.size() == 3 and self.step == 20:
            self._may_die(where, 1)

    def save(self):
        self._may_die_saving("before saving")
        super().save()
        self._may_die_saving("after saving")

    def sync(self):
        joining = hvd.size() == 3 and os.path.exists("lost")
        if joining:
            self._may_die("who sends", 0)
            self._may_die("who receives", 2)
        super().sync()
        if joining:
            self._may_die("who has received", 2)

state = Dying(hvd.broadcast_object, hvd.rank, step=0, trained=0.0)
"""
PROGRAM = (
    TRAIN.replace("state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)\n", DYING)
    .replace("        state.step += 1\n", "        state.step += 1\n        state.trained += size / hvd.size()\n")
    .replace(
        "            return state.step\n",
        "            assert state.trained == state.step\n            return state.step\n",
    )
)


@pytest.fixture
def job(launcher: Launcher) -> Job:
    return Job(launcher, warm.python(*warm.NUMPY))


def together(job: Job, dead: int) -> list[Said]:
    """The last that three living workers have said, once that is of one epoch."""

    def found() -> list[Said] | None:
        last = {line.pid: line for line in job.said if line.pid != dead and psutil.pid_exists(line.pid)}
        there = sorted(last.values(), key=lambda line: line.rank)
        # A newcomer may say its first line before a survivor says its second, and have the rank of who died.
        of_one_epoch = len({line.step for line in there}) == 1
        complete = [(line.rank, line.size) for line in there] == [(rank, 3) for rank in range(3)]
        return there if of_one_epoch and complete else None

    return wait_for(found, DEADLINE, f"three workers to train: {job.error}")


@pytest.mark.parametrize("where", ["before saving", "after saving", "who sends", "who receives", "who has received"])
def test_a_worker_is_killed_in_the_middle_of_a_commit_or_a_sync(job: Job, where: str) -> None:
    """Nothing is lost, and nothing done twice."""
    flags = ["-np", "3", "--min-np", "1", "--failures-per-host", "99"]
    job.start(*flags, program=PROGRAM, env={"WHERE": where})
    first = job.members(1, 3)
    if "saving" not in where:
        (job.folder / "lost").touch()
        os.kill(first[2].pid, signal.SIGKILL)
    died = job.folder / "died"
    wait_for(lambda: died.exists() and died.read_text(), DEADLINE, f"a death: {job.error}")
    again = together(job, int(died.read_text()))
    survivors = {line.pid for line in first} - {int(died.read_text()), first[2].pid if "saving" not in where else 0}
    assert {line.pid for line in again} > survivors
    if "saving" in where:
        for pid in survivors:
            assert [line.step for line in job.said if line.pid == pid][1] == 20, "who could commit the step has it"
    assert job.finished() == 0
    over = [line for line in job.said if line.what == "over"]
    assert [line.size for line in over] == [3, 3, 3]
    assert len({line.step for line in over}) == 1
    assert over[0].step >= max(line.step for line in again)
