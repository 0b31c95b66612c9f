"""How long a job's rendezvous takes: N simulated workers do all that a worker does, with authentication on.

Each worker has a client of its own, registers, publishes one value of the size that Gloo publishes when it connects
lazily (154 bytes), and gets everyone's. Server and workers run on this one machine, the workers as threads of a few
processes, so the time is mostly the machine's own: N workers on N hosts share only the server.

Targets on 2 cores: 256 workers within 2 s, 1,024 within 8 s, at most 4 requests per worker whatever N is.

    python benchmarks/rendezvous.py 256 1024
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from hvdgloo.rendezvous import RendezvousClient, RendezvousServer, WorkerInfo, generate_secret

GLOO_VALUE_BYTES = 154
WORKERS_PER_HOST = 8
TIMEOUT = 120.0


def worker(endpoint: str, secret: bytes, place: int, size: int, host: str) -> float:
    """All that one worker does; returns when its registration was answered (monotonic seconds)."""
    with RendezvousClient(endpoint, secret) as client:
        address = client.local_address(timeout=TIMEOUT)
        info = WorkerInfo(None, place, host, host, address, 1024 + place, os.getpid())
        registration = client.register(0, info, timeout=TIMEOUT)
        registered = time.monotonic()
        store = client.store("gloo", timeout=TIMEOUT)
        store.set(f"0/{registration.rank}", bytes([registration.rank % 256]) * GLOO_VALUE_BYTES)
        values = store.get_many([f"0/{rank}" for rank in range(size)])
        assert registration.rank == place
        assert [value[0] for value in values] == [rank % 256 for rank in range(size)]
        return registered


def workers(endpoint: str, secret: bytes, places: Sequence[int], size: int, pipe: Connection) -> None:
    """One process: a thread for each of its workers."""
    registered: list[float] = []
    failures: list[BaseException] = []

    def run(place: int) -> None:
        try:
            registered.append(worker(endpoint, secret, place, size, f"host{place // WORKERS_PER_HOST}"))
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
        pipe.send(server.endpoint)
        pipe.recv()
        pipe.send((server.requests_served, time.process_time()))


def measure(size: int, processes: int) -> bool:
    """One rendezvous of ``size`` workers; prints a line, returns whether all went well."""
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
    requests, cpu = ours.recv()
    for child in (*children, server):
        child.join()
    failures = sum(failed for failed, _ in results)
    registered = max(last for _, last in results) - started
    print(
        f"{size:5d} workers: {elapsed:6.2f} s (all registered after {registered:.2f} s), "
        f"{requests / size:.2f} requests per worker, server {cpu:.2f} s CPU, {failures} failures"
    )
    return bool(failures == 0 and requests <= 4 * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[256, 1024], help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--processes", type=int, default=16, help="processes that hold the workers' threads")
    options = parser.parse_args()
    results = [measure(size, options.processes) for size in options.sizes for _ in range(options.rounds)]
    if not all(results):
        raise SystemExit("some workers failed, or made more than 4 requests")


if __name__ == "__main__":
    main()
