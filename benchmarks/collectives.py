"""Collectives of several libraries in interleaved rounds of one run: time, processor time, and bandwidth over size.

    python benchmarks/collectives.py [--np 2] [--rounds 15] [--only allreduce,gradients] [--json FILE] [--plot FILE]

torch.distributed on Gloo is always measured. Open MPI is if mpirun and mpi4py are installed (Debian's openmpi-bin, and
``pip install 'hvdgloo[benchmarks]'``): then mpirun starts the processes, which all libraries share. Horovod is if it
can be imported.

A round calls each library in turn, each after a barrier of its own; the time is the slowest rank's. Medians and minima
are in milliseconds, processor time in milliseconds per operation, of all ranks together. Results are checked once. What
each library costs while nothing is done (rank 0's share of a core) comes last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASYNC_SIZES = [4, 1 << 16, 1 << 20]
SIZES = [4, 64, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28]
IDLE_SECONDS = 2.0
"""Seconds of idleness, to see what it costs."""

ENOUGH_SECONDS = 0.004
"""Small operations are repeated until a measurement takes about this long."""


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        group: what selects it on the command line.
        nbytes: size of a rank's data.
    """

    group: str
    name: str
    nbytes: int


def cases() -> list[Case]:
    """All cases."""
    return [
        *(Case("allreduce", f"allreduce {shown(size)}", size) for size in SIZES),
        *(Case("unnamed", f"allreduce {shown(size)} without a name", size) for size in ASYNC_SIZES[:2]),
        *(Case("async", f"async and synchronize {shown(size)}", size) for size in ASYNC_SIZES),
        Case("gradients", "161 gradients", 102_228_128),
        Case("blocking", "161 gradients by blocking calls", 102_228_128),
        Case("group", "161 gradients as a group", 102_228_128),
        Case("broadcast", "broadcast 100 MB", 100_000_000),
        Case("allgather", "allgather 10 MB per rank", 10_000_000),
        Case("alltoall", "alltoall 10 MB", 10_000_000),
    ]


def shown(nbytes: int) -> str:
    """64 KiB for 65536."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


# A worker -------------------------------------------------------------------------------------------------------------


def worker(path: str, rounds: int, groups: list[str]) -> None:
    """One rank; rank 0 writes what all measured to ``path``."""
    import torch
    import torch.distributed as dist
    from peers import available

    torch.set_num_threads(1)
    peers: list[Any] = []
    idle: dict[str, float] = {}
    for kind in available(mpi="OMPI_COMM_WORLD_RANK" in os.environ):
        peers.append(kind())
        peers[-1].barrier()
        used = time.process_time()
        time.sleep(IDLE_SECONDS)
        idle[kind.name] = (time.process_time() - used) / IDLE_SECONDS - sum(idle.values())
    rank, size = dist.get_rank(), dist.get_world_size()

    def slowest(values: list[float], op: Any = dist.ReduceOp.MAX) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op)
        return [float(value) for value in tensor]

    results: dict[str, Any] = {}
    for case in cases():
        if case.group not in groups:
            continue
        calls = [(peer, prepare(peer, case, rank, size)) for peer in peers]
        repeats = []
        for peer, call in calls:
            call()
            peer.barrier()
            begin = time.perf_counter()
            call()
            (once,) = slowest([time.perf_counter() - begin])
            repeats.append(max(1, min(1000, math.ceil(ENOUGH_SECONDS / max(once, 1e-6)))))
        times: dict[str, list[float]] = {peer.name: [] for peer in peers}
        busy = {peer.name: 0.0 for peer in peers}
        for turn in range(rounds):
            for index in range(len(calls)):
                at = (turn + index) % len(calls)
                peer, call = calls[at]
                peer.barrier()
                used = time.process_time()
                begin = time.perf_counter()
                for _ in range(repeats[at]):
                    call()
                times[peer.name].append((time.perf_counter() - begin) / repeats[at])
                busy[peer.name] += (time.process_time() - used) / repeats[at]
        results[case.name] = {"nbytes": case.nbytes, "group": case.group}
        for peer in peers:
            results[case.name][peer.name] = {
                "seconds": slowest(times[peer.name]),
                "cpu_seconds": slowest([busy[peer.name] / rounds], dist.ReduceOp.SUM)[0],
            }
        if rank == 0:
            print(line(case.name, results[case.name]), file=sys.stderr, flush=True)
    if rank == 0:
        results["memcpy"] = {shown(size): copying(size) for size in SIZES[2:]}
        results["idle"] = idle
        Path(path).write_text(json.dumps(results))
    dist.barrier()


def prepare(peer: Any, case: Case, rank: int, size: int) -> Callable[[], object]:
    """The call to measure, after one whose result was checked."""
    import torch

    if case.group in ("gradients", "blocking", "group"):
        from engine import resnet50_shapes

        reduce = getattr(peer, case.group)
        tensors = [torch.full(shape, float(rank)) for shape in reversed(resnet50_shapes())]
        reduce(tensors)
        assert all(bool((tensor == size * (size - 1) / 2).all()) for tensor in tensors), peer.name
        for tensor in tensors:
            tensor.fill_(1e-30)
        return lambda: reduce(tensors)
    count = case.nbytes // 4
    if case.group == "alltoall":
        count -= count % size
    own = torch.full((count,), float(rank + 1))
    ways = {"allreduce": peer.allreduce, "unnamed": peer.allreduce_unnamed, "async": peer.allreduce_async}
    if case.group in ways:
        allreduce = ways[case.group]
        allreduce(own)
        assert bool((own == size * (size + 1) / 2).all()), peer.name
        own.fill_(1e-30)
        return lambda: allreduce(own)
    if case.group == "broadcast":
        peer.broadcast(own)
        assert bool((own == 1).all()), peer.name
        return lambda: peer.broadcast(own)
    gathered = peer.allgather(own) if case.group == "allgather" else peer.alltoall(own)
    parts = gathered.view(size, -1)
    assert all(bool((parts[source] == source + 1).all()) for source in range(size)), peer.name
    return lambda: peer.allgather(own) if case.group == "allgather" else peer.alltoall(own)


def copying(nbytes: int) -> float:
    """Seconds in which one process copies this many bytes: the best of several."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    repeats = max(1, (1 << 24) // nbytes)
    best = math.inf
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(repeats):
            np.copyto(target, source)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best


