"""Slow networks: a reduction and training steps with each form in which gradients can cross between hosts.

    python benchmarks/slow_networks.py [--rates 100mbit,1gbit,10gbit] [--layout 2x2]
        [--only reduction,resnet50,pause,inner,inner-small] [--megabytes 102] [--rounds 5] [--quick] [--json FILE]

Hosts are network namespaces of this machine (the tests' bed; Linux, root), whose links ``tc tbf`` limits in both
directions. One job measures everything: in each round every way has its turn, so that whatever disturbs the machine
disturbs all of them. Below 1 Gbit/s there are a fifth as many rounds. Everything has run once before the links are
limited.

``reduction``: one float32 tensor as a gradient, with ``--wire`` full, bf16, int8 and int4; next to it Gloo by
torch.distributed, with the tensor itself, and cast to bfloat16 as DDP's ``bf16_compress_hook`` does; and
torch.distributed on the backend hvdgloo.

``resnet50``: training steps of that network (102 MB of gradients) on two small images, by ``DistributedOptimizer``,
by ``LocalSGD`` with ``sync_every=8`` and int8, at once, in 4 fragments that are awaited a step later, and in 2 that
are awaited 3 steps later, and by torch's DistributedDataParallel, without a hook, and with those for bfloat16 and
PowerSGD (rank 4). ``pause`` is a network of as many parameters whose computation is a pause of 0.4 s, as for a
program that waits for its GPU: unlike the ranks of ``resnet50``, its ranks leave the processors to each other.
"alone" sends nothing: nothing can be faster. With LocalSGD, eight steps are timed, from one outer step's end to
another's, and a step is an eighth of them. Of either case, a rank has a copy of the network for each way, in all some
3 GB.

``inner`` is what LocalSGD adds to the steps in which nothing is sent: steps of ``resnet50`` by turns with the plain
optimizer ("alone"). ``inner-small`` is the same for a perceptron of 25 layers, whose step takes a few milliseconds. The
network is not used, so one rate will do, and a processor for each rank tells most:
``--only inner,inner-small --rates 10gbit --layout 2x1``.

A time is the slowest rank's, and so is the processor time of its process; bytes are what the busiest host has sent over
its interface, with all headers and acknowledgements. Printed is the least of all rounds, and what it is of ``full``'s;
where there is none, of what "alone" takes.
"codec" is the processor time of encoding and decoding. Ranks share this machine's processors, so with few of them the
processor time counts more than on real hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling import bits

WIRES = ("full", "bf16", "int8", "int4")
SYNC_EVERY = 8
PAUSE, LAYERS = 0.4, 16
FIGURES = ("seconds", "processor", "codec", "sent")

Step = Callable[[], object]
Build = Callable[[], tuple[Any, Callable[[Any], Any]]]


@dataclass(frozen=True)
class Task:
    """The work of a rank.

    Attributes:
        rates: of each host's link, as ``tc`` spells them.
        cases: the names of what is measured.
        nbytes: size of the tensor that is reduced, and of the gradients of ``pause``.
        width: channels of ResNet-50's first layer, which has 64.
        pause: seconds that ``pause`` computes.
        rounds: turns of each way at 1 Gbit/s and more.
        path: the file for rank 0's figures.
    """

    rates: tuple[str, ...]
    cases: tuple[str, ...]
    nbytes: int
    width: int
    pause: float
    rounds: int
    path: str


class Rank:
    """One rank's measurements."""

    def __init__(self, task: Task) -> None:
        import hvdgloo.torch as hvd

        self._hvd, self.task = hvd, task
        self._codec = 0.0
        self._watch_codecs()

    def _watch_codecs(self) -> None:
        """Count the time that threads spend encoding and decoding."""
        from hvdgloo._backends import codec_torch

        def counted(method: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any, **kwargs: Any) -> None:
                begin = time.thread_time()
                method(*args, **kwargs)
                self._codec += time.thread_time() - begin

            return call

        for kind in (codec_torch.TorchBlocks, codec_torch.TorchBFloat16):
            for name in ("encode", "decode"):
                setattr(kind, name, counted(getattr(kind, name)))

    def limit(self, rate: str) -> None:
        """Have the hosts' links pass no more than so many bits a second."""
        self._hvd.barrier()
        if self._hvd.local_rank() == 0:
            burst = str(max(256 << 10, int(bits(rate) / 8 * 0.002)))
            limit = f"tc qdisc replace dev eth0 root tbf rate {rate} burst {burst} latency 100ms"
            subprocess.run(limit.split(), check=True)
        self._hvd.barrier()

    def once(self, step: Step, steps: int) -> list[float]:
        """Return the figures of one call, divided by the steps of which it consists; see ``FIGURES``."""
        self._hvd.barrier()
        sent, codec, processor, begin = _sent(), self._codec, time.process_time(), time.perf_counter()
        for _ in range(steps):
            step()
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        codec = self._codec - codec
        self._hvd.barrier()
        own = (seconds, processor, codec, float(_sent() - sent))
        every = self._hvd.allgather_object(own, name="figures")
        return [max(figures) / steps for figures in zip(*every, strict=True)]

    def measure(self, case: str, ways: dict[str, tuple[Step, int]]) -> list[dict[str, Any]]:
        """Return a row for each rate and way: each round's figures."""
        for step, steps in ways.values():
            for _ in range(max(steps, 3)):  # DDP rearranges its buckets, and PowerSGD begins, after the first steps
                step()
        rows = []
        for rate in self.task.rates:
            self.limit(rate)
            found: dict[str, list[list[float]]] = {way: [] for way in ways}
            rounds = self.task.rounds if bits(rate) >= 1e9 else max(1, self.task.rounds // 5)
            for turn in range(rounds):
                for way in list(ways)[:: -1 if turn % 2 else 1]:
                    found[way].append(self.once(*ways[way]))
            for way, turns in found.items():
                figures = dict(zip(FIGURES, map(list, zip(*turns, strict=True)), strict=True))
                rows.append({"case": case, "rate": rate, "way": way, **figures})
        if self._hvd.local_rank() == 0:
            subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)
        return rows


