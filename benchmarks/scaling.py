"""How far it goes: a training step of a thousand ranks, put together from pieces that are measured here.

    python benchmarks/scaling.py [--slots 4] [--jitter 0.02] [--latency 3e-5] [--memory 8e9]
        [--measured FILE] [--json FILE]
    python benchmarks/scaling.py --validate [--layouts 2x1,4x1,8x1,8x2] [--rates 100mbit,1gbit,2.5gbit]
        [--measured FILE] [--json FILE]

A step is a queue: gradients become ready in buckets of 25 MB during the backward pass, each bucket is agreed upon,
reduced within its host, across hosts, and handed out within the host, one after the other. **Measured** on this
machine, in processor time: what an agreement costs per message that a node handles, over real sockets between
processes; what a step of Gloo's ring and an exchange of halving and doubling cost, and each byte; what starting costs
the launcher per host and the rendezvous server per worker. **Assumed**, and to be replaced by figures of one's own: the
networks' speed on one GPU, when their gradients become ready, the fabric's latency and the share of its bandwidth that
is payload, the speed of memory, and how much the slowest of many ranks deviates. Everything else is **predicted**.

Beside the predictions stands what has been **published** of Horovod: 90 % for Inception V3 and ResNet-101 and 68 % for
VGG-16 on 512 GPUs (128 servers with 4 P100 each, 25 Gbit/s, RoCE; Sergeev and Del Balso, 2018).

``--validate`` compares the model with reality as far as one machine can: hosts are network namespaces (the tests' bed;
Linux, root), their links are limited by ``tc tbf``, and the computation is a sleep, which needs no GPU. All hosts share
this machine's cores, so the model is told so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdgloo._backends.base import FEW_RANKS
from hvdgloo._backends.cube import Cube
from hvdgloo.config import Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' bed

BUCKET = 25e6
BATCH = 64
FAN_IN, TREE_FROM_RANKS = Config().control_fanin, Config().control_tree_ranks
TREE_FROM_HOSTS = 3
IN_SLICES_FROM = Config().hierarchical_threshold
PAYLOAD = 0.94
RANKS = (1, 8, 32, 128, 512, 1024)
GBITS = (1, 10, 25, 100)


@dataclass(frozen=True)
class Network:
    """What is assumed of a network, on one GPU like a P100 with batches of 64.

    Attributes:
        parameters: how many, of 4 bytes each.
        images: per second, forward and backward, without communication.
        curve: points (share of the backward pass, share of the gradients' bytes that are ready by then).
        published: efficiency on 512 GPUs, if it has been published of Horovod.
    """

    parameters: float
    images: float
    curve: tuple[tuple[float, float], ...]
    published: float | None = None


NETWORKS = {
    "ResNet-50": Network(25.6e6, 219, ((0.15, 0.55), (0.5, 0.85), (1, 1))),
    "ResNet-101": Network(44.5e6, 130, ((0.12, 0.35), (0.75, 0.9), (1, 1)), 0.90),
    "Inception V3": Network(23.8e6, 142, ((0.3, 0.5), (0.7, 0.9), (1, 1)), 0.90),
    "VGG-16": Network(138.4e6, 154, ((0.03, 0.895), (0.3, 0.96), (1, 1)), 0.68),
}


@dataclass(frozen=True)
class Costs:
    """What is measured here; seconds of processor time, unless it says otherwise.

    Attributes:
        agreement: an agreement of two ranks, elapsed time.
        message: what each further rank that a node serves adds to it.
        ring: one of the ring's 2(n - 1) steps, for one rank.
        exchange: one exchange of halving and doubling, for one rank.
        byte: each byte that a rank sends, and receives another for it.
        agent: an agent, for the launcher.
        worker: a worker, for the rendezvous server.
    """

    agreement: float
    message: float
    ring: float
    exchange: float
    byte: float
    agent: float = 0.0
    worker: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Where a step is to run.

    Attributes:
        ranks, slots: in all, and on each host.
        rate: bytes of payload a second that a host sends, and receives at the same time.
        latency: seconds of a message between hosts.
        jitter: standard deviation of a rank's time of computation, as a share of it.
        memory: bytes a second that one host's ranks reduce or copy together.
        share: how many hosts share a core; below 1 if each has several.
    """

    ranks: int
    slots: int
    rate: float
    latency: float = 30e-6
    jitter: float = 0.02
    memory: float = 8e9
    share: float = 0.0

    @property
    def hosts(self) -> int:
        return max(1, -(-self.ranks // self.slots))

    @property
    def local(self) -> int:
        """Ranks on a host."""
        return min(self.slots, self.ranks)


def ready(curve: Sequence[tuple[float, float]], share: float) -> float:
    """At what share of the backward pass so large a share of the gradients' bytes is ready."""
    before = (0.0, 0.0)
    for time_, bytes_ in curve:
        if share <= bytes_:
            return before[0] + (time_ - before[0]) * (share - before[1]) / (bytes_ - before[1])
        before = (time_, bytes_)
    return 1.0


def agreement(cluster: Cluster, costs: Costs) -> float:
    """Seconds from a bucket that is ready everywhere to the order to reduce it."""
    if cluster.ranks == 1:
        return 0.0
    contended = max(1.0, cluster.share)
    if cluster.ranks < TREE_FROM_RANKS or cluster.hosts < TREE_FROM_HOSTS:
        return contended * (costs.agreement + (cluster.ranks - 2) * costs.message)
    levels = math.ceil(math.log(cluster.hosts * (FAN_IN - 1) + 1, FAN_IN) - 1e-9) - 1
    children = cluster.local - 1 + min(FAN_IN, cluster.hosts - 1)
    return contended * (costs.agreement * levels + children * costs.message) + 2 * levels * cluster.latency


def across(cluster: Cluster, costs: Costs, nbytes: float) -> float:
    """Seconds of an allreduce between hosts, the way that the Gloo plane takes.

    What is large goes in slices, one for each rank of a host; what is small goes through the hosts' first ranks. What
    few hosts send to each other at once is reckoned as a ring.
    """
    if cluster.hosts == 1:
        return 0.0
    cube = Cube(0, cluster.hosts)
    each = nbytes / cluster.local if nbytes >= IN_SLICES_FROM else nbytes
    if cluster.hosts <= FEW_RANKS or each > cube.most_bytes:
        sent = 2 * (cluster.hosts - 1) / cluster.hosts * nbytes
        return _way(cluster, costs, sent, 2 * (cluster.hosts - 1), costs.ring)
    sent = 2 * (cube.corners - 1) / cube.corners * nbytes
    if cube.corners < cluster.hosts:
        sent += nbytes  # the rank that speaks for two receives and sends everything once more
    return _way(cluster, costs, sent, cube.steps, costs.exchange)


def _way(cluster: Cluster, costs: Costs, sent: float, steps: int, each: float) -> float:
    """On the wire, or in the processors, whichever takes longer."""
    contended = max(1.0, cluster.share)
    return max(sent / cluster.rate + steps * cluster.latency, contended * (steps * each + sent * costs.byte))


def within(cluster: Cluster, nbytes: float) -> float:
    """Seconds of reducing a bucket in its host, and of handing it out again."""
    return 2 * nbytes * (cluster.local - 1) / cluster.local / cluster.memory


def queue(buckets: Sequence[tuple[float, float]], cluster: Cluster, costs: Costs) -> float:
    """When the last of some buckets has been reduced.

    Args:
        buckets: seconds after which each is ready, and its bytes; in order.
    """
    free = 0.0
    for when, nbytes in buckets:
        if cluster.ranks > 1:
            start = max(free, when + agreement(cluster, costs))
            free = start + across(cluster, costs, nbytes) + within(cluster, nbytes)
    return free


def step(network: Network, cluster: Cluster, costs: Costs) -> float:
    """Seconds of a training step: the slowest rank's computation, and what of the communication comes after it."""
    alone = BATCH / network.images
    slowest = 1 + cluster.jitter * math.sqrt(2 * math.log(cluster.ranks)) if cluster.ranks > 1 else 1.0
    forward, backward = slowest * alone / 3, slowest * alone * 2 / 3
    total, buckets, done = 4 * network.parameters, [], 0.0
    while done < total:
        nbytes = min(BUCKET, total - done)
        done += nbytes
        buckets.append((forward + backward * ready(network.curve, done / total), nbytes))
    return max(slowest * alone, queue(buckets, cluster, costs))


def efficiency(network: Network, cluster: Cluster, costs: Costs) -> float:
    """Images per second of each rank, compared with a rank that is alone."""
    return BATCH / network.images / step(network, cluster, costs)


def start(cluster: Cluster, costs: Costs) -> dict[str, float]:
    """Processor time of a start, in seconds: the launcher's, and the rendezvous server's."""
    return {"launcher": costs.agent * cluster.hosts, "rendezvous server": costs.worker * cluster.ranks}


# The pieces.


def measure() -> Costs:
    """All of them, in half a minute."""
    (elapsed, few), (_, many) = (_agreement(ranks) for ranks in (2, 6))
    ring, exchange, byte = _gloo(8)
    return Costs(elapsed, max(0.0, (many - few) / 4), ring, exchange, byte, _launcher(64), _server(128))


def tiny(rounds: int) -> tuple[float, float]:
    """In each rank of a job: seconds of an agreement, elapsed (the median) and of this process's processors.

    The 4 bytes travel in the agreement's messages.
    """
    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    value, took = np.ones(1, np.float32), []
    for turn in range(rounds + 20):
        if turn == 20:
            used = time.process_time()
        begin = time.perf_counter()
        hvd.allreduce(value, name="tiny")
        took.append(time.perf_counter() - begin)
    used = (time.process_time() - used) / rounds
    hvd.shutdown()
    return statistics.median(took[20:]), used


def _agreement(ranks: int) -> tuple[float, float]:
    """What rank 0 of so many says of itself."""
    import hvdgloo.run

    env = {**os.environ, "HVDGLOO_CPU_OPERATIONS": "gloo"}
    elapsed, used = hvdgloo.run.run(tiny, args=(300,), np=ranks, env=env)[0]
    return float(elapsed), float(used)


def _gloo(ranks: int) -> tuple[float, float, float]:
    """Processor time of one rank: a ring's step, an exchange, and a byte sent. The ranks are threads of a process."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import scaling; scaling.gloo_pieces({ranks})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    ring, exchange, byte = json.loads(done.stdout.splitlines()[-1])
    return ring, exchange, byte


def gloo_pieces(ranks: int) -> None:
    """Print what ``_gloo`` returns, and end the process, whose groups would otherwise wait for each other."""
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta

    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined] # absent from torch's own annotations

    def group(rank: int) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        return dist.ProcessGroupGloo(store, rank, ranks, options)

    with ThreadPoolExecutor(ranks) as pool:
        groups = list(pool.map(group, range(ranks)))

        def ring(size: int) -> Callable[[int], None]:
            tensors = [torch.ones(size) for _ in range(ranks)]
            return lambda rank: groups[rank].allreduce([tensors[rank]]).wait()

        def exchanges(rank: int) -> None:
            for distance in (1 << bit for bit in range((ranks - 1).bit_length())):
                peer, sent, got = rank ^ distance, torch.ones(16), torch.empty(16)
                works = [groups[rank].recv([got], peer, distance), groups[rank].send([sent], peer, distance)]
                for work in works:
                    work.wait()
                sent.add_(got)

        def used(call: Callable[[int], None], rounds: int) -> float:
            """Processor time of one rank's call."""
            list(pool.map(call, range(ranks)))
            begin = time.process_time()
            for _ in range(rounds):
                list(pool.map(call, range(ranks)))
            return (time.process_time() - begin) / rounds / ranks

        nothing = used(lambda rank: None, 50)
        small = used(ring(16), 50) - nothing
        large = used(ring(1 << 20), 5) - nothing
        few = used(exchanges, 50) - nothing
    steps = 2 * (ranks - 1)
    byte = (large - small) / (steps / ranks * (4 << 20))
    print(json.dumps([small / steps, few / (ranks - 1).bit_length(), byte]), flush=True)
    os._exit(0)


def _launcher(agents: int) -> float:
    """An agent, for the launcher."""
    (case,) = _benchmark("launch.py", "--agents", str(agents), "--rounds", "1")["launcher"]
    return max(0.0, float(case["each_ms"])) / 1e3


def _server(workers: int) -> float:
    """A worker, for the rendezvous server."""
    (case,) = _benchmark("rendezvous.py", str(workers), "--rounds", "1")
    return float(case["cpu"]) / workers


def _benchmark(program: str, *arguments: str) -> Any:
    """The JSON of another of these programs."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, str(Path(__file__).with_name(program)), *arguments, "--json", str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
        return json.loads(result.read_text())


# What is shown.


def predictions(costs: Costs, given: argparse.Namespace) -> dict[str, Any]:
    """Everything that is predicted, by network, bandwidth and number of ranks."""
    found: dict[str, Any] = {}
    for name, network in NETWORKS.items():
        found[name] = {}
        for gbit in GBITS:
            cells = {}
            for ranks in RANKS:
                cluster = Cluster(
                    ranks, given.slots, PAYLOAD * gbit * 1e9 / 8, given.latency, given.jitter, given.memory
                )
                share = efficiency(network, cluster, costs)
                cells[ranks] = {"images_per_s": round(share * ranks * network.images, 1), "efficiency": round(share, 4)}
            found[name][gbit] = cells
    return found


def show(costs: Costs, given: argparse.Namespace, found: dict[str, Any]) -> None:
    print("measured here:")
    print(f"  an agreement of two ranks {costs.agreement * 1e6:.0f} us, each further rank {costs.message * 1e6:.1f} us")
    print(
        f"  a ring's step {costs.ring * 1e6:.0f} us, an exchange {costs.exchange * 1e6:.0f} us, of one rank's processor"
    )
    print(f"  a byte sent and one received {costs.byte * 1e9:.2f} ns of one rank's processor")
    print(f"  an agent {costs.agent * 1e3:.2f} ms of the launcher, a worker {costs.worker * 1e3:.2f} ms of the server")
    print("assumed:")
    print(f"  {given.slots} GPUs per host; latency {given.latency * 1e6:.0f} us; jitter {given.jitter:.0%}")
    print(f"  memory {given.memory / 1e9:.0f} GB/s; {PAYLOAD:.0%} of the bandwidth is payload; buckets of 25 MB")
    for name, network in NETWORKS.items():
        megabytes = network.parameters * 4 / 1e6
        print(f"  {name}: {megabytes:.0f} MB, {network.images:.0f} images/s on one GPU with batches of {BATCH}")
    print("predicted: images/s (efficiency)")
    for name, by_gbit in found.items():
        for gbit, cells in by_gbit.items():
            line = "   ".join(
                f"{ranks}: {cell['images_per_s']:,.0f} ({cell['efficiency']:.0%})" for ranks, cell in cells.items()
            )
            print(f"  {name:12s} {gbit:4d} Gbit/s   {line}")
        if NETWORKS[name].published is not None:
            print(f"  {name:12s}   25 Gbit/s   512: {NETWORKS[name].published:.0%} (published, of Horovod)")
    times = start(Cluster(1024, given.slots, 1.0), costs)
    listed = ", ".join(f"{who} {seconds:.1f} s" for who, seconds in times.items())
    print(f"predicted, processor time of a start of 1,024 ranks: {listed}")


# Against reality.

CASES: dict[str, tuple[tuple[float, float], ...]] = {
    "wire": ((0.05, 2 << 20), (0.10, 2 << 20)),
    "latency": ((0.02, 4096), (0.03, 4096), (0.04, 4096)),
}
"""By what limits them: for each bucket, when it is ready (seconds after the step's beginning), and its bytes."""

WORKER = """
import json, os, statistics, sys, time
import numpy as np
import hvdgloo.numpy as hvd

cases, rounds, path = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init()
results = {}
for name, buckets in cases.items():
    tensors = [np.ones(int(nbytes) // 4, np.float32) for _, nbytes in buckets]
    took = []
    for turn in range(rounds + 2):
        hvd.barrier()
        begin, handles = time.perf_counter(), []
        for index, (when, _) in enumerate(buckets):
            time.sleep(max(0.0, begin + when - time.perf_counter()))
            handles.append(hvd.allreduce_async(tensors[index], name=f"{name}.{index}"))
        for handle in handles:
            hvd.synchronize(handle)
        took.append(time.perf_counter() - begin)
    slowest = [max(times) for times in zip(*hvd.allgather_object(took[2:]))]
    results[name] = statistics.median(slowest)
if hvd.rank() == 0:
    with open(path, "w") as file:
        json.dump(results, file)
hvd.barrier()
"""


def validate(costs: Costs, layouts: Sequence[str], rates: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a step, for each layout, rate and case."""
    from tests.support.hosts import Bed, available

    if missing := available():
        raise SystemExit(f"there can be no hosts here: {missing}")
    cores = len(os.sched_getaffinity(0))
    found = []
    for layout in layouts:
        hosts, slots = (int(number) for number in layout.split("x"))
        with tempfile.TemporaryDirectory() as folder, Bed([f"h{number}" for number in range(1, hosts + 1)]) as bed:
            script, result = Path(folder, "worker.py"), Path(folder, "result.json")
            script.write_text(WORKER)
            where = ",".join(f"{name}:{slots}" for name in bed.names)
            for rate in rates:
                for name in bed.names:
                    shape = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb"]
                    bed[name].run([*shape, "latency", "100ms"], check=True)
                arguments = [str(script), json.dumps(CASES), str(rounds), str(result)]
                command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, sys.executable, *arguments]
                done = bed["h1"].run(command, env={"OMP_NUM_THREADS": "1"}, timeout=120)
                if done.returncode != 0:
                    raise SystemExit(f"{where}: {done.stderr}")
                measured = json.loads(result.read_text())
                cluster = Cluster(hosts * slots, slots, bits(rate) / 8 * 0.956, 50e-6, 0.0, share=hosts * slots / cores)
                for case, buckets in CASES.items():
                    predicted = max(buckets[-1][0], queue(buckets, cluster, costs))
                    error = predicted / measured[case] - 1
                    row = {"layout": layout, "rate": rate, "case": case, "error": error}
                    found.append({**row, "predicted_s": predicted, "measured_s": measured[case]})
                    print(
                        f"{layout:5s} {rate:9s} {case:8s} predicted {predicted * 1e3:7.1f} ms, "
                        f"measured {measured[case] * 1e3:7.1f} ms: {error:+.0%}",
                        flush=True,
                    )
    return found


def bits(rate: str) -> float:
    """Bits a second, of a rate as ``tc`` spells it."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate such as 100mbit or 2.5gbit, not {rate!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=4, help="GPUs of each host (default 4)")
    parser.add_argument("--latency", type=float, default=30e-6, help="seconds of a message between hosts")
    parser.add_argument("--jitter", type=float, default=0.02, help="deviation of a rank's computation, as a share")
    parser.add_argument("--memory", type=float, default=8e9, help="bytes a second that a host's ranks reduce")
    parser.add_argument("--validate", action="store_true", help="compare with hosts on this machine")
    parser.add_argument("--layouts", default="2x1,4x1,8x1,8x2", help="for --validate: hosts x ranks")
    parser.add_argument("--rates", default="100mbit,1gbit,2.5gbit", help="for --validate: of each host's link")
    parser.add_argument("--rounds", type=int, default=5, help="for --validate: steps of each case")
    parser.add_argument("--measured", metavar="FILE", help="take the pieces from an earlier run's --json")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    costs = Costs(**json.loads(Path(given.measured).read_text())["measured"]) if given.measured else measure()
    results: dict[str, Any] = {"measured": asdict(costs)}
    if given.validate:
        rows = validate(costs, given.layouts.split(","), given.rates.split(","), given.rounds)
        results["validated"] = rows
        for case in CASES:
            errors = sorted(abs(row["error"]) for row in rows if row["case"] == case)
            print(f"{case}: error {statistics.median(errors):.0%} (median), {errors[-1]:.0%} at the most")
    else:
        found = predictions(costs, given)
        show(costs, given, found)
        results["assumed"] = {
            **{key: getattr(given, key) for key in ("slots", "latency", "jitter", "memory")},
            "payload": PAYLOAD,
            "bucket": BUCKET,
            "batch": BATCH,
            "networks": {name: asdict(replace(network, published=None)) for name, network in NETWORKS.items()},
        }
        results["predicted"] = found
        results["published"] = {name: network.published for name, network in NETWORKS.items() if network.published}
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
