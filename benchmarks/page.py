"""The cost of a job's observers for its launcher: processor time for each second, by ranks and browsers.

    python benchmarks/page.py [--cases 4x1,64x10,1024x1,1024x100] [--seconds 10]

A simulated job of so many ranks says something of each rank every second; so many readers follow it live, in a process
of their own. "page" is the processor time of the server, in milliseconds for each second of the job; "observatory" the
same for the source that it reads from, simulation included. Then: what a reader gets for each second, and the time to
answer a request for the whole job (the least of ten).
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import selectors
import socket
import time
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

from hvdgloo._observe.page.page import Page
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._page_server.server import PageServer
from tests.support.observed import SimulatedJob

_SECRET = bytes(range(32))
_TOKEN = auth.status_token(_SECRET)
_PAST = 120  # seconds that the job has been running


def follow(host: str, port: int, readers: int, ended: Event, total: multiprocessing.Queue[int]) -> None:
    """Read live events over so many connections, and say in the end how many bytes came after the first second."""
    request = f"GET /events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {_TOKEN}\r\n\r\n".encode()
    received = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(readers):
            connection = socket.create_connection((host, port))
            connection.sendall(request)
            selector.register(connection, selectors.EVENT_READ)
        begin = time.monotonic() + 1.0
        while not ended.is_set():
            for key, _ in selector.select(0.1):
                assert isinstance(key.fileobj, socket.socket)
                count = len(key.fileobj.recv(1 << 20))
                received += count if time.monotonic() >= begin else 0
    total.put(received)


def ask(host: str, port: int) -> float:
    """Seconds that the whole job takes to be answered."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    began = time.perf_counter()
    connection.request("GET", "/v1/job", headers={"Authorization": f"Bearer {_TOKEN}"})
    connection.getresponse().read()
    took = time.perf_counter() - began
    connection.close()
    return took


def measure(ranks: int, readers: int, seconds: int) -> str:
    job = SimulatedJob(ranks=ranks, hosts=max(1, ranks // 8), slow=min(3, ranks - 1))
    job.advance(_PAST)
    with PageServer(Page(job.observatory), secret=_SECRET) as server:
        host, port = urlsplit(server.address).hostname or "", urlsplit(server.address).port or 0
        answer = min(ask(host, port) for _ in range(10))
        context = multiprocessing.get_context("spawn")
        ended, total = context.Event(), context.Queue()
        process = context.Process(target=follow, args=(host, port, readers, ended, total))
        process.start()
        while server.watchers < readers:
            time.sleep(0.05)
        time.sleep(2)
        own, began, used = 0.0, time.monotonic(), time.process_time()
        for second in range(seconds):
            before = time.thread_time()
            job.advance()
            own += time.thread_time() - before
            time.sleep(max(0.0, began + second + 1 - time.monotonic()))
        used = time.process_time() - used
        ended.set()
        received = total.get() / readers / seconds
        process.join()
    page, observatory = 1e3 * (used - own) / seconds, 1e3 * own / seconds
    return f"{ranks:>6}{readers:>9}{page:>10.1f}{observatory:>13.1f}{received / 1e3:>12.1f}{1e3 * answer:>12.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="4x1,64x10,1024x1,1024x100", help="RANKSxREADERS, ...")
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    print(" ranks  readers  page ms/s  observatory  kB/s each  job in ms")
    for case in options.cases.split(","):
        ranks, readers = map(int, case.split("x"))
        print(measure(ranks, readers, options.seconds), flush=True)


if __name__ == "__main__":
    main()
