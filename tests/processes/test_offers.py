"""Operations that ranks offer to each other in shared memory, between real processes: deaths, Ctrl-C, other worlds."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.processes.test_elastic_join import PROGRAM as ELASTIC
from tests.processes.test_elastic_join import epochs, in_epoch, kill, stop, told
from tests.support.job import MARKING, Job
from tests.support.launching import wait_for

HEAD = (
    MARKING
    + """
from hvdgloo._job.process import current

def total(name="x"):
    return hvd.allreduce(np.ones(3), op=hvd.Sum, name=name).tolist()

def turn():
    return current().engine._member.turn

hvd.init()
rank = hvd.rank()
for _ in range(10):
    assert total() == [hvd.size()] * 3
assert turn() == 9, "they were not offered"
"""
)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_noticed_within_a_second_by_those_that_have_offered(tmp_path: Path, victim: int) -> None:
    code = (
        HEAD
        + f"""
if rank == {victim}:
    mark(f"ready.{{rank}}")
    os.kill(os.getpid(), signal.SIGSTOP)
mark(f"ready.{{rank}}")
try:
    total()
except hvd.HorovodInternalError as error:
    mark(f"failed.{{rank}}", json.dumps([time.time(), type(error).__name__, error.rank]))
"""
    )
    with Job(3, code, tmp_path) as job:
        for rank in range(3):
            job.wait_for_file(f"ready.{rank}")
        process = psutil.Process(job.workers[victim].pid)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        others = [psutil.Process(job.workers[rank].pid) for rank in range(3) if rank != victim]
        wait_for(lambda: all(other.status() == psutil.STATUS_SLEEPING for other in others))
        since = time.time()
        process.kill()
        for rank in range(3):
            if rank != victim:
                at, kind, blamed = json.loads(job.wait_for_file(f"failed.{rank}", 11))
                assert at - since < 1.0
                assert (kind, blamed) == ("PeerLostError", victim)


def test_a_rank_that_is_killed_after_its_offer_fails_what_comes_after(tmp_path: Path) -> None:
    """Its data are there, so the operation succeeds if the death is not yet known; then every rank gets the error."""
    code = (
        HEAD
        + """
if rank == 1:
    from hvdgloo._backends.shm.lane import Lane
    def sleep(*_):
        os.kill(os.getpid(), signal.SIGKILL)
    Lane.sleep = sleep
    total()
try:
    while True:
        assert total() == [3.0] * 3
except hvd.HorovodInternalError as error:
    mark(f"failed.{rank}", json.dumps([type(error).__name__, error.rank]))
"""
    )
    with Job(3, code, tmp_path) as job:
        for rank in (0, 2):
            assert json.loads(job.wait_for_file(f"failed.{rank}")) == ["PeerLostError", 1]


OFFERED = (
    HEAD
    + """
for _ in range(2):
    total("y")
hvd.barrier()
if rank == 0:
    def watch(member=current().engine._member):
        while (own := member.own_offer) is None or not own.is_told:
            time.sleep(0.001)
        mark("offered")
    threading.Thread(target=watch).start()
"""
)
"""Rank 0 tells when it has offered."""


def test_ctrl_c_ends_the_wait_and_the_operation_goes_on(tmp_path: Path) -> None:
    code = (
        OFFERED
        + """
    try:
        total("y")
    except KeyboardInterrupt:
        mark("interrupted")
else:
    while not os.path.exists(os.environ["JOB_FOLDER"] + "/interrupted"):
        time.sleep(0.001)
    assert total("y") == [2.0] * 3
for _ in range(10):
    assert total() == [2.0] * 3
print(turn())
"""
    )
    with Job(2, code, tmp_path) as job:
        job.wait_for_file("offered")
        job.workers[0].send_signal(signal.SIGINT)
        ended = job.succeed()
    assert len({each.stdout for each in ended}) == 1


@pytest.mark.parametrize("how", ["held back", "handled"])
def test_a_ctrl_c_that_raises_nothing_does_not_end_the_wait(tmp_path: Path, how: str) -> None:
    code = (
        OFFERED
        + """
    from hvdgloo._platform import interrupts
    if HOW == "held back":
        held = interrupts.hold()
    else:
        signal.signal(signal.SIGINT, lambda *_: mark("interrupted"))
    assert total("y") == [2.0] * 3
    if HOW == "held back":
        try:
            interrupts.release(held)
        except KeyboardInterrupt:
            mark("raised")
else:
    while not os.path.exists(os.environ["JOB_FOLDER"] + "/interrupted"):
        time.sleep(0.001)
    assert total("y") == [2.0] * 3
"""
    ).replace("HOW", repr(how))
    with Job(2, code, tmp_path) as job:
        job.wait_for_file("offered")
        job.workers[0].send_signal(signal.SIGINT)
        if how == "held back":
            (tmp_path / "interrupted").touch()
        job.succeed()
    assert (tmp_path / "raised").exists() is (how == "held back")


def test_another_world_of_the_same_processes_begins_anew(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
hvd.barrier()
hvd.shutdown()
hvd.init()
assert turn() == 0
for _ in range(5):
    assert total() == [hvd.size()] * 3
assert turn() == 4
"""
    )
    with Job(2, code, tmp_path) as job:
        job.succeed()


def test_in_an_elastic_job_each_epoch_begins_anew(tmp_path: Path) -> None:
    """A rank is killed while the others offer, and another one comes."""
    program = ELASTIC.replace("np.ones(1), op=hvd.Sum)", 'np.ones(1), op=hvd.Sum, name="x")')
    program = program.replace("op=hvd.Max)", 'op=hvd.Max, name="agreed")')
    going_on = "not wants_to_go_on() and process.current().engine._member.turn > 9"
    program = program.replace("stop = not wants_to_go_on()", f"stop = {going_on}")
    assert going_on in program
    with Job(3, program, tmp_path, elastic=epochs()) as job:
        first = in_epoch(job, [0, 1, 2], 3)
        victim = next(worker for worker in range(3) if told(job, worker)[0]["pid"] == first[1]["pid"])
        others = [worker for worker in range(3) if worker != victim]
        kill(job, victim)
        second = in_epoch(job, others, 2)
        assert [second[rank]["pid"] for rank in (0, 1)] == [first[rank]["pid"] for rank in (0, 2)]
        job.add()
        in_epoch(job, [*others, 3], 3)
        stop(job, [*others, 3], tmp_path)


def test_ranks_that_end_after_the_last_operation_end_well(tmp_path: Path) -> None:
    code = HEAD + "\nfor _ in range(50):\n    total()\n"
    with Job(3, code, tmp_path) as job:
        job.succeed()


def test_ranks_that_wait_for_each_other_use_hardly_any_processor_time(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
if rank == 1:
    mark("ready")
    time.sleep(1.0)
used = time.process_time()
total()
if rank == 0:
    print(time.process_time() - used)
"""
    )
    with Job(2, code, tmp_path) as job:
        ended = job.succeed()
    assert float(ended[0].stdout) < 0.05
