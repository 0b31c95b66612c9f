"""Elastic jobs whose workers are killed, stopped, removed and added at random moments: each trains to its end.

Each trial starts a job of four workers on this machine, lists other numbers of slots for it, and has accidents: a
worker, rank 0 or two workers at once are killed, or one is stopped, so that only silence tells of it. Every third trial
is one on three hosts (the tests' bed of network namespaces; Linux, root; left out elsewhere): there, workers and agents
are killed, a host is cut off for a while, or two hosts from each other only. The job must then have made every step
exactly once, in all members of its last epoch; or say in a sentence why it could not go on. No process of it may be
left.

    python benchmarks/chaos_elastic.py [--trials 100] [--seed 1] [--first 1] [--no-hosts]

Prints a line for each trial and a table of all, and ends with status 1 if one was not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.elastic_program import Said, Training
from tests.support.hosts import Bed, Host, HostProcess, available
from tests.support.hosts_job import is_agent
from tests.support.launching import Launcher, launcher_in, wait_for

SLOTS = 4
STEPS = 400
LIMIT = 60.0
"""Seconds that a trial may take; without accidents it takes three."""

HOSTS = ("h1", "h2", "h3")

FLAGS = ("--failures-per-host", "99", "--discovery-interval", "0.1", "--grace-period", "2", "--elastic-timeout", "20")

HOSTS_FLAGS = (
    *("--blacklist-cooldown-range", "1", "2", "--heartbeat-timeout", "2", "--connect-timeout-seconds", "3"),
    *("--discovery-interval", "0.1", "--grace-period", "2", "--elastic-timeout", "20", "--start-timeout", "20"),
)

ENVIRONMENT = {"HVDGLOO_OPERATION_TIMEOUT": "2", "HVDGLOO_INLINE_THRESHOLD": "0", "OMP_NUM_THREADS": "1"}
"""Tiny tensors take the way of large ones, too, and no operation may take long."""

PROGRAM = f"""
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
    while state.step < {STEPS}:
        (ranks,) = hvd.allreduce(np.ones(1), name="ranks", op=hvd.Sum)
        state.made += ranks / hvd.size()
        state.step += 1
        state.commit()
        time.sleep(0.005)
    assert state.made == state.step, (state.made, state.step)
    return state.step

