"""Supervision of an elastic job: hosts join and leave while it runs, and workers end without ending the rest.

The elastic job (``hvdgloo.rendezvous._elastic``) decides which workers are started and ended; this module carries its
actions out, and feeds it the resulting events. A host is connected to when it is first needed, and its stay is a
``Visit``. A host that returns, whether it was removed or lost, begins another visit, once nothing is left of the last
one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from hvdgloo.errors import ConfigError, HvdglooError
from hvdgloo.rendezvous._elastic import events
from hvdgloo.rendezvous._elastic.events import Action, Ended, Event
from hvdgloo.rendezvous._elastic.events import Spawn as SpawnOrder
from hvdgloo.rendezvous._elastic.history import describe_change
from hvdgloo.rendezvous._membership.assignment import Assignment
from hvdgloo.runner.console.progress import REMEDIES
from hvdgloo.runner.job.hostlist import check_load, remark_on_load
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol.frames import Dying, Frame, Hello, Leaving, Require, Spawn, StopWorker
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.observers import PlacedWorker, SupervisionObserver
from hvdgloo.runner.supervise.policy import Policy
from hvdgloo.runner.supervise.supervisor import Supervisor
from hvdgloo.runner.transport.base import Spawner

_LOOK_AGAIN = 0.05  # seconds between looks at a command whose agent has ended


@dataclass(eq=False)
class Visit:
    """The stay of one host in the job.

    Attributes:
        name: the host's name in discoveries.
        since: time at which it was first needed.
        state: the state of its agent; None while processes of the last visit may be left there.
        link: the link to its agent, once that can be used.
        admitted: it takes part, and its workers can reach other hosts' workers.
        waiting: workers to be started there as soon as that is possible, with their numbers.
        leaving: it is to be given back.
        parted: it no longer takes part: its agent was told to end, or was lost.
        plan: the last plan by which workers were ordered here.
        lost: the job was told that all its workers are lost.
        ends_by: time at which its command is killed if it has not ended; infinite until ``over``.
    """

    name: str
    since: float
    state: HostState | None = None
    link: AgentLink | None = None
    admitted: bool = False
    waiting: list[tuple[int, SpawnOrder]] = field(default_factory=list)
    leaving: bool = False
    parted: bool = False
    plan: Assignment | None = None
    lost: bool = False
    ends_by: float = math.inf

    @property
    def hello(self) -> Hello:
        """The agent's first frame. Only for an agent that can be used."""
        assert self.link is not None
        assert self.link.hello is not None
        return self.link.hello

    @property
    def over(self) -> bool:
        """True if nothing of the job is left there, as far as can be known."""
        return self.parted and (self.state is None or self.state.final)


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


