"""The rendezvous server over real sockets: who is let in, what is refused, and that nothing harms the others."""

from __future__ import annotations

import json
import pickle
import random
import re
import select
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import requests

from hvdgloo.errors import RendezvousRefusedError, RendezvousTimeoutError
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._server import service as service_module
from hvdgloo.rendezvous._store import Limits
from hvdgloo.version import __version__
from tests.support.rendezvous import SECRET, RawClient, info, read_answer, until
from tests.support.threads import Task


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(secret=SECRET, hosts=[("h1", 2), ("h2", 1)]) as server:
        yield server


@pytest.fixture
def raw(server: RendezvousServer) -> RawClient:
    return RawClient(server.endpoint, server.status()["run"])


@pytest.fixture
def hurried() -> Iterator[RawClient]:
    """To a server with little patience."""
    with RendezvousServer(secret=SECRET, size=1, request_timeout=0.3) as server:
        yield RawClient(server.endpoint, server.status()["run"])


@pytest.fixture
def client(server: RendezvousServer) -> Iterator[RendezvousClient]:
    with RendezvousClient(server.endpoint, SECRET) as client:
        yield client


WORKERS = "/v1/epochs/0/workers?timeout=0"
WORKER = json.dumps(info(rank=0).to_dict()).encode()


def refused(answer: tuple[int, Any], status: int, reason: str) -> None:
    assert answer[0] == status
    assert reason in answer[1]["reason"], answer


