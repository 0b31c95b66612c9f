"""The cost of workers that join and leave: gaps in the survivors' training, commits, and the cost of elastic jobs
without changes.

    python benchmarks/elastic.py [--rows killed,torchrun,joined,commit,overlap,tensorflow,check,step,idle,hosts]
        [--rounds 10] [--ranks 4] [--torchrun-timeout 60] [--json FILE]

- **killed**: a rank, rank 0, and two ranks at once are killed (SIGKILL) by turns, and a second one 50 ms after the
  first. The gap is the time from a survivor's last step before to its first one after, the longest of all survivors.
  The slots that failed are started again, and the gap at which they join is told, too.
- **torchrun**: the same network with DistributedDataParallel, ``torchrun --standalone --max-restarts 3``, and a
  checkpoint in memory (/dev/shm) every ten steps, of which a rank is killed. From the last step of any rank to the
  first one; interleaved with *killed*, if both are asked for.
- **joined**: a discovery script goes from two slots to four; once more with workers that take 10 s to start.
- **commit**: a state of 102 MB in 161 tensors (ResNet-50's parameters) is committed, in one process.
- **overlap**: the same behind 50 ms of computing on the other core (``overlap=True``): what it costs the training
  thread, in ``commit()`` and in the next ``step()``.
- **tensorflow**: the same variables of TensorFlow's; where that is installed, and only if it is asked for.
- **check**: ``check_host_updates()`` against an allreduce of 4 bytes, by turns in one job.
- **step**: steps without commits in an elastic job and in a fixed one, by turns; processor time of idle workers.
- **idle**: one of 32 workers is killed, which do next to nothing (numpy).
- **hosts**: three hosts (the tests' bed of network namespaces; Linux, root) with two workers each (numpy): a worker on
  the third host is killed, and then that host is cut off.

Figures are medians. Where ranks are more than cores, steps and gaps contain the others' time, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

NOTING = """
import os, sys, time
folder = sys.argv[1]
while os.path.exists(folder + "/slow"):
    time.sleep(float(open(folder + "/slow").read()))
    break
notes = open(f"{folder}/steps.{os.uname().nodename}.{os.getpid()}", "w", buffering=1)
def note(size, rank):
    notes.write(f"{time.monotonic():.6f} {size} {rank}\\n")
"""
NETWORK = """
import torch
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(500, 500) for _ in range(5)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
inputs = torch.randn(8, 500)
"""
OURS = (
    NOTING
    + NETWORK
    + """
import hvdgloo.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    while True:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        note(hvd.size(), hvd.rank())

train(hvd.elastic.TorchState(model, optimizer, step=0))
"""
)
THEIRS = (
    NOTING
    + NETWORK
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
path, step = folder + "/checkpoint", 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
parallel = DistributedDataParallel(model)
while True:
    optimizer.zero_grad()
    parallel(inputs).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 10 == 0 and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path + ".new")
        os.rename(path + ".new", path)
    note(dist.get_world_size(), dist.get_rank())
"""
)
IDLE = (
    NOTING
    + """
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while True:
        hvd.allreduce(np.ones(1), name="x")
        state.step += 1
        state.commit()
        note(hvd.size(), hvd.rank())
        time.sleep(0.02)

train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
"""
)
CHECK = """
import json, statistics, sys, time
import torch
import hvdgloo.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)
tensor = torch.ones(1)

@hvd.elastic.run
def train(state):
    ways = {"check": state.check_host_updates, "allreduce": lambda: hvd.allreduce_(tensor, name="x")}
    times = {way: [] for way in ways}
    for turn in range(int(sys.argv[2])):
        for way in sorted(ways, reverse=turn % 2):
            hvd.allreduce_(tensor, name="y")
            begin = time.perf_counter()
            ways[way]()
            times[way].append(time.perf_counter() - begin)
    return times

times = train(state)
if hvd.rank() == 0:
    with open(sys.argv[1] + "/result", "w") as file:
        json.dump({way: statistics.median(values) for way, values in times.items()}, file)
"""
STEPS = (
    NOTING
    + NETWORK
    + """
import json, resource, statistics
import hvdgloo.torch as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    times = []
    for _ in range(int(sys.argv[2])):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[len(times) // 5:])

middle = train(hvd.elastic.TorchState(model, optimizer, step=0))
hvd.barrier()
before = resource.getrusage(resource.RUSAGE_SELF)
time.sleep(2)
after = resource.getrusage(resource.RUSAGE_SELF)
hvd.barrier()
idle = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 2
if hvd.rank() == 0:
    with open(folder + "/result", "w") as file:
        json.dump({"step": middle, "idle": idle}, file)
"""
)