def _sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def reductions(task: Task) -> dict[str, tuple[Step, int]]:
    """Return the ways to reduce one tensor."""
    import torch
    import torch.distributed as dist

    import hvdgloo.torch as hvd
    import hvdgloo.torch.distributed
    from hvdgloo._training.reducer import GradientReducer
    from hvdgloo.torch._frontend import FRONTEND

    source = torch.randn(task.nbytes // 4, generator=torch.Generator().manual_seed(hvd.rank())) * 1e-3
    tensor = source.clone()

    def encoded(wire: str) -> Step:
        reducer = GradientReducer(FRONTEND, op=hvd.Average, compression=compressor(wire))

        def step() -> None:
            reducer.ready(wire, tensor)
            reducer.wait()

        return step

    def narrow() -> None:
        cast = tensor.to(torch.bfloat16)
        dist.all_reduce(cast)
        tensor.copy_(cast)

    ways = {wire: encoded(wire) for wire in WIRES}
    hvdgloo.torch.distributed.register()
    ours = dist.new_group(backend="hvdgloo")
    ways |= {
        "torch": lambda: dist.all_reduce(tensor),
        "torch, bf16": narrow,
        "torch, hvdgloo": lambda: dist.all_reduce(tensor, group=ours),
    }

    def fresh(step: Step) -> Step:
        def of_source() -> None:
            tensor.copy_(source)  # sums of sums would overflow
            step()

        return of_source

    return {way: (fresh(step), 1) for way, step in ways.items()}


def compressor(wire: str) -> Any:
    """Return what stands for a job with ``--wire``."""
    import hvdgloo.torch as hvd
    from hvdgloo.types import WireFormat

    return type(wire, (hvd.Compression.none,), {"wire": WireFormat(wire)})


def training(build: Build, wrapped: Callable[[Any, Any], tuple[Any, Any]]) -> Step:
    """Return a training step.

    Args:
        build: see ``trainings``.
        wrapped: takes the network and its optimizer, and returns those that step.
    """
    import torch

    torch.manual_seed(1)
    network, loss = build()
    network, optimizer = wrapped(network, torch.optim.SGD(network.parameters(), lr=1e-4))

    def step() -> None:
        optimizer.zero_grad()
        loss(network).backward()
        optimizer.step()

    return step


def inner_steps(build: Build, steps: int) -> dict[str, tuple[Step, int]]:
    """Return the plain optimizer's steps and LocalSGD's inner ones, so many in a turn."""
    import hvdgloo.torch as hvd

    never = 1 << 40
    ways = {
        "alone": training(build, lambda network, sgd: (network, sgd)),
        "LocalSGD": training(build, lambda network, sgd: (network, hvd.LocalSGD(sgd, network, sync_every=never))),
    }
    return {way: (step, steps) for way, step in ways.items()}


def trainings(build: Build) -> dict[str, tuple[Step, int]]:
    """Return the ways to train a network.

    Args:
        build: returns a network, and the function that computes its loss.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    import hvdgloo.torch as hvd

    made = functools.partial(training, build)

    def distributed(wire: str) -> Step:
        return made(
            lambda network, sgd: (
                network,
                hvd.DistributedOptimizer(sgd, network.named_parameters(), compression=compressor(wire)),
            )
        )

    def parallel(hook: Callable[..., Any] | None = None, state: Any = None, **options: Any) -> Step:
        def wrapped(network: Any, sgd: Any) -> tuple[Any, Any]:
            network = torch.nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True, **options)
            if hook is not None:
                network.register_comm_hook(state, hook)
            return network, sgd

        return made(wrapped)

    def local(overlap: int = 0, **options: Any) -> tuple[Step, int]:
        step = made(
            lambda network, sgd: (
                network,
                hvd.LocalSGD(
                    sgd, network, sync_every=SYNC_EVERY, compression=hvd.Compression.int8, overlap=overlap, **options
                ),
            )
        )
        # Each turn ends with an outer step's end then: none is on its way while the other ways have their turns.
        for _ in range(overlap):
            step()
        return step, SYNC_EVERY

    power = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    ways = {"alone": made(lambda network, sgd: (network, sgd))} | {wire: distributed(wire) for wire in WIRES}
    ways |= {
        "DDP": parallel(),
        # By its name DDP would refuse the hook on CPUs, where Gloo reduces bfloat16 all the same.
        "DDP, bf16": parallel(lambda state, bucket: bf16_compress_hook(state, bucket)),
        # One bucket: the hook waits in callbacks, whose order differs from rank to rank, and Gloo's threads are few.
        "DDP, PowerSGD": parallel(powerSGD_hook, power, bucket_cap_mb=1000),
    }
    return {way: (step, 1) for way, step in ways.items()} | {
        f"LocalSGD {SYNC_EVERY}, int8": local(),
        "fragments 4, overlap 1": local(fragments=4, overlap=1),
        "fragments 2, overlap 3": local(fragments=2, overlap=3),
    }


def resnet50(width: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return the network, with so many channels in its first layer, and its loss on two images."""
    import torch
    from torch import nn

    def block(into: int, out: int, stride: int) -> nn.Module:
        layers: list[nn.Module] = []
        for kernel, size, each in ((1, out, 1), (3, out, stride), (1, 4 * out, 1)):
            layers += [nn.Conv2d(into, size, kernel, each, kernel // 2, bias=False), nn.BatchNorm2d(size), nn.ReLU()]
            into = size
        return nn.Sequential(*layers[:-1])

    class Residual(nn.Module):
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.block = block(into, out, stride)
            self.shortcut: nn.Module = nn.Identity()
            if into != 4 * out:
                convolution = nn.Conv2d(into, 4 * out, 1, stride, bias=False)
                self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(4 * out))

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(self.block(given) + self.shortcut(given))

    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    into = width
    for number, blocks in enumerate((3, 4, 6, 3)):
        out = width << number
        for first in [True] + [False] * (blocks - 1):
            layers.append(Residual(into, out, 2 if first and number else 1))
            into = 4 * out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000)]
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(1000, (2,))
    return nn.Sequential(*layers), lambda network: nn.functional.cross_entropy(network(images), labels)


