"""A host's addresses: which there are, which of them others could reach at all, and which of those the user wants.

An agent reports all of its addresses, so that an error can say why one was not considered. ``InterfaceFilter`` is what
the user asked for with ``--nics``. Everything here except ``own_addresses`` is pure.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdgloo.errors import ConfigError

EXAMPLE = "--nics eth0, --nics 10.0.0.0/8, --nics ^docker0, --nics h1=eth1,h2=ib0"


@dataclass(frozen=True)
class Address:
    """One IP address of a host.

    Attributes:
        nic: the name of its network interface.
        address: without a scope.
        prefix: length of the network part, in bits.
        up: the interface is up, and has a carrier.
    """

    nic: str
    address: str
    prefix: int
    up: bool = True

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.address)

    @property
    def version(self) -> int:
        return self.ip.version

    @property
    def network(self) -> str:
        """``10.0.0.0/24``."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    @property
    def loopback(self) -> bool:
        return self.ip.is_loopback

    @property
    def link_local(self) -> bool:
        return self.ip.is_link_local

    def __str__(self) -> str:
        return f"{self.address} ({self.nic})" if self.nic else self.address


def own_addresses() -> tuple[Address, ...]:
    """Return this host's addresses, in the system's own order of interfaces."""
    import psutil  # a few milliseconds that a job on one host can save

    try:
        stats = psutil.net_if_stats()
    except OSError:
        stats = {}  # an interface vanished at this moment; all then count as up
    found = [
        Address(nic, entry.address.partition("%")[0], _prefix(entry.netmask, entry.address), _is_up(stats.get(nic)))
        for nic, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    order = {name: index for index, name in socket.if_nameindex()}
    # An alias (eth0:1) has no index of its own.
    return tuple(sorted(found, key=lambda a: order.get(a.nic, order.get(a.nic.partition(":")[0], 1 << 30))))


def _is_up(stats: object) -> bool:
    return bool(getattr(stats, "isup", True))


def _prefix(netmask: str | None, address: str) -> int:
    if not netmask:
        return 128 if ":" in address else 32
    return int(ipaddress.ip_address(netmask)).bit_count()


class InterfaceFilter:
    """The user's rules for one host's addresses: names of interfaces, networks, and exceptions from both.

    Args:
        items: each ``eth0``, ``eth*``, ``10.0.0.0/8`` or ``10.0.0.5``, with ``^`` before it for an exception.
            Empty means any.
    """

    def __init__(self, items: Sequence[str] = ()) -> None:
        self.items = tuple(items)
        self._wanted = [item for item in items if not item.startswith("^")]
        self._unwanted = [item[1:] for item in items if item.startswith("^")]

    def allow(self, address: Address) -> bool:
        """Tell whether an address may be used: it is no exception, and it is included if the rules include anything."""
        if any(_matches(item, address) for item in self._unwanted):
            return False
        return not self._wanted or any(_matches(item, address) for item in self._wanted)

    def __str__(self) -> str:
        return ",".join(self.items)


def _matches(item: str, address: Address) -> bool:
    network = _network(item)
    if network is None:
        return fnmatch.fnmatchcase(address.nic, item)
    return network.version == address.version and address.ip in network


def _network(item: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(item.strip("[]"), strict=False)
    except ValueError:
        return None


@dataclass(frozen=True)
class NicSettings:
    """All of ``--nics``: rules for every host, and rules for single hosts, which replace the general ones."""

    general: tuple[str, ...] = ()
    by_host: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def rules(self, host: str) -> InterfaceFilter:
        """Return the rules for one host."""
        return InterfaceFilter(dict(self.by_host).get(host, self.general))

    def __bool__(self) -> bool:
        return bool(self.general or self.by_host)


def parse_nics(texts: Iterable[str], hosts: Sequence[str] | None) -> NicSettings:
    """Return the rules that the values of ``--nics`` stand for.

    Args:
        texts: each a comma-separated list of names and networks, each with an optional ``^`` before it, and before that
            an optional ``host=``.
        hosts: the job's; None if they are not known yet.

    Raises:
        ConfigError: an item cannot be understood, or a host is not the job's; the text names it.
    """
    general: list[str] = []
    by_host: dict[str, list[str]] = {}
    for item in (item.strip() for text in texts for item in text.split(",")):
        host, equals, rule = item.rpartition("=")
        host = host.strip().strip("[]")
        if equals and hosts is not None and host not in hosts:
            raise ConfigError(f"--nics {item}: {host or 'nothing'} is not one of the hosts ({', '.join(hosts[:8])})")
        if equals:
            by_host.setdefault(host, []).append(_checked(rule.strip(), item))
        elif item:
            general.append(_checked(item, item))
    return NicSettings(tuple(general), tuple((host, tuple(rules)) for host, rules in by_host.items()))


def _checked(rule: str, item: str) -> str:
    name = rule.removeprefix("^")
    broken = not name or "^" in name or any(c.isspace() for c in name)
    if broken or ("/" in name and _network(name) is None):
        raise ConfigError(
            f"--nics {item}: expected the name of a network interface, a network or an address, with ^ before it to "
            f"leave it out; for example: {EXAMPLE}"
        )
    return rule


def candidates(addresses: Iterable[Address], rules: InterfaceFilter) -> tuple[Address, ...]:
    """Return the addresses at which other hosts may be able to reach this one, and which the user allows.

    Each one once: several interfaces may have the same address (anycast, a bond's halves), and it leads to one host.
    """
    found: dict[str, Address] = {}
    for address in addresses:
        if not why_not(address, rules):
            found.setdefault(address.address, address)
    return tuple(found.values())


def why_not(address: Address, rules: InterfaceFilter, *, alone: bool = False) -> str:
    """Return why an address is not considered; empty if it is.

    Args:
        alone: there is no other host, so loopback will do.
    """
    if not rules.allow(address):
        return "left out by --nics"
    if address.loopback and not alone:
        return "loopback, which no other host can reach"
    if address.version == 6 and address.link_local:
        return "link-local"
    if not address.up:
        return "down"
    return ""


def explain_none(host: str, addresses: Sequence[Address], rules: InterfaceFilter, *, alone: bool = False) -> str:
    """Explain why a host has no usable address, and what to do."""
    if not rules.items:
        listed = ", ".join(f"{a} is {why_not(a, rules, alone=alone)}" for a in addresses) or "it has none at all"
        return f"host {host} has no address that another host could reach: {listed}. Bring a network interface up there"
    others = [a for a in addresses if not why_not(a, InterfaceFilter(), alone=alone)]
    listed = ", ".join(map(str, others)) or "nothing else that could be used"
    chosen = [a for a in addresses if rules.allow(a)]
    if not chosen:
        return f"--nics {rules} fits none of host {host}'s addresses; it has {listed}. {_ADVICE}"
    reasons = ", ".join(f"{a} is {why_not(a, rules, alone=alone)}" for a in chosen)
    return f"--nics {rules} chooses no address of host {host} that could be used: {reasons}. It has {listed}. {_ADVICE}"


_ADVICE = "--nics takes names, networks and ^exceptions, for single hosts with HOST= before them"
