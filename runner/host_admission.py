"""The admission of a job's hosts: they are probed, and each gets the address at which other hosts reach its workers.

Each host reports its addresses and tries the others' and the launcher's; ``network.addressing`` chooses from the
results. Hosts are tried together, in rounds. A job of a fixed size has one round: its hosts are admitted together, or
the job ends with an error (``admit_all``). In an elastic job, a round begins whenever hosts have joined, and the
supervisor continues its work meanwhile. Addresses in use never change: a new host must reach them, and is given an
address that the present hosts reach. If a round fails there, its hosts are tried one by one, so that an unreachable
host does not keep out the others.

A job on this machine alone needs none of this and stays on loopback. So does a job on a single other machine.

Workers that do not reach the launcher reach the rendezvous server through their agent
(``hvdgloo.runner.protocol.relay``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError, HvdglooError, LaunchError
from hvdgloo.rendezvous._host_identity import host_identity
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.network import addressing, interfaces, probe
from hvdgloo.runner.network.addressing import Reports
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, Answer, ProbeListener, ProbeResult
from hvdgloo.runner.protocol.frames import Hello, Probe, Probed, ProbesEnd, Relay, Relaying, Survey, Surveyed
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.relayed import RelayedConnections
from hvdgloo.runner.supervise.supervisor import Supervisor
from hvdgloo.runner.supervise.visits import Visit

TOGETHER = 1.0
"""Seconds for which a host of an elastic job waits for others that are on their way, to be tried together with them."""

SETTLE_SECONDS = 0.3
"""Seconds to wait, once there is a choice, for answers that might lead to a better one."""

_LOOK_AGAIN = 0.05
_LEAST, _MOST = 0.5, 3.0


def probe_timeout(connect_timeout: float) -> float:
    """Return the seconds for one probe: enough to survive a lost packet, yet so short that all probes end within 10
    s."""
    return min(_MOST, max(_LEAST, connect_timeout / 10))


def is_here(hello: Hello) -> bool:
    """Tell whether an agent shares this process's network.

    Two clones of one virtual machine may have the same identity; but the port of an agent on this machine is in use
    here.
    """
    return hello.identity == host_identity() and ports.is_held(hello.port)


def launcher_addresses(spec: LaunchSpec, host: str = "", *, needed: bool = False) -> tuple[Address, ...]:
    """Return the launcher's own addresses, at which workers on other hosts may reach it.

    Args:
        host: the name of the launcher's own host in the job, whose ``--nics`` apply; empty if it is not known.
        needed: raise an error if ``--nics`` excludes all existing addresses.

    Raises:
        ConfigError: as ``needed`` says.
    """
    rules = spec.nics.rules(host)
    own = interfaces.own_addresses()
    found = interfaces.candidates(own, rules)
    if needed and not found and rules.items:
        raise ConfigError(interfaces.explain_none("this one, the launcher's,", own, rules))
    return found


@dataclass(frozen=True)
class Reached:
    """The addresses that a host is reached at and reaches.

    Attributes:
        address: the address of its workers.
        rendezvous: the launcher's address, or loopback if the agent relays.
        port: port at which the agent relays; None if its workers reach the server themselves.
        master_port: port that its agent holds for ``MASTER_PORT``.
    """

    address: Address
    rendezvous: str
    port: int | None = None
    master_port: int = 0


@dataclass(eq=False)
class _Host:
    """A host that is to be admitted, or was.

    Attributes:
        number: identifies it in probes.
        here: True if it shares this process's network.
        until: deadline for its agent's answer.
        since: time at which it reported its addresses.
        surveyed: its addresses, once it has reported them.
        single: True once a round with it has failed, so that it gets a round of its own.
        relayed: its address, if its agent is to relay its workers' connections.
        relaying: the agent's answer to that.
        reached: set once it was admitted.
    """

    link: AgentLink
    number: int
    here: bool
    until: float
    since: float = math.inf
    surveyed: Surveyed | None = None
    candidates: Sequence[Address] = ()
    single: bool = False
    relayed: Address | None = None
    relaying: Relaying | None = None
    reached: Reached | None = None

    @property
    def name(self) -> str:
        return self.link.host.name

    @property
    def hello(self) -> Hello:
        assert self.link.hello is not None, "only hosts whose agents can be used are admitted"
        return self.link.hello

    @property
    def addresses(self) -> list[Address]:
        """All its addresses, once it has reported them."""
        assert self.surveyed is not None
        return [Address(*fields) for fields in self.surveyed.addresses]

    @property
    def loopback(self) -> Address:
        """The address at which it reaches itself."""
        return Address("", self.hello.loopback, 128 if ":" in self.hello.loopback else 8)

    @property
    def awaited(self) -> bool:
        """True while its agent is to answer."""
        return self.relaying is None if self.relayed is not None else self.surveyed is None


@dataclass(eq=False)
class _Round:
    """Hosts that are being tried, with the present hosts.

    Attributes:
        members: in the order of ``reports``; present hosts come first.
        new_hosts: the members that are not admitted yet.
        expected: number of answers.
        look_at: time of the next look at the answers, if they are not complete before.
    """

    members: list[_Host]
    new_hosts: list[_Host]
    reports: Reports
    answers: dict[tuple[int, int, str], Answer]
    expected: int
    until: float
    chosen_at: float = math.inf
    look_at: float = -math.inf
    indices: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answers) >= self.expected


class Admission:
    """The admission of a job's hosts. Nothing here blocks.

    Args:
        supervisor: is told the outcome for each host.
        launcher: the launcher's addresses that hosts may reach.
        alone: True if all hosts are one machine, and no others can join: then they need no other address than loopback.
        whole: True if the hosts that are requested first are admitted together or not at all.
        decides: False if probes are to be completed, and no host admitted.

    Attributes:
        port: port of the rendezvous server here, once it listens.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        spec: LaunchSpec,
        launcher: Sequence[Address],
        *,
        alone: bool,
        whole: bool,
        decides: bool = True,
    ) -> None:
        self._supervisor = supervisor
        self._selector = supervisor.loop.selector
        self._config = spec.config
        self._interfaces = spec.network_interfaces
        self._nics = spec.nics
        self._launcher = launcher
        self._alone = alone
        self._whole = whole
        self._decides = decides
        self._key = probe.probe_key(spec.secret)
        self._timeout = probe_timeout(spec.config.connect_timeout)
        self._hosts: dict[AgentLink, _Host] = {}
        self._pending: dict[AgentLink, _Host] = {}
        self._numbers = 0
        self._round: _Round | None = None
        self._listener: ProbeListener | None = None
        self._relays = RelayedConnections(supervisor.loop.selector, self._on_relaying)
        self.port: int | None = None
        supervisor.handlers |= {Surveyed: self._on_surveyed, Probed: self._on_probed}
        supervisor.handlers |= self._relays.handlers

    def serve(self, port: int) -> None:
        """Relay to the rendezvous server, which listens at this port, at loopback or where ``bind`` says."""
        self.port = port
        self._relays.server = ports.loopback(), port

    def close(self) -> None:
        """Stop answering probes and relaying."""
        self._relays.close()
        self._stop_listening()

    def end_probes(self) -> None:
        """Stop all probing, because no more hosts will be tried."""
        self._stop_listening()
        if not self._alone:
            for link in self._hosts:
                link.channel.send(ProbesEnd())

    def reached(self, link: AgentLink) -> Reached:
        """Return the addresses of a host that was admitted."""
        reached = self._hosts[link].reached
        assert reached is not None
        return reached

    def endpoint(self, link: AgentLink) -> tuple[str, int]:
        """Return address and port at which an admitted host's workers reach the rendezvous server."""
        reached = self.reached(link)
        port = reached.port or self.port
        assert port is not None, "the server listens before workers are started"
        return reached.rendezvous, port

    @property
    def relaying(self) -> list[str]:
        """The names of hosts whose agents relay."""
        return [host.name for host in self._hosts.values() if host.relayed is not None]

    @property
    def bind(self) -> tuple[str, ...]:
        """The addresses here at which admitted hosts' workers, or the relays, reach the rendezvous server."""
        reached = [host.reached for host in self._hosts.values() if host.reached is not None]
        return tuple(dict.fromkeys(ports.LOOPBACK if each.port else each.rendezvous for each in reached))

    @property
    def reports(self) -> Reports | None:
        """All answers, if no host is to be admitted and they are complete."""
        if self._round is None or not (self._round.complete or time.monotonic() >= self._round.until):
            return None
        return self._round.reports

    # Called by the supervisor, and by ``admit_all``.

    def request(self, link: AgentLink) -> None:
        """Begin to choose an address for a host. The supervisor is told the outcome, later or at once, unless the
        request is withdrawn."""
        host = self._add(link)
        if self._alone and not self._interfaces and self._config.port_range is None:
            self._choose_alone(host)
            return
        rules = self._nics.rules(host.name)
        link.channel.send(Survey(host.number, self._key, rules.items, not self._alone, self._config.port_range))

    def request_like(self, link: AgentLink, other: AgentLink) -> None:
        """Admit an agent on the machine of another one, which was admitted."""
        host, reached = self._add(link), self.reached(other)
        self._reach(host, reached.address, reached.rendezvous if reached.port is None else "")

    def withdraw(self, link: AgentLink) -> None:
        """Forget a host that has gone, whether or not it was admitted."""
        host = self._hosts.pop(link, None)
        self._pending.pop(link, None)
        self._relays.forget(link)
        if host is not None and self._round is not None and host in self._round.members:
            # Its answers will not come. The others begin again without it.
            self._round = None

    def keep_time(self, now: float) -> None:
        """Do what is due."""
        self._refuse_late(now)
        for host in list(self._pending.values()):
            if host.link not in self._pending:
                continue  # it has gone, as a consequence of another one's admission
            if host.relaying is not None:
                self._end_relaying(host, host.relaying)
            elif self._alone and not host.awaited:
                self._choose_alone(host)
        if self._round is not None:
            self._judge(self._round, now)
        if self._round is None:
            self._begin(now)

    @property
    def done(self) -> bool:
        """True if all hosts that were requested are admitted, or refused."""
        return not self._pending

    @property
    def next(self) -> float:
        """Time at which ``keep_time`` has something to do."""
        times = [host.until for host in self._pending.values() if host.awaited]
        if self._round is not None:
            times += [self._round.until, self._round.look_at]
        elif not self._whole:
            times += [host.since + TOGETHER for host in self._waiting()]
        return min(times, default=math.inf)

    def _add(self, link: AgentLink) -> _Host:
        until = time.monotonic() + self._config.connect_timeout
        here = _is_here(link)  # once it reports its addresses, its agent may hold another port
        host = self._hosts[link] = self._pending[link] = _Host(link, self._numbers, here, until)
        self._numbers += 1
        return host

    def _refuse_late(self, now: float) -> None:
        """Refuse hosts whose agents have not answered in time."""
        late = [host for host in self._pending.values() if host.awaited and now >= host.until]
        if not late:
            return
        timeout = self._config.connect_timeout
        remedy = "if the host is only slow, raise --connect-timeout-seconds"
        silent = ", ".join(host.name for host in late if host.relayed is None)
        unheard = ", ".join(host.name for host in late if host.relayed is not None)
        for host in late:
            if host.relayed is None:
                text = f"the agent on {silent} did not report its addresses within {timeout:g} s; {remedy}"
            else:
                text = f"the agent on {unheard} did not listen for its workers within {timeout:g} s; {remedy}"
            self._refuse(host, LaunchError(text))

    # Rounds.

    def _waiting(self) -> list[_Host]:
        """Return the hosts that have reported their addresses, and were not tried yet."""
        return [host for host in self._pending.values() if not host.awaited]

    def _begin(self, now: float) -> None:
        """Begin a round, if there are hosts to try, and no others to wait for."""
        waiting = self._waiting()
        if not waiting:
            return
        patience = math.inf if self._whole else TOGETHER
        others = self._supervisor.visits.coming or any(host.surveyed is None for host in self._pending.values())
        if others and now < min(host.since for host in waiting) + patience:
            return
        waiting = [host for host in waiting if self._can_be_tried(host)]
        single = [host for host in waiting if host.single]
        new_hosts = single[:1] or waiting
        if not new_hosts:
            return
        self._listen()
        there = [host for host in self._hosts.values() if host.reached is not None]
        self._round = self._round_of(there, new_hosts, now)
        self._judge(self._round, now)

    def _can_be_tried(self, host: _Host) -> bool:
        """Tell whether a host has addresses that others may reach. If it has none, it is refused, or admitted at
        loopback."""
        assert host.surveyed is not None
        if self._lacks_port(host):
            return False
        rules = self._nics.rules(host.name)
        host.candidates = interfaces.candidates(host.addresses, rules)
        if not host.candidates:
            if not self._whole and host.here and not rules.items and not self._others(host):
                self._admit(host, Reached(host.loopback, host.loopback.address))  # this machine has no network
            else:
                self._refuse(host, LaunchError(interfaces.explain_none(host.name, host.addresses, rules)))
            return False
        unheard = [host.surveyed.failures.get(address.address) for address in host.candidates]
        if all(unheard) and self._config.port_range:
            self._refuse(host, ConfigError(f"host {host.name}: {unheard[0]}"))
            return False
        return True

    def _lacks_port(self, host: _Host) -> bool:
        """Refuse the first host of a job of a fixed size if it has no port for ``MASTER_PORT``."""
        failure = host.surveyed.port_failure if host.surveyed is not None else ""
        if not (failure and self._whole and host.number == 0):
            return False
        self._refuse(host, ConfigError(f"host {host.name}: {failure}"))
        return True

    def _others(self, host: _Host) -> bool:
        """Tell whether any other present host is reached at an address other than loopback."""
        there = [other.reached for other in self._hosts.values() if other is not host and other.reached is not None]
        return any(not reached.address.loopback for reached in there)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> None:
        """Answer probes of the launcher's addresses from now on."""
        if self._listener is None:
            addresses = [address.address for address in self._launcher]
            port_range = self._config.port_range
            self._listener = ProbeListener(self._selector, self._key, LAUNCHER, addresses, port_range)

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
            [host.name for host in members],
            [(g.reached.address,) if g.reached is not None else g.candidates for g in members],
            self._launcher,
            answers,
            unheard,
        )
        tries: dict[int, list[tuple[int, str, int]]] = {}
        for source, target, address in addressing.tried(reports):
            if (source, target, address.address) not in answers:
                if target == LAUNCHER:
                    number, port = LAUNCHER, self._listener.ports[address.address]
                else:
                    other = members[target]
                    assert other.surveyed is not None
                    number, port = other.number, other.surveyed.ports[address.address]
                tries.setdefault(source, []).append((number, address.address, port))
        for source, targets in tries.items():
            members[source].link.channel.send(Probe(targets, self._timeout))
        expected = len(answers) + sum(map(len, tries.values()))
        indices = {LAUNCHER: LAUNCHER, **{host.number: index for index, host in enumerate(members)}}
        # The agents end their probes in time; only an overloaded one takes longer to report.
        until = now + self._timeout + self._config.connect_timeout
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
        """End a round if the missing answers can change nothing, or its time is over."""
        over = round.complete or now >= round.until
        if not (over or now >= round.look_at):
            return
        round.look_at = now + _LOOK_AGAIN
        if not self._decides:
            return
        choice = addressing.choose(round.reports)
        if choice is not None:
            round.chosen_at = min(round.chosen_at, now)
            if over or now >= round.chosen_at + SETTLE_SECONDS or addressing.settled(round.reports):
                self._round = None
                for host, address, launcher in zip(round.members, choice.addresses, choice.launcher, strict=True):
                    if host.link in self._pending:
                        self._reach(host, address, launcher)
        elif over:
            self._round = None
            if self._whole:
                self._refuse(round.new_hosts[0], addressing.explain(round.reports))
            elif len(round.new_hosts) > 1:
                for host in round.new_hosts:
                    host.single = True
            else:
                self._refuse(round.new_hosts[0], LaunchError(addressing.describe_unreached(round.reports)))

    # The outcome.

    def _choose_alone(self, host: _Host) -> None:
        """Choose the address of a host that no other has to reach."""
        if self._lacks_port(host):
            return
        address = host.loopback
        if self._interfaces:
            rules = self._nics.rules(host.name)
            fitting = [a for a in host.addresses if not interfaces.why_not(a, rules, alone=True)]
            if not fitting:
                self._refuse(host, LaunchError(interfaces.explain_none(host.name, host.addresses, rules, alone=True)))
                return
            address = min(fitting, key=lambda a: (a.loopback, a.version))
        self._reach(host, address, address.address if host.here else "")

    def _reach(self, host: _Host, address: Address, launcher: str) -> None:
        """Admit a host, unless its agent has to listen for its workers before."""
        if launcher:
            self._admit(host, Reached(address, launcher))
        else:
            host.relayed, host.until = address, time.monotonic() + self._config.connect_timeout
            host.link.channel.send(Relay(self._config.port_range))

    def _end_relaying(self, host: _Host, answer: Relaying) -> None:
        assert host.relayed is not None
        if answer.failure:
            self._refuse(
                host, LaunchError(f"the agent on host {host.name} cannot listen for its workers: {answer.failure}")
            )
        else:
            self._admit(host, Reached(host.relayed, host.hello.loopback, answer.port))

    def _admit(self, host: _Host, reached: Reached) -> None:
        port = host.hello.port if host.surveyed is None else host.surveyed.port
        host.reached = replace(reached, master_port=port)
        del self._pending[host.link]
        self._supervisor.admit(host.link, f"reached at {reached.address}")

    def _refuse(self, host: _Host, error: HvdglooError) -> None:
        self.withdraw(host.link)
        self._supervisor.refuse(host.link, error)

    # Frames. They are only noted; ``keep_time`` does the rest.

    def _on_surveyed(self, link: AgentLink, frame: Surveyed) -> None:
        host = self._hosts.get(link)
        if host is not None:
            host.surveyed, host.since = frame, time.monotonic()

    def _on_relaying(self, link: AgentLink, frame: Relaying) -> None:
        host = self._hosts.get(link)
        if host is not None and host.relayed is not None:
            host.relaying = frame

    def _on_probed(self, link: AgentLink, frame: Probed) -> None:
        host = self._hosts.get(link)
        if self._round is None or host is None or host.number not in self._round.indices:
            return
        source = self._round.indices[host.number]
        for (number, address, _), (own, who, detail, outcome) in frame.answers:
            target = self._round.indices.get(number)
            if target is not None:
                name = self._round.indices.get(who, -1)
                self._round.answers[source, target, address] = Answer(ProbeResult(outcome), own, name, detail)


