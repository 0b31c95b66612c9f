"""Attacks on the way by which agents come by themselves: the handshake, and the frames after it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdgloo._net import framing
from hvdgloo._net.codec import to_json
from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.handshake import _CLAIM, _HELLO, _MAGIC, Handshake, Link
from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES
from hvdgloo.errors import AuthenticationError, LaunchError
from hvdgloo.rendezvous._auth import generate_secret
from hvdgloo.runner.inbound import listener as module
from hvdgloo.runner.inbound.hello import Bootstrap, Reply, handshake, introduce, read_bootstrap
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.inbound.sealed import SealedChannel
from hvdgloo.runner.network.probe import probe_key
from hvdgloo.runner.protocol.frames import Beat, Frame, Noise, Signal, Spawn, Start, Survey
from tests.support.inbound import PATIENCE, arrival, eventually, visit


@pytest.fixture
def listener() -> Iterator[TaskListener]:
    with TaskListener(2, addresses=["127.0.0.1"]) as listening:
        yield listening


def connected(listener: TaskListener) -> socket.socket:
    return socket.create_connection(listener.invitation.endpoints[0], timeout=PATIENCE)


def rest(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    try:
        while piece := sock.recv(4096):
            data += piece
    except ConnectionResetError:
        pass
    return data


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, "it was closed"
        data += piece
    return data


def begun(sock: socket.socket, nonce: bytes) -> tuple[bytes, bytes]:
    """The launcher's nonce and proof for this one."""
    sock.sendall(_HELLO.pack(_MAGIC, bytes(_CLAIM.size), nonce))
    return exactly(sock, NONCE_BYTES), exactly(sock, PROOF_BYTES)


def proven(listener: TaskListener, sock: socket.socket) -> Link:
    """A task's end after both have proved the secret."""
    return handshake(listener.secret).prove(sock, 0, time.monotonic() + PATIENCE)


def test_a_task_that_knows_the_secret_is_let_in(listener: TaskListener) -> None:
    sock, answer = visit(listener, arrival(1, name="executor 7"))
    assert answer.refused == ""
    eventually(lambda: [each.label for each in listener.arrived] == ["h1 (executor 7)"])
    assert listener.arrived[0].address == "127.0.0.1"
    sock.close()


def test_a_task_with_another_secret_is_told_nothing_and_believes_nothing(listener: TaskListener) -> None:
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        visit(listener, arrival(0), generate_secret())
    assert listener.arrived == ()


def test_a_task_that_cannot_prove_the_secret_is_sent_away(listener: TaskListener) -> None:
    """Also if it goes on after a proof that it cannot check."""
    with connected(listener) as sock:
        begun(sock, os.urandom(NONCE_BYTES))
        sock.sendall(os.urandom(PROOF_BYTES) + framing.head(2) + b"{}" + bytes(framing.TAG))
        assert rest(sock) == b""
    assert listener.arrived == ()


def test_the_launcher_s_own_proof_is_no_proof_of_a_task(listener: TaskListener) -> None:
    with connected(listener) as sock:
        _, proof = begun(sock, os.urandom(NONCE_BYTES))
        sock.sendall(proof)
        assert rest(sock) == b""
    assert listener.arrived == ()


def test_what_was_recorded_is_worthless_in_another_connection(listener: TaskListener) -> None:
    said: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: Any, flags: int = 0) -> None:
            said.append(bytes(data))
            super().sendall(data, flags)

    with Recorded() as sock:
        sock.settimeout(PATIENCE)
        sock.connect(listener.invitation.endpoints[0])
        _, answer = introduce(listener.secret, sock, arrival(0), time.monotonic() + PATIENCE)
        assert answer == Reply()
        eventually(lambda: listener.arrived != ())  # else it would seem to have left before it is noted
    eventually(lambda: listener.arrived == ())
    with connected(listener) as sock:
        sock.sendall(b"".join(said))
        assert len(rest(sock)) <= NONCE_BYTES + PROOF_BYTES
    assert listener.arrived == ()


