"""The hosts of an elastic job: their usable slots, and the hosts that are left out, with duration and reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from hvdgloo.topology import abbreviated


def cooldown_time(failures: int, cooldown: tuple[float, float], chance: float) -> float:
    """Return the seconds for which a host is left out.

    Args:
        failures: number of times that it was left out, this one included.
        cooldown: the shortest and the longest time.
        chance: number from 0 to 1, so that hosts that failed together do not return together.
    """
    shortest, longest = cooldown
    doubled = shortest * 2.0 ** min(failures, 64)  # 2**64 s is beyond any limit already
    return min(longest, max(shortest, doubled + chance * shortest))


class _Host(msgspec.Struct):
    """A listed host.

    Attributes:
        order: its index in the list.
        failures: number of failures since it was last left out.
        outs: number of times that it was left out.
        until: time from which it can be used again; infinite if never.
        reason: why it is, or was, left out.
        identity: its machine or pod, as far as that is known.
        leaving: True if it announced that it will leave.
        shown: its name in messages; empty if that is its name.
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
        """Clear the record of its failures."""
        self.failures, self.outs, self.until, self.reason, self.leaving = 0, 0, -math.inf, "", False


class Hosts:
    """All listed hosts.

    Args:
        failures: number of failures at which a host is left out.
        cooldown: the shortest and the longest time for which it is left out; None for ever.
        chance: returns a random number from 0 to 1.
    """

    def __init__(self, failures: int, cooldown: tuple[float, float] | None, chance: Callable[[], float]) -> None:
        self._limit = failures
        self._cooldown = cooldown
        self._chance = chance
        self._hosts: dict[str, _Host] = {}
        self._machines: dict[str, str] = {}

    def machine(self, name: str) -> str:
        """Return the machine that a host is a part of; empty if it is a machine by itself."""
        return self._machines.get(name, "")

    def update(self, hosts: Iterable[tuple[str, int]], machines: Mapping[str, str] | None = None) -> None:
        """Replace the list of hosts. Hosts that are missing from it are forgotten, with their records.

        Args:
            machines: name to machine, for hosts that are parts of one.
        """
        self._machines = dict(machines or {})
        before, self._hosts = self._hosts, {}
        for order, (name, slots) in enumerate(hosts):
            host = self._hosts[name] = before.get(name) or _Host(slots, order)
            host.slots, host.order = slots, order

    def note(self, name: str, shown: str = "") -> None:
        """Add the host of a worker that registered without a launcher; ``shown`` is its name in messages."""
        self._hosts.setdefault(name, _Host(1 << 30, len(self._hosts))).shown = shown

    def shown(self, name: str) -> str:
        """Return a host's name in messages."""
        host = self._hosts.get(name)
        return (host.shown if host is not None else "") or name

    def usable(self, now: float) -> list[tuple[str, int]]:
        """Return names and slots of the hosts that can be used, in the list's order."""
        return [(name, slots) for name in self._hosts if (slots := self.slots(name, now))]

    def slots(self, name: str, now: float) -> int:
        """Return the number of usable slots of a host."""
        host = self._hosts.get(name)
        return 0 if host is None or host.leaving or now < host.until else host.slots

    def order(self, name: str) -> int:
        """Return a host's index in the list; the list's length if it is not listed."""
        host = self._hosts.get(name)
        return len(self._hosts) if host is None else host.order

    def failed(self, name: str, reason: str, now: float, *, at_once: bool = False) -> float | None:
        """Count a failure on a host.

        Args:
            at_once: leave the host out, whatever number of failures is allowed.

        Returns:
            the time until which it is left out (infinite for ever) if this failure is the reason; otherwise None.
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
        """Stop using a host that is about to leave, until it has left the list and returned."""
        if name in self._hosts:
            self._hosts[name].leaving = True
            self._hosts[name].reason = "it is being given back"

    def identified(self, name: str, identity: str) -> None:
        """Set the machine or pod behind a name. A different one than before starts with a clean record."""
        host = self._hosts.get(name)
        if host is not None:
            if host.identity not in ("", identity):
                host.clear()
            host.identity = identity

    def next_return(self, now: float) -> float:
        """Return the time at which the first host that is left out can be used again; infinite if none can."""
        return min((host.until for host in self._hosts.values() if host.until > now), default=math.inf)

    def all_out(self, now: float) -> bool:
        """Return whether hosts are listed, and all of them are left out for ever."""
        return bool(self._hosts) and all(host.until == math.inf for host in self._hosts.values())

    def account(self, now: float) -> str:
        """Describe the usable slots, and why each of the other hosts is left out."""
        usable = dict(self.usable(now))
        parts = [f"{name}: {slots}" for name, slots in usable.items()]
        for name, host in self._hosts.items():
            if name not in usable:
                back = f", for another {host.until - now:.0f} s" if now < host.until < math.inf else ""
                parts.append(f"{name}: left out{back}, as {host.reason}")
        return abbreviated(parts, separator="; ") or "no host is listed"
