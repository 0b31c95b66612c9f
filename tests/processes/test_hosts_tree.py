"""A tree of leaders over real hosts: who is named when a rank, a leader, the root or a host is gone, and how soon.

Rank 0 is on h1, ranks 1 and 2 are on h2, rank 3 is on h3 and reports to rank 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvdgloo._backends.select import gloo_provider
from hvdgloo._engine.control import VERDICT_SECONDS
from tests.processes.test_launcherless_hosts import Server, worker
from tests.support.hosts import Bed, HostProcess
from tests.support.launching import wait_for

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not gloo_provider("auto"), reason="hosts need Gloo, and that needs torch or pygloo"),
]

HOSTS = ("h1", "h2", "h2", "h3")
SOON = VERDICT_SECONDS - 0.5
"""Seconds until all know of a killed rank: mostly some milliseconds, more on a busy machine, and less than what those
wait who see that a connection has ended and are not told why."""
SILENCE = 3
TREE = {"HVDGLOO_CONTROL_FANIN": "1", "HVDGLOO_CONTROL_TREE_RANKS": "2"}

WORKER = """
import json, os, signal, time
import numpy as np
import hvdgloo.numpy as hvd
from hvdgloo._job.process import current
from hvdgloo.errors import PeerLostError

def write(name, value):
    with open(name + ".new", "w") as file:
        json.dump(value, file)
    os.rename(name + ".new", name)

hvd.init()
rank, steps = hvd.rank(), 0
try:
    # All have to leave in the same step, and do not look at the same moment.
    while not hvd.allreduce(np.array([float(os.path.exists("enough"))]), op=hvd.Max, name="enough")[0]:
        if os.path.exists(f"die{rank}"):
            write(f"ended{rank}", [time.time()])
            os.kill(os.getpid(), signal.SIGKILL)
        total = hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, name="step")
        assert total[0] == 10, total
        steps += 1
        if steps == 3:
            write(f"ready{rank}", sorted(current().engine._control.peers.connections))
        time.sleep(0.02)
    rows = hvd.allgather(np.full((rank, 3), float(rank)))
    assert rows.sum() == 3 * (1 + 4 + 9)
    hvd.shutdown()
    hvd.init()  # the tree is made again, and rank 0 listens elsewhere
    assert hvd.allreduce(np.array([rank + 1.0]), op=hvd.Sum, name="again")[0] == 10
    connections = sorted(current().engine._control.peers.connections)
    hvd.barrier()  # no rank leaves before all have looked
    write(f"ended{rank}", connections)
    hvd.shutdown()
except PeerLostError as error:
    write(f"ended{rank}", [time.time(), error.rank, str(error)])
    os._exit(0)
"""


class Job:
    """Four ranks without a launcher, who know that they are ready to be disturbed."""

    def __init__(self, bed: Bed, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.server = Server(bed["h1"], folder, "-np", "4", "--once")
        shared = {**self.server.variables, **TREE, **variables}
        program = f"import os\nos.chdir({str(folder)!r})\n{WORKER}"
        self.workers: list[HostProcess] = [
            worker(bed[host], program, {**shared, "HVDGLOO_INDEX": str(index)}) for index, host in enumerate(HOSTS)
        ]
        self.connections = [self.said(f"ready{rank}", 40) for rank in range(4)]

    def said(self, name: str, deadline: float) -> Any:
        path = self.folder / name
        wait_for(path.exists, deadline, f"file {name}")
        return json.loads(path.read_text())

    def end(self) -> None:
        for process in self.workers:
            process.kill()
            process.communicate(timeout=20)
        self.server.stop()


@pytest.fixture
def job(bed: Bed, tmp_path: Path) -> Iterator[Job]:
    with started(bed, tmp_path) as made:
        yield made


@contextmanager
def started(bed: Bed, folder: Path, **variables: str) -> Iterator[Job]:
    folder.chmod(0o777)
    job = Job(bed, folder, variables)
    try:
        yield job
    finally:
        job.end()


def test_members_speak_to_their_leader_and_leaders_to_the_one_above(job: Job) -> None:
    assert job.connections == [[1], [0, 2, 3], [1], [1]]
    (job.folder / "enough").touch()
    assert [job.said(f"ended{rank}", 20) for rank in range(4)] == job.connections


@pytest.mark.parametrize(("victim", "who"), [(2, "a member"), (1, "a leader"), (0, "the root"), (3, "a leaf")])
def test_a_killed_rank_is_named_by_all_others_at_once(job: Job, victim: int, who: str) -> None:
    (job.folder / f"die{victim}").touch()
    (when,) = job.said(f"ended{victim}", 20)
    for rank in set(range(4)) - {victim}:
        ended, named, text = job.said(f"ended{rank}", 20)
        assert named == victim, f"{who}: {text}"
        assert f"rank {victim} (host {HOSTS[victim]}, pid " in text
        assert ended - when < SOON, f"{who} was missed after {ended - when:.2f} s"


def test_a_host_that_is_cut_off_is_named_by_all_others(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    with started(bed, tmp_path, HVDGLOO_OPERATION_TIMEOUT=str(SILENCE)) as job:
        bed["h2"].cut()
        when = time.time()
        for rank, expected in enumerate([1, 0, 0, 1]):
            ended, named, text = job.said(f"ended{rank}", 20)
            assert named == expected, text
            assert f"has not answered for {SILENCE} s (stopped, swapping, or cut off" in text
            assert ended - when < 2 * SILENCE, "each level counts from the last answer, not from the level below"
