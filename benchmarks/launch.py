"""The cost of a start: agents by the dozen, hosts over ssh, and `hvdgloo-run -np 2` against `torchrun`, in one run.

- **cost**: processor time, all processes together, of ``hvdgloo-run -np 2 true``, and of ``import hvdgloo.numpy``
  beyond numpy's own import.
- **many**: 100 workers that import numpy, join the job and sum 8 bytes once.
- **agents**: 2, 8, 32 and 64 of one launcher, by a command template on this machine, one idle worker each; no ssh.
- **launcher**: the launcher's own processor time and open files for 128 and 256 agents. Each agent's command is a fake
  that stands for ssh and for all that is behind it: it says what an agent would say, and has one worker which ends at
  once. Addresses are not tried, since all agents say that they are on this machine.
- **hosts**: 4 hosts with 2 idle workers each over real ssh, on the tests' bed of network namespaces (Linux, root).
- **job**: two workers that import torch, join the job and sum 4 bytes once, by ``hvdgloo-run`` and by ``torchrun``,
  and the time of ``import torch`` alone (one process; and two at once, which share the cores), in interleaved rounds.

    python benchmarks/launch.py [--rounds 5] [--agents 128,256] [--only cost,many,agents,launcher,hosts,job]
        [--json FILE]

``--agents`` chooses the numbers of fake agents, and with it alone this is the only case.

Times are seconds from the start of the command: until all workers run (or have the sum), and until it has ended.
Modules are imported from byte code, as after an installation by pip: a first round, which does not count, writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

IDLE = """
import os, sys, time
os.write(1, b"up %.6f\\n" % time.monotonic())
with open(sys.argv[1]) as gate:
    gate.read()
"""
OURS = """
import time
import torch
import hvdgloo.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="first")
print("up %.6f\\n" % time.monotonic(), end="", flush=True)
"""
THEIRS = """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("up %.6f\\n" % time.monotonic(), end="", flush=True)
dist.destroy_process_group()
"""
NUMPY = """
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(1), name="first")
"""
MANY = 100
WORKER = (sys.executable, "-S", "-c", IDLE)
_UP = re.compile(r"\bup (\d+\.\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", metavar="N,N", help="numbers of fake agents (default 128,256)")
    parser.add_argument("--only", help="which cases (default: cost,many,agents,launcher,hosts,job)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    cases = (options.only or ("launcher" if options.agents else "cost,many,agents,launcher,hosts,job")).split(",")
    if "cost" in cases:
        results["cost"] = cost(options.rounds)
    if "many" in cases:
        results["many"] = many(options.rounds)
    if "agents" in cases:
        results["agents"] = [agents(number, options.rounds) for number in (2, 8, 32, 64)]
    if "launcher" in cases:
        numbers = (options.agents or "128,256").split(",")
        results["launcher"] = [launcher(int(number), options.rounds) for number in numbers]
    if "hosts" in cases:
        results["hosts"] = hosts(options.rounds)
    if "job" in cases:
        results["job"] = job(options.rounds)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))


# Processor time.


def cost(rounds: int) -> dict[str, Any]:
    """Measure the cost of a job that does nothing, and of a worker's import."""
    python = sys.executable
    commands = {
        "an empty Python": [python, "-c", "pass"],
        "hvdgloo-run -np 2 true": [python, "-m", "hvdgloo.runner", "-np", "2", "true"],
        "import numpy": [python, "-c", "import numpy"],
        "import hvdgloo.numpy": [python, "-c", "import hvdgloo.numpy"],
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            spent = processor_time(command)
            if number:
                runs[name].append(spent)
    medians = {name: show_cost(name, spent) for name, spent in runs.items()}
    over = medians["import hvdgloo.numpy"]["processor"] - medians["import numpy"]["processor"]
    print(f"processor time over import numpy, s: {over:.3f} (target: at most 0.10); of the job: target at most 0.40")
    return {"medians": medians, "over_import_numpy": over}


def many(rounds: int) -> dict[str, Any]:
    """Many workers on few cores."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "worker.py")
        program.write_text(NUMPY)
        command = [sys.executable, "-m", "hvdgloo.runner", "-np", str(MANY), str(program)]
        runs = [processor_time(command) for _ in range(min(rounds, 3))]
    return show_cost(f"{MANY} numpy workers", runs)


def processor_time(command: Sequence[str]) -> dict[str, float]:
    """Seconds until a command has ended, and the processor time of it and of all descendants that it waited for."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    ended, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor": spent, "ended": ended}


