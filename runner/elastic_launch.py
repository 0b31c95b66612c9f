"""An elastic job: its workers and hosts change while it runs.

The supervisor's loop runs on this thread: it exchanges frames with agents, and carries out the actions of the elastic
job. Hosts are discovered on another one, which queues its answers in the loop.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from hvdgloo._net import ports
from hvdgloo.errors import JobFailedError
from hvdgloo.rendezvous._elastic.events import Spawn as SpawnOrder
from hvdgloo.rendezvous._membership.assignment import Assignment
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import StartDisplay
from hvdgloo.runner.elastic.discovery import HostManager, host_entry
from hvdgloo.runner.elastic.host_polling import HostPolling
from hvdgloo.runner.host_admission import Admission, launcher_addresses
from hvdgloo.runner.host_setup import HostWorkers, check_outputs, check_ports, required_on
from hvdgloo.runner.job.spec import Discovery, ElasticSpec, LaunchSpec, Slot
from hvdgloo.runner.job_console import expect
from hvdgloo.runner.job_report import complete
from hvdgloo.runner.launch_observer import LaunchObserver
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.observing.job_observer import progress_display
from hvdgloo.runner.protocol.frames import Spawn
from hvdgloo.runner.rendezvous_host import open_rendezvous
from hvdgloo.runner.signals import ENDING, passed_on
from hvdgloo.runner.supervise.elastic import ElasticSupervisor, Visit
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.select import AnyHostSpawner, hosts_here
from hvdgloo.topology import places


class ElasticJob:
    """An elastic job; see ``hvdgloo.runner.launch.Attempt``.

    Raises:
        ConfigError, DiscoveryError: outputs cannot be used, or hosts cannot be discovered.
        JobFailedError, KeyboardInterrupt: a signal arrived before hosts were known.
    """

    def __init__(self, spec: LaunchSpec, elastic: ElasticSpec, around: Surroundings) -> None:
        self._spec = spec
        self._elastic = elastic
        self._around = around
        self._spawner = around.spawner or AnyHostSpawner(spec.reach, fork=around.fork)
        check_outputs(spec, self._spawner, spec.hosts)
        self._manager = _asked(elastic.discovery, around.signals)
        self._entry = elastic.entry or partial(host_entry, slots=None)
        if spec.config.port_range is not None:
            listed = self._manager.current_hosts
            self._learn(listed)
            hosts = [replace(self._entry(name), slots=slots) for name, slots in listed]
            check_ports(spec, self._spawner, hosts, most=elastic.rules.largest)
        self._job_id = secrets.token_hex(16)
        self._ranks: dict[int, int] = {}
        self._plan: Assignment | None = None
        self._slots: tuple[Slot, ...] = ()
        self._workers: WeakKeyDictionary[Visit, HostWorkers] = WeakKeyDictionary()
        self.hosts: list[HostState] = []

    def rank_of(self, number: int) -> int:
        return self._ranks.get(number, number)

    def supervisor(self, observer: LaunchObserver) -> ElasticSupervisor:
        self._supervisor = ElasticSupervisor(
            self._spec,
            self._spawner,
            self.hosts,
            self._job_id,
            observer,
            entry=self._entry,
            required=partial(required_on, self._spec, self._spawner),
            ranks=self._ranks,
        )
        return self._supervisor

    def run(self, console: Console, observer: LaunchObserver, display: StartDisplay) -> None:
        spec, elastic, supervisor = self._spec, self._elastic, self._supervisor
        expect(console, spec, elastic.rules.largest or elastic.rules.size)
        supervisor.on_start = display.close
        with display, observer.running(progress_display(spec, self._around.job_observer, console)):
            rules = replace(elastic.rules, start_timeout=spec.start_timeout)
            self._epochs = ElasticEpochs(rules, act=supervisor.act)
            polling = HostPolling(self._manager, self._listed, supervisor.tell_soon, interval=elastic.interval)
            supervisor.feed, supervisor.on_turn = self._epochs.feed, polling.keep_time
            supervisor.environment, supervisor.frame = self._environment, self._frame
            alone = not elastic.rules.hosts_may_come and not spec.network_interfaces and _all_here(spec, self._spawner)
            launcher = () if alone else launcher_addresses(spec, needed=True)
            bind = (ports.LOOPBACK, *(address.address for address in launcher))
            with open_rendezvous(supervisor, spec, bind, elastic=self._epochs) as rendezvous:
                admission = Admission(supervisor, spec, supervisor, launcher, alone=alone, whole=False)
                admission.serve(rendezvous.port)
                supervisor.admission = self._admission = admission
                with closing(admission), polling:
                    rendezvous.serve()
                    supervisor.supervise()

    def _listed(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        self._learn(hosts)
        self._supervisor.listed(hosts)

    def _learn(self, hosts: Sequence[tuple[str, int | None]]) -> None:
        """Find out which of the listed hosts are this one. This resolves names, so it must not be done in the loop."""
        if isinstance(self._spawner, AnyHostSpawner):
            self._spawner.learn([host_entry(*host) for host in hosts])

    def _environment(self, visit: Visit) -> Mapping[str, str]:
        """Return the environment that all workers of a host share."""
        return self._workers_on(visit).environment

    def _frame(self, visit: Visit, order: SpawnOrder, number: int) -> Spawn:
        """Return the frame that starts a worker, with the place that it will probably get."""
        if order.plan is not self._plan:  # workers that are started together have one, and there may be thousands
            self._plan, self._slots = order.plan, _slots(order.plan)
        return self._workers_on(visit).spawn(
            number,
            self._slots[order.plan.ranks[order.worker]],
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
        workers = self._workers.get(visit)
        if workers is None:
            link = visit.link
            assert link is not None
            address, rendezvous = self._admission.reached(link).address, self._admission.endpoint(link)
            workers = self._workers[visit] = HostWorkers(
                self._spec, self._spawner, self._job_id, link.host, visit.hello, address, rendezvous
            )
        return workers

    def _master(self, plan: Assignment) -> tuple[str, int] | None:
        """Return an address and a free port of rank 0's host, if that host has been admitted; once all workers are
        together, they are known in any case."""
        visit = self._supervisor.visit(plan.members[0].host)
        if visit is None or not visit.admitted:
            return None
        assert visit.link is not None
        reached = self._admission.reached(visit.link)
        return reached.address.address, reached.master_port

    def result(self, console: Console) -> LaunchResult:
        supervisor, outcome = self._supervisor, self._supervisor.outcome
        # Workers that do not call hvd.init() come to no epoch, and yet end well.
        last = supervisor.changes[-1][1].assignment if supervisor.changes else self._epochs.assignment
        # Workers that the job had no time to request from the supervisor have no number.
        workers = [supervisor.workers.get(member.worker, -1) for member in last.members]
        outcome.statuses = {rank: outcome.statuses.get(number) for rank, number in enumerate(workers)}
        outcome.overdue = [rank for rank, number in enumerate(workers) if number in outcome.overdue]
        result = LaunchResult(
            outcome,
            _slots(last),
            numbers=tuple(workers),
            workers=tuple(member.worker for member in last.members),
            changes=tuple(supervisor.changes),
            why_over=supervisor.end.consequence if supervisor.end is not None else "",
        )
        failure = supervisor.end.failure if supervisor.end is not None else None
        failed = supervisor.workers.get(failure.worker) if failure is not None else None
        return complete(result, self._spec, self._spawner, console, host=self._entry, failed=failed)


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
