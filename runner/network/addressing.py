"""Decides from reports at which address each host of a job is reached, and how its workers reach the launcher. Pure.

``plan`` says which hosts try which; ``choose`` looks at the results. The same reports give the same choice, in whatever
order they came, and a further answer can only lead to a choice that ranks higher: so collecting answers may stop once
those that are still missing can change nothing (``settled``).

Ranks, highest first:

1. IPv4 before IPv6; all hosts of a job use one of the two.
2. An address of the launcher that all hosts reach. Otherwise each host uses the first that it reaches itself; if it
   reaches none, its agent relays its workers' connections to the rendezvous server.
3. For the hosts: the addresses from which they reach the launcher's; else those in one network that all hosts are in;
   else each host's first.

A host's addresses are in its own order, except that those in networks shared by many hosts go first, and link-local
ones and those that several hosts have (a Docker bridge's) go last. What is left out is not decided here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdgloo.errors import HostsUnreachableError
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, Answer, ProbeResult

ALL_PAIRS = 32
"""Up to this many hosts, all try all others."""

NEIGHBOURS = 4
"""Above that, each host tries the first one and this many that follow it."""

_VERSIONS = (4, 6)
_NAMED_PAIRS = 6
_NAMED_IN_A_LINE = 3

Answers = Mapping[tuple[int, int, str], Answer]
"""Results by source, target and address. Hosts are numbers, or LAUNCHER."""


@dataclass(frozen=True)
class Placement:
    """The chosen addresses.

    Attributes:
        addresses: of each host.
        launcher: for each host, the address at which its workers reach the launcher; empty if they do not.
    """

    addresses: tuple[Address, ...]
    launcher: tuple[str, ...]


@dataclass(frozen=True)
class Reports:
    """Everything that is known of a job's hosts.

    Attributes:
        names: of the hosts, in order.
        candidates: each host's addresses that may be used.
        launcher: the launcher's own.
        answers: the results of probes; a probe that is absent has not been answered.
        unheard: (host, address) where nothing listens, and why.
    """

    names: Sequence[str]
    candidates: Sequence[Sequence[Address]]
    launcher: Sequence[Address] = ()
    answers: Answers = field(default_factory=dict)
    unheard: Mapping[tuple[int, str], str] = field(default_factory=dict)


@functools.cache
def plan(hosts: int) -> tuple[tuple[int, ...], ...]:
    """Return the other hosts that each host tries: their numbers, in order; the launcher is tried as well."""
    everyone = range(hosts)
    if hosts <= ALL_PAIRS:
        return tuple(tuple(other for other in everyone if other != host) for host in everyone)
    # The first host tries all others, as all others try it.
    return tuple(
        tuple(sorted({0, *((host + step) % hosts for step in range(1, NEIGHBOURS + 1))} - {host}))
        if host
        else tuple(everyone[1:])
        for host in everyone
    )


@functools.cache
def _tried_by(hosts: int) -> tuple[tuple[int, ...], ...]:
    """Return the hosts that try each host."""
    found: list[list[int]] = [[] for _ in range(hosts)]
    for source, targets in enumerate(plan(hosts)):
        for target in targets:
            found[target].append(source)
    return tuple(map(tuple, found))


def choose(reports: Reports) -> Placement | None:
    """Return the choice, as far as answers are there; None if they allow none."""
    for version in _VERSIONS:
        usable = _usable(reports, version)
        if all(usable):
            return _place(reports, version, usable)
    return None


def settled(reports: Reports) -> bool:
    """Tell whether missing answers can change nothing, even if all of them were "reached"."""
    now = choose(reports)
    return now is not None and now == choose(_all_reached(reports))


def _all_reached(reports: Reports) -> Reports:
    answers = dict(reports.answers)
    for source, target, address in tried(reports):
        answers.setdefault((source, target, address.address), Answer(ProbeResult.REACHED, "", target))
    return Reports(reports.names, reports.candidates, reports.launcher, answers, reports.unheard)


def tried(reports: Reports) -> list[tuple[int, int, Address]]:
    """Yield every probe of the plan: which host tries which other, at which address."""
    return [
        (source, target, address)
        for source, targets in enumerate(plan(len(reports.names)))
        for target in (*targets, LAUNCHER)
        for address in (reports.launcher if target == LAUNCHER else reports.candidates[target])
        if (target, address.address) not in reports.unheard
    ]


def _usable(reports: Reports, version: int) -> list[list[Address]]:
    """Return, for each host, the addresses reached by every host that tried them, best first."""
    order = _Order(reports)
    return [
        [
            address
            for address in order.best_first(addresses, version)
            if (host, address.address) not in reports.unheard
            and all(_reached(reports.answers, source, host, address) for source in sources)
        ]
        for host, (addresses, sources) in enumerate(zip(reports.candidates, _tried_by(len(reports.names)), strict=True))
    ]


def _reached(answers: Answers, source: int, target: int, address: Address) -> bool:
    found = answers.get((source, target, address.address))
    return found is not None and found.outcome is ProbeResult.REACHED


class _Order:
    """The preference between addresses, before any has been tried."""

    def __init__(self, reports: Reports) -> None:
        self._owners = Counter(a for host in reports.candidates for a in {a.address for a in host})
        self._members = Counter(network for host in reports.candidates for network in {a.network for a in host})

    def best_first(self, addresses: Sequence[Address], version: int) -> list[Address]:
        return sorted(
            (a for a in addresses if a.version == version),
            key=lambda a: (a.link_local, self._owners[a.address] > 1, -self._members[a.network]),
        )


def _place(reports: Reports, version: int, usable: Sequence[Sequence[Address]]) -> Placement:
    hosts = range(len(usable))
    order = _Order(reports)
    launcher = next(
        (
            a.address
            for a in order.best_first(reports.launcher, version)
            if all(_reached(reports.answers, host, LAUNCHER, a) for host in hosts)
        ),
        None,
    )
    if launcher is None:
        chosen = _in_one_network(usable) or [addresses[0] for addresses in usable]
        preferred = [a for v in dict.fromkeys((version, *_VERSIONS)) for a in order.best_first(reports.launcher, v)]
        reached = [
            next((a.address for a in preferred if _reached(reports.answers, host, LAUNCHER, a)), "") for host in hosts
        ]
        return Placement(tuple(chosen), tuple(reached))
    sources = [reports.answers[host, LAUNCHER, launcher].source for host in hosts]
    own = [next((a for a in usable[host] if a.address == sources[host]), None) for host in hosts]
    if None not in own:
        return Placement(tuple(a for a in own if a is not None), (launcher,) * len(usable))
    chosen = _in_one_network(usable) or [own[host] or usable[host][0] for host in hosts]
    return Placement(tuple(chosen), (launcher,) * len(usable))


def _in_one_network(usable: Sequence[Sequence[Address]]) -> list[Address] | None:
    """Return an address of each host, in the first of the first host's networks that all are in."""
    for wanted in usable[0]:
        found = [next((a for a in addresses if a.network == wanted.network), None) for addresses in usable]
        if None not in found:
            return [a for a in found if a is not None]
    return None


