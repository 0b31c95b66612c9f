"""The cost of the engine: hvdgloo against torch.distributed's Gloo, in interleaved rounds of one run.

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

    python benchmarks/engine.py --ranks 512 1024 4096

shows what the agreement alone costs rank 0, without sockets and with simulated members, which all say the same and do
nothing else. Processor time, the least of three rounds; memory is the most that the first step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import hvdgloo.run
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.messages import Decoder, Execute, Request, Response, Submit, encode, frame
from hvdgloo.types import Collective, DType, TensorSpec

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


class Simulated:
    """Rank 0's coordinator, and members that say what they are told to. Times are of this process, in seconds."""

    def __init__(self, ranks: int, tensors: int) -> None:
        self.ranks = range(ranks)
        settings = CoordinatorSettings(60.0, 1024, 0.0, True, 60.0, 0.0)
        self._coordinator = Coordinator(ranks, {0: tuple(self.ranks)}, settings, str)
        self._decoder = Decoder()
        spec = TensorSpec(DType.FLOAT32, (1000, 1000))
        requests = tuple(Request(f"allreduce.layer{i}.weight", Collective.ALLREDUCE, (spec,)) for i in range(tensors))
        tracemalloc.start()
        self.say([Submit((), requests)], self.ranks)
        self.first_step_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self._coordinator = Coordinator(ranks, {0: tuple(self.ranks)}, settings, str)
        self._decoder = Decoder()
        self.first_step, items = self.say([Submit((), requests)], self.ranks)
        self.numbers = tuple(item.signature for item in items if isinstance(item, Response))

    def say(self, messages: list[Submit], ranks: range) -> tuple[float, tuple[int | Response, ...]]:
        """These ranks send the same messages; how long rank 0 was busy with them, and what it has ordered."""
        arriving = [encode(message) for message in messages]
        begun = time.process_time()
        for data in arriving:
            for rank in ranks:
                self._coordinator.receive(rank, self._decoder.decode(data), 0.0)
        self._coordinator.release(0.0)
        outbox, self._coordinator.outbox = self._coordinator.outbox, []
        for _, message in outbox:
            frame(message)
        used = time.process_time() - begun
        return used, tuple(item for _, message in outbox if isinstance(message, Execute) for item in message.items)

    def steps(self, messages: int, ranks: range, rounds: int = 3) -> float:
        """A step in which these ranks name all tensors in so many messages: the least of three rounds."""
        part = -(-len(self.numbers) // messages)
        named = [Submit(self.numbers[at : at + part]) for at in range(0, len(self.numbers), part)]
        used = []
        for _ in range(rounds):
            seconds, items = self.say(named, ranks)
            assert items == self.numbers
            used.append(seconds)
        return min(used)


def agreement(ranks: int) -> None:
    """Print what the agreement between so many simulated ranks costs."""
    steady = Simulated(ranks, 161)
    print(f"{ranks} ranks; milliseconds of rank 0's processor time")
    mib = steady.first_step_bytes / 2**20
    print(f"  first step, 161 tensors            {steady.first_step * 1e3:8.1f}   ({mib:.1f} MiB)")
    for messages in (1, 8, 161):
        name = f"a step of 161 tensors in {messages}"
        print(f"  {name:34} {steady.steps(messages, steady.ranks) * 1e3:8.1f}")
    joined = Simulated(ranks, 20)
    gone, left = joined.ranks[: ranks // 2], joined.ranks[ranks // 2 :]
    used, _ = joined.say([Submit((), (Request("join", Collective.JOIN),))], gone)
    print(f"  half of the ranks join             {used * 1e3:8.1f}")
    print(f"  a step of 20 tensors of the others {joined.steps(1, left) * 1e3:8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the gradients (default 15)")
    parser.add_argument("--small-rounds", type=int, default=100, help="rounds of 4 bytes (default 100)")
    parser.add_argument("--json", help="also write all figures there")
    parser.add_argument("--processor", action="store_true", help="processor time of repeated operations, by thread")
    parser.add_argument("--ranks", type=int, nargs="+", help="only what the agreement of so many ranks costs rank 0")
    options = parser.parse_args()
    if options.ranks:
        for ranks in options.ranks:
            agreement(ranks)
        return
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
