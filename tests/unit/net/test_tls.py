"""TLS: what is sent is encrypted, and an attacker in the middle is noticed before anything of value is said."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from hvdgloo._engine.connection import ControlConnection
from hvdgloo._engine.messages import Failed, Message, Stacks, frame
from hvdgloo._net import tls as tls_module
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo._net.tls import Tls
from hvdgloo.config import Config, TlsFiles
from hvdgloo.errors import AuthenticationError, ConfigError, ConnectError, MissingDependencyError, RendezvousError
from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from hvdgloo.rendezvous._client.connection import HttpConnection
from tests.support.certificates import authority
from tests.support.launching import run_command
from tests.support.rendezvous import SECRET, info, until
from tests.support.threads import Task


def describe(rank: int) -> str:
    return f"rank {rank}"


class Middle:
    """An attacker between client and server who records what passes, and decrypts it if it has a certificate.

    Args:
        target: address and port of the server.
        tls: speaks TLS with both sides; None passes bytes on as they are.
    """

    def __init__(self, target: tuple[str, int], tls: Tls | None = None) -> None:
        self.seen = bytearray()
        self._target, self._tls = target, tls
        self._listener = listen("127.0.0.1", None)
        self.port: int = self._listener.getsockname()[1]
        self._socks = [self._listener]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near: socket.socket = self._listener.accept()[0]
                self._socks.append(near)
                far: socket.socket = socket.create_connection(self._target, 10)
                self._socks.append(far)
                if self._tls is not None:
                    near = self._tls.accepted(near)
                    self._socks.append(near)
                    near.settimeout(10)
                    near.do_handshake()
                    far, _ = self._tls.connected(far, time.monotonic() + 10)
                    self._socks.append(far)
                    far.settimeout(10)
            except OSError:
                return
            for source, drain in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, drain), daemon=True).start()

    def _pump(self, source: socket.socket, drain: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.seen += data
                drain.sendall(data)
        except OSError:
            pass
        for sock in (source, drain):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends an accept()
        self._accepting.join(20)  # it may be about to add a connection
        for sock in self._socks:
            sock.close()


@pytest.fixture
def middle() -> Iterator[Callable[..., Middle]]:
    with ExitStack() as stack:

        def make(target: tuple[str, int], tls: Tls | None = None) -> Middle:
            made = Middle(target, tls)
            stack.callback(made.close)
            return made

        yield make


class TestControlPlane:
    @pytest.fixture
    def listener(self) -> Iterator[socket.socket]:
        with listen("127.0.0.1", None) as listener:
            yield listener

    def meet(
        self, listener: socket.socket, port: int, ours: Tls | None, theirs: Tls | None
    ) -> tuple[dict[int, Link], Link]:
        """Rank 0's connections and rank 1's; raises what rank 1 gets if it is refused."""
        with ThreadPoolExecutor(1) as pool:
            handshake = Handshake(SECRET, 0, 0, tls=ours)
            accepting = pool.submit(handshake.accept_all, listener, [1], {"secret setting": 1}, 1.5, describe)
            link, settings = Handshake(SECRET, 0, 0, tls=theirs).connect("127.0.0.1", port, 1, 5.0, describe)
            assert settings["secret setting"] == 1
            return accepting.result(10), link

    def test_messages_of_all_sizes_pass_and_nothing_of_them_is_seen(
        self, listener: socket.socket, middle: Callable[..., Middle]
    ) -> None:
        between = middle(listener.getsockname())
        links, link = self.meet(listener, between.port, Tls(), Tls())
        here, there = ControlConnection(links[1]), ControlConnection(link)
        messages: list[Message] = [Failed("plain words"), Stacks("plain words" * 300_000), Failed("x" * (1 << 16))]
        for sender, receiver in ((here, there), (there, here)):
            arrived: list[Message] = []
            for message in messages:
                sender.send_frame(frame(message))  # the other end does not read, and yet it returns
            deadline = time.monotonic() + 20
            while len(arrived) < len(messages):
                assert time.monotonic() < deadline
                sender.flush()
                arrived += receiver.receive()
            assert arrived == messages
            assert not sender.pending
        assert len(between.seen) > 6_000_000
        assert b"plain words" not in between.seen
        assert b"secret setting" not in between.seen
        here.shutdown()
        with pytest.raises((EOFError, OSError)):
            until(there.receive, "the end")
        here.close()
        there.close()

    def test_without_it_everything_is_seen(self, listener: socket.socket, middle: Callable[..., Middle]) -> None:
        """Or the test above would prove nothing."""
        between = middle(listener.getsockname())
        links, link = self.meet(listener, between.port, None, None)
        assert b"secret setting" in between.seen
        links[1].sock.close()
        link.sock.close()

    def test_an_attacker_in_the_middle_is_noticed_on_both_sides(
        self, listener: socket.socket, middle: Callable[..., Middle]
    ) -> None:
        """It passes on what both sign, but not under its own certificate."""
        between = middle(listener.getsockname(), Tls())
        with pytest.raises(ConnectError, match="does not know this job's secret"):
            self.meet(listener, between.port, Tls(), Tls())
        assert b"secret setting" not in between.seen

    @pytest.mark.parametrize(("ours", "theirs"), [(Tls(), None), (None, Tls())], ids=["member", "rank 0"])
    def test_one_side_without_it(self, listener: socket.socket, ours: Tls | None, theirs: Tls | None) -> None:
        expected = (
            "closed during the handshake|reset"
            if theirs is None
            else "HVDGLOO_TLS=required must be set for every process"
        )
        with pytest.raises(ConnectError, match=expected):
            self.meet(listener, listener.getsockname()[1], ours, theirs)

    def test_silent_visitors_and_garbage_do_not_delay_it(self, listener: socket.socket) -> None:
        address = listener.getsockname()
        strangers = [socket.create_connection(address) for _ in range(50)]
        for sock in strangers[::2]:
            sock.sendall(b"\x16\x03\x01\x02\x00")  # a handshake that never goes on
        started = time.monotonic()
        links, link = self.meet(listener, address[1], Tls(), Tls())
        assert time.monotonic() - started < 1.5
        for sock in [*strangers, links[1].sock, link.sock]:
            sock.close()

    def test_certificates_of_the_user_s(self, listener: socket.socket, tmp_path: Path) -> None:
        certificate, key = authority(tmp_path, "own")
        links, link = self.meet(listener, listener.getsockname()[1], Tls(certificate, key), Tls(authority=certificate))
        assert isinstance(link.sock, ssl.SSLSocket)
        assert link.sock.getpeercert(binary_form=True) == ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())
        links[1].sock.close()
        link.sock.close()
        other, _ = authority(tmp_path, "other")
        with pytest.raises(ConnectError, match="its certificate is not signed by HVDGLOO_TLS_CA"):
            self.meet(listener, listener.getsockname()[1], Tls(certificate, key), Tls(authority=other))


class TestRendezvous:
    @pytest.fixture
    def server(self) -> Iterator[RendezvousServer]:
        with RendezvousServer(secret=SECRET, size=1, tls=Tls()) as server:
            yield server

    def target(self, server: RendezvousServer) -> tuple[str, int]:
        host, _, port = server.endpoint.rpartition(":")
        return host, int(port)

    def test_a_worker_s_requests(self, server: RendezvousServer, middle: Callable[..., Middle]) -> None:
        between = middle(self.target(server))
        with RendezvousClient(f"127.0.0.1:{between.port}", SECRET, tls=Tls()) as client:
            assert client.register(0, info(host_name="visible"), timeout=10).rank == 0
            store = client.store("s")
            for value in (b"", b"visible" * 10, b"visible" * 1_000_000):
                store.set("visible", value)
                assert store.get("visible", timeout=5) == value
            waiting = Task(lambda: store.get("later", timeout=10))
            until(lambda: server.status()["store"]["waiting_requests"], "it waits")
            store.set("later", b"now")
            assert waiting.result() == b"now"
            assert client.local_address() == "127.0.0.1"
            # Requests follow each other on one connection: an idle one is not taken for a closed one.
            assert server.status()["store"]["connected_clients"] == 1
            assert server._front is not None
            assert len(server._front._connections) <= 2
        until(lambda: not server.status()["store"]["connected_clients"], "it is gone")
        assert len(between.seen) > 14_000_000
        assert b"visible" not in between.seen
        assert b"HTTP" not in between.seen

    def test_who_hangs_up_while_it_waits_loses_its_place(self) -> None:
        made: list[HttpConnection] = []

        class Client(RendezvousClient):
            def _connect(self, deadline: float, target: str) -> HttpConnection:
                made.append(super()._connect(deadline, target))
                return made[-1]

        with RendezvousServer(secret=SECRET, size=2, tls=Tls()) as server:
            client = Client(server.endpoint, SECRET, tls=Tls())
            waiting = Task(lambda: client.register(0, info(), timeout=20))
            until(lambda: server.status()["epochs"][0]["arrived"], "it is in")
            client.close()  # or it would register once more
            for connection in made:
                with suppress(OSError):  # ``close`` does so, too
                    connection._socket.shutdown(socket.SHUT_RDWR)  # as the end of its process does
            until(lambda: not server.status()["epochs"][0]["arrived"], "its place is free")
            assert isinstance(waiting.failure(), RendezvousError)

    def test_an_attacker_in_the_middle_learns_nothing(
        self, server: RendezvousServer, middle: Callable[..., Middle]
    ) -> None:
        between = middle(self.target(server), Tls())
        with (
            RendezvousClient(f"127.0.0.1:{between.port}", SECRET, tls=Tls()) as client,
            pytest.raises(AuthenticationError),
        ):
            client.store("s").set("key", b"a value")
        assert b"GET /v1/hello" in between.seen
        assert b"a value" not in between.seen
        assert b"/v1/kv" not in between.seen

    def test_an_attacker_who_comes_in_between_later_learns_nothing(
        self, server: RendezvousServer, middle: Callable[..., Middle]
    ) -> None:
        """Every new connection's certificate is compared with the one that a hello has confirmed."""
        between = middle(self.target(server), Tls())
        with RendezvousClient(server.endpoint, SECRET, tls=Tls()) as client:
            client.store("s").set("key", b"a value")
            client._port = between.port
            client._idle.pop().close()
            with pytest.raises(AuthenticationError):
                client.store("s").set("key", b"a value")
        assert b"/v1/kv" not in between.seen

    def test_a_server_that_was_started_again_is_another_one(self) -> None:
        """Data that a client has stored is lost, as without TLS: only a registration starts over by itself."""
        with RendezvousServer(secret=SECRET, size=1, tls=Tls()) as first:
            client = RendezvousClient(first.endpoint, SECRET, tls=Tls())
            store = client.store("s")
            store.set("key", b"a value")
        with client, RendezvousServer(secret=SECRET, size=1, port=self.target(first)[1], tls=Tls()) as second:
            for call in (lambda: store.set("key", b"another"), lambda: store.delete("key"), client.status):
                with pytest.raises(AuthenticationError, match="another certificate than before: it has been restarted"):
                    call()
            assert second.requests_served == 0
            assert client.register(0, info(), timeout=10).rank == 0
            assert store.delete("key") is False

    def test_no_thread_sees_that_another_asks_for_the_server_s_id_again(
        self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between one thread's hello and its request, another one forgets which server it was."""
        client = RendezvousClient(server.endpoint, SECRET, tls=Tls())
        mine = client._hello_lock

        class Lock:
            def __enter__(self) -> None:
                mine.acquire()

            def __exit__(self, *_: object) -> None:
                mine.release()
                client._run = ""

        monkeypatch.setattr(client, "_hello_lock", Lock())
        with client:
            assert client._run_id(time.monotonic() + 10)

    def test_a_handshake_holds_up_no_other_connection(
        self, server: RendezvousServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It costs a signature, and every answer needs the front's lock."""
        front, free = server._front, []
        assert front is not None

        def shake_hands(sock: Any) -> bool:
            free.append(front._lock.acquire(timeout=5))
            if free[-1]:
                front._lock.release()
            return tls_module.shake_hands(sock)

        monkeypatch.setattr("hvdgloo.rendezvous._server.http_front.shake_hands", shake_hands)
        with RendezvousClient(server.endpoint, SECRET, tls=Tls()) as client:
            client.status()
        assert free
        assert all(free)

    def test_a_client_without_it(self, server: RendezvousServer) -> None:
        with (
            RendezvousClient(server.endpoint, SECRET) as client,
            pytest.raises(RendezvousError, match="status 400: this server uses TLS: set HVDGLOO_TLS=required"),
        ):
            client.status(timeout=2)

    def test_a_server_without_it(self) -> None:
        with (
            RendezvousServer(secret=SECRET, size=1) as server,
            RendezvousClient(server.endpoint, SECRET, tls=Tls()) as client,
            pytest.raises(
                RendezvousError, match="does not use TLS, and HVDGLOO_TLS=required must be set for every process"
            ),
        ):
            client.status(timeout=2)

    def test_another_secret(self, server: RendezvousServer) -> None:
        with RendezvousClient(server.endpoint, bytes(32), tls=Tls()) as client, pytest.raises(AuthenticationError):
            client.status(timeout=2)

    def test_slow_handshakes_hold_no_thread(self, server: RendezvousServer) -> None:
        strangers = [socket.create_connection(self.target(server)) for _ in range(100)]
        for sock in strangers[::2]:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        with RendezvousClient(server.endpoint, SECRET, tls=Tls()) as client:
            started = time.monotonic()
            client.store("s").set("k", b"v")
            assert time.monotonic() - started < 2
        for sock in strangers:
            sock.close()

    def test_requests_that_arrive_together_are_all_served(self, server: RendezvousServer) -> None:
        """No selector announces data that TLS has decrypted beyond the first request."""
        with socket.create_connection(self.target(server), 10) as plain:
            sock, _ = Tls().connected(plain, time.monotonic() + 10)
            sock.settimeout(10)
            one = f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n"
            sock.sendall(one.encode() * 3)
            data = b""
            while data.count(b"HTTP/1.1 200 OK") < 3:
                piece = sock.recv(1 << 16)
                assert piece, data
                data += piece
            sock.close()

    def test_the_page_with_a_certificate_of_the_user_s(self, tmp_path: Path) -> None:
        import requests

        certificate, key = authority(tmp_path, "own")
        with (
            RendezvousServer(secret=SECRET, size=1, tls=Tls(certificate, key)) as server,
            requests.Session() as session,
        ):
            session.trust_env = False
            session.verify = False
            with pytest.warns(match="Unverified"):
                answer = session.get(
                    f"https://{server.endpoint}/v1/status", headers={"Authorization": f"Bearer {server.token}"}
                )
            assert json.loads(answer.text)["epochs"][0]["expected"] == 1


class TestSettings:
    @pytest.mark.parametrize(
        ("environ", "files"),
        [
            ({}, None),
            ({"HVDGLOO_TLS": "off", "HVDGLOO_TLS_CERT": "c"}, None),
            ({"HVDGLOO_TLS": "required"}, TlsFiles()),
            ({"HVDGLOO_TLS_CERT": "c", "HVDGLOO_TLS_KEY": "k"}, TlsFiles("c", "k")),
            ({"HVDGLOO_TLS": "auto", "HVDGLOO_TLS_CA": "a"}, TlsFiles(authority="a")),
        ],
    )
    def test_when_it_is_spoken(self, environ: dict[str, str], files: TlsFiles | None) -> None:
        assert Config.from_env(environ).tls_files == files

    def test_listeners_need_what_they_show(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="HVDGLOO_TLS_CA is set without HVDGLOO_TLS_CERT"):
            RendezvousServer(secret=SECRET, size=1, tls=Tls(authority="a"))
        with pytest.raises(ConfigError, match=f"{tmp_path}/absent cannot be used: No such file"):
            _ = Tls(f"{tmp_path}/absent").fingerprint
        (tmp_path / "odd").write_text("no certificate")
        with pytest.raises(ConfigError, match=f"{tmp_path}/odd cannot be used: "):
            _ = Tls(f"{tmp_path}/odd").fingerprint
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'hvdgloo\[tls\]'"):
            RendezvousServer(secret=SECRET, size=1, tls=Tls())

    def test_an_authority_that_cannot_be_read(self, tmp_path: Path) -> None:
        with socket.socket() as sock, pytest.raises(ConfigError, match=r"HVDGLOO_TLS_CA=.*absent cannot be used"):
            Tls(authority=f"{tmp_path}/absent").connected(sock, time.monotonic() + 1)

    def test_a_connection_that_cannot_be_encrypted_is_closed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[socket.socket] = []
        connect = socket.create_connection
        monkeypatch.setattr("socket.create_connection", lambda *args: made.append(connect(*args)) or made[-1])
        tls = Tls(authority=f"{tmp_path}/absent")
        with listen("127.0.0.1", None) as listener, pytest.raises(ConfigError, match="absent cannot be used"):
            HttpConnection("127.0.0.1", listener.getsockname()[1], time.monotonic() + 10, tls)
        assert [sock.fileno() for sock in made] == [-1]

    def test_an_encrypted_key_is_refused(self, tmp_path: Path) -> None:
        """OpenSSL would ask on the terminal, and wait."""
        certificate, key = authority(tmp_path, "own")
        private = load_pem_private_key(Path(key).read_bytes(), None)
        encryption = BestAvailableEncryption(b"a password")
        Path(key).write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        script = "import sys; from hvdgloo._net.tls import Tls; Tls(*sys.argv[1:]).check_listener()"
        done = run_command(
            [sys.executable, "-c", script, certificate, key],
            stdin=subprocess.DEVNULL,
            timeout=20,
            start_new_session=True,
        )
        assert "ConfigError: HVDGLOO_TLS_CERT, HVDGLOO_TLS_KEY: " in done.stderr
        assert "cannot be used: the private key is encrypted, and there is no way to ask" in done.stderr

    def test_a_key_leaves_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Even where files in memory are unknown."""
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.delattr("os.memfd_create")
        assert len(Tls().fingerprint) == 32
        assert list(tmp_path.iterdir()) == []
