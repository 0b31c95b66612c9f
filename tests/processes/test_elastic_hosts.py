"""Elastic jobs over hosts that come, go and fail: three of them in namespaces, with real ssh."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support import warm
from tests.support.elastic_program import DEADLINE, TRAIN, Training
from tests.support.hosts import Bed, HostProcess
from tests.support.hosts_job import inner_pid, is_agent
from tests.support.launching import wait_for


class Job(Training):
    """An elastic job of ``TRAIN``, launched on h1; its hosts are those that ``lists`` has named last."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder)
        self.bed = bed
        self.process: HostProcess | None = None

    def start(
        self,
        *flags: str,
        script: bool = True,
        program: str = TRAIN,
        launcher: str = "h1",
        env: Mapping[str, str] | None = None,
    ) -> HostProcess:
        (self.folder / "worker.py").write_text(program)
        hosts = ["--host-discovery-script", str(self._script()), "--discovery-interval", "0.2"] if script else []
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.process = self.bed[launcher].popen(
                [sys.executable, "-m", "hvdgloo.runner", *hosts, *flags, warm.python(), "worker.py"],
                cwd=self.folder,
                env=env,
                stdout=out,
                stderr=err,
            )
        return self.process

    def lists(self, *lines: str) -> None:
        """The discovery script prints these from now on."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.folder / "hosts")

    def _script(self) -> Path:
        script = self.folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        script.chmod(0o755)
        return script

    def on(self, number: int, *hosts: str) -> list[int]:
        """Wait for the ``number``-th epoch of so many workers, which are on these hosts; returns their processes."""
        members = self.members(number, len(hosts))
        assert [member.worker.split("/")[0] for member in members] == list(hosts), members
        return [member.pid for member in members]

    def agents(self, host: str) -> list[psutil.Process]:
        """The watchdog and the agent proper on a host, in this order."""
        found = [process for process in self.bed[host].processes() if is_agent(process)]
        return sorted(found, key=lambda process: process.ppid() in {other.pid for other in found})

    def worker(self, host: str, pid: int) -> psutil.Process:
        """A worker's process, as this machine numbers it."""
        return next(process for process in self.bed[host].processes() if inner_pid(process) == pid)

    def end(self) -> int:
        """The launcher's exit status; nothing is left on any host then."""
        assert self.process is not None
        status = self.process.wait(DEADLINE)
        wait_for(lambda: all(host.is_empty() for host in self.bed if host.on), 10.0, "the end of all processes")
        return status


@pytest.fixture
def job(bed: Bed, tmp_path: Path) -> Iterator[Job]:
    with job_on(bed, tmp_path / "job") as made:
        yield made


@contextmanager
def job_on(bed: Bed, folder: Path) -> Iterator[Job]:
    made = Job(bed, folder)
    try:
        yield made
    finally:
        if made.process is not None:
            made.process.kill()
        bed.unite()
        for host in bed:
            host.reconnect()
            for process in host.processes():
                host.kill(process)


def test_hosts_come_and_go_and_come_back(job: Job) -> None:
    """A job that began on this machine takes in others; one that left and returns is as new."""
    job.lists("localhost:1")
    job.start("-np", "1", "--min-np", "1")
    (first,) = job.on(1, "localhost")
    # One by one: which of two is there first cannot be known.
    job.lists("localhost:1", "h2:1")
    assert job.on(1, "localhost", "h2")[0] == first
    job.lists("localhost:1", "h2:1", "h3:1")
    assert job.on(1, "localhost", "h2", "h3")[0] == first
    job.lists("localhost:1", "h3:1")
    assert job.on(2, "localhost", "h3")[0] == first
    wait_for(job.bed["h2"].is_empty, DEADLINE, "h2 to be left")
    job.lists("localhost:1", "h3:1", "h2:1")
    assert job.on(2, "localhost", "h3", "h2")[0] == first
    assert job.finished() == 0
    assert "left out" not in job.error


@pytest.mark.extended
def test_a_worker_and_then_an_agent_are_killed(job: Job) -> None:
    job.start("-np", "3", "--min-np", "1", "-H", "h1:1,h2:1,h3:1", "--failures-per-host", "2", script=False)
    first = job.on(1, "h1", "h2", "h3")
    job.worker("h1", first[0]).kill()  # rank 0
    again = job.on(2, "h2", "h3", "h1")
    assert again[:2] == first[1:]
    job.agents("h3")[1].kill()
    # Its watchdog has ended the worker; another agent takes its place, and with it another worker.
    assert job.on(3, "h2", "h1", "h3")[:2] == [again[0], again[2]]
    assert job.finished() == 0


def test_a_host_that_is_cut_off_is_survived(job: Job) -> None:
    flags = ["--heartbeat-timeout", "3", "-H", "h1:1,h2:1,h3:1"]
    job.start("-np", "3", "--min-np", "1", *flags, script=False)
    first = job.on(1, "h1", "h2", "h3")
    job.bed["h2"].cut()
    assert job.on(1, "h1", "h3") == [first[0], first[2]]
    wait_for(job.bed["h2"].is_empty, DEADLINE, "the agent there to end its worker")
    assert "host h2 is left out: its agent has been silent for 3 s" in job.error
    job.bed["h2"].reconnect()
    assert job.finished() == 0


