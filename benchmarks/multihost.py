"""An allreduce across hosts: bytes over each host's wire and time, hvdgloo against torch's Gloo, on shaped links.

    python benchmarks/multihost.py [--layouts 2x1,2x2,4x2] [--mib 64] [--rounds 7] [--rate 1gbit] [--json FILE]

Hosts are network namespaces of this machine (the tests' bed; Linux, root), each with its own link, which ``tc tbf``
limits in both directions as a network card of that speed would; ``--rate none`` leaves links as they are, and then the
processors are the limit. The workers are started over real ssh. Rounds alternate between the libraries; figures are
medians of the slowest rank's time. No allreduce can send less than 2(h-1)/h times the tensor's size from each of h
hosts, whatever the number of ranks on it; a flat ring in host order sends 2(p-1)/p times as much for p ranks. Variables
HVDGLOO_* reach the workers: with HVDGLOO_HIERARCHICAL_THRESHOLD=0 nothing is reduced in each host first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

WORKER = """
import json, statistics, sys, time
import torch
import torch.distributed as dist
import hvdgloo.torch as hvd

torch.set_num_threads(1)
hvd.init()
dist.init_process_group("gloo")
mib, rounds, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tensor = torch.full((mib << 18,), 1e-30)

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

ways = {"hvdgloo": lambda: hvd.allreduce_(tensor, op=hvd.Sum, name="x"), "torch": lambda: dist.all_reduce(tensor)}
for call in ways.values():
    call()
seconds, wire = {way: [] for way in ways}, {way: [] for way in ways}
for turn in range(rounds):
    for way in sorted(ways, reverse=turn % 2):
        dist.barrier()
        before, begin = sent(), time.perf_counter()
        ways[way]()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        seconds[way].append(float(took))
        wire[way].append(sent() - before)
every = hvd.allgather_object({way: statistics.median(values) for way, values in wire.items()})
if hvd.rank() == 0:
    with open(path, "w") as file:
        json.dump({way: {"seconds": seconds[way], "wire": max(one[way] for one in every)} for way in ways}, file)
"""


def measure(hosts: int, ranks: int, mib: int, rounds: int, rate: str, folder: Path) -> dict[str, Any]:
    """One layout's figures, by library: ``seconds`` of each round, and the bytes that the busiest host has sent."""
    sys.path.insert(0, str(ROOT))
    from tests.support.hosts import Bed

    names = [f"h{number}" for number in range(1, hosts + 1)]
    script, result = folder / "worker.py", folder / f"{hosts}x{ranks}.json"
    script.write_text(WORKER)
    with Bed(names) as bed:
        if rate != "none":
            for name in names:
                shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb"]
                bed[name].run([*shape, "latency", "100ms"], check=True)
        where = ",".join(f"{name}:{ranks}" for name in names)
        arguments = [str(script), str(mib), str(rounds), str(result)]
        command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, sys.executable, *arguments]
        settings = {name: value for name, value in os.environ.items() if name.startswith("HVDGLOO_")}
        done = bed["h1"].run(command, env={"OMP_NUM_THREADS": "1", **settings}, timeout=600)
        if done.returncode != 0:
            raise SystemExit(f"{where}: {done.stderr}")
    return dict(json.loads(result.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="2x1,2x2,4x2", help="hosts x ranks on each (default: 2x1,2x2,4x2)")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor (default: 64)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc spells it, or none")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in given.layouts.split(","):
            hosts, ranks = (int(number) for number in layout.split("x"))
            measured = measure(hosts, ranks, given.mib, given.rounds, given.rate, Path(folder))
            results[layout] = measured
            least = 2 * (hosts - 1) / hosts * (given.mib << 20)
            cells = []
            for way, figures in measured.items():
                middle = statistics.median(figures["seconds"])
                times = figures["wire"] / least
                cells.append(f"{way} {middle:.3f} s, {figures['wire'] / 2**20:.0f} MiB sent ({times:.2f} x the least)")
            ours, theirs = (statistics.median(measured[way]["seconds"]) for way in ("hvdgloo", "torch"))
            print(f"{layout}: {'; '.join(cells)}; hvdgloo takes {ours / theirs:.2f} x torch's time", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