state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, made=0.0)
say("over", train(state))
"""


@dataclass(frozen=True)
class Trial:
    """The events of one trial.

    Attributes:
        accidents: in words, each with the seconds since the start.
        took: seconds until the launcher ended.
        problem: why it was not as it should be; empty if it was.
        said: the sentence with which the launcher gave the job up; empty if it did not.
    """

    number: int
    accidents: tuple[str, ...]
    status: int | None
    took: float
    problem: str
    said: str

    def line(self) -> str:
        verdict = "ok " if not self.problem else "BAD"
        text = f"{self.number:4} {verdict} {self.took:5.1f} s, status {self.status}: {'; '.join(self.accidents)}"
        more = self.problem or self.said
        return f"{text}\n     {more}" if more else text


class Accidents:
    """Accidents of a job; each method describes in words what it did, or returns None if there was nothing to do it
    to."""

    def __init__(self, training: Training, chance: random.Random) -> None:
        self._training = training
        self._chance = chance
        self.stopped: list[int] = []

    def have_one(self) -> str:
        """One accident that is possible now."""
        kinds: list[Callable[[], str | None]] = [self.kill_any, self.kill_first, self.kill_two, self.stop_one]
        self._chance.shuffle(kinds)
        happened = next((done for kind in kinds if (done := kind()) is not None), None)
        return happened or self.list_slots()

    def kill_any(self) -> str | None:
        return self._signal(self._members()[-1:], signal.SIGKILL)

    def kill_first(self) -> str | None:
        return self._signal([worker for worker in self._members() if worker.rank == 0], signal.SIGKILL)

    def kill_two(self) -> str | None:
        return self._signal(self._members()[:2], signal.SIGKILL)

    def stop_one(self) -> str | None:
        chosen = self._members()[:1]
        self.stopped += [worker.pid for worker in chosen]
        return self._signal(chosen, signal.SIGSTOP)

    def list_slots(self) -> str:
        """Another number of slots is listed from now on."""
        slots = self._chance.randint(1, SLOTS)
        list_slots(self._training.folder, slots)
        return f"{slots} slots"

    def _members(self) -> list[Said]:
        """Living workers that have been in training, each as it was in its newest epoch, in random order."""
        newest = {worker.pid: worker for worker in self._training.said}
        living = [worker for pid, worker in newest.items() if Path(f"/proc/{pid}").exists() and pid not in self.stopped]
        self._chance.shuffle(living)
        return living

    @staticmethod
    def _signal(workers: list[Said], signum: int) -> str | None:
        if not workers:
            return None
        for worker in workers:
            try:
                os.kill(worker.pid, signum)
            except ProcessLookupError:
                continue  # it has ended just now
        return f"{signal.Signals(signum).name} to rank {' and '.join(str(worker.rank) for worker in workers)}"


class HostAccidents:
    """Accidents of a job on several hosts.

    Args:
        bed: of ``HOSTS``.
    """

    def __init__(self, bed: Bed, chance: random.Random) -> None:
        self._bed = bed
        self._chance = chance

    def have_one(self) -> str:
        """One accident; what cuts networks ends with it."""
        kinds = [self.kill_worker, self.kill_worker, self.kill_agent, self.cut, self.cut, self.part]
        return self._chance.choice(kinds)()

    def kill_worker(self) -> str:
        host = self._any()
        return self._kill(host, [process for process in host.processes() if _is_worker(process)], "a worker")

    def kill_agent(self) -> str:
        host = self._any()
        return self._kill(host, [process for process in host.processes() if is_agent(process)][-1:], "the agent")

    def cut(self) -> str:
        """A host is cut off, and then it is not."""
        host, seconds = self._any(), self._chance.uniform(0.2, 4.0)
        host.cut()
        time.sleep(seconds)
        host.reconnect()
        return f"{host.name} was cut off for {seconds:.1f} s"

    def part(self) -> str:
        """Two hosts do not reach each other for a while."""
        one, other = self._chance.sample(HOSTS, 2)
        seconds = self._chance.uniform(0.2, 4.0)
        self._bed.part(one, other)
        time.sleep(seconds)
        self._bed.unite()
        return f"{one} and {other} were cut off from each other for {seconds:.1f} s"

    def _any(self) -> Host:
        return self._bed[self._chance.choice(HOSTS)]

    @staticmethod
    def _kill(host: Host, processes: list[psutil.Process], what: str) -> str:
        for process in processes[:1]:
            host.kill(process)
        return f"{what} on {host.name} was killed" if processes else f"{host.name} has nothing to kill"


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "worker.py" in process.cmdline() and "hvdgloo.runner" not in process.cmdline()
    except psutil.Error:
        return False  # it has ended just now


def list_slots(folder: Path, slots: int) -> None:
    """Set the output of the discovery script from now on."""
    (folder / "hosts.new").write_text(f"localhost:{slots}\n")
    (folder / "hosts.new").rename(folder / "hosts")


def one_trial(number: int, folder: Path, chance: random.Random, python: str = sys.executable) -> Trial:
    """Start a job, have some accidents, and see how it ends; ``python`` runs its workers."""
    folder.mkdir(parents=True, exist_ok=True)
    with launcher_in(folder) as launcher:
        training = Training(launcher.folder)
        process = _start(launcher, python)
        started = time.monotonic()
        accidents = Accidents(training, chance)
        happened = []
        if chance.random() < 0.8:  # otherwise while they start
            wait_for(lambda: training.said or process.poll() is not None, LIMIT, "training")
        for _ in range(chance.randint(1, 4)):
            time.sleep(chance.choice([0.0, chance.uniform(0.0, 1.5)]))
            if process.poll() is not None:
                break
            what = accidents.list_slots() if chance.random() < 0.3 else accidents.have_one()
            happened.append(f"{time.monotonic() - started:.2f} s: {what}")
        try:
            status: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        took = time.monotonic() - started
        problem = _problem(training, status)
        try:
            launcher.assert_nothing_left()
        except AssertionError as error:
            problem = problem or str(error)
        return Trial(number, tuple(happened), status, took, problem, _sentence(training))


def one_trial_on_hosts(
    number: int, folder: Path, chance: random.Random, bed: Bed, python: str = sys.executable
) -> Trial:
    """As ``one_trial``, on the hosts of a bed, whose networks are whole again afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(folder)
    process = _start_on_hosts(bed, folder, python)
    started = time.monotonic()
    accidents, happened = HostAccidents(bed, chance), []
    try:
        if chance.random() < 0.8:
            wait_for(lambda: training.said or process.poll() is not None, LIMIT, "training")
        for _ in range(chance.randint(1, 3)):
            time.sleep(chance.uniform(0.0, 1.5))
            if process.poll() is not None:
                break
            began = time.monotonic() - started
            happened.append(f"{began:.2f} s: {accidents.have_one()}")
        try:
            status: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        took = time.monotonic() - started
        problem = _problem(training, status)
        try:
            wait_for(lambda: all(host.is_empty() for host in bed), 20.0, "the end of all processes of the job")
        except AssertionError as error:
            problem = problem or str(error)
    finally:
        process.kill()
        for host in bed:
            for left in host.processes():
                host.kill(left)
    return Trial(number, tuple(happened), status, took, problem, _sentence(training))