# When there is no choice.


def explain(reports: Reports) -> HostsUnreachableError:
    """Return the error that explains why there is no choice: which host does not reach which, with each result."""
    usable = {version: _usable(reports, version) for version in _VERSIONS}
    hosts = range(len(reports.names))
    lacking = {version: {host for host in hosts if not usable[version][host]} for version in _VERSIONS}
    never = lacking[4] & lacking[6]
    pairs = _failing_pairs(reports, never or lacking[4] | lacking[6])
    lines = [_describe_pair(reports, source, target) for source, target in pairs[:_NAMED_PAIRS]]
    if len(pairs) > _NAMED_PAIRS:
        lines.append(f"and {len(pairs) - _NAMED_PAIRS} more pairs")
    if never:
        head = "the hosts do not reach each other"
    else:
        head = "all hosts are reached, but not all by the same family of addresses, and a job uses either IPv4 or IPv6"
        lines = [
            *(f"{reports.names[h]} is reached by IPv6 alone: {usable[6][h][0]}" for h in sorted(lacking[4])),
            *(f"{reports.names[h]} is reached by IPv4 alone: {usable[4][h][0]}" for h in sorted(lacking[6])),
            *lines,
        ]
    remedy = (
        "Open the firewall between them (--port-range narrows the ports), or choose addresses that are connected "
        "(--nics takes names, networks and ^exceptions, for single hosts with HOST= before them)"
    )
    names = tuple((reports.names[source], reports.names[target]) for source, target in pairs)
    return HostsUnreachableError("\n".join([f"{head}:", *(f"  {line}" for line in lines), remedy]), pairs=names)


