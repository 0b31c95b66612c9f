"""Probes with proof of identity, over loopback addresses. Pains 7 (whose address is it?), 14 and 30."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from hvdgloo.runner.network.probe import (
    LAUNCHER,
    Answer,
    ProbeListener,
    Prober,
    ProbeResult,
    ProbeTarget,
    answer,
    judge,
    probe_key,
    question,
)

KEY = probe_key(b"s" * 32)
OTHER_KEY = probe_key(b"t" * 32)
NONCE = b"n" * 16


class Loop:
    """One selector for both sides, as launcher and agents have one each."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.listeners: list[ProbeListener] = []
        self.sockets: list[socket.socket] = []
        self.turns = 0

    def listener(self, host: int, *addresses: str, key: bytes = KEY) -> ProbeListener:
        made = ProbeListener(self.selector, key, host, addresses, None)
        self.listeners.append(made)
        return made

    def server(self, address: str = "127.0.0.1", backlog: int = 5) -> socket.socket:
        made = socket.create_server((address, 0), backlog=backlog)
        self.sockets.append(made)
        return made

    def probe(self, *targets: ProbeTarget, timeout: float = 5.0) -> dict[ProbeTarget, Answer]:
        found: dict[ProbeTarget, Answer] = {}
        prober = Prober(self.selector, KEY, targets, timeout, found.__setitem__)
        end = time.monotonic() + 30
        while not prober.done:
            self.turn(0.0 if prober.deadline is None else prober.deadline - time.monotonic())
            prober.tick()
            assert time.monotonic() < end
        return found

    def turn(self, timeout: float) -> None:
        self.turns += 1
        for key, _ in self.selector.select(max(0.0, timeout)):
            key.data()

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            self.turn(0.05)
            assert time.monotonic() < end

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for sock in self.sockets:
            sock.close()
        assert not list(self.selector.get_map()), "everything was unregistered"
        self.selector.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def target(listener: ProbeListener, host: int, address: str = "127.0.0.1") -> ProbeTarget:
    return ProbeTarget(host, address, listener.ports[address])


class TestProof:
    TARGET = ProbeTarget(3, "10.0.0.3", 1)

    def reply(self, host: int = 3, address: str = "10.0.0.3", key: bytes = KEY, nonce: bytes = NONCE) -> Answer:
        told = answer(key, question(key, nonce, self.TARGET), host, address)
        assert told is not None
        return judge(KEY, NONCE, self.TARGET, told, "10.0.0.1")

    def test_the_host_that_was_meant(self) -> None:
        assert self.reply() == Answer(ProbeResult.REACHED, "10.0.0.1", 3)

    def test_another_host_of_the_job(self) -> None:
        assert self.reply(host=1) == Answer(ProbeResult.OTHER_HOST, "10.0.0.1", 1)
        assert self.reply(host=LAUNCHER).host == LAUNCHER

    def test_the_host_at_another_address(self) -> None:
        assert self.reply(address="10.0.0.4") == Answer(ProbeResult.OTHER_ADDRESS, "10.0.0.1", 3, "10.0.0.4")

    def test_pain_30_another_job_proves_nothing(self) -> None:
        assert self.reply(key=OTHER_KEY).outcome is ProbeResult.STRANGER

    def test_pain_30_an_answer_to_another_question_proves_nothing(self) -> None:
        assert self.reply(nonce=b"m" * 16).outcome is ProbeResult.STRANGER

    @pytest.mark.parametrize("position", [8, 11, 12, 27, 28, 59])
    def test_pain_30_no_byte_of_it_can_be_changed(self, position: int) -> None:
        told = bytearray(answer(KEY, question(KEY, NONCE, self.TARGET), 3, "10.0.0.3") or b"")
        told[position] ^= 1
        assert judge(KEY, NONCE, self.TARGET, bytes(told), "").outcome is ProbeResult.STRANGER

    def test_pain_30_a_stranger_is_told_nothing(self) -> None:
        assert answer(KEY, question(OTHER_KEY, NONCE, self.TARGET), 3, "10.0.0.3") is None
        assert answer(KEY, b"GET / HTTP/1.1\r\n".ljust(76, b" "), 3, "10.0.0.3") is None


