"""The end of jobs over several hosts: pains 22 (a crashed rank leaves others running) and 24 (orphans), with real
ssh."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.hosts import Bed
from tests.support.hosts_job import FERTILE, OFFSPRING, HostsJob, assert_clean
from tests.support.launching import wait_for
from tests.support.selection import extended

SOON = 5.0
CUT = 10.0


@pytest.fixture
def job(bed: Bed, tmp_path: Path) -> Iterator[HostsJob]:
    made = HostsJob(bed, tmp_path / "job")
    yield made
    if made.process is not None:
        made.process.kill()
    for host in bed:
        for process in host.processes():
            host.kill(process)


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("sys.exit(3)", 3, "exited with status 3"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), 11)", 139, "was killed by signal 11 (SIGSEGV)"),
        ("os._exit(0 if os.kill(os.getpid(), 15) else 0)", 143, "was killed by signal 15 (SIGTERM)"),
    ],
    ids=["exit", "kill", "crash", "term"],
)
def test_pain_22_the_end_of_a_worker_ends_the_job_on_all_hosts(job: HostsJob, how: str, status: int, said: str) -> None:
    # Once with the default grace period, which all of these workers' children use up.
    job.start_fertile(*([] if status == 3 else ["--grace-period", "1"]), ends=1, how=how)
    job.strike()
    assert_clean(job.bed, SOON, time.monotonic())
    assert job.wait() == status
    assert job.last_words.startswith(f"hvdgloo-run: the job failed: rank 1 on host h2 {said}")


def test_pain_22_an_out_of_memory_kill_on_another_host_is_called_so(job: HostsJob) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"hvdgloo-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 * 1024 * 1024))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        job.start_fertile(
            "--grace-period",
            "1",
            ends=1,
            how=f"open('{group}/cgroup.procs', 'w').write(str(os.getpid())); data = b'x' * 300_000_000",
        )
        job.strike()
        assert_clean(job.bed, SOON, time.monotonic())
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), what="an empty control group")
        group.rmdir()
    assert job.wait() == 137
    assert (
        "rank 1 on host h2 was killed by signal 9 (SIGKILL); the kernel ended a process for lack of" in job.last_words
    )


TRAIN = """
import os, time
import torch, hvdgloo.torch as hvd
hvd.init()
open(f"ready{hvd.rank()}", "w").write(str(os.getpid()))
while True:
    hvd.allreduce(torch.ones(1000), name="gradient")
