"""Addresses of an elastic job's hosts: chosen for each host that joins, while the others work.

The choice is made as for the hosts of a fixed job (``hvdgloo.runner.network_discovery``), with two differences.
Addresses in use never change: a new host must reach them, and is given an address that the present hosts reach. And
nothing here blocks: hosts that join at about the same time are tried together, in rounds, between which the supervisor
does its work. If a round fails, its hosts are tried one by one, so that an unreachable host does not keep out the
others.

Workers that cannot reach the launcher reach the rendezvous server through their agent
(``hvdgloo.runner.protocol.relay``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.network import addressing, interfaces, probe
from hvdgloo.runner.network.addressing import Reports
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, Answer, ProbeListener, ProbeResult
from hvdgloo.runner.network_discovery import SETTLE_SECONDS, is_here, loopback_of, probe_timeout
from hvdgloo.runner.protocol.frames import Probe, Probed, Relay, Relaying, Survey, Surveyed
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.elastic import ElasticSupervisor, Visit
from hvdgloo.runner.supervise.relayed import RelayedConnections

TOGETHER = 1.0
"""Seconds for which a host waits for others that are on their way, to be tried together with them."""


@dataclass(frozen=True)
class Reached:
    """The addresses that a host is reached at and reaches.

    Attributes:
        address: the address of its workers.
        rendezvous: the launcher's address, or loopback if the agent relays.
        port: port at which the agent relays; None if its workers reach the server themselves.
    """

    address: Address
    rendezvous: str
    port: int | None = None


@dataclass(eq=False)
class _Host:
    """A host that is to be admitted, or was.

    Attributes:
        number: identifies it in probes.
        surveyed: its addresses, once it has reported them.
        until: deadline for its report.
        alone: True once a round with it has failed, so that it gets a round of its own.
        relayed: its address, if its agent is to relay its workers' connections.
        reached: set once it was admitted.
    """

    visit: Visit
    link: AgentLink
    number: int
    until: float
    since: float = math.inf
    surveyed: Surveyed | None = None
    candidates: Sequence[Address] = ()
    alone: bool = False
    relayed: Address | None = None
    reached: Reached | None = None


@dataclass(eq=False)
class _Round:
    """Hosts that are being tried, with the present hosts.

    Attributes:
        members: in the order of ``reports``; present hosts come first.
        new_hosts: the members that are not admitted yet.
        expected: number of answers.
    """

    members: list[_Host]
    new_hosts: list[_Host]
    reports: Reports
    answers: dict[tuple[int, int, str], Answer]
    expected: int
    until: float
    chosen_at: float = math.inf
    indices: dict[int, int] = field(default_factory=dict)


class Admission:
    """The admission of hosts.

    Args:
        launcher: the launcher's addresses, at which the rendezvous server listens.
        server: address and port of the rendezvous server on this host, for connections that agents relay.
        loopback: True if all hosts are this machine, and no others can join: then they need no other address.
    """

    def __init__(
        self,
        supervisor: ElasticSupervisor,
        spec: LaunchSpec,
        launcher: Sequence[Address],
        server: tuple[str, int],
        *,
        loopback: bool,
    ) -> None:
        self._supervisor = supervisor
        self._network = spec.network
        self._nics = spec.nics
        self._launcher = launcher
        self._loopback = loopback
        self._key = probe.probe_key(spec.secret)
        self._timeout = probe_timeout(spec.network.connect_timeout)
        self._hosts: dict[Visit, _Host] = {}
        self._numbers = 0
        self._round: _Round | None = None
        self._listener: ProbeListener | None = None
        self._relayed = RelayedConnections(supervisor.selector, server, self._on_relaying)
        supervisor.handlers |= {Surveyed: self._on_surveyed, Probed: self._on_probed}
        supervisor.handlers |= self._relayed.handlers

    def close(self) -> None:
        """Stop answering probes and relaying."""
        self._relayed.close()
        if self._listener is not None:
            self._listener.close()

    def reached(self, visit: Visit) -> Reached:
        """Return the addresses of a host that was admitted."""
        reached = self._hosts[visit].reached
        assert reached is not None
        return reached

    # Called by the supervisor.

    def request(self, visit: Visit) -> None:
        """Begin to choose an address for a host."""
        assert visit.link is not None
        now = time.monotonic()
        host = _Host(visit, visit.link, self._numbers, now + self._network.connect_timeout)
        self._numbers += 1
        self._hosts[visit] = host
        if self._loopback:
            own = loopback_of(visit.hello)
            self._admit(host, Reached(own, own.address))
            return
        rules = self._nics.rules(visit.link.host.name)
        host.link.channel.send(Survey(host.number, self._key, rules.items, True, self._network.port_range))

    def withdraw(self, visit: Visit) -> None:
        """Forget a host that has gone."""
        host = self._hosts.pop(visit, None)
        if host is not None:
            self._relayed.forget(host.link)
        if host is not None and self._round is not None and host in self._round.members:
            # Its answers will not come. The others begin again without it.
            self._round = None

    def keep_time(self, now: float) -> None:
        for host in list(self._hosts.values()):
            if self._is_awaited(host) and now >= host.until:
                timeout = self._network.connect_timeout
                what = "listen for its workers" if host.surveyed is not None else "report its addresses"
                self._refuse(
                    host,
                    f"its agent did not {what} within {timeout:g} s; if the host is only slow, raise "
                    "--connect-timeout-seconds",
                )
        if self._round is not None:
            self._judge(self._round, now)
        if self._round is None:
            self._begin(now)

    @property
    def next(self) -> float:
        times = [host.until for host in self._hosts.values() if self._is_awaited(host)]
        if self._round is not None:
            times += [self._round.until, self._round.chosen_at + SETTLE_SECONDS]
        else:
            times += [host.since + TOGETHER for host in self._waiting()]
        return min(times, default=math.inf)

    @staticmethod
    def _is_awaited(host: _Host) -> bool:
        """Tell whether its agent is to answer."""
        return host.reached is None and (host.surveyed is None or host.relayed is not None)

    # Rounds.

    def _waiting(self) -> list[_Host]:
        """Return the hosts that have reported their addresses, and were not tried yet."""
        return [host for host in self._hosts.values() if host.reached is None and not self._is_awaited(host)]

    def _begin(self, now: float) -> None:
        """Begin a round, if there are hosts to try, and no others to wait for."""
        waiting = self._waiting()
        if not waiting:
            return
        others = self._supervisor.coming or any(host.surveyed is None for host in self._hosts.values())
        if others and now < min(host.since for host in waiting) + TOGETHER:
            return
        alone = [host for host in waiting if host.alone]
        new_hosts = alone[:1] or waiting
        self._listen()
        there = [host for host in self._hosts.values() if host.reached is not None]
        self._round = self._round_of(there, new_hosts, now)
        self._judge(self._round, now)

    def _listen(self) -> None:
        """Answer probes of the launcher's addresses from now on."""
        if self._listener is None:
            addresses = [address.address for address in self._launcher]
            port_range = self._network.port_range
            self._listener = ProbeListener(self._supervisor.selector, self._key, LAUNCHER, addresses, port_range)

    def _round_of(self, there: list[_Host], new_hosts: list[_Host], now: float) -> _Round:
        """Send the members of a round the probes that the new hosts need."""
        assert self._listener is not None
        members = [*there, *new_hosts]
        unheard = {(LAUNCHER, address): reason for address, reason in self._listener.failures.items()}
        for index, host in enumerate(members):
            if host.surveyed is not None:
                unheard |= {(index, address): reason for address, reason in host.surveyed.failures.items()}
                if host.reached is not None and host.reached.address.address not in host.surveyed.ports:
                    # It was admitted at loopback, as the only host, and without a network.
                    unheard.setdefault((index, host.reached.address.address), "its agent does not listen there")
        answers = self._known(there)
        reports = Reports(
            [host.visit.name for host in members],
            [(g.reached.address,) if g.reached is not None else g.candidates for g in members],
            self._launcher,
            answers,
            unheard,
        )
        tries: dict[int, list[tuple[int, str, int]]] = {}
        for source, target, address in addressing.tried(reports):
            if (source, target, address.address) not in answers:
                number, ports = LAUNCHER, dict(self._listener.ports)
                if target != LAUNCHER:
                    other = members[target]
                    assert other.surveyed is not None
                    number, ports = other.number, dict(other.surveyed.ports)
                tries.setdefault(source, []).append((number, address.address, ports[address.address]))
        for source, targets in tries.items():
            members[source].link.channel.send(Probe(targets, self._timeout))
        expected = len(answers) + sum(map(len, tries.values()))
        indices = {LAUNCHER: LAUNCHER, **{host.number: index for index, host in enumerate(members)}}
        # The agents end their probes in time; only an overloaded one takes longer to report.
        until = now + self._timeout + self._network.connect_timeout
        return _Round(members, new_hosts, reports, answers, expected, until, indices=indices)

    def _known(self, there: Sequence[_Host]) -> dict[tuple[int, int, str], Answer]:
        """Return the answers that are known: present hosts reach each other, and the launcher."""
        answers = {}
        for source, host in enumerate(there):
            assert host.reached is not None
            own = host.reached.address.address
            for target, other in enumerate(there):
                assert other.reached is not None
                answers[source, target, other.reached.address.address] = Answer(ProbeResult.REACHED, own, target)
            for address in self._launcher:
                answers[source, LAUNCHER, address.address] = Answer(ProbeResult.REACHED, own, LAUNCHER)
        return answers

    def _judge(self, round: _Round, now: float) -> None:
        """End a round if nothing can change its outcome, or its time is over."""
        complete = len(round.answers) >= round.expected or now >= round.until
        choice = addressing.choose(round.reports)
        if choice is not None:
            if all(choice.launcher) and round.chosen_at == math.inf:
                round.chosen_at = now
            if complete or now >= round.chosen_at + SETTLE_SECONDS or addressing.settled(round.reports):
                self._round = None
                for host, address, launcher in zip(round.members, choice.addresses, choice.launcher, strict=True):
                    if host not in round.new_hosts:
                        continue
                    if launcher:
                        self._admit(host, Reached(address, launcher))
                    else:
                        host.relayed, host.until = address, now + self._network.connect_timeout
                        host.link.channel.send(Relay(self._network.port_range))
            return
        if not complete:
            return
        self._round = None
        if len(round.new_hosts) > 1:
            for host in round.new_hosts:
                host.alone = True
        else:
            self._refuse(round.new_hosts[0], addressing.describe_unreached(round.reports))

    # The outcome.

    def _admit(self, host: _Host, reached: Reached) -> None:
        host.reached = reached
        self._supervisor.admit(host.visit, f"reached at {reached.address}")

    def _refuse(self, host: _Host, reason: str) -> None:
        self._supervisor.refuse(host.visit, reason)

    # Frames.

    def _host_of(self, link: AgentLink) -> _Host | None:
        return next((host for host in self._hosts.values() if host.link is link), None)

    def _on_surveyed(self, link: AgentLink, frame: Surveyed) -> None:
        host = self._host_of(link)
        if host is None:
            return
        addresses = [Address(*fields) for fields in frame.addresses]
        rules = self._nics.rules(link.host.name)
        host.surveyed, host.since = frame, time.monotonic()
        host.candidates = interfaces.candidates(addresses, rules)
        if host.candidates:
            return
        if is_here(host.visit.hello) and not rules.items and not self._others(host):
            own = loopback_of(host.visit.hello)
            self._admit(host, Reached(own, own.address))  # this machine has no network
        else:
            self._refuse(host, interfaces.explain_none(host.visit.name, addresses, rules))

    def _others(self, host: _Host) -> bool:
        """Tell whether any other present host is reached at an address other than loopback."""
        there = [other.reached for other in self._hosts.values() if other is not host and other.reached is not None]
        return any(not reached.address.loopback for reached in there)

    def _on_relaying(self, link: AgentLink, frame: Relaying) -> None:
        host = self._host_of(link)
        if host is None or host.relayed is None or host.reached is not None:
            return
        if frame.failure:
            self._refuse(host, f"its workers do not reach the launcher, nor could its agent listen: {frame.failure}")
        else:
            self._admit(host, Reached(host.relayed, host.visit.hello.loopback, frame.port))

    def _on_probed(self, link: AgentLink, frame: Probed) -> None:
        host = self._host_of(link)
        if self._round is None or host is None or host.number not in self._round.indices:
            return
        source = self._round.indices[host.number]
        for (number, address, _), (own, who, detail, outcome) in frame.answers:
            target = self._round.indices.get(number)
            if target is not None:
                name = self._round.indices.get(who, -1)
                self._round.answers[source, target, address] = Answer(ProbeResult(outcome), own, name, detail)


def launcher_addresses(spec: LaunchSpec) -> tuple[Address, ...]:
    """Return the launcher's own addresses, at which workers on other hosts may reach it.

    Raises:
        ConfigError: ``--nics`` excludes all existing addresses.
    """
    rules = interfaces.InterfaceFilter(spec.nics.general)
    own = interfaces.own_addresses()
    found = interfaces.candidates(own, rules)
    if not found and rules.items:
        raise ConfigError(interfaces.explain_none("this one, the launcher's,", own, rules))
    return found