class TestOverSockets:
    def test_hosts_are_reached_at_all_of_their_addresses(self, loop: Loop) -> None:
        one, two = loop.listener(1, "127.0.0.1", "127.0.0.2", "::1"), loop.listener(2, "127.0.0.3")
        targets = [
            *(target(one, 1, address) for address in ("127.0.0.1", "127.0.0.2", "::1")),
            target(two, 2, "127.0.0.3"),
        ]
        found = loop.probe(*targets)
        assert {t: a.outcome for t, a in found.items()} == dict.fromkeys(targets, ProbeResult.REACHED)
        assert found[targets[2]].source == "::1"

    def test_pain_7_an_address_that_another_host_has_too(self, loop: Loop) -> None:
        """172.17.0.1 is every Docker host's: it connects, to oneself."""
        own = loop.listener(0, "127.0.0.1")
        asked = target(own, 1)
        assert loop.probe(asked) == {asked: Answer(ProbeResult.OTHER_HOST, "127.0.0.1", 0)}

    def test_another_job_s_agent_is_a_stranger(self, loop: Loop) -> None:
        asked = target(loop.listener(1, "127.0.0.1", key=OTHER_KEY), 1)
        assert loop.probe(asked)[asked].outcome is ProbeResult.STRANGER

    def test_a_foreign_server_is_a_stranger(self, loop: Loop) -> None:
        server = loop.server()

        def greet() -> None:
            sock, _ = server.accept()
            sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)
            loop.sockets.append(sock)

        loop.selector.register(server, selectors.EVENT_READ, greet)
        asked = ProbeTarget(1, "127.0.0.1", server.getsockname()[1])
        assert loop.probe(asked)[asked].outcome is ProbeResult.STRANGER
        loop.selector.unregister(server)

    def test_a_server_that_hangs_up_is_a_stranger(self, loop: Loop) -> None:
        server = loop.server()
        loop.selector.register(server, selectors.EVENT_READ, lambda: server.accept()[0].close())
        asked = ProbeTarget(1, "127.0.0.1", server.getsockname()[1])
        assert loop.probe(asked)[asked].outcome is ProbeResult.STRANGER
        loop.selector.unregister(server)

    def test_pain_14_every_kind_of_failure_has_its_name(self, loop: Loop) -> None:
        silent = loop.server()
        closed = loop.server()
        port = closed.getsockname()[1]
        closed.close()
        # A queue that is full: further connections are not answered.
        full = loop.server("127.0.0.4", backlog=0)
        loop.sockets += [socket.create_connection(full.getsockname()) for _ in range(1)]
        targets = {
            ProbeResult.SILENT: ProbeTarget(1, "127.0.0.1", silent.getsockname()[1]),
            ProbeResult.REFUSED: ProbeTarget(1, "127.0.0.1", port),
            ProbeResult.TIMED_OUT: ProbeTarget(1, *full.getsockname()),
        }
        begin = time.monotonic()
        found = loop.probe(*targets.values(), timeout=0.3)
        assert {t: a.outcome for t, a in found.items()} == {t: outcome for outcome, t in targets.items()}
        assert found[targets[ProbeResult.TIMED_OUT]].detail == "0.3"
        assert 0.25 < time.monotonic() - begin < 2.0, "all at once"

    def test_many_probes(self, loop: Loop) -> None:
        listener = loop.listener(1, *(f"127.0.1.{n}" for n in range(1, 31)))
        targets = [target(listener, 1, address) for address in listener.ports for _ in range(1)] * 20
        numbered = [ProbeTarget(t.host, t.address, t.port) for t in targets]
        found: list[Answer] = []
        prober = Prober(loop.selector, KEY, numbered, 30.0, lambda _, a: found.append(a))
        loop.until(lambda: prober.done)
        assert [a.outcome for a in found] == [ProbeResult.REACHED] * 600

    def test_very_many_that_are_swallowed_end_in_time(self, loop: Loop) -> None:
        silent = loop.server(backlog=1000)
        targets = [ProbeTarget(number, *silent.getsockname()) for number in range(700)]
        begin = time.monotonic()
        found = loop.probe(*targets, timeout=0.2)
        assert time.monotonic() - begin < 1.5
        assert len(found) == 700
        assert {a.outcome for a in found.values()} == {ProbeResult.SILENT, ProbeResult.FAILED}
        assert found[targets[-1]].detail == "there was no time to try it"


class TestListener:
    def test_it_listens_at_these_addresses_alone(self, loop: Loop) -> None:
        listener = loop.listener(1, "127.0.0.2")
        (port,) = listener.ports.values()
        connections = psutil.net_connections("tcp")
        ours = [each.laddr for each in connections if each.pid == os.getpid() and each.status == psutil.CONN_LISTEN]
        assert [address for address in ours if address[1] == port] == [("127.0.0.2", port)]

    def test_an_address_that_is_not_here_is_told_and_the_others_are_served(self, loop: Loop) -> None:
        listener = loop.listener(1, "192.0.2.1", "127.0.0.1")
        assert list(listener.ports) == ["127.0.0.1"]
        assert "192.0.2.1: this host has no such" in listener.failures["192.0.2.1"]

    def test_strangers_who_say_little_neither_keep_it_busy_nor_keep_others_out(self, loop: Loop) -> None:
        listener = loop.listener(1, "127.0.0.1")
        strangers = [socket.create_connection(("127.0.0.1", listener.ports["127.0.0.1"])) for _ in range(300)]
        loop.sockets += strangers
        for stranger in strangers:
            stranger.send(b"h")
        asked = target(listener, 1)
        assert loop.probe(asked)[asked].outcome is ProbeResult.REACHED
        before = loop.turns
        end = time.monotonic() + 0.3
        while (left := end - time.monotonic()) > 0:
            loop.turn(left)
        assert loop.turns - before < 20, "it sleeps while strangers do"

    def test_a_question_in_pieces_is_answered(self, loop: Loop) -> None:
        listener = loop.listener(1, "127.0.0.1")
        port = listener.ports["127.0.0.1"]
        with socket.create_connection(("127.0.0.1", port)) as sock:
            asked = question(KEY, NONCE, ProbeTarget(1, "127.0.0.1", port))
            received = b""
            sock.setblocking(False)

            def receive() -> None:
                nonlocal received
                received += sock.recv(100)

            loop.selector.register(sock, selectors.EVENT_READ, receive)
            for piece in (asked[:10], asked[10:]):
                sock.send(piece)
                loop.turn(0.1)
                loop.turn(0.05)
            loop.until(lambda: bool(received))
            loop.selector.unregister(sock)
        assert judge(KEY, NONCE, ProbeTarget(1, "127.0.0.1", port), received, "").outcome is ProbeResult.REACHED

    def test_a_prober_that_is_closed_reports_nothing_more(self, loop: Loop) -> None:
        asked = target(loop.listener(1, "127.0.0.1"), 1)
        found: list[Answer] = []
        prober = Prober(loop.selector, KEY, [asked] * 3, 5.0, lambda _, a: found.append(a))
        prober.close()
        prober.close()
        assert prober.done
        loop.turn(0.05)
        assert found == []
