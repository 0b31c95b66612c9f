"""Accuracy with fewer bytes between hosts: the loss of a small model, by the way in which ranks exchange gradients.

    python benchmarks/slow_networks_accuracy.py [--np 4] [--seeds 0,1,2] [--steps 448] [--only "full;int8"] [--json F]

A transformer of 64,000 parameters learns to predict the next character of Python's help texts, with AdamW. Each rank
has its own part of the text. Ranks are processes that Gloo connects as if each were on a host of its own, so that all
that crosses between them crosses in the form under test. For each way the table has the mean loss on text that was held
back, the least and the greatest of all seeds, and the megabytes that a rank exchanged.

Two ways are there to be worse: "int4, a scale for 65536" shows what blocks of 64 values are worth, and "apart" what the
exchange is: each rank learns from its own part of the text only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hvdgloo.run

STEPS = 448
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 8, 64, 4, 1
RATE, WARM_UP = 3e-3, 20

ON_HOSTS_OF_THEIR_OWN = {"HVDGLOO_CPU_OPERATIONS": "gloo", "HVDGLOO_WIRE_THRESHOLD": "0"}

BY_SETTING = ("bf16", "int8", "int4", "int4-feedback")
"""Ways that a program does not choose: plain ``DistributedOptimizer`` in a job with ``--wire``."""

COARSE = "int4, a scale for 65536"
"""As int4, but many more values share a scale than in the codec."""


@dataclass(frozen=True)
class Result:
    """The end of one training.

    Attributes:
        way, seed: what was trained.
        loss: on text that was held back.
        megabytes: the size of what a rank exchanged, in the form in which it crossed.
        digests: a checksum of each rank's parameters.
    """

    way: str
    seed: int
    loss: float
    megabytes: float
    digests: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        """True if all ranks ended with the same parameters, to the last bit."""
        return len(set(self.digests)) == 1


def ways() -> dict[str, Callable[[Any, Any], Any]]:
    """For each way that a program chooses, what makes its optimizer from a plain one and the model."""
    import hvdgloo.torch as hvd

    def every_step(plain: Any, model: Any) -> Any:
        return hvd.DistributedOptimizer(plain, model.named_parameters())

    def local(sync_every: int, **options: Any) -> Callable[[Any, Any], Any]:
        return lambda plain, model: hvd.LocalSGD(plain, model, sync_every=sync_every, inner="rank", **options)

    def diloco(sync_every: int, **options: Any) -> Callable[[Any, Any], Any]:
        return lambda plain, model: hvd.DiLoCo(plain, model, sync_every=sync_every, inner="rank", **options)

    return {
        "full": every_step,
        **dict.fromkeys((*BY_SETTING, COARSE), every_step),
        "LocalSGD 8": local(8),
        "LocalSGD 8, int8": local(8, compression=hvd.Compression.int8),
        "LocalSGD 8, int8, 2 fragments, overlap 3": local(8, compression=hvd.Compression.int8, fragments=2, overlap=3),
        "LocalSGD 16": local(16),
        "LocalSGD 16, 4 fragments, overlap 2": local(16, fragments=4, overlap=2),
        "LocalSGD 64": local(64),
        "DiLoCo 16, momentum 0.5": diloco(16, outer_momentum=0.5),
        "DiLoCo 16": diloco(16),
        "DiLoCo 64": diloco(64),
        "apart": lambda plain, model: plain,
    }


def transformer(characters: int) -> Any:
    """Make the model."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
            self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.attention(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.projection(seen.transpose(1, 2).flatten(2))
            step: torch.Tensor = self.narrow(functional.gelu(self.wide(self.norms[1](x))))
            return x + step

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(characters, WIDTH)
            self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
            self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)], nn.LayerNorm(WIDTH))
            self.head = nn.Linear(WIDTH, characters)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.blocks(self.embed(text) + self.places))
            return scores.flatten(0, 1)

    return Transformer()


