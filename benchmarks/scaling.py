"""Scaling: a training step of a thousand ranks, put together from pieces that are measured here.

    python benchmarks/scaling.py [--slots 4] [--jitter 0.02] [--latency 3e-5] [--memory 8e9]
        [--measured FILE] [--json FILE]
    python benchmarks/scaling.py --validate [--layouts 2x1,4x1,4x2,8x1,8x2] [--rates 100mbit,1gbit,2.5gbit]
        [--runs 1] [--measured FILE] [--json FILE]

``scaling_model.py`` beside this file says how a step is put together. **Measured** on this machine are the pieces
(``scaling_pieces.py``): what an agreement costs per message that a node handles, over real sockets between processes;
what a step of Gloo's ring, an exchange of halving and doubling and a step within a host cost, and each byte; what each
byte costs to encode and to decode for ``--wire``; what starting costs the launcher per host and the rendezvous server
per worker. **Assumed**, and to be replaced by figures of one's own: the networks' speed on one GPU, when their
gradients become ready, the fabric's latency and the share of its bandwidth that is payload, the speed of memory, and
how much the slowest of many ranks deviates. Everything else is **predicted**.

Beside the predictions stands what has been **published** of Horovod: 90 % for Inception V3 and ResNet-101 and 68 % for
VGG-16 on 512 GPUs (128 servers with 4 P100 each, 25 Gbit/s, RoCE; Sergeev and Del Balso, 2018).

``--validate`` compares the model with reality as far as one machine can: hosts are network namespaces (the tests' bed;
Linux, root), their links are limited by ``tc tbf``, and the computation is a sleep, which needs no GPU. The pieces are
measured between such hosts, whose links are not limited then, in jobs of their own: none of them comes from a step.
All hosts share this machine's processors, so the model is told how many there are. It is to be told nothing else that
a cluster would not be told, but that ``tbf`` lets a burst pass after a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import scaling_pieces
from scaling_model import (
    BATCH,
    BUCKET,
    NETWORKS,
    Cluster,
    Costs,
    efficiency,
    queue,
    start,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' bed

PAYLOAD = 0.94
RANKS = (1, 8, 32, 128, 512, 1024)
GBITS = (1, 10, 25, 100)
WIRES = ("full", "bf16", "int8", "int4")
SLOW_NETWORKS, SLOW_GBITS, SLOW_HOSTS = ("ResNet-50", "VGG-16"), (1, 10), (4, 8, 16, 32, 64)


def measure() -> Costs:
    """All pieces, on this machine, in half a minute."""
    costs, _, _ = scaling_pieces.measure(scaling_pieces.Here(), scaling_pieces.ALONE)
    return replace(costs, agent=_launcher(64), worker=_server(128), codec=scaling_pieces.codec())


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


def by_wire(costs: Costs, given: argparse.Namespace) -> dict[str, Any]:
    """Return what is predicted for slow networks: efficiencies by network, bandwidth, value of ``--wire`` and number
    of hosts."""

    def share(name: str, gbit: float, wire: str, hosts: int) -> float:
        rate = PAYLOAD * gbit * 1e9 / 8
        cluster = Cluster(hosts * given.slots, given.slots, rate, given.latency, given.jitter, given.memory, form=wire)
        return round(efficiency(NETWORKS[name], cluster, costs), 4)

    return {
        name: {
            gbit: {wire: {hosts: share(name, gbit, wire, hosts) for hosts in SLOW_HOSTS} for wire in WIRES}
            for gbit in SLOW_GBITS
        }
        for name in SLOW_NETWORKS
    }


def show_measured(costs: Costs) -> None:
    print("measured here, of a rank's processor time unless it says otherwise:")
    print(
        f"  an agreement of two ranks {costs.agreement * 1e6:.0f} us elapsed, {costs.member * 1e6:.0f} us of each "
        f"one's processor, each further rank {costs.message * 1e6:.1f} us of rank 0's"
    )
    print(
        f"  a ring's step {costs.ring * 1e6:.0f} us, an exchange {costs.exchange * 1e6:.0f} us, another host told at "
        f"once {costs.peer * 1e6:.0f} us, a step within a host {costs.meeting * 1e6:.0f} us"
    )
    print(
        f"  a byte sent and one received {costs.ring_byte * 1e9:.2f} ns in a ring, {costs.byte * 1e9:.2f} ns in an "
        "exchange"
    )
    for wire, (encode, decode) in costs.codec.items():
        print(f"  {wire}: a byte of float32 encoded {encode * 1e9:.2f} ns, decoded {decode * 1e9:.2f} ns")


def show(costs: Costs, given: argparse.Namespace, found: dict[str, Any], wires: dict[str, Any]) -> None:
    show_measured(costs)
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
    if wires:
        print(f"predicted: efficiency with --wire, on hosts with {given.slots} GPUs")
    for name, by_gbit in wires.items():
        for gbit, forms in by_gbit.items():
            for wire, cells in forms.items():
                line = "   ".join(f"{hosts} hosts: {share:.0%}" for hosts, share in cells.items())
                print(f"  {name:12s} {gbit:4d} Gbit/s   {wire:4s}   {line}")
    times = start(Cluster(1024, given.slots, 1.0), costs)
    listed = ", ".join(f"{who} {seconds:.1f} s" for who, seconds in times.items())
    print(f"predicted, processor time of a start of 1,024 ranks: {listed}")


# Against reality.

CASES: dict[str, tuple[tuple[float, float], ...]] = {
    "wire": ((0.05, 2 << 20), (0.10, 2 << 20)),
    "latency": ((0.02, 4096), (0.03, 4096), (0.04, 4096)),
}
"""By what limits them: for each bucket, when it is ready (seconds after the step's beginning), and its bytes."""

BURST, IN_FRAMES = 256 * 1024, 0.956
"""Bytes that ``tbf`` lets pass at once, and the share of what it counts that is TCP's payload, in frames of 1,514."""

WORKER = """
import json, statistics, subprocess, sys, time
import numpy as np
import hvdgloo.numpy as hvd

cases, rates, limit, rounds, runs, path = json.loads(sys.argv[1])
hvd.init()
results = []
for run in range(runs):
    for rate in rates:
        hvd.barrier()
        if hvd.local_rank() == 0:
            subprocess.run([*limit, rate], check=True)
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
            results.append((rate, name, statistics.median(slowest)))
if hvd.rank() == 0:
    with open(path, "w") as file:
        json.dump(results, file)
hvd.barrier()
"""
LIMIT = f"tc qdisc replace dev eth0 root tbf burst {BURST} latency 100ms rate".split()


class Hosts:
    """A bed of hosts, as a place to run jobs."""

    def __init__(self, bed: Any) -> None:
        self._bed = bed

    def run(self, argv: Sequence[str], hosts: int, slots: int) -> None:
        where = ",".join(f"h{number}:{slots}" for number in range(1, hosts + 1))
        command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, *argv]
        done = self._bed["h1"].run(command, env={"OMP_NUM_THREADS": "1"}, timeout=120)
        if done.returncode != 0:
            raise SystemExit(f"{where}: {done.stderr}")