@pytest.mark.extended
def test_a_host_whose_power_fails_comes_back_after_its_cooldown(job: Job) -> None:
    flags = ["--heartbeat-timeout", "3", "--blacklist-cooldown-range", "1", "2", "-H", "h1:1,h2:1,h3:1"]
    job.start("-np", "3", "--min-np", "1", *flags, script=False)
    first = job.on(1, "h1", "h2", "h3")
    job.bed["h3"].cut()
    job.on(1, "h1", "h2")
    job.bed["h3"].reconnect()
    assert job.on(2, "h1", "h2", "h3")[:2] == first[:2]
    assert job.finished() == 0


@pytest.mark.extended
def test_two_hosts_that_are_cut_off_from_each_other_only(job: Job) -> None:
    """Both reach the launcher and rank 0: only connecting shows that they cannot be in one job, so one is left out."""
    flags = ["--gloo-timeout-seconds", "3", "--connect-timeout-seconds", "3", "-H", "h1:1,h2:1,h3:1"]
    direct = {"HVDGLOO_INLINE_THRESHOLD": "0"}  # tiny tensors would travel by way of rank 0
    job.start("-np", "3", "--min-np", "2", *flags, script=False, env=direct)
    first = job.on(1, "h1", "h2", "h3")
    job.bed.part("h2", "h3")
    two = job.members(1, 2)
    assert two[0].pid == first[0]
    assert two[1].pid in first[1:]
    assert job.finished() == 0
    assert re.search(r"host h[23] is left out: others", job.error)


SHOWN = """
from hvdgloo._job.process import current

def say(what, step):
    engine = current().engine
    # At the end the links to workers that left are gone.
    for link in list(engine._control.peers.connections.values()):
        assert (type(link._socket).__mro__[1].__name__ == "SSLSocket") == ("TLS" in os.environ), link
    assert engine._in_tree == ("HVDGLOO_CONTROL_TREE_RANKS" in os.environ and len(engine.topology.hosts) > 2)
    places = hvd.rank(), hvd.size(), hvd.local_rank(), step, os.getpid(), os.environ["HVDGLOO_WORKER"]
    print(what, *places, flush=True)

@elastic.run_fn
def train"""
WATCHED = TRAIN.replace("\n@elastic.run_fn\ndef train", SHOWN)
"""Checks in every epoch how its ranks are connected."""


@pytest.mark.extended
def test_what_members_of_each_epoch_say_is_encrypted(job: Job) -> None:
    flags = ["--tls", "required", "-H", "h1:1,h2:1,h3:1", "--failures-per-host", "2", "-x", "TLS"]
    job.start("-np", "3", "--min-np", "1", *flags, script=False, program=WATCHED, env={"TLS": "1"})
    first = job.on(1, "h1", "h2", "h3")
    job.worker("h1", first[0]).kill()  # the next rank 0 is on another host
    assert job.on(2, "h2", "h3", "h1")[:2] == first[1:]
    assert job.finished() == 0, job.error
    assert "Traceback" not in job.error


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["the root", "a leader", "below a leader"])
def test_in_a_tree_of_leaders_any_rank_may_die(job: Job, victim: str) -> None:
    """Rank 0 is on h1, ranks 1 and 2 are on h2, rank 3 is on h3 and reports to rank 1. Each epoch has another tree."""
    tree = {"HVDGLOO_CONTROL_FANIN": "1", "HVDGLOO_CONTROL_TREE_RANKS": "2"}
    flags = ["-H", "h1:1,h2:2,h3:1", "--failures-per-host", "9"]
    job.start("-np", "4", "--min-np", "1", *flags, script=False, program=WATCHED, env=tree)
    first = job.on(1, "h1", "h2", "h2", "h3")
    rank = {"the root": 0, "a leader": 1, "below a leader": 3}[victim]
    job.worker(("h1", "h2", "h2", "h3")[rank], first[rank]).kill()
    again = job.members(2, 4)
    assert [worker.pid for worker in again if worker.pid in first] == [pid for pid in first if pid != first[rank]]
    assert job.finished() == 0, job.error
    assert "Traceback" not in job.error


def test_sigterm_to_an_agent_is_a_removal(job: Job) -> None:
    """Preemption: the workers leave at their next commit, with status 0, and no step is lost."""
    job.start("-np", "3", "--min-np", "1", "-H", "h1:1,h2:1,h3:1", script=False)
    first = job.on(1, "h1", "h2", "h3")
    job.agents("h2")[1].send_signal(signal.SIGTERM)
    assert job.on(1, "h1", "h3") == [first[0], first[2]]
    wait_for(job.bed["h2"].is_empty, DEADLINE, "h2 to be left")
    assert job.finished() == 0
    assert "host h2 is to be given back" in job.error
    assert "failed" not in job.error
    assert "left out" not in job.error