def text() -> Any:
    """Return Python's help texts, with a number for each character."""
    from pydoc_data.topics import topics

    import torch

    whole = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: number for number, character in enumerate(sorted(set(whole)))}
    return torch.tensor([numbers[character] for character in whole])


def train(way: str, seed: int, steps: int, data: Any) -> Result:
    """Train once on a text, on this rank of a job."""
    import torch
    from torch.nn import functional

    import hvdgloo.torch as hvd

    learned, held_back = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    part = len(learned) // hvd.size()
    mine = learned[hvd.rank() * part : (hvd.rank() + 1) * part].unfold(0, CONTEXT + 1, 1)
    chance = torch.Generator().manual_seed(1000 * seed + hvd.rank())

    torch.manual_seed(seed)
    model = transformer(int(data.max()) + 1)
    plain = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    optimizer = ways()[way](plain, model)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: max(0.01, min(1.0, (done + 1) / WARM_UP) * (1 + math.cos(math.pi * done / steps)) / 2),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def loss_of(sample: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(sample[:, :-1]), sample[:, 1:].reshape(-1))

    before = crossed()
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = loss_of(mine[torch.randint(len(mine), (BATCH,), generator=chance)])
        loss.backward()
        optimizer.step()
        rates.step()
    if hasattr(optimizer, "finish"):
        optimizer.finish()
    megabytes = (crossed() - before) / 1e6
    with torch.no_grad():
        windows = held_back.unfold(0, CONTEXT + 1, 1)
        held_back_loss = loss_of(windows[torch.linspace(0, len(windows) - 1, 512).long()]).item()
    digest = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    digests = tuple(hvd.allgather_object(digest, name="digests"))
    return Result(way, seed, held_back_loss, megabytes, digests)


def crossed() -> int:
    """Return the bytes that this rank has exchanged so far, in the form in which they crossed."""
    import hvdgloo.torch as hvd

    return sum(plane.wire_bytes for plane in hvd.metrics().planes.values())


def worker(chosen: Sequence[str], seeds: Sequence[int], steps: int) -> list[Result]:
    """Train in all ways that one job can, and with all seeds."""
    import torch

    import hvdgloo.torch as hvd
    from hvdgloo._backends.codec import BLOCKS
    from hvdgloo.types import WireFormat

    torch.set_num_threads(1)
    if COARSE in chosen:
        BLOCKS[WireFormat.INT4] = 1 << 16, 4
    hvd.init()
    data = text()
    return [train(way, seed, steps, data) for way in chosen for seed in seeds]


def measure(chosen: Sequence[str], seeds: Sequence[int], ranks: int, steps: int) -> list[Result]:
    """Train in the ways that were chosen, each with all seeds."""
    jobs: dict[str, list[str]] = {}
    for way in chosen:
        jobs.setdefault(way if way in (*BY_SETTING, COARSE) else "full", []).append(way)
    results: list[Result] = []
    for job, its_ways in jobs.items():
        env = {**ON_HOSTS_OF_THEIR_OWN, "HVDGLOO_WIRE": "int4" if job == COARSE else job}
        results += hvdgloo.run.run(worker, args=(its_ways, seeds, steps), np=ranks, env=env)[0]
    return results


def mean(results: Sequence[Result], way: str) -> float:
    """Return the mean loss of all seeds."""
    return statistics.fmean(result.loss for result in results if result.way == way)


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| | loss, mean (range) | MB exchanged | the same on all ranks |", "|---|---|---|---|"]
    for way in dict.fromkeys(result.way for result in results):
        its = [result for result in results if result.way == way]
        losses = [result.loss for result in its]
        lines.append(
            f"| {way} | {mean(results, way):.3f} ({min(losses):.3f} to {max(losses):.3f}) | {its[0].megabytes:.1f} | "
            f"{'yes' if all(result.is_shared for result in its) else 'NO'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", help="some of the ways, by their names in the table, separated by ';'")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = list(ways()) if options.only is None else options.only.split(";")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    results = measure(chosen, seeds, options.np, options.steps)
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
