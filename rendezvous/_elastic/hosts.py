"""The hosts of an elastic job: which slots can be used, and which hosts are left out, until when, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def cooldown_time(failures: int, cooldown: tuple[float, float], chance: float) -> float:
    """For how long a host is left out, in seconds.

    Args:
        failures: how often it has been left out, from 1.
        cooldown: the shortest and the longest time.
        chance: from 0 to 1, so that hosts that failed together do not come back together.
    """
    shortest, longest = cooldown
    doubled = shortest * 2.0 ** min(failures, 64)  # 2**64 s is beyond any limit already
    return min(longest, max(shortest, doubled + chance * shortest))


@dataclass
class _Host:
    """One host that is listed.

    Attributes:
        order: its place in the list.
        failures: since it was last left out.
        outs: how often it was left out.
        until: when it can be used again; infinite if never.
        reason: why it is, or was, left out.
        identity: the machine or pod that it was, as far as that is known.
        leaving: it has said that it will not be there much longer.
        shown: its name in messages; empty if it is the name.
    """

    slots: int
    order: int
    failures: int = 0
    outs: int = 0
    until: float = -math.inf
    reason: str = ""
    identity: str = ""
    leaving: bool = False
    shown: str = ""

    def clear(self) -> None:
        """Start with a clean record."""
        self.failures, self.outs, self.until, self.reason, self.leaving = 0, 0, -math.inf, "", False


class Hosts:
    """All hosts that are listed.

    Args:
        failures: a host is left out at this failure.
        cooldown: the shortest and the longest time for which it is left out; None for ever.
        chance: from 0 to 1, at random.
    """

    def __init__(self, failures: int, cooldown: tuple[float, float] | None, chance: Callable[[], float]) -> None:
        self._limit = failures
        self._cooldown = cooldown
        self._chance = chance
        self._hosts: dict[str, _Host] = {}
        self._machines: dict[str, str] = {}

    def machine(self, name: str) -> str:
        """The machine that a host is a part of; empty if it is none by itself."""
        return self._machines.get(name, "")

    def update(self, hosts: Iterable[tuple[str, int]], machines: Mapping[str, str] | None = None) -> None:
        """From now on there are these hosts, and no others. One that is missing is forgotten, and so is its record.

        Args:
            machines: of those that are parts of one: name to machine.
        """
        self._machines = dict(machines or {})
        before, self._hosts = self._hosts, {}
        for order, (name, slots) in enumerate(hosts):
            host = self._hosts[name] = before.get(name) or _Host(slots, order)
            host.slots, host.order = slots, order

    def note(self, name: str, shown: str = "") -> None:
        """A worker has come from this host, without a launcher; ``shown`` is its name in messages."""
        self._hosts.setdefault(name, _Host(1 << 30, len(self._hosts))).shown = shown

    def shown(self, name: str) -> str:
        """A host's name in messages."""
        host = self._hosts.get(name)
        return (host.shown if host is not None else "") or name

    def usable(self, now: float) -> list[tuple[str, int]]:
        """Names and slots of hosts on which there may be workers, in the list's order."""
        return [(name, slots) for name in self._hosts if (slots := self.slots(name, now))]

    def slots(self, name: str, now: float) -> int:
        """How many slots of a host can be used."""
        host = self._hosts.get(name)
        return 0 if host is None or host.leaving or now < host.until else host.slots

    def order(self, name: str) -> int:
        """Its place in the list; behind all others if it is not listed."""
        host = self._hosts.get(name)
        return len(self._hosts) if host is None else host.order

    def failed(self, name: str, reason: str, now: float, *, at_once: bool = False) -> float | None:
        """A failure on a host is counted.

        Args:
            at_once: leave it out whatever number of failures is allowed.

        Returns:
            the time until which it is left out, infinite for ever, if this failure is the reason for it; else None.
        """
        host = self._hosts.get(name)
        if host is None or host.leaving or now < host.until:
            return None
        host.failures += 1
        if host.failures < self._limit and not at_once:
            return None
        host.failures = 0
        host.outs += 1
        host.reason = reason
        host.until = math.inf
        if self._cooldown is not None:
            host.until = now + cooldown_time(host.outs, self._cooldown, self._chance())
        return host.until

    def leaves(self, name: str) -> None:
        """It will not be there much longer. It counts again once it has left the list and come back."""
        if name in self._hosts:
            self._hosts[name].leaving = True
            self._hosts[name].reason = "it is being given back"

    def identified(self, name: str, identity: str) -> None:
        """What stands behind a name. Another machine or pod than before has done nothing wrong yet."""
        host = self._hosts.get(name)
        if host is not None:
            if host.identity not in ("", identity):
                host.clear()
            host.identity = identity

    def next_return(self, now: float) -> float:
        """When the first of the hosts that are left out can be used again; infinite if none will."""
        return min((host.until for host in self._hosts.values() if host.until > now), default=math.inf)

    def all_out(self, now: float) -> bool:
        """Whether hosts are listed, and all of them are left out for ever."""
        return bool(self._hosts) and all(host.until == math.inf for host in self._hosts.values())

    def account(self, now: float) -> str:
        """Which slots can be used, and why each of the other hosts is out."""
        usable = dict(self.usable(now))
        parts = [f"{name}: {slots}" for name, slots in usable.items()]
        for name, host in self._hosts.items():
            if name not in usable:
                back = f", for another {host.until - now:.0f} s" if now < host.until < math.inf else ""
                parts.append(f"{name}: left out{back}, as {host.reason}")
        return "; ".join(shortened(parts)) if parts else "no host is listed"


def shortened(parts: Sequence[str], show: int = 16) -> Sequence[str]:
    """The first of these parts of a list in a message, and how many more there are."""
    more = len(parts) - show
    return [*parts[:show], f"and {more} more"] if more > 0 else parts
