"""What a job's rendezvous costs its server: N simulated workers do all that a worker does, with authentication on.

Each worker has a client of its own, registers, publishes one value of the size that Gloo publishes when it connects
lazily (154 bytes), gets those of its neighbours in a ring and a hypercube of all ranks, says that it has connected, and
waits for rank 0, which asks whether all have. Server and workers run on this one machine, the workers as threads of a
few processes, so the time is mostly the machine's own: N workers on N hosts share only the server, and what counts is
its processor time.

Targets: 2 s of the server's processor time for 1,024 workers, 10 s for 4,096; at most 6 requests per worker, whatever
their number.

    python benchmarks/rendezvous.py 1024 4096
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from hvdgloo.rendezvous import RendezvousClient, RendezvousServer, WorkerInfo, generate_secret

GLOO_VALUE_BYTES = 154
WORKERS_PER_HOST = 8
TIMEOUT = 120.0


def neighbours(rank: int, size: int) -> list[int]:
    """With whom a rank of a large Gloo group connects at first."""
    ring = {(rank - 1) % size, (rank + 1) % size}
    cube = {rank ^ distance for distance in (1 << bit for bit in range(size.bit_length()))}
    return sorted(peer for peer in ring | cube if peer < size and peer != rank)


def worker(endpoint: str, secret: bytes, place: int, size: int) -> float:
    """All that one worker does; returns when its registration was answered (monotonic seconds)."""
    host, address = (
        place // WORKERS_PER_HOST,
        f"10.0.{place // WORKERS_PER_HOST >> 8}.{place // WORKERS_PER_HOST & 255}",
    )
    with RendezvousClient(endpoint, secret, connect_timeout=TIMEOUT) as client:
        client.local_address(timeout=TIMEOUT)
        port = 0 if place % WORKERS_PER_HOST else 32768 + host
        identity = f"{host:016x}"
        info = WorkerInfo(None, place, f"host{host}", identity, address, port, 40000 + 7 * host + place)
        registration = client.register(0, info, timeout=TIMEOUT)
        registered = time.monotonic()
        assert (registration.rank, registration.topology.size) == (place, size)
        assert registration.topology.workers[place].pid == info.pid
        store = client.store("gloo", timeout=TIMEOUT)
        store.set(f"0/{place}", bytes([place % 256]) * GLOO_VALUE_BYTES)
        peers = neighbours(place, size)
        values = store.get_many([f"0/{rank}" for rank in peers])
        assert [value[0] for value in values] == [rank % 256 for rank in peers]
        store.set(f"met/{place}", b"\1")
        if place == 0:
            store.get_many([f"met/{rank}" for rank in range(size)])
            store.set("agreed", b"\1")
        else:
            store.get("agreed")
        return registered


def workers(endpoint: str, secret: bytes, places: Sequence[int], size: int, pipe: Connection) -> None:
    """One process: a thread for each of its workers."""
    registered: list[float] = []
    failures: list[BaseException] = []

    def run(place: int) -> None:
        try:
            registered.append(worker(endpoint, secret, place, size))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(place,)) for place in places]
    pipe.send("ready")
    pipe.recv()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((len(failures), max(registered, default=0.0)))


def serve(secret: bytes, size: int, pipe: Connection) -> None:
    """The server's process: serves until told to stop, then says how many requests it had and what it used."""
    with RendezvousServer(secret=secret, size=size, start_timeout=TIMEOUT) as server:
        begun = time.process_time()
        pipe.send(server.endpoint)
        pipe.recv()
        cpu = time.process_time() - begun
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send((server.requests_served, cpu, memory))


def measure(size: int, processes: int) -> dict[str, float]:
    """One rendezvous of ``size`` workers; prints a line, and returns what is in it."""
    context = multiprocessing.get_context("spawn")
    secret = generate_secret()
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(secret, size, theirs))
    server.start()
    endpoint = ours.recv()
    pipes, children = [], []
    for index in range(processes):
        mine, its = context.Pipe()
        child = context.Process(target=workers, args=(endpoint, secret, range(size)[index::processes], size, its))
        child.start()
        mine.recv()
        pipes.append(mine)
        children.append(child)
    started = time.monotonic()
    for pipe in pipes:
        pipe.send("go")
    results = [pipe.recv() for pipe in pipes]
    elapsed = time.monotonic() - started
    ours.send("stop")
    requests, cpu, memory = ours.recv()
    for child in (*children, server):
        child.join()
    failures = sum(failed for failed, _ in results)
    registered = max(last for _, last in results) - started
    print(
        f"{size:5d} workers: {elapsed:6.2f} s (all registered after {registered:.2f} s), "
        f"{requests / size:.2f} requests per worker, server {cpu:.2f} s CPU, {memory:.0f} MiB, {failures} failures",
        flush=True,
    )
    return {"workers": size, "elapsed": elapsed, "requests": requests, "cpu": cpu, "mib": memory, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[1024, 4096], help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--processes", type=int, default=16, help="processes that hold the workers' threads")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = [measure(size, options.processes) for size in options.sizes for _ in range(options.rounds)]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    if not all(one["failures"] == 0 and one["requests"] <= 6 * one["workers"] + 1 for one in results):
        raise SystemExit("some workers failed, or made more than 6 requests")


if __name__ == "__main__":
    main()
