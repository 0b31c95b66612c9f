"""The launcher's part in probing the network: every host reports its addresses and tries the others' and the
launcher's, and ``network.addressing`` chooses from the results.

A job on this machine alone needs none of this and stays on loopback; a job on a single other machine stays on that
machine's loopback, where its agent relays connections to the rendezvous server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.rendezvous._host_identity import host_identity
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.network import addressing, interfaces, probe
from hvdgloo.runner.network.addressing import Placement, Reports
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, Answer, ProbeListener, ProbeResult, ProbeTarget
from hvdgloo.runner.protocol.frames import Hello, Probe, Probed, ProbesEnd, Survey, Surveyed
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.supervisor import Supervisor


def loopback_of(hello: Hello) -> Address:
    """Return the address at which an agent's host reaches itself."""
    return Address("", hello.loopback, 128 if ":" in hello.loopback else 8)


SETTLE_SECONDS = 0.3
"""Seconds to wait, once there is a choice, for answers that might lead to a better one."""

_LOOK_AGAIN = 0.05
_LEAST, _MOST = 0.5, 3.0


@dataclass(frozen=True)
class DiscoveredNetwork:
    """The chosen addresses.

    Attributes:
        placement: the address of each host, and the address at which it reaches the launcher.
        master_port: port held on the first host for ``MASTER_PORT``.
    """

    placement: Placement
    master_port: int


def probe_timeout(connect_timeout: float) -> float:
    """Return the seconds for one probe: enough to survive a lost packet, yet so short that all probes end within 10
    s."""
    return min(_MOST, max(_LEAST, connect_timeout / 10))


def discover(supervisor: Supervisor, spec: LaunchSpec) -> DiscoveredNetwork:
    """Choose the address at which each host is reached.

    Raises:
        LaunchError: a host has no usable address, or does not report.
        HostsUnreachableError: two hosts do not reach each other.
        ConfigError: no port of the range is free.
        JobFailedError: a signal interrupted it.
    """
    links = supervisor.links
    first: dict[str, AgentLink] = {}
    for link in links:
        first.setdefault(link.host.machine, link)
    # Of several agents on one machine, one reports for all.
    spokesmen = list(first.values())
    alone = len(spokesmen) == 1 or all(is_here(_hello(link)) for link in spokesmen)
    if alone:
        network = _alone(supervisor, spec, spokesmen)
    else:
        supervisor.probing()
        network = _Discovery(supervisor, spec, spokesmen).run()
    chosen = network.placement
    found = dict(zip(first, zip(chosen.addresses, chosen.launcher, strict=True), strict=True))
    addresses, launcher = zip(*(found[link.host.machine] for link in links), strict=True)
    if not alone:
        supervisor.probed([f"reached at {address}" for address in addresses])
    return replace(network, placement=Placement(addresses, launcher))


def explore(supervisor: Supervisor, spec: LaunchSpec) -> Reports:
    """Collect all answers about which hosts reach which, for ``hvdgloo-run doctor``.

    Raises:
        LaunchError: a host has no usable address, or does not report.
        JobFailedError: a signal interrupted it.
    """
    supervisor.probing()
    return _Discovery(supervisor, spec, supervisor.links).collect(everything=True)


def is_here(hello: Hello) -> bool:
    """Tell whether an agent shares this process's network.

    Two clones of one virtual machine may have the same identity; but the port of an agent on this machine is in use
    here.
    """
    return hello.identity == host_identity() and ports.is_held(hello.port)


def _alone(supervisor: Supervisor, spec: LaunchSpec, links: Sequence[AgentLink]) -> DiscoveredNetwork:
    """Choose the address for a job on one host, or on several names of this one."""
    first = _hello(links[0])
    address, port = loopback_of(first), first.port
    if spec.network.nics or spec.network.port_range:
        discovery = _Discovery(supervisor, spec, links)
        discovery.survey(listen=False)
        port = discovery.master_port
        if spec.network.nics:
            address = discovery.wanted_alone()
    launcher = address.address if is_here(first) else ""
    return DiscoveredNetwork(Placement((address,) * len(links), (launcher,) * len(links)), port)


def _hello(link: AgentLink) -> Hello:
    assert link.hello is not None, "addresses are chosen once all agents are up"
    return link.hello