@dataclass(frozen=True)
class Step:
    """One step of one worker: when it was done (time.monotonic()), in a job of which size, as which rank."""

    at: float
    size: int
    rank: int


class Watched:
    """The steps of a job's workers, as they write them down.

    Args:
        folder: of the job; all workers see it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> dict[str, list[Step]]:
        """By host and process id, as in ``h1.1234``."""
        found = {}
        for path in self.folder.glob("steps.*"):
            lines = path.read_text().split("\n")[:-1]  # the last one may be half written
            parts = [line.split() for line in lines]
            found[path.name.removeprefix("steps.")] = [Step(float(at), int(s), int(r)) for at, s, r in parts]
        return found

    def members(self, size: int, *, after: float, steps: int = 10) -> dict[int, str]:
        """By rank, the workers that have made so many steps in a job of this size since then, the last one just now."""
        members = {}
        now = time.monotonic()
        for worker, made in self.steps().items():
            recent = [step for step in made[-steps:] if step.at > after and step.size == size]
            if len(recent) == steps and recent[-1].at > now - 1:
                members[recent[-1].rank] = worker
        return members

    def wait_for(self, size: int, *, after: float, timeout: float) -> dict[int, str]:
        """Wait until all ranks of a job of this size are in training."""
        deadline = time.monotonic() + timeout
        while len(members := self.members(size, after=after)) < size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {timeout:g} s there are ranks {sorted(members)} of {size}")
            time.sleep(0.02)
        return members

    def gap(self, workers: Sequence[str], since: float, sizes: Callable[[int], bool]) -> float:
        """The longest time, over some workers, from the last step before some moment to the first one in a job of such
        a size."""
        gaps = []
        for worker in workers:
            made = self.steps()[worker]
            before = max(step.at for step in made if step.at <= since)
            gaps.append(next(step.at for step in made if step.at > since and sizes(step.size)) - before)
        return max(gaps)

    def joins(self, workers: Sequence[str], since: float) -> list[float]:
        """The gaps at which workers joined, each the longest over those who were there."""
        found: dict[int, list[float]] = {}
        for worker in workers:
            for before, step in itertools.pairwise(self.steps()[worker]):
                if step.at > since and step.size > before.size:
                    found.setdefault(step.size, []).append(step.at - before.at)
        return [max(gaps) for gaps in found.values()]

    def step_time(self, workers: Sequence[str], size: int) -> float:
        """The median of the time from step to step in a job of this size."""
        times = []
        for worker in workers:
            for before, step in itertools.pairwise(self.steps()[worker]):
                if step.size == before.size == size:
                    times.append(step.at - before.at)
        return statistics.median(times)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job, which is ended afterwards."""
    with open(folder / "output", "wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), start_new_session=True)
    try:
        yield job
    except (TimeoutError, StopIteration) as error:
        print((folder / "output").read_text()[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:6])}: {error}") from error
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def elastic(size: int, program: Path, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    given = flags or ["-np", str(size), "--min-np", "1", "--failures-per-host", "1000"]
    return [sys.executable, "-m", "hvdgloo.runner", *given, "--", sys.executable, str(program), *arguments]


def folder_for(where: Path, name: str, program: str) -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp(prefix=name, dir=where))
    path = folder / "worker.py"
    path.write_text(program)
    return folder, path


WAYS: dict[str, tuple[tuple[int, ...], float]] = {
    "a rank": ((2,), 0.0),
    "rank 0": ((0,), 0.0),
    "two at once": ((0, 2), 0.0),
    "a second one 50 ms later": ((1, 3), 0.05),
}


def kill(members: dict[int, str], victims: Sequence[int], pause: float) -> float:
    """Kill ranks, with a pause in between; when the first one was."""
    began = time.monotonic()
    for number, victim in enumerate(victims):
        if number:
            time.sleep(pause)
        os.kill(int(members[victim].rpartition(".")[2]), signal.SIGKILL)
    return began


