"""What ``--autotune`` chooses: against the settings of the start, and against the best of a full grid.

    python benchmarks/tune.py train [--np 2] [--rounds 10] [--only mlp,conv,transformer]
    python benchmarks/tune.py grid [--layout 2x2] [--rate 1gbit] [--rounds 8]

``train``: each network of benchmarks/train.py is trained with autotune until it has chosen. From then on, samples of
five steps alternate between the choice and the settings of the start, in the same job; the ratio of their medians is
printed, and what the steps of the search cost on average.

``grid``: hosts are network namespaces of this machine (the tests' bed; Linux, root) with links that ``tc tbf`` limits.
A program without a framework sends the gradients of a small network one by one. When autotune has chosen, every
combination of fusion threshold, hierarchical threshold and cycle time is measured in the same job; then the five best
and the choice alternate. The choice's median is compared with the best of these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvdgloo._engine.settings import Choice

STEPS = 5
AUTOTUNE = {
    "HVDGLOO_AUTOTUNE_LOG": "/tmp/tune_grid.csv",
    "HVDGLOO_AUTOTUNE": "1",
    "HVDGLOO_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HVDGLOO_AUTOTUNE_STEPS_PER_SAMPLE": "5",
}
SIZES = [4 * count for layer in range(20) for count in (192 * 192, 192, 768 * 192 // (1 + layer % 3), 768)]
FUSION = [mib << 20 for mib in (1, 4, 16, 32, 64)]
HIERARCHICAL = [kib << 10 for kib in (32, 128, 512, 8192)]
CYCLES = [0.0, 0.001]


class Alternation:
    """One rank's steps with settings that rank 0 chooses."""

    def __init__(self, hvd: Any, step: Callable[[], None]) -> None:
        from hvdgloo._job import process

        self._hvd, self._step = hvd, step
        self.engine = process.current().engine

    def choose(self) -> tuple[Choice, list[float]]:
        """Step until autotune has chosen; returns its choice (on all ranks) and the seconds of each step."""
        seconds = []
        while True:
            for _ in range(10):
                begin = time.perf_counter()
                self._step()
                seconds.append(time.perf_counter() - begin)
            coordinator = self.engine._coordinator
            done = coordinator is not None and coordinator._tuner is None
            if self._hvd.broadcast_object(done, name="done"):
                break
        choice = self.engine.settings_in_use
        return self._hvd.broadcast_object(choice, name="choice"), seconds

    def sample(self, choice: Choice, steps: int = STEPS) -> float:
        """The median seconds of some steps with a choice."""
        if self._hvd.rank() == 0:
            self.engine.tune(choice)
        self._hvd.barrier()
        self._step()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def alternate(self, choices: Sequence[Choice], rounds: int) -> list[float]:
        """The median seconds of each of several choices, in turns."""
        found: list[list[float]] = [[] for _ in choices]
        for turn in range(rounds):
            for number in range(len(choices)):
                place = (number + turn) % len(choices)
                found[place].append(self.sample(choices[place]))
        return [statistics.median(times) for times in found]


def trained(name: str, rounds: int) -> dict[str, Any]:
    """One rank's figures for a network."""
    import torch
    from torch import nn
    from train import networks  # benchmarks/train.py

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    network, inputs, targets = networks()[name]()
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()

    bench = Alternation(hvd, step)
    choice, searching = bench.choose()
    start = bench.engine.start_settings
    chosen, before = bench.alternate([choice, start], rounds)
    figures = {"choice": choice.as_flags(start), "chosen": chosen, "start": before}
    hvd.shutdown()
    return {**figures, "searching": statistics.fmean(searching), "steps": len(searching)}