class _Discovery:
    """The discovery of one job's network.

    Args:
        links: links to the agents that report and probe.
    """

    def __init__(self, supervisor: Supervisor, spec: LaunchSpec, links: Sequence[AgentLink]) -> None:
        self._supervisor = supervisor
        self._links = links
        self._network = spec.network
        self._names = [link.host.name for link in links]
        settings = spec.nics
        self._rules = [settings.rules(name) for name in self._names]
        here = [rules for rules, link in zip(self._rules, links, strict=True) if is_here(_hello(link))]
        self._launcher_rules = here[0] if here else interfaces.InterfaceFilter(settings.general)
        self._key = probe.probe_key(spec.secret)
        self._surveyed: dict[int, Surveyed] = {}
        self._answers: dict[tuple[int, int, str], Answer] = {}
        supervisor.handlers[Surveyed] = self._on_surveyed
        supervisor.handlers[Probed] = self._on_probed

    def run(self) -> DiscoveredNetwork:
        reports = self.collect()
        chosen = addressing.choose(reports)
        if chosen is None:
            raise addressing.explain(reports)
        return DiscoveredNetwork(chosen, self.master_port)

    def collect(self, *, everything: bool = False) -> Reports:
        """Have all hosts report and probe.

        Args:
            everything: wait for all answers, even those that can change nothing.
        """
        launcher = interfaces.candidates(interfaces.own_addresses(), self._launcher_rules)
        listener = ProbeListener(
            self._supervisor.selector,
            self._key,
            LAUNCHER,
            [address.address for address in launcher],
            self._network.port_range,
        )
        try:
            self.survey(listen=True)
            reports = self._reports(launcher, listener)
            self._probe(reports, listener, everything)
        finally:
            listener.close()
            for link in self._links:
                link.channel.send(ProbesEnd())
        return reports

    def survey(self, *, listen: bool) -> None:
        """Have all hosts report their addresses.

        Raises:
            LaunchError: a host does not report, or has no usable address.
            ConfigError: the first host has no port for ``MASTER_PORT``.
        """
        for number, (link, rules) in enumerate(zip(self._links, self._rules, strict=True)):
            link.channel.send(Survey(number, self._key, rules.items, listen, self._network.port_range))
        # Nothing is probed yet: a living agent answers at once, unless its host is overloaded.
        timeout = self._network.connect_timeout
        self._converse(lambda: len(self._surveyed) == len(self._names), time.monotonic() + timeout)
        silent = [name for number, name in enumerate(self._names) if number not in self._surveyed]
        if silent:
            raise LaunchError(
                f"the agent on {', '.join(silent)} did not report its addresses within {timeout:g} s; if the host is "
                "only slow, raise --connect-timeout-seconds"
            )
        if self._surveyed[0].port_failure:
            raise ConfigError(f"host {self._names[0]}: {self._surveyed[0].port_failure}")

    @property
    def master_port(self) -> int:
        return self._surveyed[0].port

    def wanted_alone(self) -> Address:
        """Return the address that ``--nics`` chooses for a job on one host, which may be loopback.

        Raises:
            LaunchError: there is no such address.
        """
        addresses = self._addresses(0)
        fitting = [a for a in addresses if not interfaces.why_not(a, self._rules[0], alone=True)]
        if not fitting:
            raise LaunchError(interfaces.explain_none(self._names[0], addresses, self._rules[0], alone=True))
        return min(fitting, key=lambda a: (a.loopback, a.version))

    def _addresses(self, host: int) -> list[Address]:
        return [Address(*fields) for fields in self._surveyed[host].addresses]

    def _reports(self, launcher: Sequence[Address], listener: ProbeListener) -> Reports:
        candidates = []
        unheard = {(LAUNCHER, address): reason for address, reason in listener.failures.items()}
        for host, (name, rules) in enumerate(zip(self._names, self._rules, strict=True)):
            addresses = self._addresses(host)
            candidates.append(interfaces.candidates(addresses, rules))
            unheard |= {(host, address): reason for address, reason in self._surveyed[host].failures.items()}
            if not candidates[-1]:
                raise LaunchError(interfaces.explain_none(name, addresses, rules))
            if all((host, a.address) in unheard for a in candidates[-1]) and self._network.port_range:
                raise ConfigError(f"host {name}: {unheard[host, candidates[-1][0].address]}")
        return Reports(self._names, candidates, launcher, self._answers, unheard)

    def _probe(self, reports: Reports, listener: ProbeListener, everything: bool) -> None:
        """Have all hosts probe, until everything is answered or the missing answers can change nothing."""
        timeout = probe_timeout(self._network.connect_timeout)
        tries: list[list[ProbeTarget]] = [[] for _ in self._names]
        for source, target, address in addressing.tried(reports):
            listening = listener.ports if target == LAUNCHER else self._surveyed[target].ports
            tries[source].append(ProbeTarget(target, address.address, listening[address.address]))
        for link, targets in zip(self._links, tries, strict=True):
            link.channel.send(Probe([(t.host, t.address, t.port) for t in targets], timeout))
        expected = sum(len(targets) for targets in tries)
        # The agents end their probes in time; only an overloaded one takes longer to report.
        deadline = time.monotonic() + timeout + self._network.connect_timeout
        chosen_at: float | None = None
        while len(self._answers) < expected and time.monotonic() < deadline:
            self._converse(lambda: len(self._answers) >= expected, time.monotonic() + _LOOK_AGAIN)
            if everything:
                continue
            now = time.monotonic()
            if chosen_at is None and addressing.choose(reports) is not None:
                chosen_at = now
            if chosen_at is not None and (now - chosen_at > SETTLE_SECONDS or addressing.settled(reports)):
                return

    def _converse(self, done: Callable[[], bool], deadline: float) -> None:
        """Continue until ``done`` or the deadline. A lost agent ends the job, unless hosts are only examined."""
        links = self._supervisor.links
        self._supervisor.converse(lambda: done() or any(link.gone for link in links), deadline)
        lost = [link.host.name for link in links if link.gone]
        if lost:
            raise LaunchError(f"the agent on {', '.join(lost)} was lost while addresses were tested")

    def _on_surveyed(self, link: AgentLink, frame: Surveyed) -> None:
        self._surveyed[self._links.index(link)] = frame

    def _on_probed(self, link: AgentLink, frame: Probed) -> None:
        source = self._links.index(link)
        for (host, address, _), (own, who, detail, outcome) in frame.answers:
            self._answers[source, host, address] = Answer(ProbeResult(outcome), own, who, detail)
