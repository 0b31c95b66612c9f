"""What the engine costs: hvdgloo against torch.distributed's Gloo, in interleaved rounds of one run.

On one host hvdgloo chooses shared memory; with HVDGLOO_CPU_OPERATIONS=gloo both run on Gloo.

Two cases on ``--np`` ranks, one thread each:

- the 161 parameters of ResNet-50 (102 MB of float32): hvdgloo gets each on its own (as hooks submit them) and all are
  awaited; torch reduces them in buckets of 25 MB as DistributedDataParallel does, copying gradients in and out.
  For comparison, torch is also shown on buckets that are filled already;
- an allreduce of 4 bytes, 20 in a row per round.

    python benchmarks/engine.py [--np 2] [--rounds 15] [--json FILE]

Medians and minima in milliseconds are printed, with the ratio of medians: below 1, hvdgloo is faster.

    python benchmarks/engine.py --processor

shows instead what repeated operations cost, in processor time of rank 0 by thread, so that other work on the machine
hardly matters: 161 tensors of 4 bytes one by one by ``allreduce_async_`` and ``synchronize``, and what an optimizer's
hooks add to a backward pass of 161 parameters, without buckets (HVDGLOO_GRADIENT_BUCKET=0).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import hvdgloo.run

BUCKET_BYTES = 25 << 20
SMALL_IN_A_ROW = 20


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's 161 parameters (He et al., 2015), in order of definition."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for out, into, kernel in ((width, channels, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, kernel, kernel), (out,), (out,)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def worker(rounds: int, small_rounds: int) -> dict[str, list[float]]:
    """One rank's timings in seconds by case."""
    import torch
    import torch.distributed as dist

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")  # beside hvdgloo, from the variables that the launcher sets
    gradients = [torch.ones(shape) for shape in reversed(resnet50_shapes())]
    assert len(gradients) == 161
    buckets: list[list[Any]] = [[]]
    for gradient in gradients:
        if sum(g.nbytes for g in buckets[-1]) + gradient.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)
    filled = [torch.cat([g.flatten() for g in bucket]) for bucket in buckets]

    def ours() -> None:
        handles = [hvd.allreduce_async_(g, op=hvd.Sum, name=str(i)) for i, g in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)

    def torchs() -> None:
        works = []
        for bucket, flat in zip(buckets, filled, strict=True):
            torch.cat([g.flatten() for g in bucket], out=flat)
            works.append(dist.all_reduce(flat, async_op=True))
        for bucket, flat, work in zip(buckets, filled, works, strict=True):
            work.wait()
            for gradient, piece in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def torchs_filled() -> None:
        for work in [dist.all_reduce(flat, async_op=True) for flat in filled]:
            work.wait()

    tiny = torch.ones(1)

    def ours_tiny() -> None:
        for _ in range(SMALL_IN_A_ROW):
            hvd.allreduce_(tiny, op=hvd.Max, name="tiny")

    def torchs_tiny() -> None:
        for _ in range(SMALL_IN_A_ROW):
            dist.all_reduce(tiny, op=dist.ReduceOp.MAX)

    times: dict[str, list[float]] = {}

    def interleave(cases: dict[str, Callable[[], None]], count: int, repeated: int = 1) -> None:
        for turn in range(count + 2):
            for name, case in cases.items():
                for tensor in (*gradients, tiny, *filled):
                    tensor.fill_(1.0)
                dist.barrier()
                start = time.perf_counter()
                case()
                if turn >= 2:
                    times.setdefault(name, []).append((time.perf_counter() - start) / repeated)

    interleave({"gradients hvdgloo": ours, "gradients torch": torchs, "gradients torch, filled": torchs_filled}, rounds)
    gradients, filled = [], []
    interleave({"4 bytes hvdgloo": ours_tiny, "4 bytes torch": torchs_tiny}, small_rounds, SMALL_IN_A_ROW)
    dist.destroy_process_group()
    hvd.shutdown()
    return times


def processor(rounds: int) -> dict[str, float]:
    """One rank's medians of processor time in seconds, by what used it."""
    import torch

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    clocks = {"caller": time.CLOCK_THREAD_CPUTIME_ID}
    for thread in threading.enumerate():
        for kind in ("control", "data"):
            if thread.name.startswith(f"hvdgloo-{kind}") and thread.ident is not None:
                clocks[kind] = time.pthread_getcpuclockid(thread.ident)

    def used() -> dict[str, float]:
        return {kind: time.clock_gettime(clock) for kind, clock in clocks.items()}

    found: dict[str, list[float]] = {}

    def note(before: dict[str, float], after: dict[str, float], what: str) -> None:
        for kind in clocks:
            found.setdefault(f"{what}, {kind} thread", []).append(after[kind] - before[kind])

    tensors = [torch.zeros(1) for _ in resnet50_shapes()]
    for turn in range(rounds + 3):
        hvd.barrier()
        begun = used()
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum, name=str(i)) for i, tensor in enumerate(tensors)]
        submitted = used()
        for handle in handles:
            hvd.synchronize(handle)
        if turn >= 3:
            note(begun, submitted, "submitting 161")
            note(submitted, used(), "waiting for 161")

    def parameters() -> list[Any]:
        return [torch.nn.Parameter(torch.ones(16)) for _ in resnet50_shapes()]

    def backward(trained: list[Any]) -> float:
        loss: Any = torch.stack([parameter.sum() for parameter in trained]).sum()
        begun = time.thread_time()
        loss.backward()
        return time.thread_time() - begun

    plain, hooked = parameters(), parameters()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(hooked, lr=0.1))
    for turn in range(rounds + 3):
        hvd.barrier()
        for parameter in (*plain, *hooked):
            parameter.grad = None
        without = backward(plain)
        cost = (backward(hooked) - without) / len(hooked)
        optimizer.synchronize()
        if turn >= 3:
            found.setdefault("a hook, caller thread", []).append(cost)
    hvd.shutdown()
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the gradients (default 15)")
    parser.add_argument("--small-rounds", type=int, default=100, help="rounds of 4 bytes (default 100)")
    parser.add_argument("--json", help="also write all figures there")
    parser.add_argument("--processor", action="store_true", help="processor time of repeated operations, by thread")
    options = parser.parse_args()
    if options.processor:
        os.environ.setdefault("HVDGLOO_GRADIENT_BUCKET", "0")
        medians = hvdgloo.run.run(processor, (10 * options.rounds,), np=options.np)[0]
        print(f"{options.np} ranks; microseconds of rank 0's processor time")
        for name, seconds in medians.items():
            print(f"  {name:36} {seconds * 1e6:8.1f}")
        return
    per_rank = hvdgloo.run.run(worker, (options.rounds, options.small_rounds), np=options.np)
    # A collective has ended when its slowest rank has.
    times = {name: [max(turn) for turn in zip(*(r[name] for r in per_rank), strict=True)] for name in per_rank[0]}
    print(f"{options.np} ranks; milliseconds")
    for name, values in times.items():
        print(f"  {name:26} median {statistics.median(values) * 1e3:8.3f}   min {min(values) * 1e3:8.3f}")
    for ours, theirs in (
        ("gradients hvdgloo", "gradients torch"),
        ("gradients hvdgloo", "gradients torch, filled"),
        ("4 bytes hvdgloo", "4 bytes torch"),
    ):
        ratio = statistics.median(times[ours]) / statistics.median(times[theirs])
        print(f"  {ours} / {theirs}: {ratio:.2f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(times, file)


if __name__ == "__main__":
    main()