class ElasticSupervisor(Supervisor):
    """A supervisor that starts and ends workers as the elastic job decides, until the job is over.

    Args:
        hosts: filled in: the hosts that take part, or are on their way.
        entry: converts a host's name in discoveries to the entry that transports need.
        required: returns a host's requirements.
        ranks: filled in: number of a worker to its current rank.

    Attributes:
        feed, admission, environment, frame, on_start: must be set before ``supervise``.
        feed: feeds an event to the job, whose actions come back through ``act``.
        environment: returns the environment that all workers of a host share.
        frame: returns the frame that starts a worker.
        on_start: called when all workers of an epoch are complete.
        on_turn: called in each turn of the loop until the end is decided, with monotonic time.
        workers: id of each worker to its number.
        end: the end of the job; None until then.
        changes: each epoch that reached training, in order, with the seconds since the beginning.
    """

    feed: Callable[[Event], None]
    admission: AdmissionControl
    environment: Callable[[Visit], Mapping[str, str]]
    frame: Callable[[Visit, SpawnOrder, int], Spawn]
    on_start: Callable[[], None]

    def __init__(
        self,
        spec: LaunchSpec,
        spawner: Spawner,
        hosts: list[HostState],
        job_id: str,
        observer: SupervisionObserver,
        *,
        entry: Callable[[str], HostEntry],
        required: Callable[[HostEntry], Require],
        ranks: dict[int, int],
    ) -> None:
        super().__init__(spec, spawner, hosts, job_id, observer)
        self._agents.open(required)
        self._entry = entry
        self._ranks = ranks
        self.workers: dict[str, int] = {}
        self.on_turn: Callable[[float], None] = lambda now: None
        self.end: Ended | None = None
        self.changes: list[tuple[float, events.Changed]] = []
        self._began = time.monotonic()
        self._ids: dict[int, str] = {}
        self._visits: dict[str, Visit] = {}
        self._past: list[Visit] = []
        self._listed: dict[str, int | None] = {}
        self._slots: dict[str, int] = {}  # of hosts that are listed without, once their agents have told
        self._began_with_hosts = False
        self._machines: dict[str, str] = {}
        self._told_of_machines = self._told_of_load = False
        self.handlers |= {Leaving: self._on_leaving}

    def _policy(self) -> Policy:
        return Policy(self.outcome, self._observer.notice, self._stop_after_failure)

    # From other threads.

    def listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Use the hosts that are listed now, and no others."""
        self._loop.call_soon(partial(self._on_listed, dict(hosts)))

    def tell_soon(self, text: str) -> None:
        """Report news to the user, unless the job is over."""
        self._loop.call_soon(partial(self._tell, text))

    def act(self, action: Action) -> None:
        """Have the loop carry out an action of the job. Called under the job's lock."""
        if isinstance(action, events.Formed):
            # The members have not been told yet, so that their next output gets the right rank.
            self._loop.call_first(partial(self._on_placed, action.assignment))
        else:
            self._loop.call_soon(partial(self._carry_out, action))

    # The job's actions, in the loop.

    def _carry_out(self, action: Action) -> None:
        """Do what the job has decided; nothing more once it has ended."""
        if self.end is not None:
            return
        match action:
            case SpawnOrder() as spawn:
                self.start_worker(spawn)
            case events.Stop(worker, reason):
                self.stop_worker(worker, reason)
            case events.Tell(text, left_out):
                self._tell(text)
                if left_out is not None:
                    self.job_observers.host(left_out[0], "left out")
            case events.Changed() as change:
                if self.changes:
                    self._tell(describe_change(change, self.changes[-1][1]))
                self.changes.append((time.monotonic() - self._began, change))
            case Ended() as ended:
                self.end = ended
                waiting = [spawn.worker for visit in self._visits.values() for _, spawn in visit.waiting]
                for worker in [*waiting, *(self._ids[number] for number in sorted(self._verdict.running))]:
                    self.stop_worker(worker, "the job is over")
                self._finish(ended)

    def start_worker(self, spawn: SpawnOrder) -> None:
        """Start a worker as soon as its host can be used."""
        number = len(self._ids)
        self.workers[spawn.worker], self._ids[number] = number, spawn.worker
        self._ranks[number] = spawn.plan.ranks[spawn.worker]
        if self.settled:
            return
        visit = self._visits.get(spawn.host)
        if visit is not None and visit.lost and visit.plan is spawn.plan:
            return  # the rest of an order, whose workers the job has given up together
        visit = self._come(spawn.host)
        if visit is None:
            return
        visit.waiting.append((number, spawn))
        visit.plan = spawn.plan
        if visit.admitted:
            self._start_waiting(visit)

    def stop_worker(self, worker: str, reason: str) -> None:
        """End a worker."""
        number = self.workers.get(worker)
        if number is None:
            return
        for visit in self._visits.values():
            if any(spawn.worker == worker for _, spawn in visit.waiting):
                visit.waiting = [item for item in visit.waiting if item[1].worker != worker]
                self.feed(events.Gone(worker, 0, "was no longer needed"))
                self._let_go(visit)
                return
            if visit.link is not None and number in visit.link.workers and number in self._verdict.running:
                if self._spec.output.verbose:
                    self.notice(f"rank {self._ranks[number]} on host {visit.name} is told to end: {reason}")
                visit.link.channel.send(StopWorker(number, signal.SIGTERM, self._spec.times.grace_after_failure))

    def _tell(self, text: str) -> None:
        if not self.settled:
            self._observer.news(text)

    def _finish(self, ended: Ended) -> None:
        """End the job. Workers that were told to end have the usual time for that."""
        failing = ended.failure
        if failing is not None:
            who = "" if failing.rank is not None or not failing.worker else f"a new worker on host {failing.host} "
            reason = who + failing.reason if failing.reason else ended.text
            self.fail(Failure(failing.rank, failing.host, failing.status, reason))
        if self.settled:
            return
        self._verdict.settled = True
        self._hard_deadline = time.monotonic() + self._spec.times.grace_after_failure + self._spec.times.end_timeout
        self._finish_if_over()

    @property
    def coming(self) -> bool:
        """True if any host is on its way."""
        return any(visit.state is not None and visit.state.starting_up for visit in self._visits.values())

    def visit(self, name: str) -> Visit | None:
        """Return the current visit of a host."""
        return self._visits.get(name)

    # Workers.

    def _start_waiting(self, visit: Visit) -> None:
        assert visit.link is not None
        if not visit.waiting:
            return
        # An order of thousands may not be complete yet; its plan is.
        planned = visit.waiting[-1][1].plan.workers[visit.name]
        workers = max(len(visit.link.workers) + len(visit.waiting), planned)
        try:
            check_load(visit.name, workers, visit.hello.cores)
        except ConfigError as error:
            self.refuse(visit.link, error)
            return
        remark = remark_on_load([replace(visit.link.host, slots=workers)], [visit.hello.cores])
        if remark and not self._told_of_load:
            self._told_of_load = True
            self.notice(remark)
        for number, spawn in visit.waiting:
            self._spawn(visit.link, self.frame(visit, spawn, number))
        visit.waiting.clear()

    def _on_placed(self, assignment: Assignment) -> None:
        self.on_start()
        for worker, rank in assignment.ranks.items():
            if worker in self.workers:
                self._ranks[self.workers[worker]] = rank
        placed = [
            PlacedWorker(self.workers[member.worker], rank, member.host, member.local_rank)
            for rank, member in enumerate(assignment.members)
            if member.worker in self.workers
        ]
        self.job_observers.placed(assignment.epoch, placed)

    def _has_ended(self, link: AgentLink, number: int, status: int, reason: str) -> None:
        link.release(number)
        if not self.settled:
            self.feed(events.Gone(self._ids[number], status, reason))
            visit = self._visit_of(link.state)
            if visit is not None:
                self._let_go(visit)
        self._finish_if_over()

    # Hosts.

    def _on_listed(self, hosts: dict[str, int | None]) -> None:
        if self.settled:
            return
        self._listed = hosts
        self._feed_hosts()
        for name, slots in hosts.items():
            if slots is None:
                visit = self._come(name)
                if visit is not None and visit.link is not None:
                    self._tell_slots(visit)
        for visit in list(self._visits.values()):
            self._let_go(visit)

    def _feed_hosts(self) -> None:
        """Feed the listed hosts whose slots are known to the job."""
        known = {name: self._slots.get(name) if slots is None else slots for name, slots in self._listed.items()}
        hosts = tuple((name, slots) for name, slots in known.items() if slots is not None)
        # First wait for all hosts: the job starts on all available slots, or reports that they are too few.
        self._began_with_hosts = self._began_with_hosts or len(hosts) == len(known)
        if self._began_with_hosts:
            machines = tuple((name, profile.hostname) for name, _ in hosts if (profile := self._entry(name).profile))
            self.feed(events.HostsListed(hosts, machines))

    def _come(self, name: str) -> Visit | None:
        """Return the visit of a host that is needed, beginning it now if there is none; None if the host cannot be
        used."""
        visit = self._visits.get(name)
        if visit is not None and visit.parted:
            self._past.append(self._visits.pop(name))
            visit = None
        if visit is None:
            visit = self._visits[name] = Visit(name, time.monotonic())
            self._begin_visit(visit)
        return None if visit.parted else visit

    def _begin_visit(self, visit: Visit) -> None:
        """Have the host's agent started, unless processes of its last visit may be left there."""
        if any(past.name == visit.name and not past.over for past in self._past):
            return
        visit.since = time.monotonic()
        try:
            state = HostState(self._entry(visit.name), visit.since, self._spec.times.grace_after_failure)
            self._agents.add(state)
        except HvdglooError as error:
            self._lose(visit, str(error))
            return
        visit.state = state

    def usable(self, link: AgentLink) -> None:
        """Probe a host whose agent is up."""
        visit = self._visit_of(link.state)
        if visit is None or self.settled:
            return
        visit.link = link
        self.feed(events.Identified(visit.name, visit.hello.identity))
        self._note_machine(visit)
        self._tell_slots(visit)
        self._agents.happen(link.state, host_state.Probe())
        self.admission.request(link)

    def _tell_slots(self, visit: Visit) -> None:
        if visit.name in self._listed and self._listed[visit.name] is None:
            self._note_slots(visit.name, max(1, visit.hello.gpus))

    def _note_slots(self, host: str, slots: int) -> None:
        """Record the number of slots of a host that is listed without."""
        if self._slots.get(host) != slots:
            self._slots[host] = slots
            self._feed_hosts()

    def _note_machine(self, visit: Visit) -> None:
        """Treat several names of one machine as several hosts, with a notice."""
        other = self._machines.setdefault(visit.hello.identity, visit.name)
        if other != visit.name and other in self._listed and not self._told_of_machines:
            if self._spec.reach.agent_command or visit.state is None or visit.state.host.profile is not None:
                return  # several containers look like one machine
            self._told_of_machines = True
            self.notice(
                f"{other} and {visit.name} are the same machine ({visit.hello.hostname}); it is used as if it were "
                "several, and each starts with the first GPU"
            )

    def admit(self, link: AgentLink, detail: str) -> None:
        """Let a host take part: its workers can reach the other hosts' workers. ``environment`` has its address."""
        visit = self._visit_of(link.state)
        if visit is None or not link.state.accepts(host_state.Probed):
            return  # its stream has ended: it is about to be lost
        visit.admitted = True
        self._agents.happen(link.state, host_state.Probed(detail))
        self._begin(link, self.environment(visit), elastic=True)
        self._start_waiting(visit)
        self._let_go(visit)

    def refuse(self, link: AgentLink, error: HvdglooError) -> None:
        """Refuse a host that cannot take part, or cannot run the requested workers."""
        visit = self._visit_of(link.state)
        if visit is not None:
            self._lose(visit, str(error))
        self._agents.offer(host_state.Finish(), [link.state])

    def unusable(self, host: HostState) -> None:
        """Give up a host on which no agent can be used."""
        visit = self._visit_of(host)
        if visit is not None:
            self._lose(visit, host.failure)

    def lost(self, host: HostState, link: AgentLink | None, text: str) -> None:
        """Continue without a host that is lost."""
        if link is not None:
            self._verdict.gone(link.workers)
            link.workers.clear()
        visit = self._visit_of(host)
        if visit is not None:
            self._lose(visit, f"its agent {text}")
        self._finish_if_over()

    def ended(self, link: AgentLink) -> None:
        visit = self._visit_of(link.state)
        if visit is not None:
            visit.parted = True
        self._verdict.gone(link.workers)
        self._finish_if_over()

    def _on_dying(self, link: AgentLink, frame: Dying) -> None:
        visit = self._visit_of(link.state)
        if visit is not None:
            self._lose(visit, f"its agent ended its workers, because {frame.reason}")

    def _on_leaving(self, link: AgentLink, _: Frame) -> None:
        visit = self._visit_of(link.state)
        if visit is not None and not self.settled:
            visit.leaving = True
            self.notice(f"host {visit.name} is to be given back; its workers leave at their next commit")
            self.feed(events.Leaving(host=visit.name))
            self._let_go(visit)

    def _lose(self, visit: Visit, reason: str) -> None:
        """End a host's part in the job, and report the reason."""
        if visit.parted:
            return
        visit.parted, visit.admitted = True, False
        visit.waiting.clear()
        if visit.link is not None:
            self.admission.withdraw(visit.link)
        if not self.settled:
            visit.lost = True
            self.job_observers.host(visit.name, "lost", reason)
            self._feed_lost(visit.name, reason)

    def _feed_lost(self, host: str, reason: str) -> None:
        """Tell the job that a host is lost, or could not be used from the start."""
        unknown = self._listed.get(host, 0) is None and host not in self._slots
        if unknown:
            self._note_slots(host, 0)  # so that the job knows it, and does not start anything there now
        self.feed(events.HostLost(host, reason))
        if unknown:
            self._note_slots(host, 1)  # when its time comes, it is tried again

    def _let_go(self, visit: Visit) -> None:
        """End the agent of a host that is no longer listed, or is to be given back, once no worker runs there."""
        if visit.parted or visit.waiting or (visit.name in self._listed and not visit.leaving):
            return
        if visit.link is not None and visit.link.workers:
            return
        visit.parted, visit.admitted = True, False
        if visit.link is not None:
            self.admission.withdraw(visit.link)
        self.job_observers.host(visit.name, "left")
        if visit.state is not None:
            self._agents.offer(host_state.Finish(), [visit.state])

    def _visit_of(self, host: HostState) -> Visit | None:
        return next((visit for visit in (*self._visits.values(), *self._past) if visit.state is host), None)

    # The loop.

    def _next(self, now: float, deadline: float | None) -> float:
        times = [super()._next(now, deadline), self.admission.next]
        times += [self._late(visit) for visit in self._visits.values()]
        if any(visit.over for visit in (*self._past, *self._visits.values())):
            times.append(now + _LOOK_AGAIN)
        return min(times)

    def _late(self, visit: Visit) -> float:
        """Return the time at which the start of a host has taken too long."""
        coming = visit.state is not None and visit.state.starting_up
        return visit.since + self._spec.start_timeout if coming else math.inf

    def _keep_time(self) -> None:
        super()._keep_time()
        now = time.monotonic()
        if not self.settled:
            self.admission.keep_time(now)
            self.on_turn(now)
            for visit in list(self._visits.values()):
                self._keep_visit(visit, now)
        for visit in [visit for visit in self._past if visit.over]:
            if visit.state is None or self._has_gone(visit, visit.state, now):
                self._past.remove(visit)

    def _keep_visit(self, visit: Visit, now: float) -> None:
        if visit.state is None and not visit.parted:
            self._begin_visit(visit)
        elif visit.state is not None and now >= self._late(visit):
            late = f"has not answered within {self._spec.start_timeout:g} s; {REMEDIES[visit.state.step]}"
            self._agents.happen(visit.state, host_state.Lost(late))
        elif visit.over and not visit.waiting:
            self._past.append(self._visits.pop(visit.name))

    def _has_gone(self, visit: Visit, host: HostState, now: float) -> bool:
        """Release a host whose visit is over; return False while its last command has not ended."""
        link = self._agents.link(host)
        if link is not None and link.stream.poll() is None:
            if now >= visit.ends_by:
                link.stream.kill()
                visit.ends_by = math.inf
            if visit.ends_by == math.inf:
                visit.ends_by = now + self._spec.times.end_timeout
            return False
        self._agents.forget(host)
        return True
