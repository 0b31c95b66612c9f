"""The plan of a bed of hosts, as values: its hosts, their NICs and addresses, and the commands that make them.

Pure. The keeper (``keeper.py``) carries a plan out; the ``Bed`` shows it to tests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Nic:
    """A network card.

    Attributes:
        name: as the host sees it.
        network: the letter of the network that it is plugged into.
    """

    name: str = "eth0"
    network: str = "a"


@dataclass(frozen=True)
class HostSpec:
    """A host that is wanted.

    Attributes:
        name: its host name, which every host of the bed can resolve (to its first NIC's addresses).
        nics: its network cards, in the order of their indices.
        ipv4, ipv6: which addresses they get.
        docker0: there is a bridge of this name with 172.17.0.1, as on every other host.
        priv0: there is a NIC in a subnet of this host's own, that no other host has a route to.
        private_first: docker0 and priv0 come before the NICs that lead somewhere.
        loopback_name: the host resolves its own name to 127.0.1.1, as Debian's installer arranges it.
        private_tmp: it has a /tmp of its own (the test's tmp_path, if that is below it, can then not be seen there).
        sshd_options: lines added at the top of its sshd_config.
        users: other names that root may log in under.
        bashrc: what its login shell's start-up file holds.
    """

    name: str
    nics: tuple[Nic, ...] = (Nic(),)
    ipv4: bool = True
    ipv6: bool = False
    docker0: bool = True
    priv0: bool = True
    private_first: bool = False
    loopback_name: bool = False
    private_tmp: bool = False
    sshd_options: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    bashrc: str = ""


@dataclass(frozen=True)
class Card:
    """A NIC with its addresses, and the port of the network's switch that it is plugged into."""

    name: str
    network: str
    port: str
    ipv4: str | None
    ipv6: str | None

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for address in (self.ipv4, self.ipv6) if address)


@dataclass(frozen=True)
class HostPlan:
    """A host with everything decided."""

    spec: HostSpec
    index: int
    cards: tuple[Card, ...]
    gateway: bool

    @property
    def private_address(self) -> str:
        return f"10.200.{self.index}.1"

    @property
    def address(self) -> str:
        """The address at which other hosts reach it: its first NIC's first address."""
        return self.cards[0].addresses[0]

    def own_commands(self) -> list[str]:
        """Return the input of ``ip -batch`` inside the host, once its cards have been put there."""
        lines = ["link set lo up"]
        for card in self.cards:
            lines += [f"address add {card.ipv4}/24 dev {card.name}"] if card.ipv4 else []
            lines += [f"address add {card.ipv6}/64 dev {card.name} nodad"] if card.ipv6 else []
            lines.append(f"link set {card.name} up")
        if self.gateway and self.cards:
            number = network_number(self.cards[0].network)
            lines += [f"route add default via 10.77.{number}.1"] if self.cards[0].ipv4 else []
            lines += [f"route add ::/0 via fd77:{number}::1"] if self.cards[0].ipv6 else []
        return lines

    def private_commands(self) -> list[str]:
        """The NICs that lead nowhere."""
        lines = []
        if self.spec.docker0:
            lines += ["link add docker0 type bridge", "address add 172.17.0.1/16 dev docker0", "link set docker0 up"]
        if self.spec.priv0:
            lines += [
                "link add priv0 type bridge",
                f"address add {self.private_address}/24 dev priv0",
                "link set priv0 up",
            ]
        return lines


@dataclass(frozen=True)
class Plan:
    """A whole bed."""

    hosts: tuple[HostPlan, ...]
    networks: tuple[str, ...]
    routed: bool

    def switch_commands(self, inits: Sequence[int]) -> list[str]:
        """Return the input of ``ip -batch`` where the switches stand; ``inits`` are the hosts' processes."""
        lines = ["link set lo up"]
        for network in self.networks:
            number = network_number(network)
            lines.append(f"link add br-{network} type bridge")
            lines += [
                f"address add 10.77.{number}.1/24 dev br-{network}",
                f"address add fd77:{number}::1/64 dev br-{network} nodad",
                f"link set br-{network} up",
            ]
        for host, init in zip(self.hosts, inits, strict=True):
            for card in host.cards:
                lines += [
                    f"link add {card.port} type veth peer name {card.name} netns {init}",
                    f"link set {card.port} master br-{card.network} up",
                ]
        return lines

    def hosts_file(self, host: HostPlan) -> str:
        """This host's /etc/hosts."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for other in self.hosts:
            if other is host and host.spec.loopback_name:
                lines.append(f"127.0.1.1 {host.spec.name}")
            else:
                lines += [f"{address} {other.spec.name}" for address in _reached_at(host, other)]
        return "".join(f"{line}\n" for line in lines)


def network_number(network: str) -> int:
    return ord(network) - ord("a") + 1


def make_plan(specs: Sequence[HostSpec], *, routed: bool) -> Plan:
    """Decide on addresses: ``10.77.<network>.<10 + index>`` and ``fd77:<network>::<10 + index>``."""
    hosts = []
    for index, spec in enumerate(specs):
        cards = tuple(_card(spec, index, position, nic) for position, nic in enumerate(spec.nics))
        hosts.append(HostPlan(spec, index, cards, gateway=routed))
    networks = tuple(dict.fromkeys(nic.network for spec in specs for nic in spec.nics))
    return Plan(tuple(hosts), networks, routed)


def as_data(plan: Plan) -> dict[str, object]:
    """For the keeper, which imports nothing of ours."""
    return {
        "hosts": [
            {
                "name": host.spec.name,
                "hosts_file": plan.hosts_file(host),
                "private": host.private_commands(),
                "private_first": host.spec.private_first,
                "own": host.own_commands(),
                "private_tmp": host.spec.private_tmp,
                "below_tmp": _below_tmp(),
                "sshd_options": list(host.spec.sshd_options),
                "users": list(host.spec.users),
                "bashrc": host.spec.bashrc,
                "addresses": [address for card in host.cards for address in card.addresses],
            }
            for host in plan.hosts
        ],
        "routed": plan.routed,
    }


def _below_tmp() -> list[str]:
    """Return the folders of the checkout and its interpreter that are in /tmp; none of them inside another one."""
    folders = {str(Path(__file__).parents[3]), sys.prefix, sys.base_prefix}
    below = sorted(folder for folder in folders if folder.startswith("/tmp/"))
    return [folder for folder in below if not any(folder.startswith(f"{other}/") for other in below)]


def _card(spec: HostSpec, index: int, position: int, nic: Nic) -> Card:
    number = network_number(nic.network)
    return Card(
        nic.name,
        nic.network,
        f"p{index}-{position}",
        f"10.77.{number}.{10 + index}" if spec.ipv4 else None,
        f"fd77:{number}::{10 + index}" if spec.ipv6 else None,
    )


def _reached_at(host: HostPlan, other: HostPlan) -> tuple[str, ...]:
    """The addresses under which ``host`` finds ``other``: on a network that they share, if there is one."""
    shared = {card.network for card in host.cards}
    best = sorted(other.cards, key=lambda card: card.network not in shared)
    return best[0].addresses if best else ()