"""


@pytest.mark.parametrize("rank", [1, *extended(0, 2)])
def test_pain_22_the_summary_names_who_was_killed_and_not_who_noticed(job: HostsJob, rank: int) -> None:
    need_installed("torch")
    job.start(TRAIN, python=warm.python())
    for other in range(3):
        job.file(f"ready{other}")
    job.worker(rank).kill()
    assert_clean(job.bed, SOON, time.monotonic())
    assert job.wait() == 137
    assert job.last_words.startswith(
        f"hvdgloo-run: the job failed: rank {rank} on host h{rank + 1} was killed by signal 9 (SIGKILL)"
    )


def test_pain_22_the_summary_names_an_agent_that_was_killed_and_not_its_workers_peers(job: HostsJob) -> None:
    need_installed("torch")
    job.start(TRAIN, python=warm.python())
    for other in range(3):
        job.file(f"ready{other}")
    job.agents("h2")[1].kill()
    assert_clean(job.bed, SOON, time.monotonic())
    assert job.wait() == 1
    assert job.last_words.startswith("hvdgloo-run: the job failed: the agent on host h2 was killed by signal 9")


@pytest.mark.parametrize("where", ["h3", *extended("h1")])
@pytest.mark.parametrize("which", ["agent", *extended("watchdog", "both")])
def test_pain_24_kill_9_of_an_agent_leaves_nothing_on_any_host(job: HostsJob, where: str, which: str) -> None:
    job.start_fertile("--grace-period", "1")
    watchdog, agent = job.agents(where)
    victims = {"agent": [agent], "watchdog": [watchdog], "both": [agent, watchdog]}[which]
    # It is there, and is about to become a program without an environment.
    (forgetful,) = wait_for(lambda: [p for p in job.bed[where].processes() if _is_forgetful(p)])
    for victim in victims:
        victim.suspend()
    for victim in victims:
        victim.kill()
    killed = time.monotonic()
    if which == "both":
        # Nothing but the environment tells what belongs to the job: a daemon that cleared it and left its session is
        # out of reach when both of its watchers were killed at one instant.
        forgetful.kill()
    assert_clean(job.bed, SOON, killed)
    assert job.wait() == 1
    assert f"the agent on host {where} " in job.last_words
    assert {
        # ssh does not tell by which signal the command that it ran was killed.
        "both": "was killed by signal 9" if where == "h1" else "was killed, or lost",
        "agent": "was killed by signal 9",
        "watchdog": "ended its workers, because its watchdog was killed",
    }[which] in job.last_words


@pytest.mark.parametrize(("flags", "within"), [((), CUT + 3), (("--grace-period", "1"), CUT)], ids=["default", "short"])
def test_pain_24_an_agent_that_hangs_is_swept_up_by_the_second_way(
    job: HostsJob, flags: tuple[str, ...], within: float
) -> None:
    job.start_fertile(*flags)
    watchdog, agent = job.agents("h2")
    agent.suspend()
    watchdog.suspend()
    assert_clean(job.bed, within, time.monotonic())
    assert job.wait() == 1
    assert "the agent on host h2 has been silent for 5 s" in job.last_words
    assert "a second time" not in job.error


@pytest.mark.parametrize("whose", ["launcher", "sshd"])
def test_pain_24_the_end_of_a_connection_leaves_nothing_on_either_side(job: HostsJob, whose: str) -> None:
    job.start_fertile("--grace-period", "1")
    if whose == "launcher":
        job.ssh_client("h2").kill()
    else:
        for session in job.bed["h2"].sessions():
            job.bed["h2"].kill(session)
    assert_clean(job.bed, SOON, time.monotonic())
    assert job.wait() == 1
    assert "the agent on host h2 " in job.last_words
    assert ("was killed by signal 9" if whose == "launcher" else "lost its connection") in job.last_words


def test_pain_24_kill_9_of_the_launcher_leaves_nothing_on_any_host(job: HostsJob) -> None:
    process = job.start_fertile()
    process.kill()
    assert_clean(job.bed, SOON, time.monotonic())


@pytest.mark.parametrize("name", ["h3", *extended("h1")])
def test_pain_24_a_host_that_is_cut_off_ends_its_workers_and_so_do_the_others(
    make_bed: Callable[..., Bed], tmp_path: Path, name: str
) -> None:
    """``h1`` is the launcher's own host: then it is the others that are cut off."""
    bed = make_bed(["h1", "h2", "h3"])
    job = HostsJob(bed, tmp_path / "job")
    job.start_fertile()
    assert len(bed[name].processes()) >= 1 + OFFSPRING
    bed[name].cut()
    took = assert_clean(bed, CUT, time.monotonic())
    assert took > 3, "silence shorter than this would be a false alarm"
    assert job.wait() == 1
    lost = "h3" if name == "h3" else "h"
    assert f"the agent on host {lost}" in job.last_words
    assert "has been silent for 5 s: its host is cut off" in job.last_words