def gap_after(watched: Watched, size: int, victims: Sequence[int], pause: float, timeout: float) -> dict[str, float]:
    """Kill, wait until all ranks are there again, and look back."""
    members = watched.wait_for(size, after=0.0, timeout=timeout)
    time.sleep(0.5)  # only steps of a settled job are measured
    began = kill(members, victims, pause)
    survivors = [pid for rank, pid in members.items() if rank not in victims]
    watched.wait_for(size, after=began + 0.2, timeout=timeout)
    gap = watched.gap(survivors, began, lambda now: (now != size and now <= size - len(victims)) or now > size)
    return {"gap": gap, "join": max(watched.joins(survivors, began))}


def killed(where: Path, ranks: int, rounds: int) -> Generator[dict[str, float], None, None]:
    """One figure for each way in each round, from one job."""
    folder, program = folder_for(where, "killed", OURS)
    watched = Watched(folder)
    with started(elastic(ranks, program, str(folder)), folder):
        for _ in range(rounds):
            measured: dict[str, float] = {}
            joins = []
            for way, (victims, pause) in WAYS.items():
                if max(victims) >= ranks:
                    continue
                figures = gap_after(watched, ranks, victims, pause, 90)
                measured[way] = figures["gap"]
                joins.append(figures["join"])
            measured["failed slots join"] = statistics.median(joins)
            measured["step"] = watched.step_time(list(watched.steps()), ranks)
            yield measured


def torchrun(where: Path, ranks: int, timeout: float) -> dict[str, float]:
    """One kill in a job of its own; the timeout if it does not come back."""
    memory = Path("/dev/shm") if os.path.isdir("/dev/shm") else where
    folder, script = folder_for(memory, "torchrun", THEIRS)
    try:
        watched = Watched(folder)
        flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"]
        with started([sys.executable, "-m", "torch.distributed.run", *flags, str(script), str(folder)], folder):
            members = watched.wait_for(ranks, after=0.0, timeout=90)
            time.sleep(0.5)
            began = kill(members, [ranks // 2], 0.0)
            old = set(watched.steps())
            deadline = began + timeout
            while time.monotonic() < deadline:
                first = [made[0].at for pid, made in watched.steps().items() if pid not in old and made]
                if len(first) == ranks:
                    last = max(step.at for pid in old for step in watched.steps()[pid])
                    return {"torchrun": max(first) - last}
                time.sleep(0.05)
            return {"torchrun": timeout}
    finally:
        shutil.rmtree(folder)


def joined(where: Path, slow: float) -> dict[str, float]:
    """From two slots to four."""
    folder, program = folder_for(where, "joined", OURS)
    watched = Watched(folder)
    hosts, script = folder / "hosts", folder / "discover"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    flags = ["-np", "2", "--min-np", "1", "--host-discovery-script", str(script)]
    with started(elastic(2, program, str(folder), flags=flags), folder):
        members = watched.wait_for(2, after=0.0, timeout=90)
        if slow:
            (folder / "slow").write_text(str(slow))
        new = hosts.with_suffix(".new")
        new.write_text("localhost:4\n")
        began = time.monotonic()
        new.replace(hosts)
        watched.wait_for(4, after=began, timeout=90 + slow)
        return {"gap": max(watched.joins(list(members.values()), began))}


def commit(rounds: int) -> dict[str, float]:
    """Of 102 MB in 161 tensors, in this process; milliseconds."""
    import copy

    import torch

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in _resnet50())
    assert len(model) == 161
    state = hvd.elastic.TorchState(model, step=0)

    def changed() -> None:
        with torch.no_grad():
            for parameter in model:
                parameter.add_(1e-3)

    def failed() -> None:
        """A step that has failed before it changed anything."""

    ways: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
        "deepcopy": (changed, lambda: copy.deepcopy(model.state_dict())),
        "commit": (changed, state.commit),
        "unchanged": (failed, state.commit),
        "restore": (failed, state.restore),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    state.commit()
    for turn in range(rounds + 2):
        for way, (before, action) in ways.items():
            before()
            begin = time.perf_counter()
            action()
            if turn >= 2:
                times[way].append((time.perf_counter() - begin) * 1e3)
            if way == "deepcopy":
                state.commit()
    return {way: statistics.median(values) for way, values in times.items()}


def overlap(rounds: int) -> dict[str, float]:
    """Of the same, behind the next step's computing; milliseconds."""
    import torch

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in _resnet50())
    optimizer = torch.optim.SGD(model, lr=1e-3)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    state = hvd.elastic.TorchState(model, optimizer, step=0, overlap=True)
    matrix = torch.randn(512, 512)

    def timed(action: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        action()
        return (time.perf_counter() - begin) * 1e3

    def compute() -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.05:
            torch.mm(matrix, matrix)

    plain, committed, waited = [], [], []
    for turn in range(rounds + 2):
        compute()
        step = timed(optimizer.step)
        commit = timed(state.commit)
        compute()
        after = timed(optimizer.step)
        if turn >= 2:
            plain.append(step)
            committed.append(commit)
            waited.append(after - step)
    figures = {"step": plain, "commit": committed, "wait": waited}
    return {name: statistics.median(values) for name, values in figures.items()}


def tensorflow(rounds: int) -> dict[str, float]:
    """Of TensorFlow's variables of these sizes; milliseconds."""
    import tensorflow as tf

    import hvdgloo.tensorflow as hvd

    hvd.init()
    variables = [tf.Variable(tf.random.normal([size])) for size in _resnet50()]
    state = hvd.elastic.TensorFlowState(variables, step=0)
    ways = {"copies": lambda: [variable.numpy().copy() for variable in variables], "commit": state.commit}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 2):
        for way, action in ways.items():
            for variable in variables:
                variable.assign_add(tf.ones_like(variable))
            begin = time.perf_counter()
            action()
            if turn >= 2:
                times[way].append((time.perf_counter() - begin) * 1e3)
    return {way: statistics.median(values) for way, values in times.items()}