def test_the_launcher_s_key_is_none_of_a_task(listener: TaskListener) -> None:
    with connected(listener) as sock:
        link = proven(listener, sock)
        sock.sendall(Link(sock, sending=link.receiving, receiving=link.sending).signed(to_json(arrival(0))))
        assert rest(sock) == b""
    assert listener.arrived == ()


def test_a_message_of_another_place_is_no_introduction(listener: TaskListener) -> None:
    """Its tag covers its number: what was signed to come later cannot come first."""
    with connected(listener) as sock:
        link = proven(listener, sock)
        link.signed(b"{}")
        sock.sendall(link.signed(to_json(arrival(0))))
        assert rest(sock) == b""
    assert listener.arrived == ()


@pytest.mark.parametrize("purpose", ["control connection", "shared memory connection for x", "probe"])
def test_a_proof_for_another_purpose_is_none(listener: TaskListener, purpose: str) -> None:
    with connected(listener) as sock, pytest.raises(AuthenticationError, match="does not know this job's secret"):
        Handshake(listener.secret, 0, 0, purpose).prove(sock, 0, time.monotonic() + PATIENCE)
    assert listener.arrived == ()


def test_a_changed_introduction_is_refused(listener: TaskListener) -> None:
    with connected(listener) as sock:
        sock.sendall(proven(listener, sock).signed(to_json(arrival(0))).replace(b'"index":0', b'"index":1'))
        assert rest(sock) == b""
    assert listener.arrived == ()


def test_a_length_is_not_believed(listener: TaskListener) -> None:
    with connected(listener) as sock:
        proven(listener, sock)
        sock.sendall(struct.pack("!I", 1 << 30))
        assert rest(sock) == b""


def test_a_message_that_was_cut_short_is_no_introduction(listener: TaskListener) -> None:
    with connected(listener) as sock:
        sock.sendall(proven(listener, sock).signed(to_json(arrival(0)))[:-1])
        sock.shutdown(socket.SHUT_WR)
        assert rest(sock) == b""
    assert listener.arrived == ()


@pytest.mark.parametrize("words", [b"[]", b"{}", b'{"index": "x"}', b"\xff", b"[" * 5000], ids=range(5))
def test_an_introduction_that_is_none_is_refused_and_the_listener_goes_on(listener: TaskListener, words: bytes) -> None:
    with connected(listener) as sock:
        sock.sendall(proven(listener, sock).signed(words))
        assert rest(sock) == b""
    sock, answer = visit(listener, arrival(0))
    assert answer == Reply()
    sock.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", bytes(40), _MAGIC])
def test_silence_and_noise_delay_no_task(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """As many strangers as there are places, and more."""
    monkeypatch.setattr(module, "MOST_VISITORS", 4)
    monkeypatch.setattr(module, "_GRACE", 0.01)
    with TaskListener(1, addresses=["127.0.0.1"]) as listener:
        strangers = [connected(listener) for _ in range(12)]
        for stranger in strangers:
            stranger.sendall(said)
        sock, answer = visit(listener, arrival(0))
        assert answer.refused == ""
        for each in (*strangers, sock):
            each.close()


def test_strangers_have_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.1)
    with TaskListener(1, addresses=["127.0.0.1"]) as listener, connected(listener) as sock:
        assert rest(sock) == b""


