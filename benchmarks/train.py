"""Training steps per second: hvdgloo's DistributedOptimizer, torch's DistributedDataParallel on Gloo, and neither.

    python benchmarks/train.py [--np 2] [--rounds 20] [--only mlp,conv,transformer] [--json FILE]

Three networks on made-up data, one thread per rank. All ways train copies of the same network in the same processes; a
round is one step of each in turn, after a barrier. The time of a step is the slowest rank's; medians are printed, and
how many times as fast as DistributedDataParallel hvdgloo is. "alone" does not communicate: nothing can be faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hvdgloo.run


def networks() -> dict[str, Callable[[], tuple[Any, Any, Any]]]:
    """For each name, what makes a network, its inputs and its targets."""
    import torch
    from torch import nn

    def mlp() -> tuple[Any, Any, Any]:
        layers = [nn.Linear(784, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(), nn.Linear(1536, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(32, 784), torch.randint(10, (32,))

    def conv() -> tuple[Any, Any, Any]:
        layers: list[nn.Module] = []
        into = 3
        for out, stride in ((32, 1), (64, 2), (128, 2), (256, 2)):
            layers += [nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
            into = out
        layers += [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10)]
        return nn.Sequential(*layers), torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2000, 192)
            layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(192, 2000)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.layers(self.embed(tokens)))
            return scores.flatten(0, 1)

    def transformer() -> tuple[Any, Any, Any]:
        return Transformer(), torch.randint(2000, (4, 32)), torch.randint(2000, (128,))

    return {"mlp": mlp, "conv": conv, "transformer": transformer}


def worker(rounds: int, chosen: list[str]) -> dict[str, dict[str, Any]]:
    """One rank's seconds per step, by network and way."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")  # beside hvdgloo, from the variables that the launcher sets
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        torch.manual_seed(1)
        ways: dict[str, tuple[Any, Any]] = {}
        for way in ("hvdgloo", "ddp", "alone"):
            network, inputs, targets = networks()[name]()
            if way == "ddp":
                network = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
            optimizer: Any = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
            if way == "hvdgloo":
                hvd.broadcast_parameters(network.state_dict(), root_rank=0)
                optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters())
            ways[way] = network, optimizer

        def step(network: Any, optimizer: Any, inputs: Any = inputs, targets: Any = targets) -> None:
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()

        seconds: dict[str, list[float]] = {way: [] for way in ways}
        order = list(ways)
        for turn in range(rounds + 3):  # the first three are not counted
            for way in order[turn % 3 :] + order[: turn % 3]:
                dist.barrier()
                begin = time.perf_counter()
                step(*ways[way])
                if turn >= 3:
                    seconds[way].append(time.perf_counter() - begin)
        count = sum(parameter.numel() for parameter in ways["alone"][0].parameters())
        results[name] = {"parameters": count, **seconds}
    dist.destroy_process_group()
    hvd.shutdown()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="mlp,conv,transformer")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    chosen = given.only.split(",")
    if unknown := set(chosen) - {"mlp", "conv", "transformer"}:
        parser.error(f"--only {','.join(sorted(unknown))}: there are mlp, conv and transformer")
    ranks = hvdgloo.run.run(worker, args=(given.rounds, chosen), np=given.np)
    for name in chosen:
        ways = {
            way: [max(times) for times in zip(*(rank[name][way] for rank in ranks), strict=True)]
            for way in ("hvdgloo", "ddp", "alone")
        }
        middle = {way: statistics.median(times) for way, times in ways.items()}
        shown = [f"{way} {1 / seconds:.2f} steps/s ({seconds * 1e3:.1f} ms)" for way, seconds in middle.items()]
        print(
            f"{name} ({ranks[0][name]['parameters'] / 1e6:.1f} M parameters): {', '.join(shown)}; "
            f"hvdgloo {middle['ddp'] / middle['hvdgloo']:.2f} x ddp"
        )
    if given.json:
        Path(given.json).write_text(json.dumps(ranks, indent=1))


if __name__ == "__main__":
    main()