@contextmanager
def hosts_here(number: int) -> Iterator[Hosts]:
    """So many hosts, which are namespaces of this machine."""
    from tests.support.hosts import Bed

    with Bed([f"h{host}" for host in range(1, number + 1)]) as bed:
        yield Hosts(bed)


@dataclass(frozen=True)
class Bench:
    """The replacement of a fabric between hosts on this machine.

    Attributes:
        latency: seconds of a message between two of them, beyond the processors' time; measured.
        memory: bytes a second that a host with two ranks reduces or copies; measured.
        processors: of this machine.
    """

    latency: float
    memory: float
    processors: int


def validate(
    costs: Costs, bench: Bench, layouts: Sequence[str], rates: Sequence[str], rounds: int, runs: int
) -> list[dict[str, Any]]:
    """Predicted and measured seconds of a step, for each layout, rate and case."""
    found = []
    for layout in layouts:
        hosts, slots = (int(number) for number in layout.split("x"))
        with tempfile.TemporaryDirectory() as folder, hosts_here(hosts) as bed:
            script, result = Path(folder, "worker.py"), Path(folder, "result.json")
            script.write_text(WORKER)
            told = json.dumps([CASES, rates, LIMIT, rounds, runs, str(result)])
            bed.run([sys.executable, str(script), told], hosts, slots)
            measured = json.loads(result.read_text())
        for rate in rates:
            cluster = Cluster(
                ranks=hosts * slots,
                slots=slots,
                rate=bits(rate) / 8 * IN_FRAMES,
                latency=bench.latency,
                jitter=0.0,
                memory=bench.memory,
                processors=bench.processors,
                burst=BURST * IN_FRAMES,
            )
            for case, buckets in CASES.items():
                predicted = max(buckets[-1][0], queue(buckets, cluster, costs))
                took = [seconds for one, name, seconds in measured if (one, name) == (rate, case)]
                errors = [predicted / seconds - 1 for seconds in took]
                row = {"layout": layout, "rate": rate, "case": case, "errors": errors}
                found.append({**row, "predicted_s": predicted, "measured_s": took})
                print(
                    f"{layout:5s} {rate:9s} {case:8s} predicted {predicted * 1e3:7.1f} ms, measured "
                    f"{min(took) * 1e3:7.1f} to {max(took) * 1e3:7.1f} ms: {min(errors):+.0%} to {max(errors):+.0%}",
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
    parser.add_argument("--layouts", default="2x1,4x1,4x2,8x1,8x2", help="for --validate: hosts x ranks; or none")
    parser.add_argument("--rates", default="100mbit,1gbit,2.5gbit", help="for --validate: of each host's link")
    parser.add_argument("--rounds", type=int, default=5, help="for --validate: steps of each case")
    parser.add_argument("--runs", type=int, default=1, help="for --validate: by turns, each a median of such steps")
    parser.add_argument("--measured", metavar="FILE", help="take the pieces from an earlier run's --json")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    results = compare(given) if given.validate else predict(given)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


def earlier(given: argparse.Namespace, key: str) -> dict[str, Any] | None:
    """The pieces of the run that ``--measured`` names, or None.

    Raises:
        SystemExit: it has measured others.
    """
    if not given.measured:
        return None
    found = json.loads(Path(given.measured).read_text())
    if key not in found:
        raise SystemExit(f"{given.measured} has no {key!r}: its pieces were measured elsewhere")
    return dict(found[key])


def predict(given: argparse.Namespace) -> dict[str, Any]:
    known = earlier(given, "measured")
    costs = Costs(**known) if known else measure()
    found = predictions(costs, given)
    wires = by_wire(costs, given) if costs.codec else {}
    show(costs, given, found, wires)
    return {
        "measured": asdict(costs),
        "assumed": {
            **{key: getattr(given, key) for key in ("slots", "latency", "jitter", "memory")},
            "payload": PAYLOAD,
            "bucket": BUCKET,
            "batch": BATCH,
            "networks": {name: asdict(replace(network, published=None)) for name, network in NETWORKS.items()},
        },
        "predicted": found,
        "predicted by wire": wires,
        "published": {name: network.published for name, network in NETWORKS.items() if network.published},
    }


def compare(given: argparse.Namespace) -> dict[str, Any]:
    from tests.support.hosts import available

    if missing := available():
        raise SystemExit(f"there can be no hosts here: {missing}")
    known = earlier(given, "measured between hosts")
    if known:
        costs, bench = Costs(**known["costs"]), Bench(**known["bench"])
    else:
        crowd = scaling_pieces.CROWDED
        with hosts_here(crowd.hosts) as bed:
            costs, latency, memory = scaling_pieces.measure(bed, crowd)
        bench = Bench(latency, memory, len(os.sched_getaffinity(0)))
    show_measured(costs)
    print(f"  a message between two hosts {bench.latency * 1e6:.0f} us beyond that, elapsed")
    print(f"  a host's two ranks reduce or copy {bench.memory / 1e9:.1f} GB/s; {bench.processors} processors in all")
    print(f"assumed: {IN_FRAMES:.1%} of a link's bytes are payload, and {BURST >> 10} KiB pass at once after a pause")
    layouts = [] if given.layouts == "none" else given.layouts.split(",")
    rows = validate(costs, bench, layouts, given.rates.split(","), given.rounds, given.runs)
    for case in CASES:
        if errors := sorted(abs(error) for row in rows if row["case"] == case for error in row["errors"]):
            print(f"{case}: error {statistics.median(errors):.0%} (median), {errors[-1]:.0%} at the most")
    return {"measured between hosts": {"costs": asdict(costs), "bench": asdict(bench)}, "validated": rows}


if __name__ == "__main__":
    main()
