"""Elastic jobs on one host, by the real launcher: workers and slots come and go."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.support import warm
from tests.support.elastic_launch import Job
from tests.support.elastic_program import DEADLINE, TRAIN
from tests.support.launching import Launcher, wait_for


@pytest.fixture
def job(launcher: Launcher) -> Job:
    return Job(launcher, warm.python(*warm.NUMPY))


@pytest.mark.parametrize("victims", [[1], [0], [0, 2]], ids=["one", "rank 0", "two at once"])
def test_killed_workers_are_survived_and_their_slots_started_again(job: Job, victims: list[int]) -> None:
    job.start("-np", "3", "--min-np", "1", "--failures-per-host", "99", fresh=victims == [0])
    first = job.members(1, 3)
    for victim in victims:
        os.kill(first[victim].pid, signal.SIGKILL)
    survivors = [worker.pid for rank, worker in enumerate(first) if rank not in victims]
    again = job.members(2, 3)
    # Survivors stay the processes that they are, in their order, and newcomers follow; local ranks are the slots.
    assert [worker.pid for worker in again[: len(survivors)]] == survivors
    assert sorted(worker.local_rank for worker in again) == [0, 1, 2]
    assert {worker.local_rank for worker in again[len(survivors) :]} == set(victims)
    assert {worker.worker for worker in again}.isdisjoint(first[victim].worker for victim in victims)
    assert all(worker.label == worker.rank for worker in again)
    assert len({worker.step for worker in again}) == 1
    assert again[0].step > 0
    job.finish()
    assert len({worker.step for worker in job.members(1, 3, "over")}) == 1
    assert job.end() == 0
    assert "was killed by signal 9 (SIGKILL)" in job.error
    assert "hvdgloo-run: the workers changed" in job.error


def test_with_one_failure_per_host_the_host_is_out_and_the_job_ends_with_that_status(job: Job) -> None:
    job.start("-np", "2", "--min-np", "1", "--failures-per-host", "1")
    os.kill(job.members(1, 2)[1].pid, signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL
    assert "host localhost is left out" in job.error
    summary = job.error[job.error.index("the job failed: rank 1 on host localhost was killed") :]
    assert "host localhost is left out" in summary
    assert summary.count("was killed by signal 9 (SIGKILL)") == 1


def test_success_needs_all_members_of_the_last_epoch(job: Job) -> None:
    """Horovod's #3852: there, any worker that ends with 0 makes the job a success."""
    fails = TRAIN + "import sys\nsys.exit(7 if hvd.rank() == 1 else 0)\n"
    job.start("-np", "2", "--min-np", "1", "--failures-per-host", "99", program=fails)
    job.members(1, 2)
    job.finish()
    assert job.end() == 7
    assert "rank 1 on host localhost exited with status 7" in job.error


def test_an_error_of_the_program_ends_the_job_with_its_last_lines(job: Job) -> None:
    fails = TRAIN.replace("        state.step += 1", "        state.step += 1\n        raise KeyError('no such key')")
    job.start("-np", "2", "--min-np", "2", "--failures-per-host", "1", program=fails)
    assert job.end() == 1
    assert "KeyError: 'no such key'" in job.error


def test_ctrl_c_ends_an_elastic_job_with_130(job: Job) -> None:
    process = job.start("-np", "2", "--min-np", "1", "--failures-per-host", "99", fresh=True)
    job.members(1, 2)
    process.send_signal(signal.SIGINT)
    assert job.end() in (130, -signal.SIGINT)
    assert "left out" not in job.error
    assert "went on" not in job.error


def test_a_killed_agent_takes_its_host(job: Job) -> None:
    """The watchdog ends the workers; no other host is there, so that the job ends, too."""
    process = job.start("-np", "2", "--min-np", "1", "--failures-per-host", "1", fresh=True)
    job.members(1, 2)
    _, agent = job.launcher.agents(process)
    agent.kill()
    assert job.end() != 0
    assert "its agent was killed by signal 9 (SIGKILL)" in job.error


def test_a_job_starts_when_enough_slots_are_there_and_then_on_all(job: Job) -> None:
    flags = job.discovers("localhost:1")
    job.start("-np", "2", "--min-np", "1", "--max-np", "3", *flags, "--verbose")
    job.discovers("localhost:4")
    assert [worker.worker.rpartition("/")[0] for worker in job.members(1, 3)] == [f"localhost/{n}" for n in range(3)]
    assert job.finished() == 0


def test_slots_that_come_join_and_slots_that_go_leave_without_losing_a_step(job: Job) -> None:
    flags = job.discovers("localhost:1")
    job.start("-np", "1", "--min-np", "1", *flags)
    (alone,) = job.members(1, 1)
    job.discovers("localhost:2")
    both = job.members(1, 2)
    assert both[0].pid == alone.pid
    assert both[1].local_rank == 1
    job.discovers("localhost:1")
    (left,) = job.members(2, 1)
    assert left.pid == alone.pid
    assert left.step > both[0].step
    assert job.finished() == 0
    assert "Traceback" not in job.error
    # The one that left has ended with 0, and has said why.
    assert "host localhost has only 1 slot now" in job.error or "leaves the job" in job.error