def pausing(nbytes: int, seconds: float) -> tuple[Any, Callable[[Any], Any]]:
    """Return a network whose gradients are ready one after the other while it pauses, and its loss."""
    import torch
    from torch import nn

    shape = (nbytes // 4 // LAYERS // 1024, 1024)  # PowerSGD compresses matrices only
    gradient = torch.randn(shape) * 1e-3

    class Pausing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds / 3 / LAYERS)
            return given.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(seconds * 2 / 3 / LAYERS)
            return gradients[0], gradient

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([torch.zeros(shape) for _ in range(LAYERS)])

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            for weights in self.layers:
                given = Pausing.apply(given, weights)  # type: ignore[no-untyped-call]
            return given

    return Network(), lambda network: network(torch.zeros(())).sum()


def perceptron() -> tuple[Any, Callable[[Any], Any]]:
    """Return a network whose step is short, and its loss."""
    import torch
    from torch import nn

    layers = [layer for _ in range(25) for layer in (nn.Linear(128, 128), nn.ReLU())]
    given = torch.randn(64, 128)
    return nn.Sequential(*layers), lambda network: network(given).square().mean()


CASES: dict[str, Callable[[Task], dict[str, tuple[Step, int]]]] = {
    "reduction": reductions,
    "resnet50": lambda task: trainings(lambda: resnet50(task.width)),
    "pause": lambda task: trainings(lambda: pausing(task.nbytes, task.pause)),
    "inner": lambda task: inner_steps(lambda: resnet50(task.width), 5),
    "inner-small": lambda task: inner_steps(perceptron, 200),
}


