"""The cost of a job's rendezvous for its server: N simulated workers do all that a worker does, with authentication on.

Each worker has a connection of its own, registers, publishes one value of the size that Gloo publishes when it connects
lazily (154 bytes), gets its neighbours' in a ring and a hypercube of all ranks, says that it has connected, and
waits for rank 0, which asks whether all have. Every request is signed as a client signs it, and every answer's
signature is verified.

The workers are generators in one process with one selector, so that thousands of them cost less than the server does. N
workers on N hosts would share only the server: what counts is the processor time of the server's process.

Targets: 2 s of the server's processor time for 1,024 workers, 10 s for 4,096; at most 6 requests per worker, whatever
their number.

    python benchmarks/rendezvous.py 1024 4096
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import selectors
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo.config import parse_endpoint
from hvdgloo.rendezvous import RendezvousServer, WorkerInfo, generate_secret
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous import _messages as messages

GLOO_VALUE_BYTES = 154
WORKERS_PER_HOST = 8
TIMEOUT = 120.0
POLL = 45.0  # seconds, as a client's longest wait

Request = tuple[str, str, bytes]
Answer = tuple[int, bytes]
Script = Generator[Request, Answer, None]


def neighbours(rank: int, size: int) -> list[int]:
    """With whom a rank of a large Gloo group connects at first."""
    ring = {(rank - 1) % size, (rank + 1) % size}
    cube = {rank ^ distance for distance in (1 << bit for bit in range(size.bit_length()))}
    return sorted(peer for peer in ring | cube if peer < size and peer != rank)


def until_there(method: str, target: str, body: bytes, pending: int) -> Generator[Request, Answer, bytes]:
    """A call that the server holds back, repeated as long as it says ``pending``."""
    while True:
        status, answer = yield method, target, body
        if status == 200:
            return answer
        assert status == pending, (status, answer)


@dataclass
class Job:
    """The shared state of the simulated workers.

    Attributes:
        registered: monotonic seconds of the last answer to a registration.
        topology: the packed one that all are told; the same for each.
    """

    size: int
    secret: bytes
    registered: float = 0.0
    topology: bytes = b""

    def script(self, worker: Worker) -> Script:
        """All that one worker asks for, as a client does it."""
        place, size = worker.place, self.size
        host = place // WORKERS_PER_HOST
        status, hello = yield "GET", "/v1/hello", b""
        assert status == 200, (status, hello)
        worker.run = json.loads(hello)["run"]
        address, port = f"10.0.{host >> 8}.{host & 255}", 0 if place % WORKERS_PER_HOST else 32768 + host
        info = WorkerInfo(None, place, f"host{host}", f"{host:016x}", address, port, 40000 + 7 * host + place)
        body = json.dumps(info.to_dict(), separators=(",", ":")).encode()
        placed = yield from until_there("POST", f"/v1/epochs/0/workers?timeout={POLL:.3f}", body, 202)
        self.registered = time.monotonic()
        if not self.topology:
            rank, topology = messages.unpack_placed(placed)
            assert topology.size == size
            assert topology.workers[rank].pid == info.pid
            self.topology = placed[-len(messages.pack_topology(topology)) :]
        assert placed == messages.pack_placed(place, self.topology)
        yield from self._set(f"0/{place}", bytes([place % 256]) * GLOO_VALUE_BYTES)
        peers = neighbours(place, size)
        values = yield from self._get_many([f"0/{rank}" for rank in peers])
        assert [value[0] for value in values] == [rank % 256 for rank in peers]
        yield from self._set(f"met/{place}", b"\1")
        if place == 0:
            yield from self._get_many([f"met/{rank}" for rank in range(size)])
            yield from self._set("agreed", b"\1")
        else:
            yield from until_there("GET", f"/v1/kv/gloo/agreed?timeout={POLL:.3f}", b"", 404)

    @staticmethod
    def _set(key: str, value: bytes) -> Generator[Request, Answer, None]:
        status, answer = yield "PUT", f"/v1/kv/gloo/{key.replace('/', '%2F')}", value
        assert status == 204, (status, answer)

    @staticmethod
    def _get_many(keys: list[str]) -> Generator[Request, Answer, list[bytes]]:
        target = f"/v1/kv/gloo?op=get&timeout={POLL:.3f}"
        return messages.unpack_values((yield from until_there("POST", target, messages.pack_keys(keys), 404)))


@dataclass
class Worker:
    """One simulated worker: its connection, what it does, and the request that is under way."""

    place: int
    sock: socket.socket
    signer: auth.Signer
    run: str = ""
    client: str = field(default_factory=auth.generate_id)
    counter: int = -1
    received: bytearray = field(default_factory=bytearray)

    def send(self, request: Request) -> None:
        method, target, body = request
        self.counter += 1
        credentials = self.signer.sign(method, target, auth.digest(body), self.run, self.client, self.counter)
        data = (
            f"{method} {target} HTTP/1.1\r\nHost: rendezvous\r\nAuthorization: {credentials.header()}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.sock.settimeout(TIMEOUT)  # rank 0's list of all keys may not fit into the socket's buffer
        self.sock.sendall(data)
        self.sock.setblocking(False)

    def answer(self) -> Answer | None:
        """The answer, if all of it has arrived and its signature is right."""
        data = self.sock.recv(1 << 20)
        if not data:
            raise ConnectionError("the server has closed the connection")
        self.received += data
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return None
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        if len(body) < int(headers.get("content-length", 0)):
            return None
        self.received.clear()
        status = int(lines[0].split()[1])
        signature, answered = headers.get(auth.ANSWER_HEADER.lower(), ""), bytes(body)
        if not self.signer.verify_answer(signature, self.run, self.client, self.counter, status, auth.digest(answered)):
            raise ConnectionError(f"status {status}, not signed: {answered[:200]!r}")
        return status, answered


def simulate(endpoint: str, job: Job) -> int:
    """All workers of a job, from the first connection to the last answer; returns how many failed."""
    reserve_descriptors(job.size, "the benchmark", "its workers' connections")
    selector, signer, failures = selectors.DefaultSelector(), auth.Signer(job.secret), 0
    for place in range(job.size):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(parse_endpoint(endpoint))
        worker = Worker(place, sock, signer)
        selector.register(sock, selectors.EVENT_WRITE, (worker, job.script(worker)))
    deadline = time.monotonic() + TIMEOUT
    while selector.get_map():
        ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready and time.monotonic() >= deadline:
            print(f"{len(selector.get_map())} workers are not through after {TIMEOUT:.0f} s", flush=True)
            return failures + len(selector.get_map())
        for key, events in ready:
            worker, script = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    selector.modify(worker.sock, selectors.EVENT_READ, key.data)
                    worker.send(next(script))
                elif (answer := worker.answer()) is not None:
                    worker.send(script.send(answer))
            except (StopIteration, AssertionError, OSError, ValueError) as end:
                selector.unregister(worker.sock)
                worker.sock.close()
                if not isinstance(end, StopIteration):
                    print(f"worker {worker.place}: {type(end).__name__}: {end}", flush=True)
                    failures += 1
    return failures


def serve(secret: bytes, size: int, pipe: Connection) -> None:
    """The server's process: serves until told to stop, then says how many requests it had and what it used."""
    with RendezvousServer(secret=secret, size=size, start_timeout=TIMEOUT) as server:
        begun = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(server.endpoint)
        pipe.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(
            {
                "requests": server.requests_served,
                "user": used.ru_utime - begun.ru_utime,
                "system": used.ru_stime - begun.ru_stime,
                "switches": used.ru_nvcsw - begun.ru_nvcsw,
                "mib": used.ru_maxrss / 1024,
            }
        )


