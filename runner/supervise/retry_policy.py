"""Getting an agent up on every host: whom to try now, whom to try again and when, and when it makes no sense any more.

Values in, values out; the supervisor owns commands and clock. The rules:

- At most ``AT_ONCE`` commands are on their way to their hosts at the same time: sshd drops connections at random when
  more than ten have not logged in yet (MaxStartups), and a host with many ssh clients is slow at all of them.
- What may pass by itself is tried again, after a pause that doubles and is never quite the same.
- The first failure that will not pass starts no further hosts. Those on their way get ``SETTLE`` seconds to fail too,
  so that one look at the report shows as much as possible of what is to be mended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hvdgloo.errors import UnusableHostsError
from hvdgloo.runner.console.progress import NOT_TRIED
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.transport.failures import Diagnosis, Retry

AT_ONCE = 32
ATTEMPTS = 8
"""How often a host is tried whose connection drops."""

SETTLE = 2.0
"""Seconds that hosts on their way have once another one has failed for good."""

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 5.0


@dataclass
class _Place:
    """Where one host is."""

    host: HostEntry
    due: float
    attempts: int = 0
    connecting: bool = False
    answered: bool = False
    ready: bool = False
    last: Diagnosis | None = None
    failed: bool = False

    @property
    def waits(self) -> bool:
        """It is to be tried, now or later."""
        return not (self.connecting or self.answered or self.ready or self.failed)


class Gathering:
    """The start-up of all hosts' agents.

    Args:
        hosts: in order; each name once.
        now: on the caller's clock, like all times.
        chance: for pauses.
        patient: no failure ends it; what may pass by itself gets a second attempt, not more.
    """

    def __init__(
        self, hosts: Sequence[HostEntry], now: float, chance: random.Random | None = None, *, patient: bool = False
    ) -> None:
        self._patient = patient
        self._places = {host: _Place(host, now) for host in hosts}
        self._chance = chance or random.Random()
        self._settled = math.inf

    def due(self, now: float) -> list[HostEntry]:
        """The hosts to which a command is to be started now. They count as started."""
        if self._settled < math.inf:
            return []
        room = AT_ONCE - sum(place.connecting for place in self._places.values())
        chosen = [place for place in self._places.values() if place.waits and place.due <= now][: max(0, room)]
        for place in chosen:
            place.connecting = True
            place.attempts += 1
        return [place.host for place in chosen]

    @property
    def next(self) -> float:
        """When something is to be done again if nothing happens until then."""
        times = [self._settled]
        if self._settled == math.inf and sum(place.connecting for place in self._places.values()) < AT_ONCE:
            times += [place.due for place in self._places.values() if place.waits]
        return min(times)

    def answered(self, host: HostEntry) -> None:
        """Its command has reached the host."""
        place = self._places[host]
        place.connecting, place.answered = False, True

    def ready(self, host: HostEntry) -> None:
        """Its agent can be used."""
        place = self._places[host]
        place.connecting, place.answered, place.ready = False, False, True

    def failed(self, host: HostEntry, diagnosis: Diagnosis, now: float) -> float | None:
        """Its command has ended without an agent that can be used.

        Returns:
            when it will be tried again; None if it will not.
        """
        place = self._places[host]
        place.connecting = place.answered = place.ready = False
        place.last = diagnosis
        if self._may_try_again(place, diagnosis):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(place.attempts - 1, 10))
            place.due = now + pause * self._chance.uniform(0.5, 1.5)
            return place.due
        place.failed = True
        if self._patient:
            return None
        self._settled = min(self._settled, now + SETTLE)
        return None

    def _may_try_again(self, place: _Place, diagnosis: Diagnosis) -> bool:
        if self._settled < math.inf or diagnosis.retry is Retry.NEVER:
            return False
        if self._patient:
            return place.attempts < 2
        return diagnosis.retry is Retry.UNTIL_THE_DEADLINE or place.attempts < ATTEMPTS

    def over(self, now: float) -> bool:
        """All are ready; or some have failed, and the others have had their time."""
        places = self._places.values()
        if self._settled < math.inf:
            return now >= self._settled or not any(place.connecting or place.answered for place in places)
        return all(place.ready or (self._patient and place.failed) for place in places)

    def attempts(self, host: HostEntry) -> int:
        """How often a host's command has been started, the one that runs included."""
        return self._places[host].attempts

    def last_failure(self, host: HostEntry) -> str:
        """What is known about a host that is tried again and again."""
        last = self._places[host].last
        return last.text if last is not None else ""

    def known(self, host: HostEntry) -> str:
        """What there is to say about a host that is not there: its last failure, or that its turn has not come."""
        return self.last_failure(host) or ("" if self.attempts(host) else NOT_TRIED)

    def reasons(self) -> dict[HostEntry, str]:
        """Why hosts cannot be used, for those that failed."""
        return {host: _reason(place) for host, place in self._places.items() if place.failed}

    def error(self) -> UnusableHostsError | None:
        """All that failed, if anything did."""
        failed = {place.host.name: place for place in self._places.values() if place.failed}
        if not failed:
            return None
        reasons = {name: _reason(place) for name, place in failed.items()}
        waiting = [place.host.name for place in self._places.values() if not (place.ready or place.failed)]
        return UnusableHostsError(_describe(reasons, waiting, len(self._places)), hosts=reasons)


def _reason(place: _Place) -> str:
    assert place.last is not None
    tried = f" ({place.attempts} attempts)" if place.attempts > 1 else ""
    return place.last.text + tried


def _describe(reasons: dict[str, str], waiting: Sequence[str], total: int) -> str:
    if total == 1:
        return "".join(f"host {name} cannot be used: {reason}" for name, reason in reasons.items())
    lines = [f"{len(reasons)} of {total} hosts cannot be used:"]
    lines += [f"  {name}: {reason}" for name, reason in reasons.items()]
    if waiting:
        more = f" and {len(waiting) - 16} more" if len(waiting) > 16 else ""
        lines.append(f"  (not known yet when start-up stopped: {', '.join(waiting[:16])}{more})")
    return "\n".join(lines)


def check_machines(hosts: Sequence[HostEntry], hellos: Sequence[Hello], reach: Reach) -> None:
    """Refuse two names for one machine: they would mean two local ranks 0, which take the same GPU.

    Not where a template leads to the hosts: it may well lead into several containers that look like one machine, or
    try out on one machine what is meant for many.

    Raises:
        UnusableHostsError: with all such names.
    """
    if reach.agent_command:
        return
    first: dict[str, HostEntry] = {}
    reasons = {}
    for host, hello in zip(hosts, hellos, strict=True):
        other = first.setdefault(hello.identity, host)
        if other is not host:
            reasons[host.name] = (
                f"it is the same machine as {other.name} ({hello.hostname}); give it once, with all its slots"
            )
    if reasons:
        raise UnusableHostsError(_describe(reasons, (), len(hosts)), hosts=reasons)
