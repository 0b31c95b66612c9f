"""The choices of ``--autotune``: against the settings of the start, and against the best of a full grid.

    python benchmarks/tune.py train [--np 2] [--seconds 40] [--only mlp,conv,transformer]
    python benchmarks/tune.py choose [--layout 2x2] [--rate 1gbit] --choice FILE
    python benchmarks/tune.py grid [--layout 2x2] [--rate 1gbit] --choice FILE [--seconds 40]
    python benchmarks/tune.py command [--layout 2x2] [--rate 1gbit]

``train``: each network of benchmarks/train.py is trained with autotune until it has chosen. From then on, short blocks
of steps alternate between the choice and the settings of the start, in the same job and for some seconds; the median of
the pairs' ratios is printed, and what the steps of the search cost on average. Where the start is kept, both are the
same, and the ratio shows what the measurement is worth.

``choose`` and ``grid``: hosts are network namespaces of this machine (the tests' bed; Linux, root) with links that
``tc tbf`` limits. A program without a framework sends the gradients of a small network one by one. ``choose`` has
autotune choose, and writes that into a file. ``grid`` measures every combination of fusion threshold, hierarchical
threshold and cycle time once, and the five best again, in turns, for half of the seconds; the best of these is compared
with the choice in pairs of its own, since the best of several noisy times is partly luck.

``command``: how long ``hvdgloo-run tune`` takes on such hosts, with its output.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pairs import described

from hvdgloo._engine.settings import Choice

STEPS = 3
AUTOTUNE = {"HVDGLOO_AUTOTUNE": "1"}
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

    def alternate(self, choices: Sequence[Choice], seconds: float) -> list[list[float]]:
        """For so many seconds, the median seconds of a step with each of several choices, in turns; by turn."""
        turns: list[list[float]] = []
        end = time.monotonic() + seconds
        while self._hvd.broadcast_object(time.monotonic() < end, name="more"):
            order = range(len(choices)) if len(turns) % 2 else range(len(choices) - 1, -1, -1)
            found = {number: self.sample(choices[number]) for number in order}
            turns.append([found[number] for number in range(len(choices))])
        return turns


def trained(name: str, seconds: float) -> dict[str, Any]:
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
    pairs = bench.alternate([choice, start], seconds)
    hvd.shutdown()
    return {"choice": choice.as_flags(start), "pairs": pairs, "searching": searching}


def gridded(choice: Sequence[Any] | None, seconds: float) -> dict[str, Any]:
    """One rank's figures: what is chosen, or for a choice the full grid's."""
    import numpy as np

    import hvdgloo.numpy as hvd

    hvd.init()
    arrays = [np.zeros(size // 4, np.float32) for size in SIZES]

    def step() -> None:
        handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"g{i}") for i, array in enumerate(arrays)]
        for handle in handles:
            hvd.synchronize(handle)

    bench = Alternation(hvd, step)
    start = bench.engine.start_settings
    if choice is None:
        chosen, searching = bench.choose()
        result = {"choice": astuple(chosen), "start": astuple(start), "steps": len(searching)}
    else:
        grid = [
            Choice(fused, cycle, hierarchical if start.hierarchical_threshold else 0, start.inline_threshold)
            for fused, hierarchical, cycle in itertools.product(
                FUSION, HIERARCHICAL if start.hierarchical_threshold else [0], CYCLES
            )
        ]
        once = hvd.broadcast_object([bench.sample(each, 2) for each in grid], name="grid")
        finalists = [grid[place] for place in sorted(range(len(grid)), key=lambda place: once[place])[:5]]
        turns = hvd.broadcast_object(bench.alternate(finalists, seconds / 2), name="final")
        times = [statistics.median(turn) for turn in zip(*turns, strict=True)]
        best = finalists[times.index(min(times))]
        pairs = bench.alternate([Choice(*choice), best, start], seconds / 2)
        result = {"choice": choice, "best": astuple(best), "grid": len(grid), "pairs": pairs}
    first = hvd.rank() == 0
    hvd.shutdown()
    return result if first else {}


def train(np: int, seconds: float, chosen: Sequence[str]) -> None:
    import hvdgloo.run

    for name in chosen:
        ranks = hvdgloo.run.run(trained, args=(name, seconds), np=np, env=AUTOTUNE)
        pairs = [
            [max(times) for times in zip(*turns, strict=True)]
            for turns in zip(*(rank["pairs"] for rank in ranks), strict=True)
        ]
        own, start = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        steps = ranks[0]["searching"]
        print(
            f"{name}: {ranks[0]['choice'] or 'settings of the start'}: {own:.1f} ms, start {start:.1f} ms; ratio "
            f"{described([chosen / before for chosen, before in pairs])}; {len(steps)} steps of the search took "
            f"{statistics.fmean(steps) * 1e3:.1f} ms each, half of them at most {statistics.median(steps) * 1e3:.1f}",
            flush=True,
        )


@contextmanager
def bed_with(layout: str, rate: str) -> Iterator[tuple[Any, str]]:
    """The first host of the bed, and the text for ``-H``."""
    from tests.support.hosts import Bed

    hosts, ranks = (int(number) for number in layout.split("x"))
    names = [f"h{number}" for number in range(1, hosts + 1)]
    with Bed(names) as bed:
        if rate != "none":
            for name in names:
                shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb"]
                bed[name].run([*shape, "latency", "100ms"], check=True)
        yield bed["h1"], ",".join(f"{name}:{ranks}" for name in names)


def on_hosts(layout: str, rate: str, arguments: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    """Rank 0's figures of a job on hosts of the bed."""
    with tempfile.TemporaryDirectory() as folder, bed_with(layout, rate) as (host, where):
        result = Path(folder) / "grid.json"
        command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, sys.executable, __file__, "worker"]
        command += [*arguments, "--result", str(result)]
        done = host.run(command, env={"OMP_NUM_THREADS": "1", **env}, timeout=400)
        if done.returncode != 0:
            raise SystemExit(done.stderr)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def command(layout: str, rate: str) -> None:
    with bed_with(layout, rate) as (host, where):
        begun = time.monotonic()
        done = host.run([sys.executable, "-m", "hvdgloo.runner", "tune", "-H", where], timeout=300)
        print(f"{done.stdout}{done.stderr}{layout} at {rate}: all of it took {time.monotonic() - begun:.1f} s")