# All hosts at once.


def admit_all(supervisor: Supervisor, spec: LaunchSpec, visits: Sequence[Visit]) -> Admission:
    """Admit all hosts of a job of a fixed size, whose agents are up.

    Raises:
        LaunchError: a host has no usable address, does not report, or cannot relay.
        HostsUnreachableError: two hosts do not reach each other.
        ConfigError: no port of the range is free.
        JobFailedError: a signal interrupted it.
    """
    first: dict[str, AgentLink] = {}
    for visit in visits:
        first.setdefault(visit.agent.host.machine, visit.agent)
    # Of several agents on one machine, one reports for all.
    spokesmen = list(first.values())
    alone = len(spokesmen) == 1 or all(_is_here(link) for link in spokesmen)
    with _admitting(supervisor, spec, spokesmen, alone=alone) as admission:
        supervisor.run_until(lambda: admission.done)
        for link in (visit.agent for visit in visits if visit.agent not in spokesmen):
            admission.request_like(link, first[link.host.machine])
        supervisor.run_until(lambda: admission.done)
    return admission


def explore(supervisor: Supervisor, spec: LaunchSpec, visits: Sequence[Visit]) -> Reports:
    """Collect all answers about which hosts reach which, for ``hvdgloo-run doctor``.

    Raises:
        LaunchError: a host has no usable address, does not report, or is lost.
        JobFailedError: a signal interrupted it.
    """
    with _admitting(supervisor, spec, [visit.agent for visit in visits], alone=False, decides=False) as admission:
        supervisor.run_until(lambda: admission.reports is not None or any(visit.parted for visit in visits))
        lost = [visit.name for visit in visits if visit.parted]
        if lost:
            raise LaunchError(f"the agent on {', '.join(lost)} was lost while addresses were tested")
        reports = admission.reports
    assert reports is not None
    return reports


@contextmanager
def _admitting(
    supervisor: Supervisor, spec: LaunchSpec, links: Sequence[AgentLink], *, alone: bool, decides: bool = True
) -> Iterator[Admission]:
    """Request all hosts, and end the probing at the end. After an error, nothing is left open."""
    launcher: tuple[Address, ...] = ()
    if not alone:
        supervisor.agents.offer(host_state.Probe())
        launcher = launcher_addresses(spec, next((link.host.name for link in links if _is_here(link)), ""))
    admission = Admission(supervisor, spec, launcher, alone=alone, whole=True, decides=decides)
    supervisor.admission = admission
    try:
        for link in links:
            admission.request(link)
        yield admission
    except BaseException:
        admission.close()
        raise
    finally:
        admission.end_probes()


def _is_here(link: AgentLink) -> bool:
    assert link.hello is not None, "addresses are chosen once all agents are up"
    return is_here(link.hello)