def test_slots_of_a_host_become_more_and_then_fewer_than_at_first(job: Job) -> None:
    flags = job.discovers("localhost:2")
    job.start("-np", "2", "--min-np", "1", *flags)
    first = job.members(1, 2)
    job.discovers("localhost:4")
    four = job.members(1, 4)
    assert [worker.pid for worker in four[:2]] == [worker.pid for worker in first]
    assert [worker.local_rank for worker in four] == [0, 1, 2, 3]
    job.discovers("localhost:1")
    (last,) = job.members(1, 1)
    assert last.pid == first[0].pid, "the highest slots are those that go"
    assert last.step > four[0].step
    assert job.finished() == 0
    assert "Traceback" not in job.error


def test_a_newcomer_that_never_gets_ready_keeps_no_other_waiting(job: Job) -> None:
    asleep = """
hvd.init()
if os.environ["HVDGLOO_WORKER"].split("/")[1] == "1":
    print("sleeps", flush=True)
    time.sleep(600)
"""
    sleeps = TRAIN.replace("\nhvd.init()\n", asleep)
    flags = job.discovers("localhost:1")
    job.start("-np", "1", "--min-np", "1", *flags, program=sleeps)
    job.members(1, 1)
    job.discovers("localhost:2")
    wait_for(lambda: "sleeps" in (job.folder / "out").read_text(), DEADLINE)
    job.finish()
    (over,) = job.members(1, 1, "over")
    assert over.step > 0
    assert job.end() == 0


def test_a_program_that_never_enters_elastic_run_keeps_its_size_and_says_so(job: Job) -> None:
    program = """
    import os, time
    import numpy as np
    import hvdgloo.numpy as hvd
    hvd.init()
    open("started", "w").write("x")
    while not hvd.allreduce(np.array([float(os.path.exists("over"))]), name="over", op=hvd.Sum)[0]:
        time.sleep(0.01)
    print("size", hvd.size(), flush=True)
    """
    flags = job.discovers("localhost:2")
    job.start("-np", "2", "--min-np", "1", *flags, program=program)
    job.launcher.file("started")
    job.discovers("localhost:3")
    job.says("there are free slots (localhost); they are used once all workers have entered elastic.run")
    assert job.finished() == 0
    assert (job.folder / "out").read_text().count("size 2") == 2


def test_several_names_of_this_machine_are_several_hosts_with_a_notice(job: Job) -> None:
    flags = job.discovers("localhost:1", "127.0.0.1:1")
    job.start("-np", "2", "--min-np", "1", *flags)
    assert [worker.worker.split("/")[0] for worker in job.members(1, 2)] == ["localhost", "127.0.0.1"]
    assert job.finished() == 0
    assert job.error.count("are the same machine") == 1


def test_workers_know_their_host_s_number_as_with_torchrun(job: Job) -> None:
    program = """
    import os
    print("node", os.environ["GROUP_RANK"], os.environ["NODE_RANK"], os.environ["GROUP_WORLD_SIZE"], flush=True)
    print("restart", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
    """
    hosts = ("-H", "localhost:1,127.0.0.1:2")
    job.start("-np", "3", "--min-np", "1", "--reset-limit", "7", *hosts, program=program)
    assert job.end() == 0
    said = (job.folder / "out").read_text()
    assert [said.count(f"node {number} {number} 2") for number in (0, 1)] == [1, 2]
    assert said.count("restart 0 7") == 3


def test_files_and_lines_have_the_ranks_that_workers_have_at_that_time(job: Job) -> None:
    job.start("-np", "2", "--min-np", "1", "--failures-per-host", "99", "--output-filename", "logs")
    first = job.members(1, 2)
    os.kill(first[0].pid, signal.SIGKILL)
    again = job.members(2, 2)
    assert job.finished() == 0
    assert all(line.label == line.rank for line in job.said)
    rank_0 = (job.folder / "logs" / "rank.0" / "stdout").read_text()
    assert str(first[0].pid) in rank_0
    assert str(again[0].pid) in rank_0


def test_a_stopped_worker_is_ended_by_its_agent_once_others_have_lost_it(job: Job) -> None:
    """SIGSTOP: its connections stay open. The operation's time-out makes the others give it up."""
    flags = ["-np", "2", "--min-np", "1", "--failures-per-host", "99"]
    job.start(*flags, env={"HVDGLOO_OPERATION_TIMEOUT": "3"}, fresh=True)
    first = job.members(1, 2)
    os.kill(first[1].pid, signal.SIGSTOP)
    try:
        again = job.members(2, 2)
        assert again[0].pid == first[0].pid
        assert not psutil.pid_exists(first[1].pid)
    finally:
        if psutil.pid_exists(first[1].pid):
            os.kill(first[1].pid, signal.SIGCONT)
    assert job.finished() == 0