def gridded(rounds: int) -> dict[str, Any]:
    """One rank's figures for the full grid."""
    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    arrays = [np.zeros(size // 4, np.float32) for size in SIZES]

    def step() -> None:
        handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"g{i}") for i, array in enumerate(arrays)]
        for handle in handles:
            hvd.synchronize(handle)

    bench = Alternation(hvd, step)
    choice, searching = bench.choose()
    start = bench.engine.start_settings
    grid = [
        Choice(fused, cycle, hierarchical if start.hierarchical_threshold else 0, start.inline_threshold)
        for fused, hierarchical, cycle in itertools.product(
            FUSION, HIERARCHICAL if start.hierarchical_threshold else [0], CYCLES
        )
    ]
    once = hvd.broadcast_object([bench.sample(each, 2) for each in grid], name="grid")
    best = [grid[place] for place in sorted(range(len(grid)), key=lambda place: once[place])[:5]]
    finalists = list(dict.fromkeys([choice, start, *best]))
    times = hvd.broadcast_object(bench.alternate(finalists, rounds), name="final")
    result = {
        "steps": len(searching), "choice": astuple(choice), "start": astuple(start), "grid": len(grid),
        "final": [(astuple(each), seconds) for each, seconds in zip(finalists, times, strict=True)],
    }  # fmt: skip
    first = hvd.rank() == 0
    hvd.shutdown()
    return result if first else {}


def train(np: int, rounds: int, chosen: Sequence[str]) -> None:
    import hvdgloo.run

    for name in chosen:
        ranks = hvdgloo.run.run(trained, args=(name, rounds), np=np, env=AUTOTUNE)
        figures = {key: max(rank[key] for rank in ranks) for key in ("chosen", "start", "searching", "steps")}
        print(
            f"{name}: {ranks[0]['choice'] or 'settings of the start'}: {figures['chosen'] * 1e3:.1f} ms, start "
            f"{figures['start'] * 1e3:.1f} ms, {figures['chosen'] / figures['start']:.3f} of its time; "
            f"{figures['steps']} steps of the search took {figures['searching'] * 1e3:.1f} ms each",
            flush=True,
        )


def grid(layout: str, rate: str, rounds: int) -> None:
    from tests.support.hosts import Bed

    hosts, ranks = (int(number) for number in layout.split("x"))
    names = [f"h{number}" for number in range(1, hosts + 1)]
    with tempfile.TemporaryDirectory() as folder, Bed(names) as bed:
        result = Path(folder) / "grid.json"
        if rate != "none":
            for name in names:
                shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb"]
                bed[name].run([*shape, "latency", "100ms"], check=True)
        where = ",".join(f"{name}:{ranks}" for name in names)
        command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, sys.executable, __file__, "worker"]
        command += ["--rounds", str(rounds), "--result", str(result)]
        done = bed["h1"].run(command, env={"OMP_NUM_THREADS": "1", **AUTOTUNE}, timeout=600)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        found = json.loads(result.read_text())
    times = {tuple(choice): seconds for choice, seconds in found["final"]}
    best = min(times.values())
    own, start = times[tuple(found["choice"])], times[tuple(found["start"])]
    print(
        f"{layout} at {rate}: {sum(SIZES) / 2**20:.1f} MiB in {len(SIZES)} tensors; the choice {found['choice']} takes "
        f"{own * 1e3:.1f} ms, the start {start * 1e3:.1f} ms, the best of {found['grid']} {best * 1e3:.1f} ms: "
        f"{own / best:.3f} of the best's time after {found['steps']} steps"
    )
    for choice, seconds in sorted(times.items(), key=lambda item: item[1]):
        print(f"  {choice}: {seconds * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "grid", "worker"])
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="mlp,conv,transformer")
    parser.add_argument("--layout", default="2x2", help="hosts x ranks on each (default: 2x2)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc spells it, or none")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what == "train":
        train(given.np, given.rounds, given.only.split(","))
    elif given.what == "grid":
        grid(given.layout, given.rate, given.rounds)
    else:
        figures = gridded(given.rounds)
        if figures and given.result:
            path = Path(given.result)
            path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
