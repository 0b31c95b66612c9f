"""Jobs over several hosts that are cut short at a random moment: nothing of them may be left anywhere.

Hosts are namespaces of this machine with real ssh between them (root is needed, and ``ip``, ``sshd``). Each trial
starts a job of two workers per host whose workers have offspring, waits for a random time - it may be during start-up
- and has one accident, or two: a worker, an agent, its watchdog, an ssh client, an sshd session, any process or the
launcher is killed, an agent hangs, the launcher is interrupted, a host's network is cut. Then all processes of the
job, listening sockets and shared-memory segments must be gone from all hosts within 5 seconds; within 10 where the
only sign is silence (a network that was cut, an agent that hangs). Agents that have no workers yet wait longer for a
launcher that is silent: where a host is cut off so early, there are 65 seconds. A connection that is lost before
its agent was there is retried, so a job may survive an accident during start-up: it then has another one.

Two accidents together leave no process that could do anything, and do not occur: agent and watchdog of a host are
killed (or hang), and the launcher too is killed or cannot reach that host any more.

    python benchmarks/chaos_launch.py [--trials 100] [--seed 1] [--hosts 3]

Prints a line for each trial and a table of all, and ends with status 1 if anything was left.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from hvdgloo.runner.protocol import heartbeat
from tests.support.hosts import Bed, Host, available
from tests.support.hosts_job import STUBBORN, STUBBORN_BECOMES, HostsJob, inner_pid, leftovers, occupied

LIMIT, SILENCE_LIMIT = 5.0, 10.0
START_LIMIT = 30.0
"""Seconds within which a job that survives an accident during its start is expected to run."""
BEFORE_START_LIMIT = heartbeat.BEFORE_START + 5.0
SLOTS = 2
_LAUNCHER = "hvdgloo.runner"
RUNNING = "running"
FLAGS = ("--grace-period", "1.5", "--start-timeout", "8")

OFFSPRING = f"""
import os, signal, subprocess, sys
program = {STUBBORN!r}
subprocess.Popen(program)
subprocess.Popen(program, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp(program[0], program)
    os._exit(0)
os.wait()
"""
IDLE = OFFSPRING + "open(f\"ready{os.environ['RANK']}\", 'w').write('1')\nsignal.pause()\n"
TRAINING = (
    OFFSPRING
    + """
import torch, hvdgloo.torch as hvd
hvd.init()
open(f"ready{hvd.rank()}", "w").write("1")
while True:
    hvd.allreduce(torch.ones(1000), name="gradient")
"""
)


@dataclass(frozen=True)
class Trial:
    """The events of one trial.

    Attributes:
        accidents: in words.
        moment: seconds after the launcher's start.
        stage: how many workers were up by then.
        took: seconds until everything was gone, or the limit had passed.
        left: what was left when the limit had passed, by host.
    """

    number: int
    accidents: tuple[str, ...]
    moment: float
    stage: str
    status: int | None
    took: float
    limit: float
    left: Mapping[str, list[str]]
    said: str

    @property
    def clean(self) -> bool:
        return not self.left and self.took <= self.limit and self.status != 0

    def line(self) -> str:
        verdict = "ok  " if self.clean else "LEFT"
        return (
            f"{self.number:4} {verdict} {self.moment:5.2f} s ({self.stage:12}) {' + '.join(self.accidents):45} "
            f"gone after {self.took:5.2f} s, status {self.status}: {self.said[:90]}"
        )


class Accidents:
    """Accidents of a job; each method describes in words what it did, or returns None if there was nothing to do it
    to."""

    def __init__(self, job: HostsJob, chance: random.Random) -> None:
        self._job = job
        self._chance = chance
        self.cut: list[Host] = []
        self.limit = LIMIT
        self._unwatched = False
        self._alone = False

    def have_one(self) -> str:
        """One accident that is possible now."""
        kinds: list[Callable[[], str | None]] = [
            self.worker, self.agent, self.watchdog, self.agent_and_watchdog, self.hang, self.ssh_client,
            self.sshd_session, self.anything, self.launcher, self.interrupt, self.network,
        ]  # fmt: skip
        self._chance.shuffle(kinds)
        return next(done for kind in kinds if (done := kind()) is not None)

    def worker(self) -> str | None:
        chosen = self._one(lambda process: "worker.py" in " ".join(process.cmdline()[:3]))
        signum = self._chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
        return self._signal(chosen, signum, "worker")

    def agent(self) -> str | None:
        return self._signal(self._one(self._is_agent), signal.SIGKILL, "agent")

    def watchdog(self) -> str | None:
        return self._signal(self._one(self._is_watchdog), signal.SIGKILL, "watchdog")

    def agent_and_watchdog(self) -> str | None:
        chosen = self._one(self._is_watchdog)
        if chosen is None or self._alone:
            return None
        self._unwatched = True
        host, watchdog = chosen
        for process in [*watchdog.children(), watchdog]:
            host.kill(process)
        return f"agent and watchdog on {host.name} killed"

    def hang(self) -> str | None:
        chosen = self._one(self._is_watchdog)
        if chosen is None or self._alone or not self._all_up():
            return None
        self._unwatched = True
        host, watchdog = chosen
        for process in [watchdog, *watchdog.children()]:
            host.kill(process, signal.SIGSTOP)
        self.limit = max(self.limit, SILENCE_LIMIT)
        return f"agent on {host.name} stopped"

    def ssh_client(self) -> str | None:
        return self._signal(self._one(lambda process: process.name() == "ssh"), signal.SIGKILL, "ssh client")

    def sshd_session(self) -> str | None:
        found = [(host, session) for host in self._job.bed for session in host.sessions()]
        return self._signal(self._chance.choice(found) if found else None, signal.SIGKILL, "sshd session")

    def anything(self) -> str | None:
        chosen = self._one(self._is_anything)
        if chosen is not None and _LAUNCHER in _command(chosen[1]):
            self._alone = True
        return self._signal(chosen, signal.SIGKILL, "some process")

    def _is_anything(self, process: psutil.Process) -> bool:
        # What happens to a worker's own children is up to the worker.
        command = process.cmdline()
        return command not in (STUBBORN, STUBBORN_BECOMES) and not (self._unwatched and _LAUNCHER in command)

    def launcher(self) -> str | None:
        assert self._job.process is not None
        inner = self._job.process.inner
        if inner is None or self._unwatched:
            return None
        self._alone = True
        inner.kill()
        return "launcher killed"

    def interrupt(self) -> str | None:
        assert self._job.process is not None
        inner = self._job.process.inner
        if inner is None:
            return None
        signum = self._chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        inner.send_signal(signum)
        return f"launcher got {signum.name}"

    def network(self) -> str | None:
        if self._unwatched:
            return None
        self._alone = True
        host = self._chance.choice([host for host in self._job.bed if host not in self.cut])
        host.cut()
        self.cut.append(host)
        early = not any(self._job.folder.glob("ready*"))
        self.limit = max(self.limit, BEFORE_START_LIMIT if early else SILENCE_LIMIT)
        return f"{host.name} cut off"

    def _one(self, fits: Callable[[psutil.Process], bool]) -> tuple[Host, psutil.Process] | None:
        found = []
        for host in self._job.bed:
            for process in host.processes():
                try:
                    if fits(process):
                        found.append((host, process))
                except psutil.NoSuchProcess:
                    continue
        return self._chance.choice(found) if found else None

    @staticmethod
    def _is_agent(process: psutil.Process) -> bool:
        parent = process.parent()
        return parent is not None and Accidents._runs_agent(process) and parent.cmdline() == process.cmdline()

    @staticmethod
    def _is_watchdog(process: psutil.Process) -> bool:
        return Accidents._runs_agent(process) and not Accidents._is_agent(process)

    @staticmethod
    def _runs_agent(process: psutil.Process) -> bool:
        command = process.cmdline()
        return process.name() != "ssh" and any("agent" in word for word in command[:4]) and "nsenter" not in command[0]

    def _all_up(self) -> bool:
        return stage(self._job) == RUNNING

    def _signal(self, chosen: tuple[Host, psutil.Process] | None, signum: int, what: str) -> str | None:
        if chosen is None:
            return None
        host, process = chosen
        try:
            number = inner_pid(process)
        except (FileNotFoundError, ProcessLookupError):
            return None
        host.kill(process, signum)
        return f"{what} {number} on {host.name} got {signal.Signals(signum).name}"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def stage(job: HostsJob) -> str:
    """Return the stage that the start of a job has reached."""
    ready = len(list(job.folder.glob("ready*")))
    return RUNNING if ready == job.size else f"{ready} of {job.size} up"


def ending(job: HostsJob) -> bool:
    """Tell whether a job has ended or is about to. One that survives an accident during its start is not."""
    assert job.process is not None
    ends = ("stopping", "failed", "passed on to the workers", "killing the workers")
    return job.process.poll() is not None or any(text in job.error for text in ends)


def one_trial(number: int, bed: Bed, folder: Path, chance: random.Random) -> Trial:
    """Start a job, have an accident or two, and see what is left."""
    job = HostsJob(bed, folder, slots=SLOTS)
    training = chance.random() < 0.25
    moment = chance.uniform(0.0, 6.0 if training else 3.0)
    started = time.monotonic()
    process = job.start(TRAINING if training else IDLE, *FLAGS)
    time.sleep(moment)
    reached = stage(job)
    accidents = Accidents(job, chance)
    happened = [accidents.have_one()]
    since = time.monotonic()
    if chance.random() < 0.25:
        time.sleep(chance.uniform(0.0, 0.3))
        happened.append(accidents.have_one())
        since = time.monotonic()
    left = leftovers(bed)
    while left:
        starting = reached != RUNNING and not ending(job) and time.monotonic() - started < START_LIMIT
        if time.monotonic() - since > accidents.limit + 1 and not starting:
            break
        if starting and stage(job) == RUNNING:
            reached = RUNNING
            happened.append(f"then, running: {accidents.have_one()}")
            since = time.monotonic()
        time.sleep(0.05)
        left = left if occupied(bed) else leftovers(bed)
    took = time.monotonic() - since
    for host in accidents.cut:
        host.reconnect()
    left = left and leftovers(bed)
    status = process.wait(20) if not left else process.poll()
    said = (job.last_words or job.error.strip().rpartition("\n")[2]).splitlines()
    return Trial(
        number, tuple(happened), since - started, reached, status, took, accidents.limit, left, "".join(said[:1])
    )


def run(trials: int, seed: int, hosts: int, report: Callable[[str], None]) -> list[Trial]:
    """All trials; a bed on which something was left is not used again."""
    chance = random.Random(seed)
    done: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(done) < trials:
            with Bed([f"h{number}" for number in range(1, hosts + 1)]) as bed:
                while len(done) < trials:
                    number = len(done) + 1
                    done.append(one_trial(number, bed, Path(folder) / str(number), chance))
                    report(done[-1].line())
                    for name, things in done[-1].left.items():
                        report(f"       {name}: {'; '.join(things)}")
                    if done[-1].left:
                        break
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3)
    arguments = parser.parse_args()
    if available():
        sys.stderr.write(f"no bed of hosts: {available()}\n")
        return 2
    trials = run(arguments.trials, arguments.seed, arguments.hosts, lambda line: print(line, flush=True))
    print(table(trials))
    return 0 if all(trial.clean for trial in trials) else 1


def table(trials: list[Trial]) -> str:
    """Times by kind of limit, and the verdict."""
    lines = [f"{'limit':>8} {'trials':>7} {'median':>8} {'longest':>8} {'violations':>11}"]
    for limit in (LIMIT, SILENCE_LIMIT, BEFORE_START_LIMIT):
        some = [trial for trial in trials if trial.limit == limit]
        if some:
            took = [trial.took for trial in some]
            bad = sum(not trial.clean for trial in some)
            lines.append(f"{limit:6g} s {len(some):7} {statistics.median(took):6.2f} s {max(took):6.2f} s {bad:11}")
    starting = sum(trial.stage != RUNNING for trial in trials)
    things = sum(len(things) for trial in trials for things in trial.left.values())
    lines.append(f"{starting} of {len(trials)} happened during start-up; {things} things were left in all")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