def show_cost(name: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Print the medians of some runs, and return them."""
    medians: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(f"{name:<28} processor {medians['processor']:6.3f} s   ended {medians['ended']:6.2f} s", flush=True)
    return {**medians, "runs": list(runs)}


# Idle workers.


class Gate:
    """A named pipe at which workers wait."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "gate")
        os.mkfifo(self.path)
        # Both ends are held, so neither waits for the other.
        self._descriptor = os.open(self.path, os.O_RDWR)

    def open(self) -> None:
        os.unlink(self.path)
        os.close(self._descriptor)


def idle_job(start: Callable[[str], subprocess.Popen[str]], workers: int) -> dict[str, float]:
    """Start a job of idle workers, look at it when all are up, and let it end."""
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(folder)
        begin = time.monotonic()
        process = start(gate.path)
        assert process.stdout is not None
        stamps: list[float] = []
        for line in process.stdout:
            if found := _UP.search(line):
                stamps.append(float(found[1]))
                if len(stamps) == workers:
                    break
        look = inspect_tree(getattr(process, "inner", process).pid)
        gate.open()
        process.stdout.read()
        status = process.wait(60)
        end = time.monotonic()
    if status != 0 or len(stamps) != workers:
        sys.exit(f"the job ended with status {status} after {len(stamps)} of {workers} workers")
    return {"up": max(stamps) - begin, "ended": end - begin, **look}


def inspect_tree(pid: int) -> dict[str, float]:
    """Processes below the launcher, their memory (shared pages divided among those who share them), its descriptors."""
    import psutil

    launcher = psutil.Process(pid)
    processes = [launcher, *launcher.children(recursive=True)]
    memory = 0
    for process in processes:
        try:
            memory += process.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return {"processes": len(processes), "mib": memory / 2**20, "descriptors": launcher.num_fds()}


def agents(number: int, rounds: int) -> dict[str, Any]:
    """Agents by a command template that leads to this machine."""
    names = ",".join(f"n{index}:1" for index in range(number))
    argv = [sys.executable, "-m", "hvdgloo.runner", "--agent-command", "env HOST={host}", "-H", names, *WORKER]

    def start(gate: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*argv, gate], stdout=subprocess.PIPE, text=True, cwd=ROOT)

    runs = [idle_job(start, number) for _ in range(rounds)]
    return show(f"{number} agents", runs, number=number)


FAKE = r"""
import os, struct, sys
with open(sys.argv[1], "rb") as file:
    hello, lacking, spawned, cleared = file.read().split(b"\0\0--\0\0")
replies = {b"Require": lacking, b"Spawn": spawned, b"Finish": cleared}
os.write(1, hello)
buffer = b""
while data := os.read(0, 65536):
    buffer += data
    while len(buffer) >= 4 and len(buffer) >= 4 + (length := struct.unpack_from("!I", buffer)[0]):
        body, buffer = buffer[4 : 4 + length], buffer[4 + length :]
        kind = body[2 : 2 + (body[1] & 31)]  # an array, whose first item is the kind of frame
        os.write(1, replies.get(kind, b""))
        if kind == b"Finish":
            os._exit(0)
"""


def launcher(number: int, rounds: int) -> dict[str, Any]:
    """Measure the launcher's cost of agents."""
    from hvdgloo._net.ports import hold_free_port
    from hvdgloo.rendezvous import host_identity
    from hvdgloo.runner.protocol.frames import PREAMBLE, PROTOCOL, Cleared, Exited, Hello, Lacking, Spawned, encode
    from hvdgloo.version import __version__

    with tempfile.TemporaryDirectory() as folder, closing(hold_free_port()) as held:
        Path(folder, "fake.py").write_text(FAKE)
        for rank in range(number):
            hello = Hello(PROTOCOL, __version__, f"n{rank}", host_identity(), 1, 1, 0, held.port)
            worker = encode(Spawned(rank, 2)) + encode(Exited(rank, 0))
            said = (PREAMBLE + encode(hello), encode(Lacking()), worker, encode(Cleared()))
            Path(folder, f"n{rank}").write_bytes(b"\0\0--\0\0".join(said))
        fake = f"{sys.executable} -I -S {folder}/fake.py {folder}/{{host}} {{command}}"
        names = ",".join(f"n{rank}:1" for rank in range(number))
        argv = [sys.executable, "-m", "hvdgloo.runner", "--agent-command", fake, "-H", names, "true"]
        runs = [own_time(argv) for _ in range(rounds + 1)][1:]
        idle = [own_time([sys.executable, "-m", "hvdgloo.runner", "-np", "1", "true"]) for _ in range(min(rounds, 3))]
    base = statistics.median(run["processor"] for run in idle)
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    each = 1e3 * (medians["processor"] - base) / number
    print(
        f"{number} fake agents: the launcher's own processor time {medians['processor']:.2f} s, {each:.2f} ms for each "
        f"agent beyond a job of one ({base:.2f} s); target at most 3. At most {medians['descriptors']:.0f} open files, "
        f"{medians['descriptors'] / number:.2f} for each agent; ended after {medians['ended']:.1f} s",
        flush=True,
    )
    return {"number": number, "each_ms": each, "base": base, **medians, "runs": runs}