class TestSignatures:
    def test_a_good_one(self, raw: RawClient) -> None:
        assert raw.request("PUT", "/v1/kv/s/k", b"v") == (204, b"")
        assert raw.request("GET", "/v1/kv/s/k") == (200, b"v")

    @pytest.mark.parametrize("target", ["/v1/kv/s/k", "/v1/hello", "/v1/status", "/", "/metrics", "/nowhere", WORKERS])
    def test_none(self, raw: RawClient, target: str) -> None:
        status, answer = raw.request("GET", target, authorization="")
        assert status == 401
        assert set(answer) == {"error", "reason"}

    def test_another_secret(self, server: RendezvousServer, raw: RawClient) -> None:
        stranger = RawClient(server.endpoint, raw.run, secret=b"another secret, 32 bytes long...")
        refused(stranger.request("PUT", "/v1/kv/s/k", b"v"), 401, "signature is wrong")
        refused(raw.request("GET", "/v1/kv/s/k"), 404, "not there")

    def test_for_another_request(self, raw: RawClient) -> None:
        for method, target in [("PUT", "/v1/kv/s/other"), ("GET", "/v1/kv/s/k"), ("PUT", "/v1/kv/s/k?timeout=1")]:
            signed = raw.sign("PUT", "/v1/kv/s/k")
            refused(raw.request(method, target, authorization=signed), 401, "signature is wrong")

    def test_another_body(self, raw: RawClient) -> None:
        signed = raw.sign("PUT", "/v1/kv/s/k", b"v")
        refused(raw.request("PUT", "/v1/kv/s/k", b"w", authorization=signed), 401, "body is not the one")
        refused(raw.request("GET", "/v1/kv/s/k"), 404, "not there")

    def test_a_replayed_request(self, raw: RawClient) -> None:
        data = raw.head("PUT", "/v1/kv/s/k", b"v") + b"v"
        assert raw.send(data)[0] == 204
        refused(raw.send(data), 401, "received before")

    def test_a_request_recorded_in_another_run(self, raw: RawClient) -> None:
        signed = raw.sign("PUT", "/v1/kv/s/k", run=auth.generate_id())
        refused(raw.request("PUT", "/v1/kv/s/k", authorization=signed), 401, "another run")
        signed = raw.sign("PUT", "/v1/kv/s/k", run="")
        refused(raw.request("PUT", "/v1/kv/s/k", authorization=signed), 401, "another run")

    def test_counters_may_overtake_each_other(self, raw: RawClient) -> None:
        order = list(range(200))
        random.Random(3).shuffle(order)
        for counter in order:
            signed = raw.sign("GET", "/v1/status", counter=counter)
            assert raw.request("GET", "/v1/status", authorization=signed)[0] == 200

    def test_clocks_do_not_matter(
        self, server: RendezvousServer, client: RendezvousClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client whose clock is a day behind, against a server whose clock has just been moved a day ahead."""
        store = client.store("s")
        store.set("before", b"1")
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86400)
        store.set("ahead", b"2")
        monkeypatch.setattr(time, "time", lambda: real() - 86400)
        with RendezvousClient(server.endpoint, SECRET) as late:
            assert late.store("s").get_many(["before", "ahead"], timeout=1) == [b"1", b"2"]

    def test_the_status_token_only_reads_the_state(self, server: RendezvousServer) -> None:
        base, token = f"http://{server.endpoint}", server.token
        with requests.Session() as session:
            session.trust_env = False
            session.headers["Authorization"] = f"Bearer {token}"
            assert session.get(f"{base}/v1/status").json()["epochs"][0]["expected"] == 3
            assert "hvdgloo_rendezvous_workers_expected" in session.get(f"{base}/metrics").text
            assert session.head(f"{base}/v1/status").status_code == 200
            assert session.get(f"{base}/v1/kv/s/k").status_code == 401
            assert session.put(f"{base}/v1/kv/s/k", data=b"v").status_code == 401
            assert session.post(f"{base}/v1/status").status_code == 401
            assert session.post(f"{base}{WORKERS}", data=WORKER).status_code == 401
            page = session.get(f"{base}/", headers={"Authorization": ""}, auth=("any user", token))
            assert page.status_code == 404
            assert "--page serves one" in page.json()["reason"]
            challenge = session.get(f"{base}/", headers={"Authorization": ""})
            assert challenge.headers["WWW-Authenticate"].startswith("Basic ")

    def test_the_status_token_leads_to_the_page(self) -> None:
        links = iter(["http://h:1/?token=a", "http://h:1/?token=b"])
        with RendezvousServer(secret=SECRET, size=1, page=lambda: next(links)) as server:

            def get(**how: Any) -> requests.Response:
                return requests.get(f"http://{server.endpoint}/", allow_redirects=False, timeout=20, **how)

            assert get().status_code == 401
            assert get(auth=("any user", "wrong")).status_code == 401
            for token in "ab":
                answer = get(auth=("any user", server.token))
                assert (answer.status_code, answer.headers["Location"]) == (303, f"http://h:1/?token={token}")
                assert answer.headers["Cache-Control"] == "no-store"


class TestStatus:
    """The job's state in every state that an epoch can be in."""

    @staticmethod
    def epoch(server: RendezvousServer) -> dict[str, Any]:
        bearer = {"Authorization": f"Bearer {server.token}"}
        answer = requests.get(f"http://{server.endpoint}/v1/status", headers=bearer, timeout=20)
        assert answer.status_code == 200
        return dict(answer.json()["epochs"][0])

    @staticmethod
    def workers(epoch: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(each["rank"], each["host"], each["pid"], each["address"], each["port"]) for each in epoch["workers"]]

    def test_from_gathering_to_complete(self) -> None:
        with RendezvousServer(secret=SECRET, size=3) as server, ExitStack() as stack:
            found = self.epoch(server)
            assert (found["state"], found["summary"]) == ("gathering", "0 of 3 workers are in")
            clients = [stack.enter_context(RendezvousClient(server.endpoint, SECRET)) for _ in range(3)]
            tasks = [Task(lambda c=c: c.register(0, info(pid=4711), timeout=20)) for c in clients[:2]]  # type: ignore[misc]
            until(lambda: server.status()["epochs"][0]["arrived"] == 2, "two workers")
            found = self.epoch(server)
            assert self.workers(found) == [(None, "h", 4711, "127.0.0.1", 1)] * 2
            assert found["fails_in_s"] > 0
            clients[2].register(0, info(pid=4712), timeout=20)
            for task in tasks:
                task.result()
            found = self.epoch(server)
            assert (found["state"], found["arrived"], found["expected"]) == ("complete", 3, 3)
            there = [(0, "h", 4711), (1, "h", 4711), (2, "h", 4712)]
            assert sorted(self.workers(found)) == [(*each, "127.0.0.1", 1) for each in there]
            clients[2].close()
            until(lambda: not all(each["connected"] for each in self.epoch(server)["workers"]), "that one has gone")

    def test_failed(self) -> None:
        with RendezvousServer(secret=SECRET, hosts=[("h1", 2)], start_timeout=0.1) as server:
            with RendezvousClient(server.endpoint, SECRET) as client, pytest.raises(RendezvousTimeoutError):
                client.register(0, info(rank=1), timeout=20)
            found = self.epoch(server)
            assert (found["state"], found["arrived"], found["expected"]) == ("failed", 1, 2)
            assert found["summary"].startswith("epoch 0 did not start")


class TestHello:
    """The one request that can be recorded in one run of a server and be played again in the next."""

    def test_it_takes_no_body(self, raw: RawClient) -> None:
        data = raw.head("GET", "/v1/hello", authorization=raw.sign("GET", "/v1/hello", run=""))
        for length in (1, 268435456):
            with raw.connect() as sock:
                sock.sendall(data.replace(b"Content-Length: 0", b"Content-Length: %d" % length))
                refused(read_answer(sock), 400, "a hello has no body")  # which is not waited for

    def test_its_counter_holds(self, raw: RawClient) -> None:
        data = raw.head("GET", "/v1/hello", authorization=raw.sign("GET", "/v1/hello", run=""))
        assert raw.send(data) == (200, {"run": raw.run, "version": __version__, "elastic": False})
        refused(raw.send(data), 401, "received before")
        assert raw.request("GET", "/v1/status")[0] == 200  # the client is known now
        refused(raw.send(data), 401, "received before")

    def test_one_of_an_earlier_run_leaves_nothing_behind(
        self, server: RendezvousServer, raw: RawClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor does it keep a worker present that has gone."""
        monkeypatch.setattr(service_module, "_MAX_GREETED", 5)
        recorded = [RawClient(server.endpoint, "") for _ in range(20)]
        before = server.status()["store"]
        connections = [client.connect() for client in recorded]
        for client, sock in zip(recorded, connections, strict=True):
            sock.sendall(client.head("GET", "/v1/hello"))
            assert read_answer(sock)[0] == 200
        assert server.status()["store"] == before
        assert len(server._serving._greeted) == 5
        for sock in connections:
            sock.close()

    def test_a_client_that_says_no_more_is_sent_away(self, hurried: RawClient) -> None:
        with hurried.connect() as silent, hurried.connect() as member:
            silent.sendall(hurried.head("GET", "/v1/hello", authorization=hurried.sign("GET", "/v1/hello", run="")))
            assert read_answer(silent)[0] == 200
            member.sendall(hurried.head("GET", "/v1/status"))
            assert read_answer(member)[0] == 200
            assert silent.recv(1) == b""
            member.sendall(hurried.head("GET", "/v1/status"))
            assert read_answer(member)[0] == 200

    def test_replays_cost_neither_memory_nor_service(self, server: RendezvousServer, raw: RawClient) -> None:
        """45 recorded hellos, each announcing 256 MiB that never come, took 9 GB and all threads."""
        recorded = RawClient(server.endpoint, "")
        data = recorded.head("GET", "/v1/hello", Content_Length="268435456")
        process = psutil.Process()
        before = process.memory_info().rss
        attackers = [recorded.connect() for _ in range(45)]
        for sock in attackers:
            sock.sendall(data)
        started = time.monotonic()
        assert raw.request("PUT", "/v1/kv/s/k", b"v")[0] == 204
        assert time.monotonic() - started < 2
        assert process.memory_info().rss - before < 100 << 20
        for sock in attackers:
            refused(read_answer(sock), 400, "a hello has no body")
            sock.close()


class TestMemory:
    """The limits of the memory that members can make the server use."""

    @pytest.fixture
    def small(self) -> Iterator[RendezvousServer]:
        limits = Limits(in_flight=3 << 20, stored=2 << 20, stored_by_one=1 << 20)
        with RendezvousServer(secret=SECRET, size=1, limits=limits) as server:
            yield server

    def test_an_announced_body_is_not_reserved(self, server: RendezvousServer, raw: RawClient) -> None:
        process = psutil.Process()
        before = process.memory_info().vms
        with ExitStack() as stack:
            for number in range(8):
                sock = stack.enter_context(raw.connect())
                sock.sendall(raw.head("PUT", f"/v1/kv/s/{number}", Content_Length="268435456") + b"x")
            until(lambda: server._serving._in_flight == 8, "all have begun")
            assert process.memory_info().vms - before < 1 << 30

    def test_one_client_may_store_so_much(self, small: RendezvousServer) -> None:
        with RendezvousClient(small.endpoint, SECRET) as client, RendezvousClient(small.endpoint, SECRET) as other:
            store = client.store("s")
            store.set("a", bytes(900_000))
            for attempt in (lambda: store.set("b", bytes(200_000)), lambda: store.set_many({"b": bytes(200_000)})):
                with pytest.raises(
                    RendezvousRefusedError, match="this client has already stored 900201 bytes"
                ) as caught:
                    attempt()
                assert caught.value.status == 507
            other.store("s").set("b", bytes(200_000))
            store.set("a", bytes(1000))  # in place of the longer value
            store.set("c", bytes(900_000))
            assert store.delete("c")
            store.set("d", bytes(900_000))

    def test_all_together_may_store_so_much(self, small: RendezvousServer) -> None:
        clients = [RendezvousClient(small.endpoint, SECRET) for _ in range(3)]
        for number, client in enumerate(clients[:2]):
            client.store(f"s{number}").set("k", bytes(1_000_000))
        with pytest.raises(
            RendezvousRefusedError, match="2000402 bytes are already stored, and at most 2097152 are allowed"
        ):
            clients[2].store("s").set("k", bytes(100_000))
        clients[2].store("s0").set("k", b"another's value gives way, and with it its place in the other's quota")
        clients[0].store("s0").set("other", bytes(1_000_000))
        for client in clients:
            client.close()

    def test_so_much_is_under_way_at_a_time(self, small: RendezvousServer) -> None:
        """Later requests are told to ask again, which the client does."""
        raw = RawClient(small.endpoint, small.status()["run"])
        with raw.connect() as slow, RendezvousClient(small.endpoint, SECRET) as client:
            slow.sendall(raw.head("PUT", "/v1/kv/s/slow", Content_Length=str(3 << 20)) + bytes((3 << 20) - 100))
            until(lambda: small._serving._in_flight > 2 << 20, "most of it has arrived")
            refused(raw.request("PUT", "/v1/kv/s/k", bytes(700_000)), 503, "may be at a time; ask again")
            waiting = Task(lambda: client.store("s").set("k", bytes(700_000)))
            until(lambda: "503" in small._serving.metrics.text()[0].decode(), "it was refused")
            slow.close()
            waiting.result()
            until(lambda: small._serving._in_flight == 0, "all is over")


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "target", "body", "status", "reason"),
        [
            ("GET", "/v1/nothing", b"", 404, "no such route"),
            ("GET", "/v1/kv/../status", b"", 400, "segment"),
            ("GET", "/v1/kv/s/../../status", b"", 400, "segment"),
            ("GET", "/v1/kv/s/%2e%2e/status", b"", 400, "segment"),
            ("GET", "/v1/kv/%2e%2e/status", b"", 400, "segment"),
            ("PUT", "/v1/kv/s/..%2f..%2fetc%2fpasswd", b"", 400, "segment"),
            ("GET", "//v1/status", b"", 400, "Absolute URI"),
            ("GET", "/v1//status", b"", 404, "no such route"),
            ("GET", "/v1/status/", b"", 404, "no such route"),
            ("GET", "/v1/status/../status", b"", 404, "no such route"),
            ("GET", "/%76%31/status", b"", 404, "no such route"),
            ("GET", "/static/x", b"", 404, "no such route"),
            ("GET", "/v1/kv/s/%00", b"", 400, "control characters"),
            ("GET", "/v1/kv/s/%ff%fe", b"", 400, "not UTF-8"),
            ("GET", "/v1/kv/%ff/k", b"", 400, "not UTF-8"),
            ("GET", "/v1/kv/s/\xff", b"", 400, "Malformed Request-URI"),
            ("PUT", "/v1/kv/s/" + "k" * 1025, b"", 400, "1 to 1024 bytes"),
            ("PUT", "/v1/kv/" + "s" * 256 + "/k", b"", 400, "1 to 255 bytes"),
            ("PATCH", "/v1/kv/s/k", b"", 405, "not allowed"),
            ("DELETE", "/v1/status", b"", 405, "not allowed"),
            ("GET", "/v1/kv/s/k?timeout=soon", b"", 400, "timeout must be"),
            ("GET", "/v1/kv/s/k?timeout=-1", b"", 400, "timeout must be"),
            ("GET", "/v1/kv/s/k?timeout=nan", b"", 400, "timeout must be"),
            ("GET", "/v1/kv/s/k?timeout=inf", b"", 400, "timeout must be"),
            ("POST", "/v1/kv/s", b"", 400, "op=set or op=get"),
            ("POST", "/v1/kv/s?op=eval", b"", 400, "op=set or op=get"),
            ("POST", "/v1/kv/s?op=get", b"{}", 400, "not a body with keys"),
            ("POST", "/v1/kv/s?op=get", b"\xff\xfe", 400, "not a body with keys"),
            ("POST", "/v1/kv/s?op=get", messages.pack_keys(["../x"]), 400, "segment"),
            ("POST", "/v1/kv/s?op=get", messages.pack_keys(["\ud800"]), 400, "UTF-8"),
            ("POST", "/v1/kv/s?op=set", b"\xff" * 12, 400, "not a body with items"),
            ("POST", "/v1/kv/s?op=set", messages.pack_items({"a\n": b""}), 400, "control characters"),
            ("POST", "/v1/kv/s?op=set", pickle.dumps({"a": b""}), 400, "body"),
            ("POST", "/v1/epochs/7/workers", WORKER, 404, "there is no epoch 7; open: 0"),
            ("POST", "/v1/epochs/-1/workers", WORKER, 404, "no such route"),
            ("POST", "/v1/epochs/x/workers", WORKER, 404, "no such route"),
            ("POST", WORKERS, b"", 400, "not a worker"),
            ("POST", WORKERS, b"[" * 5000, 400, "not a worker"),
            ("POST", WORKERS, b"{}", 400, "missing or unknown"),
            ("POST", WORKERS, b"null", 400, "JSON object"),
            ("POST", WORKERS, WORKER.replace(b'"rank": 0', b'"rank": "0"'), 400, "rank must be"),
            ("POST", WORKERS, WORKER.replace(b'"rank": 0', b'"rank": 3'), 400, "rank 3 does not exist"),
            ("POST", WORKERS, WORKER.replace(b'"rank": 0', b'"rank": null'), 400, "brings none"),
            ("POST", WORKERS, pickle.dumps(info(rank=0)), 400, "not a worker"),
        ],
    )
    def test_a_member_that_asks_wrongly(
        self, raw: RawClient, method: str, target: str, body: bytes, status: int, reason: str
    ) -> None:
        refused(raw.request(method, target, body), status, reason)

    @pytest.mark.parametrize(
        ("data", "status", "reason"),
        [
            (b"nonsense\r\n\r\n", 400, "Malformed Request-Line"),
            (b"GET / HTTP/3.0\r\n\r\n", 505, "Cannot fulfill"),
            (b"GET / FTP/1.1\r\n\r\n", 400, "bad protocol"),
            (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400, "Absolute URI"),
            (b"GET nowhere HTTP/1.1\r\n\r\n", 400, "slash"),
            (b"GET /#x HTTP/1.1\r\n\r\n", 400, "fragment"),
            (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, "Illegal header line"),
            (b"PUT / HTTP/1.1\r\nContent-Length: many\r\n\r\n", 400, "Content-Length"),
            *[
                (b"PUT / HTTP/1.1\r\n%s: 5\r\n\r\nhello" % name, 400, "name is not a word")
                for name in (b"Content-Length ", b"Content-Length\t", b"Content\x00-Length", b"X Y", b"", b"X(y)")
            ],
            *[
                (b"PUT / HTTP/1.1\r\n%s\r\n\r\nhello" % headers, 400, "goes on in the next line")
                for headers in (b"X: y\r\n z", b"Content-Length: 5\r\n\tx", b" X: y", b"Host: a\r\n b")
            ],
            *[
                (b"PUT / HTTP/1.1\r\nContent-Length: %s\r\n\r\n" % length, 400, "not a plain decimal number")
                for length in (b"-5", b"+16", b"1_6", b"016", b"0x10", b"16,16", b"1 6", b"", b"9" * 19, b"\xb2")
            ],
            *[
                (b"PUT / HTTP/1.1\r\n%s: %s\r\n%s: %s\r\n\r\n" % (name, one, name.lower(), other), 400, "more than one")
                for name, one, other in [
                    (b"Content-Length", b"16", b"16"),
                    (b"Authorization", b"a", b"b"),
                    (b"Host", b"a", b"b"),
                    (b"Transfer-Encoding", b"chunked", b"chunked"),
                ]
            ],
            (b"PUT / HTTP/1.1\r\nContent-Length: 1\r\n 6\r\n\r\n", 400, "goes on in the next line"),
            (b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n", 413, "maximum"),
            (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, "Content-Length"),
            (b"PUT / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "Unimplemented"),
            (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 414, "exceeds"),
            (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 413, "exceed"),
            (b"\r\n\r\n\r\nGET /v1/status HTTP/1.1\r\n\r\n", 401, "token"),
        ],
    )
    def test_what_is_hardly_http(self, raw: RawClient, data: bytes, status: int, reason: str) -> None:
        refused(raw.send(data), status, reason)

    def test_an_oversized_body_is_refused_before_it_is_sent(self, raw: RawClient) -> None:
        head = raw.head("PUT", "/v1/kv/s/k", Content_Length=str(10**9))
        refused(raw.send(head), 413, "maximum")

    def test_a_refusal_arrives_although_a_body_is_under_way(self, raw: RawClient) -> None:
        """Closing a socket with unread data makes the kernel throw away what the peer has not read yet."""
        body = b"x" * 10_000_000
        for _ in range(3):
            refused(raw.request("PUT", "/v1/kv/s/k", body, authorization="Bearer no"), 401, "not a")

    def test_a_body_that_ends_early(self, raw: RawClient) -> None:
        with raw.connect() as sock:
            sock.sendall(raw.head("PUT", "/v1/kv/s/k", b"x" * 100) + b"x" * 50)
            sock.shutdown(socket.SHUT_WR)
            refused(read_answer(sock), 400, "ended after 50 of 100 bytes")

    def test_a_slot_that_another_client_has(self, server: RendezvousServer, raw: RawClient) -> None:
        with raw.connect() as sock:
            sock.sendall(raw.head("POST", WORKERS, WORKER) + WORKER)
            assert read_answer(sock)[0] == 202
            other = RawClient(server.endpoint, raw.run)
            refused(other.request("POST", WORKERS, WORKER), 409, "rank 0 of epoch 0 is taken by pid 2 on host h")
            assert server.status()["epochs"][0]["arrived"] == 1


def answer_times(client: RendezvousClient, stop: threading.Event) -> list[float]:
    """Return another client's experience: seconds for a set and get, repeatedly."""
    store, times = client.store("bystander"), []
    while not stop.is_set():
        started = time.perf_counter()
        store.set("k", b"v")
        assert store.get("k", timeout=5) == b"v"
        times.append(time.perf_counter() - started)
    return times


class TestOthersAreUnharmed:
    def test_slow_clients_hold_no_thread(
        self, server: RendezvousServer, raw: RawClient, client: RendezvousClient
    ) -> None:
        """Far more of them than the server has threads; silent ones, and some that begin a request and stop."""
        with ExitStack() as stack:
            for number in range(400):
                sock = stack.enter_context(raw.connect())
                sock.sendall((b"", b"GET / HT", b"PUT /v1/kv/s/k HTTP/1.1\r\nContent-Length: 9\r\nX: ")[number % 3])
            started = time.monotonic()
            client.store("s").set("k", b"v")
            assert client.store("s").get("k", timeout=5) == b"v"
            assert time.monotonic() - started < 1
            assert server.status()["store"]["keys"] == 1

    def test_where_connections_are_scarce_strangers_go_first(
        self, server: RendezvousServer, raw: RawClient, client: RendezvousClient
    ) -> None:
        client.store("s").set("k", b"v")
        (connection,) = client._idle
        until(lambda: bool(server._front._idle), "the server to have done with it")
        server._front.max_connections = 5
        with ExitStack() as stack:
            strangers = [stack.enter_context(raw.connect()) for _ in range(10)]
            strangers[0].settimeout(5)
            assert strangers[0].recv(1) == b""
            assert not connection.stale()
            assert client.store("s").get("k", timeout=5) == b"v"

    def test_a_member_with_a_slow_body_does_not_stop_others(
        self, server: RendezvousServer, raw: RawClient, client: RendezvousClient
    ) -> None:
        with ExitStack() as stack:
            for _ in range(20):
                sock = stack.enter_context(raw.connect())
                sock.sendall(raw.head("PUT", "/v1/kv/s/slow", b"x" * 100) + b"x")
            started = time.monotonic()
            client.store("s").set("k", b"v")
            assert time.monotonic() - started < 1

    def test_a_slow_body_ends_at_its_deadline(self, hurried: RawClient) -> None:
        with hurried.connect() as sock:
            sock.sendall(hurried.head("PUT", "/v1/kv/s/slow", b"x" * 100) + b"x")
            refused(read_answer(sock), 408, "did not arrive within")
            assert sock.recv(1) == b""

    def test_a_slow_head_ends_at_its_deadline(self, hurried: RawClient) -> None:
        with hurried.connect() as slow, hurried.connect() as silent:
            slow.sendall(b"GET / HTTP/1.1\r\n")
            refused(read_answer(slow), 408, "no whole request head")
            assert silent.recv(1) == b""

    def test_so_does_a_head_that_drips(self, hurried: RawClient) -> None:
        with hurried.connect() as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nX: ")
            for _ in range(60):
                if select.select([sock], [], [], 0.05)[0]:
                    break
                sock.sendall(b"x")
            else:
                pytest.fail("each piece was given the whole time again")
            refused(read_answer(sock), 408, "no whole request head")

    @pytest.mark.extended
    def test_five_thousand_random_requests(
        self, server: RendezvousServer, raw: RawClient, client: RendezvousClient
    ) -> None:
        """From strangers and from a member that has gone mad, while a bystander measures its own answer times."""
        rng, stop = random.Random(30), threading.Event()
        bystander = Task(lambda: answer_times(client, stop))
        strangers = throw(raw, [[from_a_stranger(raw, rng)] for _ in range(1_000)])
        member = throw(raw, [[from_a_member(raw, rng) for _ in range(100)] for _ in range(40)])
        stop.set()
        times = bystander.result()
        assert sum(member.values()) == 4_000
        assert sum(strangers.values()) > 950  # a HEAD of nonsense may look like no answer
        for statuses in (strangers, member):
            assert all(400 <= status < 500 or status in (501, 505) for status in statuses), statuses
        assert len(times) > 10
        assert statistics.median(times) < 0.1
        assert max(times) < 2
        status = server.status()
        assert status["store"]["keys"] == 1  # the bystander's
        assert status["epochs"][0]["arrived"] == 0


class TestFront:
    """The answers of the front's own thread, which must never wait."""

    def test_long_polls_take_no_thread(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            waiting = [Task(lambda n=n: client.store("s").get(f"key {n}", timeout=20)) for n in range(20)]  # type: ignore[misc]
            until(lambda: server.status()["store"]["waiting_requests"] == 20, "all wait")
            assert server._front is not None
            assert server._front.pool.alive == 0
            client.store("s").set_many({f"key {n}": b"%d" % n for n in range(20)})
            assert [task.result() for task in waiting] == [b"%d" % n for n in range(20)]
            until(lambda: server.status()["store"]["waiting_requests"] == 0, "none waits")

    def test_a_long_poll_ends_in_time(self, client: RendezvousClient) -> None:
        begun = time.monotonic()
        with pytest.raises(RendezvousTimeoutError, match=r"key never was not set within 0\.3 s"):
            client.store("s").get("never", timeout=0.3)
        assert 0.25 < time.monotonic() - begun < 1.5

    def test_a_client_that_does_not_read_a_large_answer_delays_no_other(
        self, server: RendezvousServer, raw: RawClient, client: RendezvousClient
    ) -> None:
        value = bytes(range(256)) * (1 << 16)
        client.store("s").set("large", value)
        with socket.create_connection((raw.host, raw.port), timeout=20) as sock:
            sock.sendall(raw.head("GET", "/v1/kv/s/large"))
            assert server._front is not None
            pool = server._front.pool
            until(lambda: pool.alive, "a thread of the pool sends the rest")
            for number in range(5):
                client.store("s").set("k", b"%d" % number, timeout=5)
                assert client.store("s").get("k", timeout=5) == b"%d" % number
            assert read_answer(sock) == (200, value)
            sock.sendall(raw.head("GET", "/v1/hello", authorization=raw.sign("GET", "/v1/hello", run="")))
            assert read_answer(sock)[0] == 200, "its connection is as good as before"

    def test_waits_that_are_over_are_forgotten(self, server: RendezvousServer, client: RendezvousClient) -> None:
        store = client.store("s")
        for number in range(100):
            waiting = Task(lambda n=number: store.get(f"key {n}", timeout=20))  # type: ignore[misc]
            until(lambda: server._serving.counts()["waiting_requests"], "it waits")
            store.set(f"key {number}", b"")
            assert waiting.result() == b""
        assert server._front is not None
        assert len(server._front._paused._timers) <= 65

    @pytest.mark.parametrize("timeout", ["0", "0.2"])
    def test_requests_that_come_before_the_answer(self, raw: RawClient, timeout: str) -> None:
        first = raw.head("GET", f"/v1/kv/s/none?timeout={timeout}")
        second = raw.head("PUT", "/v1/kv/s/k", b"v") + b"v"
        with socket.create_connection((raw.host, raw.port), timeout=20) as sock:
            sock.sendall(first + second + raw.head("GET", "/v1/kv/s/k"))
            received = b""
            while received.count(b"HTTP/1.1 ") < 3:
                received += sock.recv(65536)
            assert re.findall(rb"HTTP/1.1 ([0-9]+)", received) == [b"404", b"204", b"200"]


def throw(raw: RawClient, batches: list[list[bytes]]) -> dict[int, int]:
    """Send each batch on a connection of its own, without waiting for answers; statuses that came back."""
    statuses: dict[int, int] = {}
    for batch in batches:
        answer = b""
        try:
            with raw.connect() as sock:
                sock.sendall(b"".join(batch))
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(65536):
                    answer += part
        except ConnectionError:
            pass  # closed while we were still sending
        for line in answer.split(b"HTTP/1.1 ")[1:]:
            statuses[int(line[:3])] = statuses.get(int(line[:3]), 0) + 1
    return statuses


def from_a_stranger(raw: RawClient, rng: random.Random) -> bytes:
    """Without a good signature: noise, unsigned, badly signed, or signed and then changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n"
    target = rng.choice(["/v1/kv/s/k", "/v1/kv/s?op=set", WORKERS, "/v1/status", "/", "/v1/hello", "/%ff", "/../x"])
    method = rng.choice(["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "get", "BREW"])
    body = rng.randbytes(rng.randrange(50))
    authorization = ["", "Basic " + rng.randbytes(9).hex(), raw.sign(method, target + "x", body)][kind - 1]
    data = bytearray(raw.head(method, target, body, authorization=authorization) + body)
    if kind == 3:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def from_a_member(raw: RawClient, rng: random.Random) -> bytes:
    """Well signed, and of no use: each is answered and leaves the connection as it was."""
    junk = "".join(rng.choice(["%00", "%ff", "%2e", "..", "a", "%25", "+", "&"]) for _ in range(rng.randrange(1, 9)))
    target = rng.choice(
        [
            f"/v1/kv/s/%00{junk}",
            f"/v1/kv/../{junk}",
            f"/v1/epochs/{junk}/workers",
            f"/v1/kv/s?op={junk}",
            WORKERS,
            f"/{junk}",
        ]
    )
    body = rng.randbytes(rng.randrange(50))
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "BREW"])
    return raw.head(method, target, body) + body