def _start_on_hosts(bed: Bed, folder: Path, python: str) -> HostProcess:
    (folder / "worker.py").write_text(PROGRAM)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\nprintf '%s:1\\n' {' '.join(HOSTS)}\n")
    script.chmod(0o755)
    sizes = ("-np", "1", "--min-np", "1", "--host-discovery-script", str(script))
    command = [sys.executable, "-m", "hvdgloo.runner", *sizes, *HOSTS_FLAGS, python, "worker.py"]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        return bed[HOSTS[0]].popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=err)


def _start(launcher: Launcher, python: str) -> subprocess.Popen[bytes]:
    folder = launcher.folder
    list_slots(folder, SLOTS)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    launcher.script(PROGRAM)
    sizes = ("-np", "1", "--min-np", "1", "--max-np", str(SLOTS))
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        flags = ("--host-discovery-script", str(script))
        return launcher.start(*sizes, *flags, *FLAGS, python, "worker.py", stdout=out, stderr=err, env=ENVIRONMENT)


def _sentence(training: Training) -> str:
    return next((line for line in training.error.splitlines() if "the job failed: " in line), "")


def _problem(training: Training, status: int | None) -> str:
    """Return the reason why a job with this status has not ended as it should; empty if it has."""
    if status is None:
        return f"it has not ended within {LIMIT:g} s: {training.error[-2000:]}"
    over = [worker for worker in training.said if worker.what == "over"]
    if status != 0:
        # A worker that is killed after the first one finished cannot be replaced; neither can one that finished,
        # and is killed before its process has ended.
        all_over = bool(over) and len(over) == over[0].size
        sentence = _sentence(training)
        expected = bool(sentence) and (not all_over or "SIGKILL" in sentence)
        return "" if expected else f"status {status}: {training.error[-2000:]}"
    if not over or len(over) != over[0].size or {worker.step for worker in over} != {STEPS}:
        return f"these have finished: {over}"
    return ""


def run(numbers: range, seed: int, report: Callable[[str], None], *, hosts: bool) -> list[Trial]:
    """The trials of these numbers, each with a seed of its own that follows from ``seed``."""
    done: list[Trial] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bed = stack.enter_context(Bed(HOSTS)) if hosts else None
        for number in numbers:
            chance = random.Random(f"{seed}.{number}")
            if bed is not None and number % 3 == 0:
                done.append(one_trial_on_hosts(number, folder / str(number), chance, bed))
            else:
                done.append(one_trial(number, folder / str(number), chance))
            report(done[-1].line())
    return done


def table(trials: list[Trial]) -> str:
    """Return the numbers of trained and of rightly failed jobs, and the time that they took."""
    trained = [trial for trial in trials if not trial.problem and trial.status == 0]
    failed = [trial for trial in trials if not trial.problem and trial.status != 0]
    took = [trial.took for trial in trials]
    bad = len(trials) - len(trained) - len(failed)
    return (
        f"{len(trials)} trials: {len(trained)} have trained, {len(failed)} have said why not, {bad} were not as they "
        f"should be; median {statistics.median(took):.1f} s, longest {max(took):.1f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=1, help="the number of the first one (default: 1)")
    parser.add_argument("--no-hosts", action="store_true", help="none of the trials on several hosts")
    arguments = parser.parse_args()
    missing = "they are not wanted" if arguments.no_hosts else available()
    if missing:
        print(f"without the trials on several hosts: {missing}")
    numbers = range(arguments.first, arguments.first + arguments.trials)
    trials = run(numbers, arguments.seed, lambda line: print(line, flush=True), hosts=not missing)
    print(table(trials))
    return 0 if not any(trial.problem for trial in trials) else 1


if __name__ == "__main__":
    raise SystemExit(main())