def _resnet50() -> list[int]:
    """Numbers of elements of its 161 parameters, 25.6 million altogether."""
    sizes = [64 * 3 * 49, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [width * inside, width, width, width * width * 9, width, width, 4 * width * width]
            sizes += [4 * width, 4 * width]
            if block == 0:
                sizes += [4 * width * inside, 4 * width, 4 * width]
            inside = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def result_of(where: Path, name: str, program: str, command: Callable[[Path, Path], list[str]]) -> dict[str, float]:
    """Return the result that a job wrote before it ended by itself."""
    folder, path = folder_for(where, name, program)
    done = subprocess.run(command(path, folder), env=environment(), capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads((folder / "result").read_text())
    return found


def check(where: Path, ranks: int) -> dict[str, float]:
    """Microseconds."""
    found = result_of(where, "check", CHECK, lambda path, folder: elastic(ranks, path, str(folder), "400"))
    return {way: seconds * 1e6 for way, seconds in found.items()}


def step(where: Path, ranks: int, fixed: bool) -> dict[str, float]:
    def command(path: Path, folder: Path) -> list[str]:
        flags = ["-np", str(ranks)] if fixed else ()
        return elastic(ranks, path, str(folder), "150", flags=flags)

    return result_of(where, "step", STEPS, command)


def idle(where: Path, ranks: int) -> dict[str, float]:
    """One kill among many."""
    folder, program = folder_for(where, "idle", IDLE)
    watched = Watched(folder)
    with started(elastic(ranks, program, str(folder)), folder):
        return {"gap": gap_after(watched, ranks, [ranks // 2], 0.0, 120)["gap"]}


def hosts(where: Path) -> dict[str, float]:
    """A worker on another host is killed; then that host is cut off."""
    sys.path.insert(0, str(ROOT))
    from tests.support.hosts import Bed

    folder, program = folder_for(where, "hosts", IDLE)
    watched = Watched(folder)
    measured = {}
    with Bed(["h1", "h2", "h3"]) as bed:
        flags = ["-np", "6", "--min-np", "2", "--failures-per-host", "1000", "-H", "h1:2,h2:2,h3:2"]
        with open(folder / "output", "wb") as output:
            command = elastic(6, program, str(folder), flags=flags)
            job = bed["h1"].popen(command, stdout=output, stderr=output, env=environment())
        try:
            watched.wait_for(6, after=0.0, timeout=60)
            time.sleep(0.5)
            ways: dict[str, Callable[[], object]] = {
                "killed": lambda: _kill_on(bed["h3"], program),
                "cut off": lambda: bed["h3"].cut(),
            }
            for what, act in ways.items():
                there = [pid for pid, made in watched.steps().items() if made and made[-1].size == 6]
                began = time.monotonic()
                act()
                deadline = began + 60
                while time.monotonic() < deadline:
                    news = {p: [s for s in m if s.at > began and s.size != 6] for p, m in watched.steps().items()}
                    if sum(bool(made) for made in news.values()) >= 4:
                        break
                    time.sleep(0.05)
                survivors = [pid for pid in there if news.get(pid)]
                measured[what] = watched.gap(survivors, began, lambda now: now != 6)
                if what == "killed":
                    watched.wait_for(6, after=began + 0.2, timeout=60)
                    time.sleep(0.5)
        except (TimeoutError, StopIteration) as error:
            print((folder / "output").read_text()[-3000:], file=sys.stderr)
            raise SystemExit(f"hosts: {error}") from error
        finally:
            bed["h3"].reconnect()
            job.send_signal(signal.SIGINT)
            job.wait(30)
    return measured


def _kill_on(host: Any, program: Path) -> None:
    worker = next(p for p in host.processes() if str(program) in p.cmdline() and "hvdgloo.runner" not in p.cmdline())
    worker.kill()


def medians(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in figures) for name in figures[0]}


def main() -> None:
    usual = ("killed", "torchrun", "joined", "commit", "overlap", "check", "step", "idle", "hosts")
    rows = (*usual, "tensorflow")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(usual), help="which ones (default: all of torch's)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4, help="of killed, torchrun, check and step (default: 4)")
    parser.add_argument("--torchrun-timeout", type=float, default=60.0, metavar="S", help="for it to come back")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    chosen = given.rows.split(",")
    if unknown := set(chosen) - set(rows):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}")
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # jobs are ended then, too

    def tell(row: str, figures: Sequence[dict[str, float]], text: str) -> None:
        results[row] = {"medians": medians(figures), "rounds": list(figures)}
        print(f"{row}: {text.format(**{k.replace(' ', '_'): v for k, v in medians(figures).items()})}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        if "killed" in chosen or "torchrun" in chosen:
            ours, theirs = [], []
            measuring = killed(where, given.ranks, given.rounds) if "killed" in chosen else None
            for _ in range(given.rounds):
                if measuring is not None:
                    ours.append(next(measuring))
                if "torchrun" in chosen:
                    theirs.append(torchrun(where, given.ranks, given.torchrun_timeout))
            if measuring is not None:
                measuring.close()
                tell("killed", ours, ", ".join(f"{w} {{{w.replace(' ', '_')}:.3f}} s" for w in ours[0]))
            if theirs:
                tell("torchrun", theirs, "{torchrun:.3f} s")
            if ours and theirs:
                ratio = medians(ours)["a rank"] / medians(theirs)["torchrun"]
                print(f"a rank killed: {ratio:.3f} x torchrun's (target: 0.2)", flush=True)
        if "joined" in chosen:
            tell("joined", [joined(where, 0.0) for _ in range(given.rounds)], "{gap:.3f} s (target: 1.0)")
            tell("joined, 10 s late", [joined(where, 10.0)], "{gap:.3f} s (target: 1.0)")
        if "commit" in chosen:
            tell(
                "commit",
                [commit(given.rounds)],
                "{commit:.1f} ms (target: 15), deepcopy {deepcopy:.1f}, nothing changed {unchanged:.2f} (target: 1), "
                "restore {restore:.2f} (target: 1)",
            )
        if "overlap" in chosen:
            text = "{commit:.2f} ms, and {wait:.2f} ms more in the next step (target: 2), which takes {step:.1f} ms"
            tell("overlap", [overlap(given.rounds)], text)
        if "tensorflow" in chosen:
            tell("tensorflow", [tensorflow(given.rounds)], "{commit:.1f} ms, copies {copies:.1f} ms")
        if "check" in chosen:
            figures = [check(where, given.ranks) for _ in range(min(3, given.rounds))]
            tell("check", figures, "{check:.0f} us, an allreduce of 4 bytes {allreduce:.0f} us (target: 1.5 x)")
        if "step" in chosen:
            fixed, changing = [], []
            for _ in range(given.rounds):
                fixed.append(step(where, given.ranks, fixed=True))
                changing.append(step(where, given.ranks, fixed=False))
            tell("step, fixed", fixed, "{step:.5f} s, idle {idle:.4f} cores")
            tell("step, elastic", changing, "{step:.5f} s, idle {idle:.4f} cores")
        if "idle" in chosen:
            tell("idle", [idle(where, 32) for _ in range(min(3, given.rounds))], "{gap:.3f} s (target: 3)")
        if "hosts" in chosen:
            figures = [hosts(where) for _ in range(min(3, given.rounds))]
            tell("hosts", figures, "killed {killed:.3f} s (target: 1.5), cut off {cut_off:.3f} s (heartbeat + 1.5)")
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
