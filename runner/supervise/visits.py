"""The visits of hosts to a job, and the source of its orders, which decides what the visitors do.

A visit is one stay of a host in the job. The hosts of a job of a fixed size are all there from the start, and stay to
the end. A host of an elastic job comes when it is first needed; if it was lost or removed and returns, it begins
another visit, once nothing is left of the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hvdgloo.errors import HvdglooError
from hvdgloo.runner.console.progress import REMEDIES
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.agents import Agents
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.policy import Policy

if TYPE_CHECKING:
    from hvdgloo.rendezvous._elastic.events import Spawn as SpawnOrder
    from hvdgloo.rendezvous._membership.assignment import Assignment

_LOOK_AGAIN = 0.05  # seconds between looks at a command whose agent has ended


@dataclass(eq=False)
class Visit:
    """The stay of one host in the job.

    Attributes:
        name: the host's name; in an elastic job, the one in discoveries.
        since: time at which it was first needed.
        state: the state of its agent; None while processes of the last visit may be left there.
        link: the link to its agent, once that can be used.
        admitted: it takes part, and its workers can reach other hosts' workers.
        parted: it no longer takes part: its agent was told to end, or was lost.
        ends_by: time at which its command is killed if it has not ended; infinite until ``over``.
        waiting: workers to be started there as soon as that is possible, with their numbers.
        leaving: it is to be given back.
        plan: the last plan by which workers were ordered here.
        lost: the job was told that all its workers are lost.
    """

    name: str
    since: float
    state: HostState | None = None
    link: AgentLink | None = None
    admitted: bool = False
    parted: bool = False
    ends_by: float = math.inf
    waiting: list[tuple[int, SpawnOrder]] = field(default_factory=list)
    leaving: bool = False
    plan: Assignment | None = None
    lost: bool = False

    @property
    def agent(self) -> AgentLink:
        """The link to its agent. Only for an agent that can be used."""
        assert self.link is not None
        return self.link

    @property
    def hello(self) -> Hello:
        """The agent's first frame. Only for an agent that can be used."""
        assert self.agent.hello is not None
        return self.agent.hello

    @property
    def coming(self) -> bool:
        """True while it is unknown whether its agent can be used."""
        return self.state is not None and self.state.starting_up

    @property
    def over(self) -> bool:
        """True if nothing of the job is left there, as far as can be known."""
        return self.parted and (self.state is None or self.state.final)


class Visits:
    """The visits of a job's hosts.

    Args:
        agents: the agents of the hosts, of which some may be there from the start.
        patient: True if hosts that miss the start timeout are lost, one by one. Otherwise ``Startup`` reports them.

    Attributes:
        current: the current visit of each host, by name.
    """

    def __init__(self, spec: LaunchSpec, agents: Agents, *, patient: bool) -> None:
        self._start_timeout = spec.start_timeout if patient else math.inf
        self._times = spec.times
        self._agents = agents
        self.current = {host.name: Visit(host.name, host.since, host) for host in agents.hosts}
        self._past: list[Visit] = []

    def of(self, host: HostState) -> Visit:
        """Return the visit with this state."""
        return next(visit for visit in (*self.current.values(), *self._past) if visit.state is host)

    def come(self, name: str) -> Visit:
        """Return the visit of a host that is needed, which may only begin now."""
        if name in self.current and self.current[name].parted:
            self._past.append(self.current.pop(name))
        return self.current.setdefault(name, Visit(name, time.monotonic()))

    def begin(self, visit: Visit, host: Callable[[str], HostEntry]) -> None:
        """Have a host's agent started, unless processes of its last visit may be left there.

        Raises:
            HvdglooError: no command can lead there.
        """
        if not any(past.name == visit.name and not past.over for past in self._past):
            visit.since = time.monotonic()
            state = HostState(host(visit.name), visit.since, self._times.grace_after_failure)
            self._agents.add(state)
            visit.state = state

    @property
    def coming(self) -> bool:
        """True if any host is on its way."""
        return any(visit.coming for visit in self.current.values())

    def next(self, now: float) -> float:
        """Return the time at which something must be done if nothing happens until then."""
        over = any(visit.over for visit in (*self._past, *self.current.values()))
        return min([now + _LOOK_AGAIN if over else math.inf, *map(self._late, self.current.values())])

    def keep_time(self, now: float) -> None:
        """Give up hosts that come too late."""
        for visit in list(self.current.values()):
            if visit.state is not None and now >= self._late(visit):
                late = f"has not answered within {self._start_timeout:g} s; {REMEDIES[visit.state.step]}"
                self._agents.happen(visit.state, host_state.Lost(late))
            elif visit.over and not visit.waiting:
                self._past.append(self.current.pop(visit.name))

    def release(self, now: float) -> None:
        """Release hosts whose visits are over, once their last commands have ended."""
        for visit in [visit for visit in self._past if visit.over]:
            if visit.state is None or self._has_gone(visit, visit.state, now):
                self._past.remove(visit)

    def _late(self, visit: Visit) -> float:
        """Return the time at which the start of a host has taken too long."""
        return visit.since + self._start_timeout if visit.coming else math.inf

    def _has_gone(self, visit: Visit, host: HostState, now: float) -> bool:
        """Release a host; return False while its last command has not ended."""
        link = self._agents.link(host)
        if link is not None and link.stream.poll() is None:
            if now >= visit.ends_by:
                link.stream.kill()
                visit.ends_by = math.inf
            if visit.ends_by == math.inf:
                visit.ends_by = now + self._times.end_timeout
            return False
        self._agents.forget(host)
        return True


class AdmissionControl(Protocol):
    """The choice of the address at which other hosts reach a host, before workers are started there."""

    def request(self, link: AgentLink) -> None:
        """Begin to choose an address for a host. ``admit`` or ``refuse`` is called for it, later or at once, unless the
        request is withdrawn."""

    def withdraw(self, link: AgentLink) -> None:
        """Forget a host that has gone, whether or not it had been admitted."""

    def keep_time(self, now: float) -> None:
        """Do what is due. Called in each turn of the loop."""

    @property
    def next(self) -> float:
        """Time at which ``keep_time`` has something to do."""


class Orders:
    """The source of a job's orders. This one gives none: the launch itself waits until all hosts are up, admits them,
    and starts all workers at once.

    Attributes:
        patient: True if the job goes on without hosts that cannot be used.
        policy: the consequences of workers' ends.
    """

    patient = False
    policy: type[Policy] = Policy

    def keep_time(self, now: float) -> None:
        """Do what is due. Called in each turn of the loop, until the end is decided."""

    def usable(self, visit: Visit) -> None:
        """Use a host whose agent is up."""

    def admitted(self, visit: Visit) -> None:
        """Use a host that was admitted."""

    def refused(self, visit: Visit, error: HvdglooError) -> None:
        """Do without a host that was not admitted, or raise the error."""
        raise error

    def lost(self, visit: Visit, reason: str) -> None:
        """Do without a host that is lost or cannot be used, or end the job."""

    def dying(self, visit: Visit, reason: str) -> None:
        """Do without a host whose agent is ending its workers."""

    def leaving(self, visit: Visit) -> None:
        """Do without a host that is to be given back. Only agents of elastic jobs wait for that."""

    def ended(self, link: AgentLink, number: int, status: int, reason: str) -> None:
        """Act on the end of a worker, of which the policy knows."""