def test_a_launcher_without_the_secret_learns_nothing_of_the_task() -> None:
    """A task sends only its nonce before the launcher's proof."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
        accepted, _ = listener.accept()
        accepted.settimeout(PATIENCE)
        accepted.sendall(os.urandom(NONCE_BYTES + PROOF_BYTES))
        accepted.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthenticationError):
            introduce(generate_secret(), task, arrival(0), time.monotonic() + PATIENCE)
        task.close()
        assert len(rest(accepted)) == _HELLO.size
        accepted.close()


# Frames.


SECRET = generate_secret()
DOWN, UP = bytes(range(32)), bytes(range(32, 64))


def channels() -> tuple[SealedChannel, socket.socket, SealedChannel]:
    """A launcher's end, the wire behind it, and an agent's end that reads what is put into ``wire``."""
    ours, theirs = socket.socketpair()
    wire, far = socket.socketpair()
    launcher, agent = (
        SealedChannel(
            os.dup(end.fileno()), end.detach(), sending=FrameMac(one, 1), receiving=FrameMac(other, 1), secret=SECRET
        )
        for end, one, other in ((ours, DOWN, UP), (far, UP, DOWN))
    )
    _WIRES.append((theirs, wire))
    return launcher, theirs, agent


_WIRES: list[tuple[socket.socket, socket.socket]] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    for pair in _WIRES:
        for sock in pair:
            sock.close()
    _WIRES.clear()


def sent(launcher: SealedChannel, heard: socket.socket, *frames: Frame) -> list[bytes]:
    found = []
    for frame in frames:
        launcher.send(frame)
        found.append(heard.recv(1 << 16))
    return found


def read(agent: SealedChannel, data: bytes) -> list[Frame | Noise]:
    _WIRES[-1][1].sendall(data)
    return agent.receive()


def close(*ends: SealedChannel) -> None:
    for end in ends:
        os.close(end.receive_fd)
        os.close(end.send_fd)


def test_frames_arrive_as_they_were_sent() -> None:
    launcher, heard, agent = channels()
    frames = [Signal(10), Beat(), Signal(12)]
    assert read(agent, b"".join(sent(launcher, heard, *frames))) == frames
    close(launcher, agent)


@pytest.mark.parametrize(
    "attack",
    [
        lambda one, two: two + one,
        lambda one, two: one + one,
        lambda one, two: two,
        lambda one, two: one[:6] + bytes([one[6] ^ 1]) + one[7:],
        lambda one, two: one[:-1] + bytes([one[-1] ^ 1]),
        lambda one, two: one[:-16] + two[-16:],
    ],
    ids=["reordered", "repeated", "left out", "changed", "another tag", "the next one's tag"],
)
def test_no_frame_can_be_tampered_with(attack: Any) -> None:
    launcher, heard, agent = channels()
    one, two = sent(launcher, heard, Signal(10), Signal(12))
    with pytest.raises(LaunchError, match="wrong signature"):
        read(agent, attack(one, two))
    close(launcher, agent)


def test_a_frame_cannot_be_sent_back() -> None:
    launcher, heard, agent = channels()
    (frame,) = sent(launcher, heard, Beat())
    heard.sendall(frame)
    with pytest.raises(LaunchError, match="wrong signature"):
        launcher.receive()
    close(launcher, agent)


def test_neither_the_secret_nor_what_follows_from_it_is_sent_and_the_agent_has_both() -> None:
    launcher, heard, agent = channels()
    env = {"HVDGLOO_SECRET": SECRET.hex(), "A": "1"}
    frames = [
        Start("id", {"A": "1"}, "/", 5.0, 5.0, 3.0),
        Spawn(0, ["true"], env),
        Survey(0, probe_key(SECRET), [], True, None),
    ]
    wire = b"".join(sent(launcher, heard, *frames))
    assert read(agent, wire) == frames
    for hidden in (SECRET, SECRET.hex().encode(), probe_key(SECRET)):
        assert hidden not in wire
    close(launcher, agent)


def test_names_and_variables_of_a_task_may_be_any_bytes(listener: TaskListener) -> None:
    odd = "h\udcff"
    sock, _ = visit(listener, arrival(0, host=odd, cwd=f"/{odd}", path=odd))
    with sock:
        eventually(lambda: len(listener.arrived) == 1)
        (found,) = listener.arrived
    assert (found.host, found.cwd, found.path) == (odd, f"/{odd}", odd)
    told = Bootstrap(b"\xff", (b"d", 1), (b"u", 1), 3, 0, {odd: odd})
    assert told.encode().count(b"\n") == 1
    assert read_bootstrap(told.encode()).environ == {odd: odd}