def work(task: Task) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo")  # beside hvdgloo, from the variables that the launcher sets
    rank, rows = Rank(task), []
    for case in task.cases:
        rows += rank.measure(case, CASES[case](task))
    if hvd.rank() == 0:
        Path(task.path).write_text(json.dumps(rows))
    dist.destroy_process_group()
    hvd.shutdown()


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Any]:
    """The first of so many hosts on this machine."""
    from tests.support.hosts import Bed, available

    if missing := available():
        raise SystemExit(f"there can be no hosts here: {missing}")
    with Bed([f"h{number}" for number in range(1, count + 1)]) as bed:
        yield bed["h1"]


def measured(task: Task, layout: str, timeout: float) -> list[dict[str, Any]]:
    """Run the job; return its rows."""
    number, ranks = (int(part) for part in layout.split("x"))
    where = ",".join(f"h{host}:{ranks}" for host in range(1, number + 1))
    command = [sys.executable, "-m", "hvdgloo.runner", "-H", where, sys.executable, str(Path(__file__).resolve())]
    with hosts(number) as host:
        done = host.run([*command, "--work", json.dumps(asdict(task))], env={"OMP_NUM_THREADS": "1"}, timeout=timeout)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    rows: list[dict[str, Any]] = json.loads(Path(task.path).read_text())
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the least figures of each way, and what they are of full precision's."""
    shown = None
    for row in rows:
        least = {figure: min(row[figure]) for figure in FIGURES}
        its = {r["way"]: r for r in rows if (r["case"], r["rate"]) == (row["case"], row["rate"])}
        standard = "full" if "full" in its else "alone"
        beside = its[standard]
        of_it = {figure: least[figure] / min(beside[figure]) for figure in ("seconds", "processor", "sent")}
        if (row["case"], row["rate"]) != shown:
            shown = row["case"], row["rate"]
            print(f"{row['case']} at {row['rate']}; in brackets of {standard}:")
        line = (
            f"  {row['way']:22s} {least['seconds']:8.3f} s ({of_it['seconds']:.2f})   processor "
            f"{least['processor'] * 1e3:6.0f} ms ({of_it['processor']:.2f})   sent {least['sent'] / 1e6:7.2f} MB "
            f"({of_it['sent']:.3f})"
        )
        if least["codec"]:
            line += f"   codec {least['codec'] * 1e3:.0f} ms ({least['codec'] / min(beside['processor']):.2f})"
        if "alone" in its and row["way"] != "alone":
            line += f"   {min(its['alone']['seconds']) / least['seconds']:.0%} of the speed alone"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit", help="of each host's link (default: %(default)s)")
    parser.add_argument("--layout", default="2x2", help="hosts x ranks on each (default: %(default)s)")
    parser.add_argument("--only", default=",".join(CASES), help="what to measure (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=102.2, help="of the tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small networks once, to see that it works")
    parser.add_argument("--timeout", type=float, default=3600.0, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write each round's figures into a file")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Task(**json.loads(given.work)))
        return
    cases = tuple(given.only.split(","))
    if unknown := set(cases) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            rates=tuple(given.rates.split(",")),
            cases=cases,
            nbytes=(4 << 20) if given.quick else int(given.megabytes * 1e6),
            width=16 if given.quick else 64,
            pause=0.02 if given.quick else PAUSE,
            rounds=1 if given.quick else given.rounds,
            path=f"{folder}/rows.json",
        )
        rows = measured(task, given.layout, given.timeout)
    show(rows)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
