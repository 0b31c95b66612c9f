"""An elastic job: its workers and hosts change while it runs.

The supervisor's loop runs on this thread: it exchanges frames with agents, and carries out the actions of the elastic
job. Hosts are discovered on another one, which queues its answers in the loop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError, HvdglooError, JobFailedError
from hvdgloo.rendezvous._elastic import events
from hvdgloo.rendezvous._elastic.events import Action, Ended, Event
from hvdgloo.rendezvous._elastic.events import Spawn as SpawnOrder
from hvdgloo.rendezvous._elastic.history import describe_change
from hvdgloo.rendezvous._membership.assignment import Assignment
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.attempt import Attempt
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import StartDisplay
from hvdgloo.runner.elastic.discovery import HostManager, host_entry
from hvdgloo.runner.elastic.host_polling import HostPolling
from hvdgloo.runner.host_admission import Admission, launcher_addresses
from hvdgloo.runner.host_setup import HostWorkers, check_outputs, check_ports
from hvdgloo.runner.job.hostlist import check_load, remark_on_load
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import Discovery, ElasticSpec, LaunchSpec, Slot
from hvdgloo.runner.job_console import expect
from hvdgloo.runner.job_report import complete
from hvdgloo.runner.launch_observer import LaunchObserver
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.observing.job_observer import progress_display
from hvdgloo.runner.protocol.frames import Spawn, StopWorker
from hvdgloo.runner.rendezvous_host import open_rendezvous
from hvdgloo.runner.signals import ENDING, passed_on
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.observers import PlacedWorker
from hvdgloo.runner.supervise.visits import Visit
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.select import AnyHostSpawner, hosts_here
from hvdgloo.topology import places


class ElasticJob(Attempt):
    """An elastic job, which starts and ends workers until it is over.

    The job itself (``hvdgloo.rendezvous._elastic``) decides which workers; this class carries its actions out, and
    feeds it the resulting events. A host is connected to when it is first needed.

    Attributes:
        feed: feeds an event to the job, whose actions come back through ``act``.
        on_start: called when all workers of an epoch are complete.
        on_turn: called in each turn of the loop until the end is decided, with monotonic time.
        workers: id of each worker to its number.
        end: the end of the job; None until then.
        changes: each epoch that reached training, in order, with the seconds since the beginning.

    Raises:
        ConfigError, DiscoveryError: outputs cannot be used, or hosts cannot be discovered.
        JobFailedError, KeyboardInterrupt: a signal arrived before hosts were known.
    """

    patient = True
    feed: Callable[[Event], None]
    on_start: Callable[[], None]

    def __init__(self, spec: LaunchSpec, elastic: ElasticSpec, around: Surroundings) -> None:
        self._spec = spec
        self._elastic = elastic
        self.spawner = around.spawner or AnyHostSpawner(spec.reach, fork=around.fork)
        check_outputs(spec, self.spawner, spec.hosts)
        self._manager = _asked(elastic.discovery, around.signals)
        self._entry = elastic.entry or partial(host_entry, slots=None)
        if spec.config.port_range is not None:
            listed = self._manager.current_hosts
            self._learn(listed)
            hosts = [replace(self._entry(name), slots=slots) for name, slots in listed]
            check_ports(spec, self.spawner, hosts, most=elastic.rules.largest)
        self.hosts: list[HostState] = []
        self.workers: dict[str, int] = {}
        self.on_turn: Callable[[float], None] = lambda now: None
        self.end: Ended | None = None
        self.changes: list[tuple[float, events.Changed]] = []
        self._began = time.monotonic()
        self._ids: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._plan: Assignment | None = None
        self._places: tuple[Slot, ...] = ()
        self._hosts_workers: WeakKeyDictionary[Visit, HostWorkers] = WeakKeyDictionary()
        self._listed: dict[str, int | None] = {}
        self._slots: dict[str, int] = {}  # of hosts that are listed without, once their agents have told
        self._began_with_hosts = False
        self._machines: dict[str, str] = {}
        self._told_of_machines = self._told_of_load = False

    def rank_of(self, number: int) -> int:
        return self._ranks.get(number, number)

    def run(self, console: Console, observer: LaunchObserver, display: StartDisplay) -> None:
        spec, elastic, supervisor = self._spec, self._elastic, self.supervisor
        expect(console, spec, elastic.rules.largest or elastic.rules.size)
        self.on_start = display.close
        with display, observer.running(progress_display(spec, observer.job_observer, console)):
            rules = replace(elastic.rules, start_timeout=spec.start_timeout)
            self._epochs = ElasticEpochs(rules, act=self.act)
            polling = HostPolling(self._manager, self.listed, self.tell_soon, interval=elastic.interval)
            self.feed, self.on_turn = self._epochs.feed, polling.keep_time
            alone = not elastic.rules.hosts_may_come and not spec.network_interfaces and _all_here(spec, self.spawner)
            launcher = () if alone else launcher_addresses(spec, needed=True)
            bind = (ports.LOOPBACK, *(address.address for address in launcher))
            with open_rendezvous(supervisor, spec, bind, elastic=self._epochs) as rendezvous:
                admission = Admission(supervisor, spec, launcher, alone=alone, whole=False)
                admission.serve(rendezvous.port)
                supervisor.admission = self._admission = admission
                with closing(admission), polling:
                    rendezvous.serve()
                    supervisor.supervise()

    def result(self, console: Console) -> LaunchResult:
        outcome = self.supervisor.outcome
        # Workers that do not call hvd.init() come to no epoch, and yet end well.
        last = self.changes[-1][1].assignment if self.changes else self._epochs.assignment
        # Workers that the job had no time to request from the supervisor have no number.
        workers = [self.workers.get(member.worker, -1) for member in last.members]
        outcome.statuses = {rank: outcome.statuses.get(number) for rank, number in enumerate(workers)}
        outcome.overdue = [rank for rank, number in enumerate(workers) if number in outcome.overdue]
        result = LaunchResult(
            outcome,
            _slots(last),
            numbers=tuple(workers),
            workers=tuple(member.worker for member in last.members),
            changes=tuple(self.changes),
            why_over=self.end.consequence if self.end is not None else "",
        )
        failure = self.end.failure if self.end is not None else None
        failed = self.workers.get(failure.worker) if failure is not None else None
        return complete(result, self._spec, self.spawner, console, host=self._entry, failed=failed)

    # From other threads.

    def listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Use the hosts that are listed now, and no others."""
        self._learn(hosts)
        self.supervisor.loop.call_soon(partial(self._on_listed, dict(hosts)))

    def _learn(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Find out which of the listed hosts are this one. This resolves names, so it must not be done in the loop."""
        if isinstance(self.spawner, AnyHostSpawner):
            self.spawner.learn([host_entry(*host) for host in hosts])

    def tell_soon(self, text: str) -> None:
        """Report news to the user, unless the job is over."""
        self.supervisor.loop.call_soon(partial(self._tell, text))

    def act(self, action: Action) -> None:
        """Have the loop carry out an action of the job. Called under the job's lock."""
        if isinstance(action, events.Formed):
            # The members have not been told yet, so that their next output gets the right rank.
            self.supervisor.loop.call_first(partial(self._on_placed, action.assignment))
        else:
            self.supervisor.loop.call_soon(partial(self._carry_out, action))

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
                    self.supervisor.job_observers.host(left_out[0], "left out")
            case events.Changed() as change:
                if self.changes:
                    self._tell(describe_change(change, self.changes[-1][1]))
                self.changes.append((time.monotonic() - self._began, change))
            case Ended() as ended:
                self.end = ended
                waiting = [
                    spawn.worker for visit in self.supervisor.visits.current.values() for _, spawn in visit.waiting
                ]
                for worker in [*waiting, *(self._ids[number] for number in sorted(self.supervisor.policy.running))]:
                    self.stop_worker(worker, "the job is over")
                self._finish(ended)

    def start_worker(self, spawn: SpawnOrder) -> None:
        """Start a worker as soon as its host can be used."""
        number = len(self._ids)
        self.workers[spawn.worker], self._ids[number] = number, spawn.worker
        self._ranks[number] = spawn.plan.ranks[spawn.worker]
        if self.supervisor.settled:
            return
        visit = self.supervisor.visits.current.get(spawn.host)
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
        for visit in self.supervisor.visits.current.values():
            if any(spawn.worker == worker for _, spawn in visit.waiting):
                visit.waiting = [item for item in visit.waiting if item[1].worker != worker]
                self.feed(events.Gone(worker, 0, "was no longer needed"))
                self._let_go(visit)
                return
            if visit.link is not None and number in visit.link.workers and number in self.supervisor.policy.running:
                if self._spec.output.verbose:
                    self.supervisor.notice(f"rank {self._ranks[number]} on host {visit.name} is told to end: {reason}")
                visit.link.channel.send(StopWorker(number, signal.SIGTERM, self._spec.times.grace_after_failure))

    def _tell(self, text: str) -> None:
        if not self.supervisor.settled:
            self.supervisor.news(text)

    def _finish(self, ended: Ended) -> None:
        """End the job. Workers that were told to end have the usual time for that."""
        failing = ended.failure
        if failing is not None:
            who = "" if failing.rank is not None or not failing.worker else f"a new worker on host {failing.host} "
            reason = who + failing.reason if failing.reason else ended.text
            self.supervisor.fail(Failure(failing.rank, failing.host, failing.status, reason))
        if not self.supervisor.settled:
            self.supervisor.settle(self._spec.times.grace_after_failure)

    # Workers.

    def _start_waiting(self, visit: Visit) -> None:
        if not visit.waiting:
            return
        # An order of thousands may not be complete yet; its plan is.
        planned = visit.waiting[-1][1].plan.workers[visit.name]
        workers = max(len(visit.agent.workers) + len(visit.waiting), planned)
        try:
            check_load(visit.name, workers, visit.hello.cores)
        except ConfigError as error:
            self.refused(visit, error)
            return
        remark = remark_on_load([replace(visit.agent.host, slots=workers)], [visit.hello.cores])
        if remark and not self._told_of_load:
            self._told_of_load = True
            self.supervisor.notice(remark)
        for number, spawn in visit.waiting:
            self.supervisor.spawn(visit.agent, self._frame(visit, spawn, number))
        visit.waiting.clear()

    def _frame(self, visit: Visit, order: SpawnOrder, number: int) -> Spawn:
        """Return the frame that starts a worker, with the place that it will probably get."""
        if order.plan is not self._plan:  # workers that are started together have one, and there may be thousands
            self._plan, self._places = order.plan, _slots(order.plan)
        return self._workers_on(visit).spawn(
            number,
            self._places[order.plan.ranks[order.worker]],
            self._master(order.plan),
            max_restarts=self._elastic.rules.reset_limit,
            more={
                "TORCHELASTIC_RESTART_COUNT": str(order.plan.epoch),
                "HVDGLOO_ELASTIC": "1",
                "HOROVOD_ELASTIC": "1",
                "HVDGLOO_WORKER": order.worker,
            },
        )

    def _workers_on(self, visit: Visit) -> HostWorkers:
        workers = self._hosts_workers.get(visit)
        if workers is None:
            workers = self._hosts_workers[visit] = HostWorkers(
                self._spec, self.spawner, self.supervisor.job_id, visit.agent, self._admission
            )
        return workers

    def _master(self, plan: Assignment) -> tuple[str, int] | None:
        """Return an address and a free port of rank 0's host, if that host has been admitted; once all workers are
        together, they are known in any case."""
        visit = self.supervisor.visits.current.get(plan.members[0].host)
        return self._workers_on(visit).master if visit is not None and visit.admitted else None

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
        self.supervisor.job_observers.placed(assignment.epoch, placed)

    def ended(self, link: AgentLink, number: int, status: int, reason: str) -> None:
        """Let the job decide who continues."""
        link.release(number)
        if not self.supervisor.settled:
            self.feed(events.Gone(self._ids[number], status, reason))
            self._let_go(self.supervisor.visits.of(link.state))

    # Hosts.

    def _on_listed(self, hosts: dict[str, int | None]) -> None:
        if self.supervisor.settled:
            return
        self._listed = hosts
        self._feed_hosts()
        for name, slots in hosts.items():
            if slots is None:
                visit = self._come(name)
                if visit is not None and visit.link is not None:
                    self._tell_slots(visit)
        for visit in list(self.supervisor.visits.current.values()):
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
        """Return the visit of a host that is needed; None if the host cannot be used."""
        visit = self.supervisor.visits.come(name)
        if visit.state is None:
            self._begin_visit(visit)
        return None if visit.parted else visit

    def _begin_visit(self, visit: Visit) -> None:
        try:
            self.supervisor.visits.begin(visit, self._entry)
        except HvdglooError as error:
            self.supervisor.lose(visit, str(error))

    def usable(self, visit: Visit) -> None:
        """Have a host probed."""
        self.feed(events.Identified(visit.name, visit.hello.identity))
        self._note_machine(visit)
        self._tell_slots(visit)
        self.supervisor.agents.happen(visit.agent.state, host_state.Probe())
        assert self.supervisor.admission is not None
        self.supervisor.admission.request(visit.agent)

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
            self.supervisor.notice(
                f"{other} and {visit.name} are the same machine ({visit.hello.hostname}); it is used as if it were "
                "several, and each starts with the first GPU"
            )

    def admitted(self, visit: Visit) -> None:
        """Start workers on a host."""
        self.supervisor.begin(visit.agent, self._workers_on(visit).environment, elastic=True)
        self._start_waiting(visit)
        self._let_go(visit)

    def refused(self, visit: Visit, error: HvdglooError) -> None:
        """Do without a host that cannot take part, or cannot run the requested workers."""
        self.supervisor.lose(visit, str(error))
        self.supervisor.let_go(visit)

    def lost(self, visit: Visit, reason: str) -> None:
        """Do without a host."""
        if not self.supervisor.settled:
            visit.lost = True
            self.supervisor.job_observers.host(visit.name, "lost", reason)
            self._feed_lost(visit.name, reason)

    def dying(self, visit: Visit, reason: str) -> None:
        """Do without a host."""
        self.supervisor.lose(visit, f"its agent ended its workers, because {reason}")

    def leaving(self, visit: Visit) -> None:
        """Have the workers of a host leave that is to be given back."""
        if not self.supervisor.settled:
            visit.leaving = True
            self.supervisor.notice(f"host {visit.name} is to be given back; its workers leave at their next commit")
            self.feed(events.Leaving(host=visit.name))
            self._let_go(visit)

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
        self.supervisor.job_observers.host(visit.name, "left")
        self.supervisor.let_go(visit)

    def keep_time(self, now: float) -> None:
        """Begin visits as soon as nothing is left of the last ones."""
        self.on_turn(now)
        for visit in list(self.supervisor.visits.current.values()):
            if visit.state is None and not visit.parted:
                self._begin_visit(visit)


def _asked(discovery: Discovery, signals: Sequence[signal.Signals]) -> HostManager:
    """Return a manager of a discovery that has answered once. That may take long, so signals end it at once.

    Raises:
        DiscoveryError: hosts cannot be determined.
        JobFailedError, KeyboardInterrupt: a signal arrived.
    """
    manager = HostManager(discovery)
    came: list[int] = []

    def interrupt(signum: int) -> None:
        came.append(signum)
        raise KeyboardInterrupt  # no discovery takes this for a failure of its own, and scripts are ended

    try:
        with passed_on([signum for signum in signals if signum in ENDING], interrupt):
            manager.update_available_hosts()
    except KeyboardInterrupt:
        if not came or came[0] == signal.SIGINT:
            raise
        raise JobFailedError("interrupted before hosts were known", exit_code=128 + came[0]) from None
    return manager


def _all_here(spec: LaunchSpec, spawner: Spawner) -> bool:
    if isinstance(spawner, AnyHostSpawner):
        return len(hosts_here(spec.hosts, spec.reach)) == len(spec.hosts)
    return all(spawner.is_local(host) for host in spec.hosts)


def _slots(assignment: Assignment) -> tuple[Slot, ...]:
    """Return the places of an epoch's members, by rank."""
    numbers = {name: number for number, (name, _) in enumerate(assignment.slots)}
    found = places([(numbers[member.home], member.local_rank) for member in assignment.members])
    return tuple(
        Slot(
            rank=rank,
            size=assignment.size,
            host=place.host,
            node=place.host,
            nodes=len(assignment.slots),
            hostname=member.home,
            local_rank=place.local_rank,
            local_size=place.local_size,
            cross_rank=place.cross_rank,
            cross_size=place.cross_size,
            agent=member.host,
        )
        for rank, (member, place) in enumerate(zip(assignment.members, found, strict=True))
    )
