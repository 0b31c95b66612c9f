"""The rendezvous client: deadlines, repetition of what is safe to repeat, and errors that say what to do."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hvdgloo.errors import (
    AuthenticationError,
    ConfigError,
    RendezvousError,
    RendezvousRefusedError,
    RendezvousTimeoutError,
)
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer, host_identity
from hvdgloo.rendezvous import _messages as messages
from hvdgloo.rendezvous._client.connection import HttpConnection
from tests.support.launching import wait_for
from tests.support.rendezvous import SECRET, RawClient, info, unreachable_port
from tests.support.threads import Task


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(secret=SECRET, size=2) as server:
        yield server


@pytest.fixture
def connect() -> Iterator[Callable[[str], RendezvousClient]]:
    """Makes clients, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(RendezvousClient(endpoint, SECRET))


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """An endpoint at which ``serve`` gets each connection in turn."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                    with sock:
                        serve(sock)
                except OSError:
                    return

        thread = Task(run)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.result(5)


@contextmanager
def proxy(endpoint: str, cut: Callable[[int], bool]) -> Iterator[tuple[str, list[bytes]]]:
    """Passes requests on, each connection once; the answer of the n-th (from 0) is lost if ``cut(n)``."""
    seen: list[bytes] = []
    host, port = endpoint.split(":")

    def serve(sock: socket.socket) -> None:
        data = sock.recv(65536)
        number = len(seen)
        seen.append(data)
        with socket.create_connection((host, int(port)), timeout=10) as upstream:
            upstream.sendall(data)
            answer = upstream.recv(65536)
        if not cut(number):
            # Said plainly, or the client may use the connection again before it sees that it is closed.
            sock.sendall(answer.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

    with listening(serve) as through:
        yield through, seen


class TestErrors:
    def test_another_secret(self, server: RendezvousServer) -> None:
        text = "HVDGLOO_SECRET must hold the server's own"
        client = RendezvousClient(server.endpoint, b"another secret, 32 bytes long...")
        with client, pytest.raises(AuthenticationError, match=text) as caught:
            client.status()
        assert server.endpoint in str(caught.value)
        assert b"another secret".hex() not in str(caught.value)

    def test_there_is_no_listener(self) -> None:
        """Connecting is tried again until connect_timeout, whatever the call's own deadline is."""
        with unreachable_port() as port, RendezvousClient(f"127.0.0.1:{port}", SECRET, connect_timeout=0.3) as client:
            started = time.monotonic()
            with pytest.raises(RendezvousError, match=r"Connection refused; check that it is running") as caught:
                client.register(0, info(), timeout=60)
            assert 0.1 < time.monotonic() - started < 2
            assert caught.value.server == f"127.0.0.1:{port}"
            assert caught.value.route == "/v1/hello"
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    def test_a_server_that_starts_later_than_its_workers(self) -> None:
        with unreachable_port() as port:
            client = RendezvousClient(f"127.0.0.1:{port}", SECRET, connect_timeout=10)
            waiting = Task(lambda: client.register(0, info(), timeout=20))
            with pytest.raises(AssertionError, match="still running"):
                waiting.result(0.2)
        with client, RendezvousServer(secret=SECRET, size=1, port=port):
            assert waiting.result().rank == 0

    def test_something_else_listens(self, connect: Callable[[str], RendezvousClient]) -> None:
        with listening(lambda sock: sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")) as endpoint:
            client = connect(endpoint)
            with pytest.raises(AuthenticationError, match="something else"):
                client.status()

    def test_something_listens_that_speaks_no_http(self, connect: Callable[[str], RendezvousClient]) -> None:
        with listening(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")) as endpoint:
            client = connect(endpoint)
            with pytest.raises(RendezvousError, match="does not speak HTTP"):
                client.status(timeout=0.3)

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx"])
    def test_something_that_listens_and_says_nothing(self, answer: bytes) -> None:
        release = threading.Event()

        def serve(sock: socket.socket) -> None:
            sock.sendall(answer)
            release.wait(10)

        with listening(serve) as endpoint, RendezvousClient(endpoint, SECRET) as client:
            started = time.monotonic()
            with pytest.raises(RendezvousTimeoutError, match="no answer until the deadline"):
                client.store("s").get("k", timeout=0.3)
            assert time.monotonic() - started < 1
            release.set()

    def test_a_slow_drip_is_no_answer(self) -> None:
        """A timeout for each packet would wait for ever."""

        def serve(sock: socket.socket) -> None:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(1000):
                sock.sendall(b"x")
                time.sleep(0.01)

        with listening(serve) as endpoint, RendezvousClient(endpoint, SECRET) as client:
            started = time.monotonic()
            with pytest.raises(RendezvousTimeoutError):
                client.status(timeout=0.3)
            assert time.monotonic() - started < 1

    def test_an_answer_that_was_changed(
        self, server: RendezvousServer, connect: Callable[[str], RendezvousClient]
    ) -> None:
        def serve(sock: socket.socket) -> None:
            host, port = server.endpoint.split(":")
            with socket.create_connection((host, int(port)), timeout=10) as upstream:
                upstream.sendall(sock.recv(65536))
                sock.sendall(upstream.recv(65536).replace(b'"run": "', b'"run": "f'))

        with listening(serve) as endpoint:
            client = connect(endpoint)
            with pytest.raises(AuthenticationError, match="not signed"):
                client.status(timeout=5)

    def test_a_recorded_answer_fits_no_other_request(
        self, server: RendezvousServer, connect: Callable[[str], RendezvousClient]
    ) -> None:
        """An attacker in between answers with what the server once said: to another client, or another request."""
        raw = RawClient(server.endpoint, "")
        with raw.connect() as sock:
            sock.sendall(raw.head("GET", "/v1/hello"))
            recorded = sock.recv(65536)
        assert b"X-Hvdgloo-Signature" in recorded
        with listening(lambda sock: sock.sendall(recorded)) as endpoint:
            client = connect(endpoint)
            with pytest.raises(AuthenticationError, match="not signed"):
                client.status(timeout=5)

    def test_a_server_of_another_version(
        self, connect: Callable[[str], RendezvousClient], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(messages, "pack_placed", lambda rank, topology: b'{"rank":0,"topology":{}}')
        with RendezvousServer(secret=SECRET, size=1) as server:
            client = connect(server.endpoint)
            with pytest.raises(RendezvousError, match=r"not an answer to a worker: .* of the same version"):
                client.register(0, info(), timeout=5)

    def test_no_such_epoch(self, server: RendezvousServer, connect: Callable[[str], RendezvousClient]) -> None:
        client = connect(server.endpoint)
        with pytest.raises(RendezvousRefusedError, match="there is no epoch 5; open: 0") as caught:
            client.register(5, info(), timeout=5)
        assert caught.value.status == 404
        assert caught.value.route == "/v1/epochs/5/workers"

    def test_a_value_that_is_too_large(self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server._front, "max_request_body_size", 1000)
        with RendezvousClient(server.endpoint, SECRET) as client, pytest.raises(RendezvousRefusedError) as caught:
            client.store("s").set("k", b"x" * 1001)
        assert caught.value.status == 413

    def test_closed(self, server: RendezvousServer) -> None:
        client = RendezvousClient(server.endpoint, SECRET)
        client.status()
        client.close()
        client.close()
        with pytest.raises(RendezvousError, match="is closed"):
            client.status()

    def test_closed_between_taking_a_connection_and_using_it(
        self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else nothing would end that request before its deadline."""
        client = RendezvousClient(server.endpoint, SECRET)
        client.status()
        take = client._take

        def take_late(deadline: float, target: str, patient: bool) -> HttpConnection:
            connection = take(deadline, target, patient)
            client.close()
            return connection

        monkeypatch.setattr(client, "_take", take_late)
        with pytest.raises(RendezvousError, match="is closed"):
            client.status()

    @pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:80", "host:http"])
    def test_a_server_that_is_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match="expected host:port"):
            RendezvousClient(text, SECRET)

    @pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
    def test_a_store_without_deadline(self, server: RendezvousServer, timeout: float) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client, pytest.raises(ValueError, match="timeout"):
            client.store("s", timeout=timeout)


class TestRepetition:
    def test_what_is_safe_is_repeated(
        self, server: RendezvousServer, connect: Callable[[str], RendezvousClient]
    ) -> None:
        """The first answers of a hello and of a set are lost."""
        with proxy(server.endpoint, lambda n: n in (0, 2)) as (endpoint, seen):
            store = connect(endpoint).store("s")
            store.set("k", b"v", timeout=5)
            assert store.get("k", timeout=5) == b"v"
        assert [data.split(b" ", 1)[0] for data in seen] == [b"GET", b"GET", b"PUT", b"PUT", b"GET"]
        assert seen[2] != seen[3]  # a repetition is signed again, or it would be taken for a replay

    def test_delete_is_not(self, server: RendezvousServer, connect: Callable[[str], RendezvousClient]) -> None:
        connect(server.endpoint).store("s").set("k", b"v")
        with proxy(server.endpoint, lambda n: n == 1) as (endpoint, seen):
            store = connect(endpoint).store("s")
            with pytest.raises(RendezvousError):
                store.delete("k")
        assert len(seen) == 2

    def test_a_registration_whose_answer_is_lost(self) -> None:
        with RendezvousServer(secret=SECRET, size=1) as server:
            with (
                proxy(server.endpoint, lambda n: n == 1) as (endpoint, _),
                RendezvousClient(endpoint, SECRET) as client,
            ):
                assert client.register(0, info(), timeout=5).rank == 0
            assert server.status()["epochs"][0]["arrived"] == 1

    def test_refusals_are_not_repeated(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            client.status()
            before = server.requests_served
            with pytest.raises(RendezvousRefusedError):
                client.register(5, info(), timeout=5)
            assert server.requests_served == before + 1

    def test_a_connection_that_the_server_closed_while_it_was_idle(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            client.status()
            assert server._front is not None
            server._front._evict()
            assert client.store("s").delete("k") is False  # not even what is never repeated fails

    def test_a_server_that_was_started_again(self, connect: Callable[[str], RendezvousClient]) -> None:
        with RendezvousServer(secret=SECRET, size=1) as first:
            client = connect(first.endpoint)
            client.status()
            port = int(first.endpoint.rpartition(":")[2])
        with RendezvousServer(secret=SECRET, size=1, port=port) as second:
            assert second.endpoint == first.endpoint
            with pytest.raises(AuthenticationError, match="it has been restarted since") as raised:
                client.status()
            assert raised.value.restarted

    def test_a_server_that_was_started_again_and_a_deadline_that_is_over(
        self, connect: Callable[[str], RendezvousClient], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that waits for the server wherever it is may start over: nothing is wrong with the secret."""
        with RendezvousServer(secret=SECRET, size=1) as first:
            client = connect(first.endpoint)
            client.status()
            port = int(first.endpoint.rpartition(":")[2])
        with RendezvousServer(secret=SECRET, size=1, port=port):
            answer = client._answer

            def late(*args: Any, **kwargs: Any) -> Any:
                answered = answer(*args, **kwargs)
                wait_for(lambda: time.monotonic() >= args[3])
                return answered

            monkeypatch.setattr(client, "_answer", late)
            with pytest.raises(RendezvousTimeoutError, match="it was restarted, and did not answer"):
                client.register(0, info(), timeout=0.5)
            monkeypatch.undo()
            assert client.register(0, info(), timeout=5)


class TestConnections:
    def test_one_connection_serves_many_calls(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            for number in range(20):
                client.store("s").set("k", b"%d" % number)
            assert server._front is not None
            assert len(server._front._connections) == 1

    def test_many_threads_share_a_client(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:

            def work(number: int) -> bytes:
                store = client.store("s")
                for turn in range(20):
                    store.set(f"{number}/{turn}", b"%d %d" % (number, turn))
                return store.get(f"{(number + 1) % 8}/19", timeout=10)

            tasks = [Task(lambda n=n: work(n)) for n in range(8)]  # type: ignore[misc]
            assert [task.result() for task in tasks] == [b"%d 19" % ((number + 1) % 8) for number in range(8)]

    def test_proxies_are_ignored(self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
        with unreachable_port() as port:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
            with RendezvousClient(server.endpoint, SECRET) as client:
                assert client.status()["epochs"]

    def test_a_forked_child_is_a_client_of_its_own(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            store = client.store("s")
            store.set("parent", b"1")
            pid = os.fork()
            if pid == 0:  # the child: whatever happens, it must not return into pytest
                try:
                    store.set("child", store.get("parent", timeout=5))
                    os._exit(0)
                finally:
                    os._exit(1)
            for number in range(20):  # meanwhile, on the connection that the child has a copy of
                store.set("parent again", b"%d" % number)
            assert os.waitpid(pid, 0)[1] == 0
            assert store.get_many(["child", "parent again"], timeout=1) == [b"1", b"19"]

    def test_local_address(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, SECRET) as client:
            assert client.local_address() == "127.0.0.1"
            assert server.requests_served == 1  # the hello, which is needed anyway


def test_host_identity() -> None:
    identity = host_identity()
    assert identity == host_identity()
    assert len(identity) == 16
    int(identity, 16)


def test_host_identity_tells_network_namespaces_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdgloo.rendezvous import _host_identity as identity

    here = identity.host_identity()
    for changed in [("_network_namespace", "net:[1]"), ("boot_id", "other")]:
        identity._identity.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(identity, changed[0], lambda value=changed[1]: value)
            assert identity.host_identity() != here
    identity._identity.cache_clear()
    assert identity.host_identity() == here