def _failing_pairs(reports: Reports, targets: set[int]) -> list[tuple[int, int]]:
    """Return, for each unusable host, the hosts that miss it at some address; first those that reach it at none."""
    found = [
        (source, target)
        for source, others in enumerate(plan(len(reports.names)))
        for target in others
        if target in targets
        and not all(_reached(reports.answers, source, target, a) for a in reports.candidates[target])
    ]
    return sorted(
        found,
        key=lambda pair: any(_reached(reports.answers, pair[0], pair[1], a) for a in reports.candidates[pair[1]]),
    )


def describe_unreached(reports: Reports) -> str:
    """Explain in one line why there is no choice: which host does not reach which, with the result for each address."""
    lacking = {host for host in range(len(reports.names)) if not any(_usable(reports, v)[host] for v in _VERSIONS)}
    pairs = _failing_pairs(reports, lacking or set(range(len(reports.names))))
    lines = [_describe_pair(reports, source, target) for source, target in pairs[:_NAMED_IN_A_LINE]]
    more = f"; and {len(pairs) - _NAMED_IN_A_LINE} more pairs" if len(pairs) > _NAMED_IN_A_LINE else ""
    return "the hosts do not reach each other: " + "; ".join(lines) + more


def _describe_pair(reports: Reports, source: int, target: int) -> str:
    return f"{reports.names[source]} -> {reports.names[target]}: {describe_tries(reports, source, target)}"


def describe_tries(reports: Reports, source: int, target: int) -> str:
    """Describe the result of one host's attempts to reach another, or the launcher, at each address."""
    addresses = reports.launcher if target == LAUNCHER else reports.candidates[target]
    return ", ".join(f"{address} {_say(reports, source, target, address)}" for address in addresses)


def _say(reports: Reports, source: int, target: int, address: Address) -> str:
    if (target, address.address) in reports.unheard:
        return f"has no listener ({reports.unheard[target, address.address]})"
    found = reports.answers.get((source, target, address.address))
    text = "was not answered" if found is None else describe(found, reports.names)
    shared = any(own.address == address.address for own in reports.candidates[source])
    return f"{text} ({reports.names[source]} has the same address)" if shared else text


def describe(answer: Answer, names: Sequence[str]) -> str:
    """Describe an answer in words that follow the address."""
    name = "the launcher" if answer.host == LAUNCHER else names[answer.host] if 0 <= answer.host < len(names) else "?"
    return {
        ProbeResult.REACHED: "was reached",
        ProbeResult.REFUSED: "refused the connection",
        ProbeResult.TIMED_OUT: f"timed out after {answer.detail or '?'} s",
        ProbeResult.NO_ROUTE: f"has no route ({answer.detail})",
        ProbeResult.SILENT: f"accepted the connection, but said nothing within {answer.detail} s",
        ProbeResult.OTHER_HOST: f"answered as another host, {name}",
        ProbeResult.OTHER_ADDRESS: f"answered as {answer.detail}, so addresses are translated on the way",
        ProbeResult.STRANGER: "was answered by something that is not this job's",
        ProbeResult.FAILED: f"failed ({answer.detail})",
    }[answer.outcome]
