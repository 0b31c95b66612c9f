"""Connections that are relayed in frames: two ends, with the frames between them in the test's hands."""

from __future__ import annotations

import os
import resource
import selectors
import socket
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdgloo.runner.agent.relaying import RelayListener
from hvdgloo.runner.protocol.frames import Frame, Relay, RelayClose, RelayCredit, RelayData, Relaying, RelayOpen
from hvdgloo.runner.protocol.relay import MOST, WINDOW, Relays
from hvdgloo.runner.supervise.relayed import RelayedConnections


class End:
    """One end of the stream of frames."""

    def __init__(self, stack: ExitStack) -> None:
        self.selector = stack.enter_context(selectors.DefaultSelector())
        self.out: deque[Frame] = deque()
        self.relays = Relays(self.selector, self.out.append)
        stack.callback(self.relays.close)

    def take(self, frame: Frame) -> None:
        self.relays.handlers[type(frame)](frame)

    def turn(self) -> bool:
        ready = self.selector.select(0)
        for key, _ in ready:
            key.data()
        return bool(ready)


class Pair:
    """An agent's end and a launcher's, with one connection: ``worker`` and ``server`` are what it connects."""

    def __init__(self, stack: ExitStack) -> None:
        self.agent, self.launcher = End(stack), End(stack)
        self.worker, ours = socket.socketpair()
        self.server, theirs = socket.socketpair()
        for sock in (self.worker, self.server):
            stack.enter_context(sock)
            sock.setblocking(False)
        self.agent.relays.add(7, ours)
        self.launcher.relays.add(7, theirs)

    def settle(self, passed_on: int = 10**9) -> None:
        """Until nothing happens any more; at most so many frames reach the other end."""
        while self.agent.turn() | self.launcher.turn() | self._pass_on(passed_on):
            pass

    def _pass_on(self, most: int) -> bool:
        moved = False
        for source, target in ((self.agent, self.launcher), (self.launcher, self.agent)):
            while source.out and most:
                target.take(source.out.popleft())
                moved = True
        return moved


def everything(sock: socket.socket) -> bytes:
    data = b""
    while True:
        try:
            piece = sock.recv(1 << 20)
        except BlockingIOError:
            return data
        if not piece:
            return data
        data += piece


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300_000)), max_size=12))
def test_what_is_written_at_one_end_is_read_at_the_other(pieces: list[tuple[bool, int]]) -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        sent, seen = [bytearray(), bytearray()], [bytearray(), bytearray()]
        sockets = (pair.worker, pair.server)
        for from_worker, size in pieces:
            source = 0 if from_worker else 1
            data = bytes(index % 251 for index in range(len(sent[source]), len(sent[source]) + size))
            while data:
                try:
                    count = sockets[source].send(data)
                except BlockingIOError:
                    count = 0
                sent[source] += data[:count]
                data = data[count:]
                pair.settle()
                for index in (0, 1):
                    seen[1 - index] += everything(sockets[index])
        pair.settle()
        for index in (0, 1):
            seen[1 - index] += everything(sockets[index])
        assert seen == sent


def test_no_more_is_read_than_the_window() -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        rest = memoryview(bytes(2 * WINDOW))
        while rest:
            try:
                rest = rest[pair.worker.send(rest) :]
            except BlockingIOError:
                if not pair.agent.turn():
                    break
        pair.settle(passed_on=0)
        read = sum(len(frame.data) for frame in pair.agent.out if isinstance(frame, RelayData))
        assert read == WINDOW
        assert not pair.agent.turn(), "its socket is not looked at any more"


@pytest.mark.parametrize("who", ["worker", "server"])
def test_an_end_reaches_the_other_side_after_what_was_sent_before(who: str) -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        one, other = (pair.worker, pair.server) if who == "worker" else (pair.server, pair.worker)
        one.sendall(b"x" * 1000)
        one.close()
        pair.settle()
        assert other.recv(2000) == b"x" * 1000
        assert ended(other)
        assert (len(pair.agent.relays), len(pair.launcher.relays)) == (0, 0)


def test_both_may_end_at_once_and_late_frames_do_no_harm() -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.worker.close()
        pair.server.close()
        pair.settle()
        for frame in (RelayData(7, b"late"), RelayCredit(7, 5), RelayClose(7), RelayData(8, b"never there")):
            pair.agent.take(frame)
        assert not pair.agent.out


@pytest.mark.parametrize("pending", [selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE])
def test_a_connection_may_be_closed_while_an_event_of_its_own_is_pending(pending: int) -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        if pending & selectors.EVENT_WRITE:
            pair.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            pair.launcher.take(RelayData(7, bytes(WINDOW)))
            everything(pair.server)
        pair.server.sendall(b"more")
        ((key, events),) = pair.launcher.selector.select(0)
        assert events == pending
        pair.launcher.relays.close()  # as an earlier callback of the same turn does
        sent = len(pair.launcher.out)
        key.data()
        assert len(pair.launcher.out) == sent
        assert not pair.launcher.selector.get_map()


def test_who_sends_more_than_the_window_loses_the_connection() -> None:
    with ExitStack() as stack:
        pair = Pair(stack)
        pair.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(64):
            pair.launcher.take(RelayData(7, bytes(WINDOW // 2)))
        assert len(pair.launcher.relays) == 0
        assert isinstance(pair.launcher.out[-1], RelayClose)
        assert pair.launcher.relays.handlers


def test_an_agent_without_descriptors_turns_workers_away_instead_of_spinning() -> None:
    sent: list[Frame] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        selectors.DefaultSelector() as selector,
        closing(RelayListener(selector, sent.append)) as listener,
        socket.socket() as worker,
    ):
        listener.handlers[Relay](Relay(None))
        (listening,) = sent
        assert isinstance(listening, Relaying)
        worker.settimeout(10)
        worker.connect(("127.0.0.1", listening.port))
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            ((key, _),) = selector.select(10)
            key.data()
            assert selector.select(0) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert worker.recv(1) == b""
        assert sent == [listening]


@dataclass(eq=False)
class Line:
    """A replacement of a ``AgentLink`` for relayed connections."""

    channel: SimpleNamespace


def test_a_launcher_that_can_open_no_more_connections_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Frame] = []
    link = cast(Any, Line(SimpleNamespace(send=sent.append)))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        selectors.DefaultSelector() as selector,
        closing(RelayedConnections(selector, lambda *_: None)) as connections,
    ):
        connections.handlers[RelayOpen](link, RelayOpen(0))  # there is no server yet
        assert sent.pop() == RelayClose(0)
        connections.server = server.getsockname()
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", lambda *_: os.open("/nowhere", os.O_RDONLY))
            connections.handlers[RelayOpen](link, RelayOpen(0))
        assert sent == [RelayClose(0)]
        monkeypatch.setattr(Relays, "__len__", lambda _: MOST)
        connections.handlers[RelayOpen](link, RelayOpen(1))
        assert sent[1:] == [RelayClose(1)]
        assert not selector.get_map()
