"""The rendezvous server at its work: waiting, gathering workers, listening."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdgloo.errors import ConfigError, RendezvousError, RendezvousTimeoutError
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from tests.support.launching import run_command
from tests.support.rendezvous import SECRET, RawClient, info, until
from tests.support.threads import Task


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(secret=SECRET, hosts=[("h1", 2), ("h2", 1)]) as server:
        yield server


@pytest.fixture
def raw(server: RendezvousServer) -> RawClient:
    return RawClient(server.endpoint, server.status()["run"])


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.endpoint, SECRET) as client:
        yield client


WORKERS = "/v1/epochs/0/workers?timeout=0"
WORKER = json.dumps(info(rank=0).to_dict()).encode()


class TestWaiting:
    def test_stop_ends_long_polls_within_a_second(self) -> None:
        server = RendezvousServer(secret=SECRET, size=20).start()
        with RendezvousClient(server.endpoint, SECRET) as client:
            keys = [Task(lambda: client.store("s").get("k", timeout=60)) for _ in range(10)]
            clients = [RendezvousClient(server.endpoint, SECRET) for _ in range(10)]
            workers = [Task(lambda c=c: c.register(0, info(), timeout=60)) for c in clients]  # type: ignore[misc]
            until(lambda: server.status()["store"]["waiting_requests"] == 20, "all to wait")
            started = time.monotonic()
            server.stop()
            assert time.monotonic() - started < 1
            for task in keys + workers:
                error = task.failure(2)
                assert isinstance(error, RendezvousError)
                assert "is being stopped" in str(error)
            for other in clients:
                other.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdgloo-rendezvous")]

    def test_starting_and_stopping_leaks_nothing(self) -> None:
        import psutil

        process = psutil.Process()
        for attempt in range(12):
            with RendezvousServer(secret=SECRET, size=1) as server, RendezvousClient(server.endpoint, SECRET) as client:
                client.register(0, info(), timeout=5)
            if attempt == 1:
                threads, descriptors = threading.active_count(), process.num_fds()
        assert threading.active_count() <= threads
        assert process.num_fds() <= descriptors

    def test_more_long_polls_than_threads_do_not_lock_others_out(
        self, raw: RawClient, client: RendezvousClient
    ) -> None:
        """Each of the many is told to come again, and the client does so by itself."""
        waiting = [Task(lambda: client.store("s").get("late", timeout=20)) for _ in range(100)]
        client.store("s").set("other", b"")
        client.store("s").set("late", b"now")
        assert [task.result() for task in waiting] == [b"now"] * 100

    def test_a_client_that_hangs_up_frees_its_thread(self, server: RendezvousServer, raw: RawClient) -> None:
        with raw.connect() as sock:
            sock.sendall(raw.head("GET", "/v1/kv/s/never?timeout=40"))
            until(lambda: server.status()["store"]["waiting_requests"] == 1, "the poll")
        until(lambda: server.status()["store"]["waiting_requests"] == 0, "its end", 2)


class TestGathering:
    def test_all_get_one_topology(self, server: RendezvousServer) -> None:
        with ExitStack() as stack:
            tasks = []
            for rank, host in [(2, "b"), (0, "a"), (1, "a")]:
                client = stack.enter_context(RendezvousClient(server.endpoint, SECRET))
                worker = info(rank=rank, host_identity=host, port=10 + rank, pid=100 + rank)
                tasks.append(Task(lambda c=client, w=worker: c.register(0, w, timeout=10)))  # type: ignore[misc]
            answers = [task.result() for task in tasks]
        assert [answer.rank for answer in answers] == [2, 0, 1]
        assert len({answer.topology for answer in answers}) == 1
        topology = answers[0].topology
        assert [host.name for host in topology.hosts] == ["h1", "h2"]
        assert [(w.host, w.local_rank, w.port, w.pid) for w in topology.workers] == [
            (0, 0, 10, 100),
            (0, 1, 11, 101),
            (1, 0, 12, 102),
        ]

    def test_a_worker_that_never_comes(self) -> None:
        """Pain 20: everyone learns at the deadline how many and which are in, and which ranks are missing."""
        with ExitStack() as stack:
            server = stack.enter_context(
                RendezvousServer(secret=SECRET, hosts=[("h1", 2), ("h2", 2)], start_timeout=0.5)
            )
            clients = [stack.enter_context(RendezvousClient(server.endpoint, SECRET)) for _ in range(4)]
            started = time.monotonic()
            tasks = [
                Task(lambda r=r: clients[r].register(0, info(rank=r), timeout=30))  # type: ignore[misc]
                for r in (0, 1, 3)
            ]
            for task in tasks:
                error = task.failure(5)
                assert isinstance(error, RendezvousTimeoutError)
                assert "epoch 0 did not start: no further worker came for 0.5 s, and 3 of 4 workers are in" in str(
                    error
                )
                assert "(hosts: h1 2 of 2, h2 1 of 2); missing: rank 2" in str(error)
            assert 0.4 < time.monotonic() - started < 2
            with pytest.raises(RendezvousTimeoutError, match="missing: rank 2"):
                clients[2].register(0, info(rank=2), timeout=30)  # too late, and told so at once

    def test_ranks_that_cannot_be_fail_for_all_at_once(self) -> None:
        with RendezvousServer(secret=SECRET, size=3) as server, ExitStack() as stack:
            started = time.monotonic()
            tasks = []
            for rank in range(3):
                client = stack.enter_context(RendezvousClient(server.endpoint, SECRET))
                worker = info(rank=rank, host_identity=str(rank % 2), host_name=f"h{rank % 2}")
                tasks.append(Task(lambda c=client, w=worker: c.register(0, w, timeout=30)))  # type: ignore[misc]
            for task in tasks:
                assert "epoch 0 cannot start: rank 2 is on host h0, but ranks must fill hosts" in str(task.failure(5))
            assert time.monotonic() - started < 5

    def test_ones_own_patience_may_end_first(self, server: RendezvousServer, client: RendezvousClient) -> None:
        started = time.monotonic()
        with pytest.raises(
            RendezvousTimeoutError, match=r"for 0\.3 s, and 1 of 3 workers are in .* missing: rank 0, 2"
        ):
            client.register(0, info(rank=1), timeout=0.3)
        assert time.monotonic() - started < 1.5

    def test_workers_may_come_one_after_the_other(self) -> None:
        """Many on few cores: the first waits longer than its time, and the server's, as others keep coming."""
        with RendezvousServer(secret=SECRET, size=3, start_timeout=1.0) as server, ExitStack() as stack:
            started = time.monotonic()
            tasks = []
            for number in range(3):
                client = stack.enter_context(RendezvousClient(server.endpoint, SECRET))
                until(lambda n=number: time.monotonic() >= started + 0.7 * n, "the next one's time")  # type: ignore[misc]
                tasks.append(Task(lambda c=client: c.register(0, info(), timeout=1.0)))  # type: ignore[misc]
            assert sorted(task.result(5).rank for task in tasks) == [0, 1, 2]
            assert time.monotonic() - started > 1.3

    def test_a_worker_that_dies_before_the_start_loses_its_place(
        self, server: RendezvousServer, raw: RawClient
    ) -> None:
        """The launcher that started it will start it again, as another client."""
        with raw.connect() as sock:
            sock.sendall(raw.head("POST", "/v1/epochs/0/workers?timeout=40", WORKER) + WORKER)
            until(lambda: server.status()["epochs"][0]["arrived"] == 1, "the worker")
        until(lambda: server.status()["epochs"][0]["arrived"] == 0, "its place to be free", 2)
        again = RawClient(server.endpoint, raw.run)
        assert again.request("POST", WORKERS, WORKER)[0] == 202

    def test_one_that_gave_up_and_went_loses_its_place_too(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client, pytest.raises(RendezvousTimeoutError):
            client.register(0, info(rank=1), timeout=0.1)
        until(lambda: server.status()["epochs"][0]["arrived"] == 0, "its place to be free", 2)

    def test_who_is_connected(self) -> None:
        with RendezvousServer(secret=SECRET, size=1) as server:
            with RendezvousClient(server.endpoint, SECRET) as client:
                client.register(0, info(), timeout=5)
                assert [w["connected"] for w in server.status()["epochs"][0]["workers"]] == [True]
            until(lambda: not server.status()["epochs"][0]["workers"][0]["connected"], "it to be gone", 2)

    def test_requests_per_worker_do_not_grow(self) -> None:
        """Pain 10: hello, register, set, get-all: four, whatever the number of workers."""
        for size in (2, 24):
            with RendezvousServer(secret=SECRET, size=size) as server:

                def work(endpoint: str = server.endpoint, size: int = size) -> list[bytes]:
                    with RendezvousClient(endpoint, SECRET) as client:
                        rank = client.register(0, info(address=client.local_address()), timeout=20).rank
                        store = client.store("gloo")
                        store.set(f"0/{rank}", b"%d" % rank)
                        return store.get_many([f"0/{other}" for other in range(size)], timeout=20)

                tasks = [Task(work) for _ in range(size)]
                assert [task.result() for task in tasks] == [[b"%d" % rank for rank in range(size)]] * size
                assert server.requests_served == 4 * size

    def test_start_timeout_and_connect_timeout_are_two_things(self) -> None:
        """Pain 11: a short time for connecting does not shorten the wait for others."""
        with RendezvousServer(secret=SECRET, size=2) as server, ExitStack() as stack:
            clients = [
                stack.enter_context(RendezvousClient(server.endpoint, SECRET, connect_timeout=0.05)) for _ in range(2)
            ]
            first = Task(lambda: clients[0].register(0, info(), timeout=20))
            with pytest.raises(AssertionError, match="still running"):
                first.result(0.3)
            clients[1].register(0, info(), timeout=20)
            assert first.result().topology.size == 2


class TestListening:
    def test_several_addresses_have_one_port(self) -> None:
        with RendezvousServer(secret=SECRET, size=1, bind=("127.0.0.1", "127.0.0.2", "::1")) as server:
            endpoints = server.endpoints
            port = endpoints[0].rpartition(":")[2]
            assert endpoints == (f"127.0.0.1:{port}", f"127.0.0.2:{port}", f"[::1]:{port}")
            for endpoint in endpoints:
                with RendezvousClient(endpoint, SECRET) as client:
                    assert client.status()["epochs"][0]["expected"] == 1
                    assert client.local_address() == ("::1" if "::1" in endpoint else client.local_address())
            assert server.endpoint == endpoints[0]

    def test_a_range_of_ports(self) -> None:
        """Pain 12."""
        with RendezvousServer(secret=SECRET, size=1) as first:
            port = int(first.endpoint.rpartition(":")[2])
            last = port + 30  # the next ones may be other tests'
            if last > 65535:
                pytest.skip("the system chose one of the last ports")
            with RendezvousServer(secret=SECRET, size=1, port_range=(port, last)) as second:
                assert port < int(second.endpoint.rpartition(":")[2]) <= last

    def test_a_port_that_is_taken(self, server: RendezvousServer) -> None:
        port = int(server.endpoint.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"cannot listen on port {port} of 127.0.0.1: Address already in use"):
            RendezvousServer(secret=SECRET, size=1, port=port).start()

    def test_an_address_that_this_host_does_not_have(self) -> None:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1: this host has no such address"):
            RendezvousServer(secret=SECRET, size=1, bind=("192.0.2.1",)).start()

    def test_there_is_no_listener_elsewhere(self, server: RendezvousServer) -> None:
        """Pain 30: only the chosen addresses."""
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", int(server.endpoint.rpartition(":")[2])), timeout=5)


def test_workers_make_six_requests_each_whatever_their_number() -> None:
    """The benchmark's workers do all that real ones do. Rank 0 asks once more, for all."""
    program = Path(__file__).parents[2] / "benchmarks/rendezvous.py"
    command = [sys.executable, str(program), "20", "--rounds", "1"]
    done = run_command(command, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "6.05 requests per worker" in done.stdout
    assert " 0 failures" in done.stdout