def test_a_second_worker_is_killed_while_the_others_form_again(job: Job) -> None:
    """Horovod's #3014 and #2030: a failure during the reset."""
    dies = TRAIN.replace(
        "state = elastic.ObjectState(",
        """
class Dying(elastic.ObjectState):
    def on_reset(self):
        super().on_reset()
        if os.environ["HVDGLOO_WORKER"].endswith("/2"):
            os.kill(os.getpid(), 9)

state = Dying(""",
    )
    job.start("-np", "4", "--min-np", "1", "--failures-per-host", "99", program=dies)
    first = job.members(1, 4)
    os.kill(first[3].pid, signal.SIGKILL)
    again = job.members(2, 4)
    assert [worker.pid for worker in again[:2]] == [first[0].pid, first[2].pid]
    assert job.finished() == 0


def test_one_worker_after_the_other_is_killed(job: Job) -> None:
    job.start("-np", "3", "--min-np", "1", "--failures-per-host", "99")
    step = -1
    for number in range(1, 5):
        members = job.members(number, 3)
        assert members[0].step > step  # the training goes on from where it was
        step = members[0].step
        os.kill(members[number % 3].pid, signal.SIGKILL)
    job.members(5, 3)
    assert job.finished() == 0
    assert job.error.count("was killed by signal 9 (SIGKILL); ") >= 4


def test_newcomers_can_be_let_in_at_once(job: Job) -> None:
    """Horovod's way: those who are in training wait in init() with the newcomer."""
    flags = job.discovers("localhost:1")
    job.start("-np", "1", "--min-np", "1", "--join", "now", *flags)
    (alone,) = job.members(1, 1)
    job.discovers("localhost:3")
    assert job.members(1, 3)[0].pid == alone.pid
    assert job.finished() == 0


@pytest.mark.extended
def test_a_host_with_more_slots_than_it_can_bear_is_left_out(job: Job) -> None:
    job.start("-np", "2", "--min-np", "1", *job.discovers("localhost:20000"))
    assert job.end() == 1
    assert "host localhost is left out: 20000 processes would run on host localhost" in job.error
    assert job.said == []


def test_below_min_np_the_job_waits_and_then_ends_with_the_failure_s_status(job: Job) -> None:
    fails = TRAIN.replace("        state.step += 1", "        if hvd.rank() == 1:\n            os._exit(5)")
    flags = job.discovers("localhost:1", "127.0.0.1:1")
    job.start("-np", "2", "--min-np", "2", "--elastic-timeout", "5", *flags, program=fails)
    assert job.end() == 5
    assert "host 127.0.0.1 is left out: rank 1 on host 127.0.0.1" in job.error
    assert "1 of 2 workers are ready (localhost: 1; 127.0.0.1: left out" in job.error
    assert "after 5 s" in job.error


def test_a_reset_limit_ends_the_job(job: Job) -> None:
    job.start("-np", "2", "--min-np", "1", "--failures-per-host", "99", "--reset-limit", "0")
    os.kill(job.members(1, 2)[1].pid, signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL, "the status of the failure that was not survived"
    assert "which exceeds --reset-limit 0" in job.error


@pytest.mark.extended
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a host name of its own")
def test_another_pod_of_the_same_name_has_a_clean_record(job: Job) -> None:
    """A host is left out for twice as long each time, unless another machine or pod stands behind its name by then."""
    pod = job.folder / "pod"
    pod.write_text("first")
    agent = f"unshare --uts sh -c 'hostname $(cat {pod})-$0; exec {{shell}}' {{host}}"
    flags = ["-H", "a:1,b:1", "--agent-command", agent, "--blacklist-cooldown-range", "1", "60"]
    # Workers of different hosts use Gloo, which is torch's.
    launcher = psutil.Process(job.start("-np", "2", "--min-np", "1", *flags, warm.python(), fresh=True).pid)
    for number, name in enumerate(["first", "second", "third"], 1):
        there = {member.worker.partition("/")[0]: member for member in job.members(number, 2)}
        pod.write_text(name)
        # The only two agents that there are: a's is the older one.
        agents = [child for child in launcher.children() if child.status() != psutil.STATUS_ZOMBIE]
        max(agents, key=lambda agent: (agent.create_time(), agent.pid)).kill()
        (alone,) = job.members(number, 1)
        assert alone.pid == there["a"].pid
    assert job.finished() == 0
    # The agent that was killed last was another pod's than the one before it.
    times = [int(seconds) for seconds in re.findall(r"host b is left out for (\d+) s", job.error)]
    assert [seconds >= 4 for seconds in times] == [False, True, False], job.error
