"""The meaning of --nics, and the addresses that are considered: pain 8."""

from __future__ import annotations

import pytest

from hvdgloo._platform import nics
from hvdgloo._platform.nics import nic_of
from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.command import interface_variables
from hvdgloo.runner.network.interfaces import (
    Address,
    InterfaceFilter,
    candidates,
    explain_none,
    own_addresses,
    parse_nics,
    why_not,
)

LOOPBACK = Address("", "127.0.0.1", 8)
LO = Address("lo", "127.0.0.1", 8)
ETH0 = Address("eth0", "10.0.0.5", 24)
ETH1 = Address("eth1", "192.168.7.5", 16)
ETH1_6 = Address("eth1", "fd00::5", 64)
LINK = Address("eth1", "fe80::5", 64)
DOWN = Address("ib0", "10.9.0.5", 24, up=False)
DOCKER = Address("docker0", "172.17.0.1", 16)
ALL = (LO, ETH0, ETH1, ETH1_6, LINK, DOWN, DOCKER)


def chosen(*texts: str, host: str = "h1") -> list[Address]:
    return list(candidates(ALL, parse_nics(texts, ["h1", "h2", "fd00::9"]).rules(host)))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((), [ETH0, ETH1, ETH1_6, DOCKER]),
        (("eth0",), [ETH0]),
        (("eth*",), [ETH0, ETH1, ETH1_6]),
        (("eth0,eth1",), [ETH0, ETH1, ETH1_6]),
        (("eth0", "docker0"), [ETH0, DOCKER]),
        (("10.0.0.0/8",), [ETH0]),
        (("192.168.7.5",), [ETH1]),
        (("192.168.7.9/16",), [ETH1]),
        (("fd00::/8",), [ETH1_6]),
        (("^docker0",), [ETH0, ETH1, ETH1_6]),
        (("^docker0,^192.168.0.0/16",), [ETH0, ETH1_6]),
        (("^eth*",), [DOCKER]),
        (("eth*,^fd00::/8",), [ETH0, ETH1]),
        (("eth1, ^eth1",), []),
        (("ib0",), []),
        (("lo",), []),
        (("h1=eth1,h2=eth0",), [ETH1, ETH1_6]),
        (("h2=eth0",), [ETH0, ETH1, ETH1_6, DOCKER]),
        (("docker0,h1=eth0", "h1=fd00::/16"), [ETH0, ETH1_6]),
        (("[fd00::9]=eth0",), [ETH0, ETH1, ETH1_6, DOCKER]),
    ],
    ids=str,
)
def test_pain_8_names_networks_exceptions_and_hosts(texts: tuple[str, ...], expected: list[Address]) -> None:
    assert chosen(*texts) == expected


def test_an_address_on_several_interfaces_is_one_candidate() -> None:
    twin = Address("eth2", ETH0.address, 32)
    assert candidates([ETH0, twin, ETH1], InterfaceFilter()) == (ETH0, ETH1)
    assert candidates([ETH0, twin, ETH1], InterfaceFilter(["^eth0"])) == (twin, ETH1)


def test_rules_of_a_host_named_by_an_ipv6_address() -> None:
    assert chosen("[fd00::9]=eth0", host="fd00::9") == [ETH0]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("h3=eth0", "h3 is not one of the hosts"),
        ("=eth0", "nothing is not one of the hosts"),
        ("^", "expected the name"),
        ("h1=", "expected the name"),
        ("^^eth0", "expected the name"),
        ("10.0.0.0/33", "expected the name"),
        ("eth0 eth1", "expected the name"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"--nics {text.replace('^', chr(92) + '^')}: {complaint}"):
        parse_nics([text], ["h1", "h2"])


def test_empty_items_mean_nothing() -> None:
    assert not parse_nics(["", "eth0,", ","], ["h1"]).by_host
    assert parse_nics(["eth0,"], ["h1"]).general == ("eth0",)
    assert not parse_nics([","], ["h1"])


@pytest.mark.parametrize(
    ("address", "reason"),
    [(LO, "loopback"), (LINK, "link-local"), (DOWN, "down"), (ETH0, ""), (Address("eth0", "169.254.1.2", 16), "")],
)
def test_why_an_address_is_not_considered(address: Address, reason: str) -> None:
    assert why_not(address, InterfaceFilter()).startswith(reason)
    assert bool(why_not(address, InterfaceFilter())) == bool(reason)


