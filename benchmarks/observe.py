"""The cost of observing: steps that are counted and steps that are not, in turns.

    python benchmarks/observe.py [--np 2] [--seconds 30] [--steps 4] [--network mlp] [--json FILE]

One job trains, and has a reader that takes its samples, as an agent does for a page. In blocks of a few steps, all
ranks count by turns or do not (as with HVDGLOO_OBSERVE=0). The time of a block is the slowest rank's. Printed are
medians of a step, of the ratios of neighbouring blocks' times and processor times, with the interval in which the
median lies with a probability of 95 %; and what a rank's samples cost, of which there is one per second. "small" is no
network but allreduces of 4 bytes, one after another.

    python benchmarks/observe.py --idle [--seconds 20]

shows the processor time of ranks that have trained, and then do nothing, per second, in three jobs: one is looked at,
one only counts, one has HVDGLOO_OBSERVE=0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
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

from pairs import described

import hvdgloo.run

KINDS = ("looked at", "counts", "off")
IDLE_AFTER = 15.0
"""Seconds without anything to do, after which a rank is idle."""


def trainer(network: str, hvd: Any) -> Callable[[], None]:
    """Return a function that makes one step."""
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


class Switch:
    """Has one rank count, or not, from the next operation on; all ranks are to change between two operations."""

    def __init__(self) -> None:
        from hvdgloo._job import process

        self._engine = engine = process.current().engine
        self._counters = engine.counters
        self._lateness = engine.counters.lateness if engine.counters is not None else None

    def turn(self, *, on: bool) -> None:
        engine = self._engine
        counters = self._counters if on else None
        engine.counters = engine._member._counters = engine._executor._counters = engine._control._counters = counters
        if engine._coordinator is not None:
            engine._coordinator._negotiator.lateness = self._lateness if on else None


def blocks(network: str, seconds: float, steps: int, folder: str) -> dict[str, Any]:
    """One rank's figures: of every pair of blocks the seconds and processor seconds of a step, counted and not."""
    import torch

    from hvdgloo._observe.reporter import Reporter

    if os.environ["HVDGLOO_RANK"] == "0":
        os.environ["HVDGLOO_OBSERVER"] = observer(folder)  # before init(), instead of the agent's
    looks: list[float] = []
    look = Reporter._look

    def timed(self: Reporter, now: float, *, last: bool = False) -> bool:
        begun = time.thread_time()
        works = look(self, now, last=last)
        looks.append(time.thread_time() - begun)
        return works

    Reporter._look = timed  # type: ignore[method-assign]
    import hvdgloo.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    step = trainer(network, hvd)
    switch = Switch()

    def block(count: int) -> tuple[float, float]:
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        return (time.perf_counter() - begun) / count, (time.process_time() - used) / count

    block(steps + 1)
    pairs: list[tuple[float, ...]] = []
    end = time.monotonic() + seconds
    while hvd.broadcast_object(time.monotonic() < end, name="more"):
        found = {}
        for on in (True, False) if len(pairs) % 2 else (False, True):
            hvd.barrier()
            switch.turn(on=on)
            hvd.barrier()
            block(1 + steps // 10)  # caches, and what the barrier has left, count for neither
            found[on] = block(steps)
        pairs.append((*found[True], *found[False]))
    switch.turn(on=True)
    hvd.shutdown()
    return {"pairs": pairs, "looks": looks}


def compare(network: str, size: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    """Print what counting costs; returns all ranks' figures."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = hvdgloo.run.run(blocks, args=(network, seconds, steps, folder), np=size)
    slowest = [
        [max(values) for values in zip(*pair, strict=True)] for pair in zip(*(r["pairs"] for r in ranks), strict=True)
    ]
    counted, counted_cpu, off, off_cpu = zip(*slowest, strict=True)
    for what, with_it, without in (("step", counted, off), ("processor time", counted_cpu, off_cpu)):
        more = statistics.median(ours - others for ours, others in zip(with_it, without, strict=True))
        ratio = described([ours / others for ours, others in zip(with_it, without, strict=True)])
        print(f"  {what:14} {statistics.median(without) * 1e6:10.1f} us, counted {more * 1e6:+.2f} us; ratio {ratio}")
    looks = [seconds for rank in ranks for seconds in rank["looks"]]
    if looks:
        print(f"  a sample       {statistics.median(looks) * 1e6:10.1f} us of processor time, {len(looks)} taken")
    return ranks


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
    parser.add_argument("--seconds", type=float, default=30.0, help="how long steps or idle ranks are looked at (30)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block (default 4; small: 200 are better)")
    parser.add_argument("--network", default="mlp", help="mlp, conv, transformer or small (default mlp)")
    parser.add_argument("--idle", action="store_true", help="processor time of ranks that do nothing")
    parser.add_argument("--json", help="also write all figures there")
    options = parser.parse_args()
    if options.idle:
        with tempfile.TemporaryDirectory() as folder:
            jobs = Jobs(options.np, options.network, folder)
            found: Any = idle(jobs, options.seconds)
            jobs.end()
    else:
        found = compare(options.network, options.np, options.seconds, options.steps)
    if options.json:
        Path(options.json).write_text(json.dumps(found), encoding="utf-8")


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
