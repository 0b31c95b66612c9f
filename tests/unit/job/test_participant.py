"""Addresses that ranks on other hosts cannot use are refused: pains 9 and 13."""

from __future__ import annotations

import threading

import pytest

from hvdgloo._job import participant
from hvdgloo._job.participant import Participant, check_addresses
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.topology import Host, Topology, Worker


def topology(*hosts: str) -> Topology:
    return Topology(
        0,
        tuple(Host(f"h{number}", f"identity {number}", (address,)) for number, address in enumerate(hosts)),
        tuple(Worker(rank, rank, 0, 100 + rank, address, 0) for rank, address in enumerate(hosts)),
    )


@pytest.mark.parametrize(
    "addresses",
    [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"), ("127.0.0.1",), ("::1",)],
    ids=["IPv4", "IPv6", "one host", "one host, IPv6"],
)
def test_what_others_can_use_is_taken(addresses: tuple[str, ...]) -> None:
    check_addresses(topology(*addresses), addresses[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_pain_9_loopback_is_refused_across_hosts(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"rank 1 \(host h1, pid 101\) can be reached at {address} only .*own host"):
        check_addresses(topology("10.0.0.1", address), "10.0.0.1")


def test_pain_9_loopback_everywhere_is_refused_if_the_server_is_reached_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 \(host h0, pid 100\) .*HVDGLOO_ADDRESS"):
        check_addresses(topology("127.0.0.1", "127.0.0.1"), "10.0.0.1")


def test_containers_that_share_a_network_may_use_its_loopback() -> None:
    check_addresses(topology("127.0.0.1", "127.0.0.1"), "127.0.0.1")


def test_pain_13_one_family_per_job() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 .* has the address 10.0.0.1 and rank 1 .* has fd00::2, but"):
        check_addresses(topology("10.0.0.1", "fd00::2"), "10.0.0.1")


def test_a_server_whose_process_does_not_run_is_waited_for_until_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system accepts connections for it. It may be the user's own program, held by one long call."""
    monkeypatch.setattr(participant, "_SAY_SO_SECONDS", 0.1)
    server = RendezvousServer(size=1, secret=b"s" * 32).listen()
    late = threading.Timer(1.0, server.start)
    late.start()
    config = Config(rendezvous=server.endpoint, secret=b"s" * 32, connect_timeout=0.2, start_timeout=20.0)
    try:
        Participant(config).client.close()
    finally:
        late.join()
        server.stop()