def test_hosts_that_cannot_be_used_are_left_out_with_the_reason(
    make_bed: Callable[[Sequence[str]], Bed], tmp_path: Path
) -> None:
    bed = make_bed(["h1", "h2", "h3"])
    bed.block("h3", "h2")
    with job_on(bed, tmp_path / "job") as job:
        job.lists("h1:1", "h9:1", "h2:1")
        job.start("-np", "1", "--min-np", "1", "--connect-timeout-seconds", "10")
        job.on(1, "h1", "h2")
        job.says("host h9 is left out:")
        job.lists("h1:1", "h9:1", "h2:1", "h3:1")
        job.says("host h3 is left out: the hosts do not reach each other: h3 -> h2: ")
        assert job.finished() == 0


def test_the_launcher_s_host_has_no_worker_and_every_other_may_die(job: Job) -> None:
    job.lists("h2:1", "h3:1")
    job.start("-np", "2", "--min-np", "1")
    first = job.on(1, "h2", "h3")
    for process in job.agents("h2"):
        process.kill()
    (last,) = job.on(1, "h3")
    assert last == first[1]
    assert job.finished() == 0


def test_the_launcher_s_death_ends_the_job_on_all_hosts(job: Job) -> None:
    process = job.start("-np", "2", "--min-np", "1", "-H", "h1:1,h2:1", script=False)
    job.on(1, "h1", "h2")
    process.kill()
    assert job.end() != 0


@pytest.mark.extended
def test_a_host_that_flaps_disturbs_no_other(job: Job) -> None:
    """It takes two successive lists without a host to remove it."""
    job.lists("h1:1", "h2:1")
    job.start("-np", "2", "--min-np", "1", "--discovery-interval", "0.5")
    first = job.on(1, "h1", "h2")
    asked = job.folder / "asked"
    flapping = f"""#!/bin/sh
echo >> {asked}
echo h1:1
test $(($(wc -l < {asked}) % 2)) = 0 || echo h2:1
"""
    new = job.folder / "flapping.sh"
    new.write_text(flapping)
    new.chmod(0o755)
    new.rename(job.folder / "hosts.sh")
    wait_for(lambda: asked.exists() and asked.read_text().count("\n") >= 6, DEADLINE, "6 questions")
    job.finish()
    assert [over.pid for over in job.members(1, 2, "over")] == first
    assert job.end() == 0
    assert "removed" not in job.error


LOCAL = """
import os, subprocess, torch
import hvdgloo.torch as hvd

hvd.init()
H, COUNT = 4, 1 << 20
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(COUNT))
optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=1.0), model, H, outer_lr=0.5, outer_momentum=0.5)
victim = os.environ["HVDGLOO_WORKER"].startswith("h3/")
receive = optimizer._hvd.outer._receive

def under_way(exchange):
    open("under way", "w").close()
    return receive(exchange)

@hvd.elastic.run
def train(state):
    places = hvd.rank(), hvd.size(), hvd.local_rank(), state.batch, os.getpid(), os.environ["HVDGLOO_WORKER"]
    print("epoch", *places, flush=True)
    while True:
        if victim and state.batch == 2 * H - 1:  # the next outer step takes half a minute
            limit = "tc qdisc add dev eth0 root tbf rate 1mbit burst 32kb latency 100ms"
            subprocess.run(limit.split(), check=True)
            optimizer._hvd.outer._receive = under_way
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
        if state.batch % H == 0 and hvd.allreduce(torch.tensor([float(os.path.exists("over"))]), op=hvd.Max):
            return

state = hvd.elastic.TorchState(model, optimizer, batch=0)
train(state)
anchor = moment = 0.0
for _ in range(state.batch // H):
    moment = 0.5 * moment + H
    anchor -= 0.5 * (H + 0.5 * moment)
torch.testing.assert_close(model.weight, torch.full((COUNT,), anchor))
assert len(set(hvd.allgather_object(model.weight.detach().numpy().tobytes()))) == 1
assert optimizer.outer_state_dict()["steps"] == state.batch // H
"""
"""Ranks meet in every fourth step. A host's link becomes slow just before the second meeting."""


@pytest.mark.timeout(150)  # mostly a tenth of it
def test_a_host_that_loses_its_power_in_an_outer_step_costs_the_others_one_step(
    make_bed: Callable[..., Bed], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    bed = make_bed(["h1", "h2", "h3"])
    limited = "tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 1ms"
    if bed["h3"].run(limited.split()).returncode:
        pytest.skip("the kernel cannot limit a link's rate (sch_tbf)")
    with job_on(bed, tmp_path / "job") as job:
        flags = ["--heartbeat-timeout", "3", "-H", "h1:1,h2:1,h3:1"]
        job.start("-np", "3", "--min-np", "1", *flags, script=False, program=LOCAL)
        first = job.on(1, "h1", "h2", "h3")
        wait_for((job.folder / "under way").exists, DEADLINE, "the outer step to begin")
        bed["h3"].power_off()
        assert job.on(1, "h1", "h2") == first[:2]
        assert [member.step for member in job.members(1, 2)] == [7, 7]
        assert job.finished() == 0, job.error
        assert "host h3 is left out" in job.error, job.error
