"""Elastic jobs whose workers are killed, stopped, removed and added at random moments: each trains to its end.

Each trial starts a job of four workers on this machine, lists other numbers of slots for it, and has accidents: a
worker, rank 0 or two workers at once are killed, or one is stopped, so that only silence tells of it. The job must then
have made every step exactly once, in all members of its last epoch; or say in a sentence why it could not go on. No
process of it may be left.

    python benchmarks/chaos_elastic.py [--trials 100] [--seed 1]

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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.elastic_program import Said, Training
from tests.support.launching import Launcher, launcher_in, wait_for

SLOTS = 4
STEPS = 400
LIMIT = 60.0
"""Seconds that a trial may take; without accidents it takes three."""

FLAGS = ("--failures-per-host", "99", "--discovery-interval", "0.1", "--grace-period", "2", "--elastic-timeout", "20")

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
    """What happened in one trial.

    Attributes:
        accidents: in words, each with the seconds since the start.
        took: seconds until the launcher ended.
        problem: why it was not as it should be; empty if it was.
        said: the launcher's last line.
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
        return text if not self.problem else f"{text}\n     {self.problem}"


class Accidents:
    """What may happen to a job; each method returns in words what it did, or None if there was nothing to do it to."""

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


def list_slots(folder: Path, slots: int) -> None:
    """What the discovery script prints from now on."""
    (folder / "hosts.new").write_text(f"localhost:{slots}\n")
    (folder / "hosts.new").rename(folder / "hosts")


def one_trial(number: int, folder: Path, chance: random.Random) -> Trial:
    """Start a job, have some accidents, and see how it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with launcher_in(folder) as launcher:
        training = Training(launcher.folder)
        process = _start(launcher)
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
        lines = training.error.strip().splitlines() or [""]
        return Trial(number, tuple(happened), status, took, problem, lines[-1])


def _start(launcher: Launcher) -> subprocess.Popen[bytes]:
    folder = launcher.folder
    list_slots(folder, SLOTS)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    launcher.script(PROGRAM)
    sizes = ("-np", "1", "--min-np", "1", "--max-np", str(SLOTS))
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        environment = {"HVDGLOO_OPERATION_TIMEOUT": "2", "OMP_NUM_THREADS": "1"}
        flags = ("--host-discovery-script", str(script))
        return launcher.start(*sizes, *flags, *FLAGS, "worker.py", stdout=out, stderr=err, env=environment)


def _problem(training: Training, status: int | None) -> str:
    """Why a job that has ended with this status has not ended as it should; empty if it has."""
    if status is None:
        return f"it has not ended within {LIMIT:g} s: {training.error[-2000:]}"
    over = [worker for worker in training.said if worker.what == "over"]
    if status != 0:
        sentences = [line for line in training.error.splitlines() if "the job failed: " in line]
        # Who is killed after the first has come to its end cannot be replaced.
        all_over = bool(over) and len(over) == over[0].size
        return "" if sentences and not all_over else f"status {status}: {training.error[-2000:]}"
    if not over or len(over) != over[0].size or {worker.step for worker in over} != {STEPS}:
        return f"these have come to the end: {over}"
    return ""


def run(trials: int, seed: int, report: Callable[[str], None]) -> list[Trial]:
    """All trials, each with a seed of its own that follows from ``seed``."""
    done: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, trials + 1):
            done.append(one_trial(number, Path(folder) / str(number), random.Random(f"{seed}.{number}")))
            report(done[-1].line())
    return done


def table(trials: list[Trial]) -> str:
    """How many have trained, how many have failed for a reason, and how long they took."""
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
    arguments = parser.parse_args()
    trials = run(arguments.trials, arguments.seed, lambda line: print(line, flush=True))
    print(table(trials))
    return 0 if not any(trial.problem for trial in trials) else 1


if __name__ == "__main__":
    raise SystemExit(main())
