"""torch.distributed over hvdgloo and over torch's gloo, by turns in the same processes.

    python benchmarks/torch_distributed.py [--np 2] [--rounds 21] [--only small,large,training] [--json FILE]

Starts its own processes on this host, with one thread each. In each round every case is measured once for each backend,
in an order that changes from round to round. A time is the slowest rank's; small operations are repeated within a
measurement. Printed are the least and the median of the rounds, and their ratios: below 1 hvdgloo is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "hvdgloo")
Step = Callable[[], object]


class Measuring:
    """One rank's measurements.

    Args:
        rounds: how often each case is measured.
    """

    def __init__(self, rounds: int) -> None:
        import torch.distributed as dist

        self._dist, self._rounds = dist, rounds
        self.rank = dist.get_rank()
        self.found: dict[str, dict[str, list[float]]] = {}

    def measure(self, name: str, case: Callable[[Any], Step], groups: dict[str, Any], repeats: int = 1) -> None:
        """Measure a case with each backend.

        Args:
            case: makes of a group what is measured.
            repeats: calls within one measurement.
        """
        import torch

        steps = {backend: case(group) for backend, group in groups.items()}
        for step in steps.values():
            for _ in range(3):
                step()
        times: dict[str, list[float]] = {backend: [] for backend in steps}
        order = list(steps)
        for number in range(self._rounds):
            for backend in order[number % len(order) :] + order[: number % len(order)]:
                step = steps[backend]
                self._dist.barrier()
                step()  # all ranks are here now
                began = time.perf_counter()
                for _ in range(repeats):
                    step()
                taken = torch.tensor([(time.perf_counter() - began) / repeats], dtype=torch.float64, device="cpu")
                self._dist.all_reduce(taken, self._dist.ReduceOp.MAX)
                times[backend].append(1e3 * taken.item())
        self.found[name] = times
        if self.rank == 0:
            ours, theirs = times["hvdgloo"], times["gloo"]
            least, median = min(ours) / min(theirs), statistics.median(ours) / statistics.median(theirs)
            times_of = f"least {min(ours):9.4f} ms ({least:.2f} of gloo's)"
            print(f"{name:38} {times_of}   median {statistics.median(ours):9.4f} ms ({median:.2f})", flush=True)


def small(measuring: Measuring, groups: dict[str, Any]) -> None:
    """Measure operations of up to 64 KiB, which take as long as their messages."""
    import torch
    import torch.distributed as dist

    def reducing(tensor: torch.Tensor, *, asynchronous: bool) -> Callable[[Any], Step]:
        def of(group: Any) -> Step:
            def step() -> None:
                # Sums would grow.
                work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=asynchronous)
                if work is not None:
                    work.wait()

            return step

        return of

    for nbytes, shown in ((4, "4 B"), (1 << 10, "1 KiB"), (1 << 14, "16 KiB"), (1 << 16, "64 KiB")):
        tensor = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
        measuring.measure(f"all_reduce {shown}", reducing(tensor, asynchronous=False), groups, 50)
        if nbytes in (4, 1 << 16):
            measuring.measure(f"all_reduce {shown}, asynchronous", reducing(tensor, asynchronous=True), groups, 20)
    measuring.measure("barrier", lambda g: lambda: dist.barrier(group=g), groups, 50)
    other = 1 - measuring.rank
    tensor = torch.ones(16, dtype=torch.float32, device="cpu")

    def there_and_back(group: Any) -> Step:
        def step() -> None:
            if measuring.rank == 0:
                dist.send(tensor, other, group=group)
                dist.recv(tensor, other, group=group)
            elif measuring.rank == 1:
                dist.recv(tensor, other, group=group)
                dist.send(tensor, other, group=group)

        return step

    measuring.measure("send and recv of 64 B, there and back", there_and_back, groups, 20)


def large(measuring: Measuring, groups: dict[str, Any]) -> None:
    """Measure operations of 1 MiB and more, which take as long as their bytes."""
    import torch
    import torch.distributed as dist

    def reducing(tensor: torch.Tensor) -> Callable[[Any], Step]:
        return lambda group: lambda: dist.all_reduce(tensor.fill_(1), group=group)

    for nbytes, shown, repeats in ((1 << 20, "1 MiB", 5), (1 << 24, "16 MiB", 1), (1 << 26, "64 MiB", 1)):
        tensor = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
        measuring.measure(f"all_reduce {shown}", reducing(tensor), groups, repeats)
    tensor = torch.ones(25_000_000, dtype=torch.float32, device="cpu")
    measuring.measure("broadcast 100 MB", lambda g: lambda: dist.broadcast(tensor, 0, group=g), groups)
    size = dist.get_world_size()
    part = torch.ones(5_000_000 // size, dtype=torch.float32, device="cpu")
    whole = part.repeat(size)

    def there_and_back(group: Any) -> Step:
        def step() -> None:
            whole.fill_(1)
            dist.reduce_scatter_tensor(part, whole, group=group)
            dist.all_gather_into_tensor(whole, part, group=group)

        return step

    measuring.measure("reduce_scatter, all_gather of 20 MB", there_and_back, groups)


def training(measuring: Measuring, groups: dict[str, Any]) -> None:
    """Measure training steps of a model of 5.2 million parameters."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    inputs, targets = torch.randn(32, 1024, device="cpu", dtype=torch.float32), torch.arange(32, device="cpu")

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1000))

    def steps(of: nn.Module) -> Step:
        optimizer = torch.optim.SGD(of.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(of(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def sharded(group: Any) -> Step:
        whole, mesh = model(), DeviceMesh.from_group(group, "cpu")
        for layer in whole:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return steps(whole)

    measuring.measure("DDP step", lambda g: steps(DistributedDataParallel(model(), process_group=g)), groups, 2)
    measuring.measure(
        "DDP step, bucket views",
        lambda g: steps(DistributedDataParallel(model(), process_group=g, gradient_as_bucket_view=True)),
        groups,
        2,
    )
    measuring.measure("FSDP2 step", sharded, groups, 2)


PARTS = {"small": small, "large": large, "training": training}


def work(arguments: argparse.Namespace) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import hvdgloo.torch.distributed  # noqa: F401 - registers the backend, whatever the environment says

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=arguments.np
    )
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    measuring = Measuring(arguments.rounds)
    for part in arguments.only.split(","):
        PARTS[part](measuring, groups)
    if arguments.json and measuring.rank == 0:
        Path(arguments.json).write_text(json.dumps(measuring.found, indent=1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="measurements of each case (default: %(default)s)")
    parser.add_argument("--only", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--json", help="write all times, in milliseconds, to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if arguments.rank is not None:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, *sys.argv, "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environ) for rank in range(arguments.np)]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