# The report -----------------------------------------------------------------------------------------------------------


def line(name: str, result: dict[str, Any]) -> str:
    """A case's medians, minima, ratios of medians, and processor time."""
    cells = []
    ours = statistics.median(result["hvdgloo"]["seconds"])
    for peer, measured in result.items():
        if isinstance(measured, dict):
            middle = statistics.median(measured["seconds"])
            least = min(measured["seconds"])
            ratio = "" if peer == "hvdgloo" else f" ({ours / middle:.2f} x)"
            cells.append(
                f"{peer} {middle * 1e3:.3f}, least {least * 1e3:.3f}, cpu {measured['cpu_seconds'] * 1e3:.2f}{ratio}"
            )
    return f"{name:32} {'; '.join(cells)}"


def plot(results: dict[str, Any], path: str, size: int) -> None:
    """Bandwidth over size: bytes of a rank's tensor by the median time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    chosen = [result for result in results.values() if result.get("group") == "allreduce"]
    for peer in [key for key, value in chosen[0].items() if isinstance(value, dict)]:
        points = [(r["nbytes"], r["nbytes"] / statistics.median(r[peer]["seconds"]) / 1e9) for r in chosen]
        axes.plot(*zip(*points, strict=True), marker="o", label=peer)
    copies = {shown(nbytes): nbytes for nbytes in SIZES}
    points = [(copies[name], copies[name] / seconds / 1e9) for name, seconds in results["memcpy"].items()]
    axes.plot(*zip(*points, strict=True), linestyle="--", color="grey", label="one process's memcpy")
    axes.set(xscale="log", yscale="log", xlabel="bytes per rank", ylabel="GB/s", title=f"allreduce, {size} ranks")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


# The run --------------------------------------------------------------------------------------------------------------


def launch(size: int, rounds: int, groups: list[str]) -> dict[str, Any]:
    """Start the workers, by mpirun where there is one, and return what they measured."""
    from hvdgloo.rendezvous import RendezvousServer, generate_secret

    secret = generate_secret()
    server = RendezvousServer(secret=secret, hosts=[("localhost", size)])
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {
        **os.environ,
        "HVDGLOO_RENDEZVOUS": server.endpoint,
        "HVDGLOO_SECRET": secret.hex(),
        "HVDGLOO_ADDRESS": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results")
            command = [sys.executable, __file__, "--worker", path, "--rounds", str(rounds), "--only", ",".join(groups)]
            if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
                flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(size)]
                processes = [subprocess.Popen(["mpirun", *flags, *command], env=environ)]
            else:
                print("no mpirun or no mpi4py: Open MPI is not measured", file=sys.stderr)
                processes = [subprocess.Popen(command, env={**environ, "RANK": str(rank)}) for rank in range(size)]
            if any(status != 0 for status in [process.wait() for process in processes]):
                raise SystemExit("a worker failed")
            return dict(json.loads(Path(path).read_text()))
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = list(dict.fromkeys(case.group for case in cases()))
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default=",".join(everything), help="of " + ", ".join(everything))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="a PNG of bandwidth over size")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    groups = given.only.split(",")
    if unknown := set(groups) - set(everything):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(everything)}")
    if given.plot and "allreduce" not in groups:
        parser.error("--plot shows allreduce, which --only leaves out")
    if given.worker:
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", ""))
        os.environ.update(RANK=rank, HVDGLOO_RANK=rank)
        worker(given.worker, given.rounds, groups)
        return
    results = launch(given.np, given.rounds, groups)
    print("idle, of a core:", ", ".join(f"{name} {share:.2%}" for name, share in results["idle"].items()))
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))
    if given.plot:
        plot(results, given.plot, given.np)


if __name__ == "__main__":
    main()