def choose(layout: str, rate: str, path: Path) -> None:
    found = on_hosts(layout, rate, [], AUTOTUNE)
    path.write_text(json.dumps(found))
    print(f"{layout} at {rate}: {found['choice']} instead of {found['start']} after {found['steps']} steps")


def grid(layout: str, rate: str, path: Path, seconds: float) -> None:
    chosen = json.loads(path.read_text())
    found = on_hosts(layout, rate, ["--choice", str(path.resolve()), "--seconds", str(seconds)], {})
    choice, best, start = zip(*found["pairs"], strict=True)
    print(
        f"{layout} at {rate}: {sum(SIZES) / 2**20:.1f} MiB in {len(SIZES)} tensors; the choice {found['choice']} takes "
        f"{statistics.median(choice) * 1e3:.1f} ms (after {chosen['steps']} steps), the start "
        f"{statistics.median(start) * 1e3:.1f} ms, the best of {found['grid']} {found['best']} "
        f"{statistics.median(best) * 1e3:.1f} ms"
    )
    for name, others in (("best", best), ("start", start)):
        ratios = [own / other for own, other in zip(choice, others, strict=True)]
        print(f"  the choice's time, of the {name}'s: {described(ratios)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "choose", "grid", "command", "worker"])
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--seconds", type=float, default=40.0, help="in which settings alternate (default: 40)")
    parser.add_argument("--only", default="mlp,conv,transformer")
    parser.add_argument("--layout", default="2x2", help="hosts x ranks on each (default: 2x2)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc spells it, or none")
    parser.add_argument("--choice", type=Path, help="the file that choose writes and grid reads")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.what in ("choose", "grid") and given.choice is None:
        parser.error(f"{given.what} needs --choice FILE")
    if given.what == "train":
        train(given.np, given.seconds, given.only.split(","))
    elif given.what == "choose":
        choose(given.layout, given.rate, given.choice)
    elif given.what == "grid":
        grid(given.layout, given.rate, given.choice, given.seconds)
    elif given.what == "command":
        command(given.layout, given.rate)
    else:
        choice = None if given.choice is None else json.loads(given.choice.read_text())["choice"]
        figures = gridded(choice, given.seconds)
        if figures:
            given.result.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