def own_time(argv: Sequence[str]) -> dict[str, float]:
    """A command's own processor time, without its children's; its most open files, and when it had ended."""
    begin, most = time.monotonic(), 0
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        try:
            most = max(most, len(os.listdir(f"/proc/{process.pid}/fd")))
        except OSError:
            pass  # it has just ended
        time.sleep(0.01)
    ended = time.monotonic() - begin
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    processor = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    said = process.communicate()[1]
    if process.returncode != 0:
        sys.exit(f"{' '.join(argv)[:200]}: status {process.returncode}\n{said.decode()}")
    return {"processor": processor, "descriptors": most, "ended": ended}


def hosts(rounds: int) -> dict[str, Any] | None:
    """Hosts over ssh."""
    sys.path.insert(0, str(ROOT))
    from tests.support.hosts import Bed, available

    missing = available()
    if missing:
        print(f"4 hosts over ssh: skipped, there can be no bed of hosts here: {missing}")
        return None
    with Bed(["h1", "h2", "h3", "h4"]) as bed:
        where = ",".join(f"{name}:2" for name in bed.names)
        argv = [sys.executable, "-m", "hvdgloo.runner", "-H", where, *WORKER]

        def start(gate: str) -> subprocess.Popen[str]:
            return bed["h1"].popen([*argv, gate], cwd=ROOT, stderr=None)

        runs = [idle_job(start, 8) for _ in range(rounds)]
    return show("4 hosts x 2 over ssh", runs)


# A job with torch.


def job(rounds: int) -> dict[str, Any] | None:
    """``hvdgloo-run`` against ``torchrun``, and ``import torch`` as the floor."""
    torchrun = shutil.which("torchrun", path=os.path.dirname(sys.executable)) or shutil.which("torchrun")
    if torchrun is None:
        print("a job with torch: skipped, there is no torchrun")
        return None
    python, floor_program = sys.executable, "import time, torch; print(f'up {time.monotonic()}\\n', end='')"
    commands: dict[str, Callable[[str], list[str]]] = {
        "import torch": lambda _: [python, "-c", floor_program],
        "import torch, two at once": lambda _: [
            "sh", "-c", '"$0" -c "$1" & "$0" -c "$1"; wait', python, floor_program,
        ],
        "hvdgloo-run -np 2": lambda folder: [python, "-m", "hvdgloo.runner", "-np", "2", f"{folder}/ours.py"],
        "torchrun --nproc-per-node 2": lambda folder: [torchrun, "--nproc-per-node", "2", f"{folder}/theirs.py"],
    }  # fmt: skip
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ours.py").write_text(OURS)
        Path(folder, "theirs.py").write_text(THEIRS)
        for number in range(rounds + 1):
            for name, command in commands.items():
                timing = one_job(command(folder))
                if number:  # the first round fills the page cache
                    runs[name].append(timing)
    medians = {name: show(name, timings) for name, timings in runs.items()}
    ours, theirs = medians["hvdgloo-run -np 2"], medians["torchrun --nproc-per-node 2"]
    floor = medians["import torch"]
    over = ours["up"] - floor["up"], theirs["up"] - floor["up"]
    print(f"over import torch, s: hvdgloo-run {over[0]:.2f} (target: at most 0.60), torchrun {over[1]:.2f}")
    ends = ours["ended"] - floor["ended"], theirs["ended"] - floor["ended"]
    print(f"over it to the end, s: hvdgloo-run {ends[0]:.2f} (target: at most 0.70), torchrun {ends[1]:.2f}")
    print(f"ratio to torchrun: {ours['up'] / theirs['up']:.2f} up, {ours['ended'] / theirs['ended']:.2f} to the end")
    return {"medians": medians, "over_import_torch": over[0], "torchrun_over_import_torch": over[1]}


def one_job(command: Sequence[str]) -> dict[str, float]:
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    end = time.monotonic()
    stamps = [float(stamp) for stamp in _UP.findall(done.stdout)]
    if done.returncode != 0 or not stamps:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr}")
    return {"up": max(stamps) - begin, "ended": end - begin}


def show(name: str, runs: Sequence[dict[str, float]], **facts: Any) -> dict[str, Any]:
    """Print the medians of some runs, and return them."""
    medians: dict[str, Any] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    line = f"{name:<28} up {medians['up']:6.2f} s   ended {medians['ended']:6.2f} s"
    if "processes" in medians:
        line += (
            f"   {medians['processes']:.0f} processes, {medians['mib']:.0f} MiB, "
            f"{medians['descriptors']:.0f} descriptors in the launcher"
        )
    print(line, flush=True)
    return {**facts, **medians, "runs": list(runs)}


if __name__ == "__main__":
    main()
