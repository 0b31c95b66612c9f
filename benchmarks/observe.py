"""What observing costs: a job that is looked at, one that nobody looks at, and one that counts nothing, in turns.

    python benchmarks/observe.py [--np 2] [--rounds 30] [--steps 20] [--network mlp] [--json FILE]

Three jobs of the same program exist at the same time, and train by turns: one has an observer that takes its samples,
as an agent does for a page; one only counts; one has HVDGLOO_OBSERVE=0. A round is so many steps of each, in an order
that changes. The time of a round is the slowest rank's; printed are medians of a step, and the median of the rounds'
ratios to the job that counts nothing. "small" is no network but allreduces of 4 bytes, one after another.

    python benchmarks/observe.py --idle [--seconds 20]

shows the processor time of ranks that have trained, and then do nothing, per second, in each of the three.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hvdgloo.run

KINDS = ("looked at", "counts", "off")
IDLE_AFTER = 15.0
"""Seconds without anything to do, after which a rank is idle."""


def trainer(network: str, hvd: Any) -> Callable[[], None]:
    """What makes one step."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    if network == "small":
        tiny = torch.ones(1)
        return lambda: hvd.allreduce_(tiny, op=hvd.Max, name="tiny")
    networks = importlib.import_module("benchmarks.train").networks()
    model, inputs, targets = networks[network]()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return step


def worker(address: str, kind: str, network: str) -> None:
    """Does what it is told: ("steps", n) or ("rest", seconds), each answered with seconds."""
    import torch

    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    step = trainer(network, hvd)
    with Client(address) as connection:
        connection.send((kind, hvd.rank()))
        while (order := connection.recv()) is not None:
            what, amount = order
            if what == "steps":
                hvd.barrier()
                begun = time.perf_counter()
                for _ in range(amount):
                    step()
                connection.send(time.perf_counter() - begun)
            else:
                used = time.process_time()
                time.sleep(amount)
                connection.send(time.process_time() - used)
    hvd.shutdown()


def observer(folder: str) -> str:
    """A socket that takes samples, and a thread that reads them."""
    path = os.path.join(folder, "agent")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(path)

    def read() -> None:
        while True:
            sock.recv(1 << 18)

    threading.Thread(target=read, daemon=True).start()
    return path


class Jobs:
    """The three jobs, whose ranks wait for orders.

    Args:
        size: ranks of each.
        network: what they train.
        folder: for sockets.
    """

    def __init__(self, size: int, network: str, folder: str) -> None:
        address = os.path.join(folder, "orders")
        path = observer(folder)
        extra: dict[str, dict[str, str]] = {
            "looked at": {"HVDGLOO_BENCHMARK_OBSERVER": path},
            "counts": {},
            "off": {"HVDGLOO_OBSERVE": "0"},
        }
        self._ranks: dict[str, dict[int, Connection]] = {kind: {} for kind in KINDS}
        self._threads = []
        with Listener(address, backlog=len(KINDS) * size) as listener:
            for kind in KINDS:
                arguments = {"np": size, "env": {**os.environ, **extra[kind]}}
                thread = threading.Thread(
                    target=hvdgloo.run.run, args=(_observed(worker), (address, kind, network)), kwargs=arguments
                )
                thread.start()
                self._threads.append(thread)
            for _ in range(len(KINDS) * size):
                connection = listener.accept()
                kind, rank = connection.recv()
                self._ranks[kind][rank] = connection

    def order(self, kind: str, what: str, amount: float) -> list[float]:
        """Have all ranks of a job do something; their answers."""
        ranks = self._ranks[kind].values()
        for connection in ranks:
            connection.send((what, amount))
        return [connection.recv() for connection in ranks]

    def end(self) -> None:
        for ranks in self._ranks.values():
            for connection in ranks.values():
                connection.send(None)
        for thread in self._threads:
            thread.join()


def _observed(function: Callable[..., None]) -> Callable[..., None]:
    """A worker that reports to the benchmark's socket, if it is told of one, instead of its agent's."""

    def call(*arguments: Any) -> None:
        path = os.environ.pop("HVDGLOO_BENCHMARK_OBSERVER", "")
        if path:
            os.environ["HVDGLOO_OBSERVER"] = path
        function(*arguments)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--np", type=int, default=2, help="ranks of each job (default 2)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default 30)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default 20)")
    parser.add_argument("--network", default="mlp", help="mlp, conv, transformer or small (default mlp)")
    parser.add_argument("--idle", action="store_true", help="processor time of ranks that do nothing")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long they are looked at (default 20)")
    parser.add_argument("--json", help="also write all figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(options.np, options.network, folder)
        found = idle(jobs, options.seconds) if options.idle else rounds(jobs, options.rounds, options.steps)
        jobs.end()
    if options.json:
        Path(options.json).write_text(json.dumps(found), encoding="utf-8")


def rounds(jobs: Jobs, count: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step in each round by kind; printed."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(count + 2):
        order = random.sample(KINDS, len(KINDS))
        for kind in order:
            seconds = max(jobs.order(kind, "steps", steps)) / steps
            if turn >= 2:
                times[kind].append(seconds)
    for kind in KINDS:
        ratios = [ours / off for ours, off in zip(times[kind], times["off"], strict=True)]
        step = statistics.median(times[kind]) * 1e3
        print(f"  {kind:10} {step:9.3f} ms a step, {100 * (statistics.median(ratios) - 1):+.2f} % of one that is off")
    return times


def idle(jobs: Jobs, seconds: float) -> dict[str, list[float]]:
    """Share of a core that each idle rank uses, by kind; printed."""
    shares: dict[str, list[float]] = {}
    for kind in KINDS:
        jobs.order(kind, "steps", 5)
    time.sleep(IDLE_AFTER)
    for kind in KINDS:
        shares[kind] = [used / seconds for used in jobs.order(kind, "rest", seconds)]
        print(f"  {kind:10} {100 * max(shares[kind]):.4f} % of a core")
    return shares


if __name__ == "__main__":
    main()
