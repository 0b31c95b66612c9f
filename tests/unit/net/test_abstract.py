"""Abstract Unix sockets: their names are no secret, and no permissions protect them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from hvdgloo._net import abstract

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")


@pytest.fixture
def name() -> str:
    return f"hvdgloo-test-{os.urandom(8).hex()}"


@pytest.fixture
def listener(name: str) -> Iterator[abstract.OwnListener]:
    with abstract.OwnListener(name) as made:
        made.setblocking(False)
        yield made


def connect(name: str, seconds: float = 5.0) -> socket.socket:
    return abstract.connect(name, time.monotonic() + seconds, lambda: False)


STRANGER = """
import os, socket, sys
os.setuid(65534)
socks = [socket.socket(socket.AF_UNIX) for _ in range(20)]
for sock in socks:
    sock.connect("\\0" + sys.argv[1])
print(flush=True)
print([sock.recv(1) for sock in socks].count(b""))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_another_user_is_turned_away_and_this_one_comes_in(listener: abstract.OwnListener, name: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline()
        with connect(name) as ours, listener.accept()[0] as accepted:
            assert abstract.lets_in(ours)
            ours.sendall(b"x")
            assert accepted.recv(1) == b"x"
        assert stranger.stdout.readline() == b"20\n"
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_connection_whose_user_cannot_be_told_is_closed(
    listener: abstract.OwnListener, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold(sock: socket.socket) -> int:
        raise OSError("no")

    with connect(name) as ours:
        monkeypatch.setattr(abstract, "user_of_peer", untold)
        with pytest.raises(OSError, match="no") as caught:
            listener.accept()
        ours.settimeout(5)
        assert ours.recv(1) == b""
        assert caught.tb is not None  # which would have kept an open socket alive


def fill(name: str) -> list[socket.socket]:
    """Connections until there is no room."""
    held: list[socket.socket] = []
    try:
        while True:
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].setblocking(False)
            held[-1].connect(f"\0{name}")
    except BlockingIOError:
        return held


def test_a_full_backlog_is_waited_for(listener: abstract.OwnListener, name: str) -> None:
    listener.listen(3)
    held = fill(name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect, name)
        assert not wait([waiting], 0.4).done  # longer than a turn
        for _ in held[:-1]:
            listener.accept()[0].close()
        waiting.result(5).close()
    for sock in held:
        sock.close()


def test_the_wait_ends_with_the_deadline_and_when_it_is_cancelled(listener: abstract.OwnListener, name: str) -> None:
    listener.listen(3)
    held = fill(name)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        connect(name, 0.1)
    with pytest.raises(BlockingIOError):
        abstract.connect(name, began + 100, lambda: True)
    assert time.monotonic() - began < 5
    for sock in held:
        sock.close()


def test_without_a_listener_it_fails_at_once(name: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        connect(name)


def test_whose_a_name_is(listener: abstract.OwnListener, name: str) -> None:
    assert abstract.holders(name) == {os.getpid()}
    assert abstract.holders(f"{name}-other") == set()


def test_processes_belong_to_their_effective_user(
    listener: abstract.OwnListener, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To /proc as to a listener, no matter which user has started them."""
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert abstract.holders(name) == {os.getpid()}
