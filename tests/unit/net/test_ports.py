"""Ports of our own listeners: pain 12."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError


@pytest.fixture
def some() -> tuple[int, int]:
    """Three ports that are free now, outside of what the system hands out."""
    for first in range(20000, 30000, 7):
        try:
            for port in range(first, first + 3):
                for sock in ports.listen(["127.0.0.1"], (port, port)):
                    sock.close()
        except ConfigError:
            continue
        return first, first + 2
    pytest.fail("no three free ports")


TAKES_NAMES = """
import os, socket, sys, time
os.setuid(65534)
held = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in sys.argv[1:]]
for sock, port in zip(held, sys.argv[1:]):
    sock.bind("\\0hvdgloo-port-" + port)
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def names_taken_by_another_user(numbers: Iterable[int]) -> Iterator[None]:
    """The marks of ports, as a process of user 65534 has them."""
    command = [sys.executable, "-S", "-c", TAKES_NAMES, *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        process.kill()


def test_pain_12_a_listener_takes_the_first_free_port_of_the_range(some: tuple[int, int]) -> None:
    listeners = [ports.listen(["127.0.0.1"], some)[0] for _ in range(3)]
    assert [listener.getsockname()[1] for listener in listeners] == list(range(some[0], some[1] + 1))
    with pytest.raises(ConfigError, match=rf"any of the ports {some[0]}-{some[1]} of 127.0.0.1: .*in use; .*wider"):
        ports.listen(["127.0.0.1"], some)
    for listener in listeners:
        listener.close()
    ports.listen(["127.0.0.1"], some)[0].close()


def test_all_addresses_have_one_port(some: tuple[int, int]) -> None:
    with socket.create_server(("127.0.0.2", some[0])):
        one, other = ports.listen(["127.0.0.1", "127.0.0.2"], some)
        with one, other:
            assert one.getsockname() == ("127.0.0.1", some[0] + 1)
            assert other.getsockname() == ("127.0.0.2", some[0] + 1)


def test_an_address_that_is_not_here_is_named_and_no_other_port_is_tried(some: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1: this host has no such address"):
        ports.listen(["127.0.0.1", "192.0.2.1"], some)


def test_two_listeners_never_share_a_port(some: tuple[int, int]) -> None:
    """Both ask for SO_REUSEADDR, with which two sockets may be bound to one port until one of them listens."""
    with ports.listen(["127.0.0.1"], some)[0] as one, ports.listen(["127.0.0.1"], some)[0] as other:
        assert one.getsockname()[1] != other.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
class TestHolds:
    def test_pain_12_what_is_held_is_skipped(self, some: tuple[int, int]) -> None:
        with ports.hold_free_port(some) as hold:
            assert hold.port == some[1], "from the end, where listeners look last"
            with ports.PortHold(some[0]), ports.listen(["127.0.0.1"], some)[0] as listener:
                assert listener.getsockname()[1] == some[0] + 1
                with pytest.raises(ConfigError, match=f"any of the ports {some[0]}-{some[1]}"):
                    ports.listen(["127.0.0.1"], some)
                with pytest.raises(ConfigError, match=rf"{some[0]}-{some[1]} free for MASTER_PORT; .*wider"):
                    ports.hold_free_port(some)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
    def test_another_user_who_takes_all_names_keeps_no_process_from_listening(self, some: tuple[int, int]) -> None:
        """And yet the name of a port that only some of them has is respected: it may be another user's job."""
        with names_taken_by_another_user(range(some[0], some[1] + 1)):
            with ports.listen(["127.0.0.1"], some)[0] as one, ports.hold_free_port(some) as hold:
                assert (one.getsockname()[1], hold.port) == (some[0], some[1])
            with socket.create_server(("127.0.0.1", some[1])), ports.hold_free_port(some) as hold:
                assert hold.port == some[1] - 1
        with names_taken_by_another_user(some), ports.listen(["127.0.0.1"], some)[0] as one:
            assert one.getsockname()[1] == some[0] + 1
        with names_taken_by_another_user(some), ports.hold_free_port(some) as hold:
            assert hold.port == some[0] + 1

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
    def test_another_user_who_takes_the_names_of_all_ports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ports, "_candidates", lambda _: [20011, 20012])
        with names_taken_by_another_user([20011, 20012]), ports.hold_free_port() as hold:
            assert hold.port in (20011, 20012)

    def test_two_who_try_at_the_same_moment_both_get_one(self, some: tuple[int, int]) -> None:
        def take() -> list[int]:
            taken = []
            for _ in range(100):
                with ports.listen(["127.0.0.1"], (some[0], some[0] + 1))[0] as listener:
                    taken.append(listener.getsockname()[1])
            return taken

        with ThreadPoolExecutor(2) as pool:
            assert all(len(one.result()) == 100 for one in [pool.submit(take), pool.submit(take)])

    def test_a_port_in_use_is_not_held(self, some: tuple[int, int]) -> None:
        with socket.create_server(("127.0.0.1", some[1])), ports.hold_free_port(some) as hold:
            assert hold.port == some[1] - 1

    def test_whether_a_port_is_held(self, some: tuple[int, int]) -> None:
        with ports.PortHold(some[0]):
            assert ports.is_held(some[0])
        assert not ports.is_held(some[0])

    def test_a_hold_ends(self, some: tuple[int, int]) -> None:
        port = (some[0], some[0])
        ports.hold_free_port(port).close()
        ports.hold_free_port(port).close()

    def test_without_a_range_ports_are_not_given_twice_and_not_by_the_system(self) -> None:
        holds = [ports.hold_free_port() for _ in range(30)]
        try:
            assert len({hold.port for hold in holds}) == 30
            low, high = ports._ephemeral_ports()
            assert not any(low <= hold.port <= high for hold in holds)
            for hold in holds:
                with socket.socket() as probe:
                    probe.bind(("", hold.port))
        finally:
            for hold in holds:
                hold.close()

    def test_without_a_range_the_search_begins_anywhere_and_comes_by_every_port_once(self) -> None:
        searches = [list(ports._candidates(None)) for _ in range(5)]
        assert len({search[0] for search in searches}) > 1
        low, high = ports._ephemeral_ports()
        assert [sorted(search) for search in searches] == [sorted(set(searches[0]))] * 5
        assert len(searches[0]) > 1000
        assert not set(searches[0]) & set(range(low, high + 1))