def test_pain_9_loopback_is_for_a_host_that_is_alone() -> None:
    assert "no other host can reach" in why_not(LO, InterfaceFilter(["lo"]))
    assert why_not(LO, InterfaceFilter(["lo"]), alone=True) == ""
    text = explain_none("h1", ALL, InterfaceFilter(["lo"]))
    assert text.startswith("--nics lo chooses no address of host h1 that could be used: 127.0.0.1 (lo) is loopback")
    assert "It has 10.0.0.5 (eth0), 192.168.7.5 (eth1), fd00::5 (eth1), 172.17.0.1 (docker0)." in text


def test_a_rule_that_fits_nothing_is_answered_with_what_there_is() -> None:
    text = explain_none("h2", (LO, ETH0, LINK), InterfaceFilter(["eth7", "^eth0"]))
    assert text.startswith("--nics eth7,^eth0 fits none of host h2's addresses; it has 10.0.0.5 (eth0). ")


def test_a_host_without_any_address_says_so() -> None:
    text = explain_none("h2", (LO, DOWN), InterfaceFilter())
    assert "127.0.0.1 (lo) is loopback, which no other host can reach, 10.9.0.5 (ib0) is down" in text
    assert "it has none at all" in explain_none("h2", (), InterfaceFilter())


def test_networks() -> None:
    assert ETH0.network == "10.0.0.0/24"
    assert ETH1_6.network == "fd00::/64"
    assert Address("tun0", "10.8.0.6", 32).network == "10.8.0.6/32"


def test_this_host_reports_its_loopback_address_and_no_scope() -> None:
    found = own_addresses()
    (loopback,) = [a for a in found if a.address == "127.0.0.1"]
    assert (loopback.prefix, loopback.loopback, loopback.up) == (8, True, True)
    assert not any("%" in a.address for a in found)


def test_libraries_that_want_an_interface_s_name_get_it() -> None:
    assert interface_variables(ETH0, chosen=False) == {"HOROVOD_GLOO_IFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    assert interface_variables(ETH1_6, chosen=False) == {"HOROVOD_GLOO_IFACE": "eth1", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert interface_variables(LOOPBACK, chosen=False) == interface_variables(LOOPBACK, chosen=True) == {}


def test_nccl_is_told_an_interface_only_if_the_user_has_chosen_one() -> None:
    """It uses several at once, which is what GPU machines with several network cards are for."""
    assert interface_variables(ETH0, chosen=True)["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert interface_variables(ETH1_6, chosen=True)["NCCL_SOCKET_IFNAME"] == "=eth1"


@pytest.mark.parametrize(
    ("address", "chosen", "before", "after"),
    [
        ("10.0.0.5", True, {}, {"NCCL_SOCKET_IFNAME": "=eth7"}),
        ("10.0.0.5", False, {}, {}),
        ("10.0.0.5", True, {"NCCL_SOCKET_IFNAME": "ib"}, {"NCCL_SOCKET_IFNAME": "ib"}),
        ("fd00::5", True, {}, {"NCCL_SOCKET_IFNAME": "=eth7", "NCCL_SOCKET_FAMILY": "AF_INET6"}),
        ("fd00::5", False, {}, {"NCCL_SOCKET_FAMILY": "AF_INET6"}),
        ("127.0.0.1", True, {}, {}),
        ("10.0.0.6", True, {}, {}),  # whose interface is not found
    ],
)
def test_without_a_launcher_a_worker_tells_nccl_itself(
    monkeypatch: pytest.MonkeyPatch, address: str, chosen: bool, before: dict[str, str], after: dict[str, str]
) -> None:
    monkeypatch.setattr(nics, "nic_of", {"10.0.0.5": "eth7", "fd00::5": "eth7", "127.0.0.1": "lo"}.get)
    environ = dict(before)
    nics.tell_nccl(address, environ, chosen=chosen)
    assert environ == after


def test_an_address_s_interface() -> None:
    (loopback,) = [address for address in own_addresses() if address.address == "127.0.0.1"]
    assert nic_of("127.0.0.1") == loopback.nic
    assert nic_of("192.0.2.1") == ""  # of a network for documentation
