"""Training steps on GPUs: hvdgloo's DistributedOptimizer, torch's DistributedDataParallel on NCCL, and neither.

    python benchmarks/gpu.py [--np 1] [--completion host,stream] [--only resnet,small] [--one-gpu nccl] [--json FILE]

All ways train copies of the same network in the same processes, and take turns; a step's time is the slowest rank's.
"resnet" is a ResNet-50 (bf16, channels_last; needs torchvision), "small" has 300 gradients of up to 16
KiB, whose steps are as long as the host takes to queue them. "alone" does not communicate: nothing can be faster. With
``--np 1`` hvdgloo is told to use NCCL, as DistributedDataParallel does. ``--one-gpu`` lets several ranks share one
GPU, over NCCL as in tests/gpu/test_shared_gpu.py, or with "staged" through the host's memory; DistributedDataParallel
has NCCL either way.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hvdgloo.run
from tests.gpu.programs import SOCKETS

WAYS = ("hvdgloo", "ddp", "alone")
KINDS = ("wall", "queued", "thread", "process")
"""The measurements of a step, in seconds: until the GPU has done it, until the host has queued it, and the processor
time of the thread and of the process."""


def networks(images_per_batch: int, edge: int) -> dict[str, Callable[[], tuple[Any, Any, Any, bool]]]:
    """For each name, what makes a network, its inputs, its targets, and whether it computes in bf16.

    Args:
        images_per_batch: of "resnet".
        edge: of these images, in pixels.
    """
    import torch
    from torch import nn

    def resnet() -> tuple[Any, Any, Any, bool]:
        import torchvision  # type: ignore[import-not-found] # the machine's; nothing else here needs it

        images = torch.randn(images_per_batch, 3, edge, edge).to(memory_format=torch.channels_last)
        network = torchvision.models.resnet50().to(memory_format=torch.channels_last)
        return network, images, torch.randint(1000, (images_per_batch,)), True

    def small() -> tuple[Any, Any, Any, bool]:
        network = nn.Sequential(*[nn.Linear(64, 64) for _ in range(150)])
        return network, torch.randn(8, 64), torch.randint(64, (8,)), False

    return {"resnet": resnet, "small": small}


def worker(rounds: int, steps: int, chosen: Sequence[str], batch: int, one_gpu: str, profile: str) -> dict[str, Any]:
    """One rank's seconds per step, by network, way and kind."""
    if one_gpu:  # before NCCL is loaded
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{os.environ['HVDGLOO_RANK']}"
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import hvdgloo.torch as hvd

    hvd.init()
    on_cpu = not torch.cuda.is_available()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", 0 if one_gpu else hvd.local_rank())
    settle: Callable[[], None] = (lambda: None) if on_cpu else torch.cuda.synchronize
    if not on_cpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True

    def seconds(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        settle()
        return time.perf_counter() - begin

    one = torch.ones(1, device=device)
    settle()

    def first_of_torch() -> None:
        dist.init_process_group("gloo" if on_cpu else "nccl")
        dist.all_reduce(one)

    edge = 32 if on_cpu else 224
    results: dict[str, Any] = {"first allreduce": seconds(lambda: hvd.allreduce(one, name="first"))}
    results["first all_reduce of a process group of torch's own"] = seconds(first_of_torch)
    for name in chosen:
        ways: dict[str, tuple[Any, Any]] = {}
        for way in WAYS:
            torch.manual_seed(1)
            network, inputs, targets, bf16 = networks(batch, edge)[name]()
            network, inputs, targets = network.to(device), inputs.to(device), targets.to(device)
            if way == "ddp":
                network = DistributedDataParallel(network, gradient_as_bucket_view=True)
            optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
            if way == "hvdgloo":
                hvd.broadcast_parameters(network.state_dict(), root_rank=0)
                optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
            ways[way] = network, optimizer

        def step(way: str, ways: Any = ways, given: Any = (inputs, targets), bf16: bool = bf16) -> None:
            network, optimizer = ways[way]
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss: Any = nn.functional.cross_entropy(network(given[0]), given[1])
            loss.backward()
            optimizer.step()

        found: dict[str, dict[str, list[float]]] = {way: {kind: [] for kind in KINDS} for way in WAYS}
        results[f"{name}, first step"] = {way: seconds(functools.partial(step, way)) for way in WAYS}
        for turn in range(rounds + 1):  # the first is not counted
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                step(way)
                settle()
                dist.barrier()
                settle()
                begun = time.perf_counter(), time.thread_time(), time.process_time()
                for _ in range(steps):
                    step(way)
                queued = time.perf_counter()
                settle()
                ends = time.perf_counter(), queued, time.thread_time(), time.process_time()
                if turn:
                    starts = begun[0], begun[0], begun[1], begun[2]
                    for kind, start, end in zip(KINDS, starts, ends, strict=True):
                        found[way][kind].append((end - start) / steps)
        results[name] = found
        if profile and not on_cpu:
            _profile(f"{profile}/{name}-{hvd.rank()}", step)
    dist.destroy_process_group()
    hvd.shutdown()
    return results


def _profile(path: str, step: Callable[[str], None]) -> None:
    """Write where three steps' time goes, as tables and as traces."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for way in WAYS[:2]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                step(way)
            torch.cuda.synchronize()
        averages = profiled.key_averages()
        tables = [averages.table(sort_by=f"self_{kind}_time_total", row_limit=30) for kind in ("cpu", "cuda")]
        Path(f"{path}-{way}.txt").write_text("\n".join(tables))
        profiled.export_chrome_trace(f"{path}-{way}.json.gz")


def show(name: str, ranks: Sequence[dict[str, Any]]) -> None:
    """Print what was measured of a network."""
    for kind in KINDS:
        times = {
            way: [max(each) for each in zip(*(rank[name][way][kind] for rank in ranks), strict=True)] for way in WAYS
        }
        shown = [f"{way} {1e3 * statistics.median(found):.2f} ms" for way, found in times.items()]
        ratios = [ours / theirs for ours, theirs in zip(times["hvdgloo"], times["ddp"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"  {name}, {kind}: {', '.join(shown)}; hvdgloo {statistics.median(ratios):.3f} x ddp ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument("--completion", default="host,stream", help="HVDGLOO_GPU_COMPLETION, each in a job of its own")
    parser.add_argument("--only", default="resnet,small")
    parser.add_argument("--batch", type=int, default=64, help="images of a step of resnet, for each rank")
    parser.add_argument("--one-gpu", choices=["nccl", "staged"], default="", help="all ranks share the first GPU")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of a way in a round")
    parser.add_argument("--profile", metavar="DIR", default="", help="write profiles there")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - {"resnet", "small"}:
        parser.error(f"--only {','.join(sorted(unknown))}: there are resnet and small")
    if given.profile:
        Path(given.profile).mkdir(parents=True, exist_ok=True)
    everything = {}
    for completion in given.completion.split(","):
        env = {"HVDGLOO_GPU_COMPLETION": completion}
        env["HVDGLOO_GPU_OPERATIONS"] = "gloo" if given.one_gpu == "staged" else "nccl"
        if given.one_gpu:
            env.update(SOCKETS)
        profile = f"{given.profile}/{completion}" if given.profile else ""
        if profile:
            Path(profile).mkdir(parents=True, exist_ok=True)
        args = (given.rounds, given.steps, chosen, given.batch, given.one_gpu, profile)
        ranks = hvdgloo.run.run(worker, args=args, np=given.np, env={**os.environ, **env})
        firsts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in ranks[0].items() if "first a" in name)
        print(f"{given.np} rank(s), completion by {completion}: {firsts}")
        for name in chosen:
            first = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in ranks[0][f"{name}, first step"].items())
            print(f"  {name}, the first step: {first}")
            show(name, ranks)
        everything[completion] = ranks
    if given.json:
        Path(given.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