@pytest.mark.extended
def test_pain_24_launcher_and_network_lost_together(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    """Then nothing tells the ssh client: it must notice by itself."""
    bed = make_bed(["h1", "h2"])
    job = HostsJob(bed, tmp_path / "job")
    process = job.start_fertile("--grace-period", "1")
    bed["h2"].cut()
    process.kill()
    assert_clean(bed, CUT, time.monotonic())


def test_a_host_that_loses_its_power_ends_the_job(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed(["h1", "h2"])
    job = HostsJob(bed, tmp_path / "job")
    job.start_fertile("--grace-period", "1")
    bed["h2"].power_off()
    assert_clean(bed, CUT, time.monotonic())
    assert job.wait() == 1
    assert "the agent on host h2 has been silent" in job.last_words


def test_a_host_that_is_back_in_time_is_not_lost(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    bed = make_bed(["h1", "h2"])
    job = HostsJob(bed, tmp_path / "job")
    process = job.start(
        """
        import os, time
        rank = os.environ["RANK"]
        def wait(name):
            while not os.path.exists(name): time.sleep(0.01)
        open(f"ready{rank}", "w").write("1")
        wait("cut")
        print(f"rank {rank} in the outage", flush=True)
        open(f"printed{rank}", "w").write("1")
        wait("enough")
        """,
        *("--heartbeat-timeout", "15"),
    )
    for name in ("ready0", "ready1"):
        job.file(name)
    bed["h2"].cut()
    (job.folder / "cut").write_text("")
    job.file("printed1")
    time.sleep(3)  # at least: a sign of life is due every 2.5 s
    assert "rank 1" not in job.output
    bed["h2"].reconnect()
    wait_for(lambda: "rank 1 in the outage" in job.output, 30, "what was said in the outage")
    (job.folder / "enough").write_text("")
    assert process.wait(20) == 0, job.error


BUSY = """
import os, sys, time
children = [os.fork() for _ in range(4)]
if 0 in children:
    while True: pass
open(f"ready{os.environ['RANK']}", "w").write("1")
end = time.monotonic() + 5
while time.monotonic() < end:
    print("x" * 1000)
"""


@pytest.mark.extended
def test_a_busy_machine_and_a_flood_of_output_are_no_silence(job: HostsJob) -> None:
    """Two workers and eight processes without a pause on each of three hosts, which share this machine's cores."""
    job.slots = 2
    assert job.start(BUSY, "--grace-period", "0.1").wait(50) == 0, job.error
    assert_clean(job.bed, SOON, time.monotonic())


# Like a shell with job control: Ctrl-Z stops only processes that another one in the session waits for.
WAITS = """
import os, sys
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    os.setpgid(0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
"""
SHELL = [sys.executable, "-S", "-c", WAITS]


def _is_forgetful(process: psutil.Process) -> bool:
    try:
        return "FORGETFUL" in process.environ()
    except psutil.Error:
        return False  # it ended meanwhile


def _suspended(job: HostsJob) -> psutil.Process:
    """The launcher, once Ctrl-Z has stopped it, and after a silence that would otherwise have ended the job."""
    job.start(FERTILE, "--heartbeat-timeout", "1", "--grace-period", "1", around=SHELL)
    for rank in range(job.size):
        job.file(f"ready{rank}")
    launcher = next(p for p in job.bed["h1"].processes() if p.cmdline()[1:3] == ["-m", "hvdgloo.runner"])
    launcher.send_signal(signal.SIGTSTP)
    wait_for(lambda: launcher.status() == psutil.STATUS_STOPPED, what="a stopped launcher")
    time.sleep(3)  # a silence has its length
    assert all(job.worker(rank).is_running() for rank in range(job.size))
    return launcher


def test_ctrl_z_stops_the_launcher_and_no_worker_on_any_host(job: HostsJob) -> None:
    launcher = _suspended(job)
    launcher.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert all(job.worker(rank).is_running() for rank in range(job.size))
    launcher.send_signal(signal.SIGTERM)
    assert_clean(job.bed, SOON, time.monotonic())


@pytest.mark.extended
def test_pain_24_kill_9_of_a_launcher_that_ctrl_z_had_stopped(job: HostsJob) -> None:
    _suspended(job).kill()
    assert_clean(job.bed, SOON, time.monotonic())


def test_pain_24_another_job_on_the_same_hosts_is_not_touched(job: HostsJob, tmp_path: Path) -> None:
    other = HostsJob(job.bed, tmp_path / "other")
    other.start_fertile()
    before = {process.pid for host in job.bed for process in host.processes()}
    job.start_fertile("--grace-period", "0.5")
    watchdog, agent = job.agents("h2")
    agent.kill()
    watchdog.kill()
    assert job.wait() == 1

    def gone(bed: Bed) -> dict[str, list[str]]:
        found = {host.name: {p.pid: p for p in host.processes()} for host in bed}
        left = {
            name: [str(p) for pid, p in processes.items() if pid not in before and not _is_forgetful(p)]
            for name, processes in found.items()
        }
        return {name: rest for name, rest in left.items() if rest}

    assert_clean(job.bed, SOON, time.monotonic(), gone)
    assert before <= {process.pid for host in job.bed for process in host.processes()}
    assert other.process is not None
    assert other.process.poll() is None
    other.process.send_signal(signal.SIGINT)
    assert other.wait() == 130


def test_pain_24_a_user_s_shared_connections_are_neither_left_behind_nor_ended(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    """``ControlMaster auto`` in ssh_config would make the job's first ssh the master of all the user's connections."""
    bed = make_bed(["h1", "h2"])
    config = bed["h1"].path(f"{bed['h1'].home}/.ssh/config")
    config.write_text(config.read_text() + "    ControlMaster auto\n    ControlPath ~/.ssh/%h\n    ControlPersist 60\n")
    job = HostsJob(bed, tmp_path / "job")
    assert job.start("pass").wait(20) == 0
    assert_clean(bed, SOON, time.monotonic())
    bed["h1"].run(["ssh", "h2", "true"], check=True)
    (master,) = [process for process in bed["h1"].processes() if process.name() == "ssh"]
    job.start_fertile("--grace-period", "0.5", ends=1, how="sys.exit(4)")
    job.strike()
    assert job.wait() == 4
    assert [process.pid for host in bed for process in host.processes()] == [master.pid]
