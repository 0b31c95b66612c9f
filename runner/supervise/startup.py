"""The start of an agent on every host: which hosts to try now, which to try again and when, and when to give up.

Pure: it reads the hosts' states and decides; the supervisor owns commands and clock. The rules:

- At most ``AT_ONCE`` commands are on their way to their hosts at the same time: sshd drops connections at random when
  more than ten have not logged in yet (MaxStartups), and a host with many ssh clients is slow at all of them.
- A failure that may be temporary is followed by another attempt, after a pause that doubles and varies a little.
- After the first permanent failure no further hosts are started. Those on their way get ``SETTLE`` seconds to fail too,
  so that one report shows as much as possible of what has to be fixed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from hvdgloo.errors import LaunchError, UnusableHostsError
from hvdgloo.runner.console.progress import NOT_TRIED, Missing, describe_missing
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.supervise.host_state import UNDER_WAY, GiveUp, HostState, Phase, TryAgain
from hvdgloo.runner.transport.failures import Diagnosis, Retry

AT_ONCE = 32
ATTEMPTS = 8
"""Maximum number of attempts for a host whose connection drops."""

SETTLE = 2.0
"""Seconds for hosts on their way once another one has failed permanently."""

_FIRST_PAUSE = 0.25
_LONGEST_PAUSE = 5.0


class Startup:
    """The start of all hosts' agents.

    Args:
        hosts: in order; each name once.
        chance: random numbers for pauses.
        patient: True if no failure ends the start; temporary ones get a second attempt, and no more.
    """

    def __init__(
        self, hosts: Sequence[HostState], chance: random.Random | None = None, *, patient: bool = False
    ) -> None:
        self._hosts = hosts
        self.patient = patient
        self._chance = chance or random.Random()
        self._settled = math.inf

    def due(self, now: float) -> list[HostState]:
        """Return the hosts whose commands are to be started now."""
        return [host for host in self._startable() if host.deadline <= now]

    @property
    def next(self) -> float:
        """Time of the next action if nothing happens until then."""
        return min([self._settled, *(host.deadline for host in self._startable())])

    def _startable(self) -> list[HostState]:
        """Return the hosts that wait for their turn, as many as there is room for, the earliest due first."""
        if self._settled < math.inf:
            return []
        room = AT_ONCE - sum(host.phase in (Phase.CONNECTING, Phase.FALLEN) for host in self._hosts)
        waiting = [host for host in self._hosts if host.phase is Phase.WAITING]
        return sorted(waiting, key=lambda host: host.deadline)[: max(0, room)]

    def judge(self, host: HostState, diagnosis: Diagnosis, now: float) -> TryAgain | GiveUp:
        """Decide about a host whose command has not led to a usable agent."""
        if self._may_try_again(host, diagnosis):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(host.attempts - 1, 10))
            return TryAgain(diagnosis, now + pause * self._chance.uniform(0.5, 1.5))
        if not self.patient:
            self._settled = min(self._settled, now + SETTLE)
        return GiveUp(diagnosis)

    def _may_try_again(self, host: HostState, diagnosis: Diagnosis) -> bool:
        if self._settled < math.inf or diagnosis.retry is Retry.NEVER:
            return False
        if self.patient:
            return host.attempts < 2
        return diagnosis.retry is Retry.UNTIL_THE_DEADLINE or host.attempts < ATTEMPTS

    def over(self, now: float) -> bool:
        """Tell whether all hosts are ready, or some have failed and the others have had their time."""
        if self._settled < math.inf:
            return now >= self._settled or not any(host.phase in UNDER_WAY for host in self._hosts)
        return not any(host.starting_up for host in self._hosts)

    # The result.

    def check(self, words: Mapping[str, str], timeout: float) -> None:
        """Refuse an incomplete start.

        Args:
            words: the last line of each command's standard error, by name of host.
            timeout: the start timeout, in seconds.

        Raises:
            UnusableHostsError: hosts failed.
            LaunchError: hosts missed the start timeout.
        """
        failed = {host.name: host.failure for host in self._hosts if host.phase is Phase.FAILED}
        late = [host for host in self._hosts if host.starting_up]
        if failed:
            text = _describe(failed, [host.name for host in late], len(self._hosts))
            raise UnusableHostsError(text, hosts=failed)
        if late:
            raise LaunchError(describe_missing([_missing(host, words.get(host.name, "")) for host in late], timeout))


def _missing(host: HostState, word: str) -> Missing:
    known = host.last.text if host.last is not None else "" if host.attempts else NOT_TRIED
    ended = host.phase is Phase.WAITING and host.last is not None
    return Missing(host.name, host.step, word or known, ended=ended)


def _describe(reasons: Mapping[str, str], waiting: Sequence[str], total: int) -> str:
    if total == 1:
        return "".join(f"host {name} cannot be used: {reason}" for name, reason in reasons.items())
    lines = [f"{len(reasons)} of {total} hosts cannot be used:"]
    lines += [f"  {name}: {reason}" for name, reason in reasons.items()]
    if waiting:
        more = f" and {len(waiting) - 16} more" if len(waiting) > 16 else ""
        lines.append(f"  (not known yet when start-up stopped: {', '.join(waiting[:16])}{more})")
    return "\n".join(lines)


def check_machines(hosts: Sequence[HostEntry], hellos: Sequence[Hello], reach: Reach) -> None:
    """Refuse two names for one machine: they would mean two local ranks 0, which would take the same GPU.

    This is allowed if a template reaches the hosts: it may lead into several containers that look like one machine, or
    be used to try out on one machine what is meant for many.

    Raises:
        UnusableHostsError: there are such names; the text has all of them.
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