def measure(size: int) -> dict[str, float]:
    """One rendezvous of ``size`` workers; prints a line, and returns what is in it."""
    context = multiprocessing.get_context("spawn")
    job = Job(size, generate_secret())
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(job.secret, size, theirs))
    server.start()
    endpoint = ours.recv()
    started, used = time.monotonic(), time.process_time()
    failures = simulate(endpoint, job)
    elapsed, simulation = time.monotonic() - started, time.process_time() - used
    ours.send("stop")
    result: dict[str, float] = ours.recv()
    server.join()
    result |= {"workers": size, "elapsed": elapsed, "failures": failures, "cpu": result["user"] + result["system"]}
    print(
        f"{size:5d} workers: {elapsed:6.2f} s (all registered after {job.registered - started:.2f} s), "
        f"{result['requests'] / size:.2f} requests per worker, server {result['cpu']:.2f} s CPU "
        f"({result['system']:.2f} s of it in the kernel), {result['switches'] / result['requests']:.1f} waits per "
        f"request, {result['mib']:.0f} MiB, {failures} failures; simulation {simulation:.2f} s",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, default=[1024, 4096], help="numbers of workers")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = [measure(size) for size in options.sizes for _ in range(options.rounds)]
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    if not all(one["failures"] == 0 and one["requests"] <= 6 * one["workers"] + 1 for one in results):
        raise SystemExit("some workers failed, or made more than 6 requests")


if __name__ == "__main__":
    main()
