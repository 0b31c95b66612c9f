"""Gloo among many hosts: an allreduce round a ring against one through the cube, and what the connections cost.

    python benchmarks/hosts.py [--ranks 8,32,128] [--sizes 4096,65536,1048576,4194304] [--rounds 7] [--json FILE]

Every rank is a thread of this process with a real group of one rank for each host, over loopback, without the engine.
The two ways alternate; results are checked. Processor time is this process's, divided by the ranks: what a rank costs
its host, except that on a real host its threads do not compete with all others' for one interpreter. Wall time
means little where so many ranks share the cores. Sockets are counted after the allreduces, the listener included, and
again after an alltoall in groups of at most ``--mesh`` ranks; threads, without the benchmark's own; bytes are what
the rendezvous store sent to a rank on average until it was connected.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hvdgloo._backends.base import Work
from hvdgloo._backends.gloo import GlooBackend
from hvdgloo._backends.process_group import ProcessGroupBackend
from hvdgloo.rendezvous import MemoryStore
from hvdgloo.types import Buffer, ReduceOp


class CountingStore(MemoryStore):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self._counting = threading.Lock()
        self.nbytes = 0

    def get_many(self, keys: Sequence[str], *, timeout: float) -> list[bytes]:
        values = super().get_many(keys, timeout=timeout)
        with self._counting:
            self.nbytes += sum(map(len, values))
        return values


def entries(folder: str) -> int:
    """Return the number of this process's descriptors that are sockets, or of its threads."""
    if folder == "task":
        return len(os.listdir("/proc/self/task"))
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue
    return found


def finish(work: Work) -> None:
    while not work.completes_within(10.0):
        pass


def round_the_ring(backend: GlooBackend, buffer: Buffer) -> Work:
    return ProcessGroupBackend.allreduce(backend, buffer, ReduceOp.SUM)


def through_the_cube(backend: GlooBackend, buffer: Buffer) -> Work:
    return backend._through_cube("allreduce", lambda cube: cube.allreduce(buffer, ReduceOp.SUM), buffer)


WAYS = {"ring": round_the_ring, "cube": through_the_cube}


def measure(ranks: int, sizes: Sequence[int], rounds: int, mesh: int) -> dict[str, Any]:
    """One group's figures: milliseconds of each round by size and way."""
    store = CountingStore()
    with ThreadPoolExecutor(ranks) as pool:
        started = threading.Barrier(ranks)
        list(pool.map(lambda _: started.wait(60), range(ranks)))  # a pool starts no thread while one is idle
        sockets, threads, begin = entries("fd"), entries("task"), time.process_time()
        backends = list(pool.map(lambda rank: GlooBackend(store, "x/", rank, ranks, "127.0.0.1", 300), range(ranks)))
        figures: dict[str, Any] = {
            "connecting_cpu_ms": 1e3 * (time.process_time() - begin) / ranks,
            "store_bytes": store.nbytes / ranks,
            "sizes": {},
        }
        for size in sizes:
            tensors = [np.empty(size // 4, np.float32) for _ in range(ranks)]
            times: dict[str, dict[str, list[float]]] = {way: {"cpu_ms": [], "wall_ms": []} for way in WAYS}
            for turn in range(rounds + 1):
                for way in sorted(WAYS, reverse=turn % 2 == 1):
                    spent = once(pool, WAYS[way], backends, tensors)
                    if turn:
                        for name, value in spent.items():
                            times[way][name].append(value)
            figures["sizes"][size] = times
        figures["sockets"] = (entries("fd") - sockets) / ranks
        figures["threads"] = (entries("task") - threads) / ranks
        if ranks <= mesh:
            ones = [1] * ranks

            def exchange(backend: GlooBackend) -> None:
                own, whole = np.zeros(ranks, np.uint8), np.zeros(ranks, np.uint8)
                finish(backend.alltoall(Buffer.of_array(own), Buffer.of_array(whole), ones, ones))

            list(pool.map(exchange, backends))
            figures["sockets_after_alltoall"] = (entries("fd") - sockets) / ranks
        for backend in backends:
            backend.close()
    return figures


def once(
    pool: ThreadPoolExecutor,
    way: Callable[[GlooBackend, Buffer], Work],
    backends: Sequence[GlooBackend],
    tensors: Sequence[Any],
) -> dict[str, float]:
    """One allreduce of all ranks; milliseconds of each rank's processor, and of the clock."""
    for tensor in tensors:
        tensor.fill(1)
    cpu, wall = time.process_time(), time.perf_counter()
    list(pool.map(lambda backend, tensor: finish(way(backend, Buffer.of_array(tensor))), backends, tensors))
    spent = {
        "cpu_ms": 1e3 * (time.process_time() - cpu) / len(backends),
        "wall_ms": 1e3 * (time.perf_counter() - wall),
    }
    for tensor in tensors:
        if not (tensor == len(backends)).all():
            raise SystemExit("a sum is wrong")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,32,128", help="of each group (default: 8,32,128; at least 6)")
    parser.add_argument(
        "--sizes", default="4096,65536,1048576,4194304", help="bytes (default: 4096,65536,1048576,4194304)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mesh", type=int, default=32, help="ranks of the largest group that also does an alltoall")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    results = {}
    for ranks in map(int, given.ranks.split(",")):
        figures = results[ranks] = measure(
            ranks, [int(size) for size in given.sizes.split(",")], given.rounds, given.mesh
        )
        after = figures.get("sockets_after_alltoall")
        print(
            f"{ranks} ranks: {figures['sockets']:.1f} sockets of each"
            + (f" ({after:.1f} after an alltoall)" if after is not None else "")
            + f", {figures['threads']:.1f} threads, {figures['store_bytes']:.0f} bytes read from the store, "
            f"{figures['connecting_cpu_ms']:.1f} ms of processor time to connect"
        )
        for size, ways in figures["sizes"].items():
            cells = [
                f"{way} {statistics.median(times['cpu_ms']):.2f} (least {min(times['cpu_ms']):.2f}) ms, "
                f"wall {statistics.median(times['wall_ms']):.0f} ms"
                for way, times in ways.items()
            ]
            print(f"  {size} bytes, processor time of a rank: {'; '.join(cells)}", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # groups of many ranks take long to end one after another
