"""From a LaunchSpec to the end of its job: the whole course on one screen, and its parts."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from hvdgloo._net.tls import Tls
from hvdgloo._platform.interrupts import raise_again
from hvdgloo.errors import JobFailedError, LaunchError
from hvdgloo.runner.attempt import Attempt
from hvdgloo.runner.console.console import Console, is_terminal
from hvdgloo.runner.console.progress import Backoff, InitProgress
from hvdgloo.runner.console.startup_view import INIT_LINE_AFTER, LiveDisplay, StartDisplay
from hvdgloo.runner.host_admission import Admission, admit_all
from hvdgloo.runner.host_setup import HostWorkers, check_outputs, check_ports, required_on
from hvdgloo.runner.job.hostlist import place, remark_on_load, shortlist
from hvdgloo.runner.job.outcome import Failure, blame
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Slot
from hvdgloo.runner.job_console import expect, open_console
from hvdgloo.runner.job_report import complete
from hvdgloo.runner.launch_observer import LaunchObserver
from hvdgloo.runner.launch_result import LaunchResult, Restart, first_line, history
from hvdgloo.runner.observing.job_observer import JobObserver, progress_display
from hvdgloo.runner.protocol.frames import CHUNK, Hello
from hvdgloo.runner.rendezvous_host import RendezvousHost, open_rendezvous
from hvdgloo.runner.signals import Interrupts, passed_on
from hvdgloo.runner.supervise.first_failure import Verdict
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.observers import PlacedWorker
from hvdgloo.runner.supervise.startup import check_machines
from hvdgloo.runner.supervise.supervisor import Supervisor, host_states
from hvdgloo.runner.supervise.visits import Visit
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.select import choose_spawner


def launch(spec: LaunchSpec, around: Surroundings) -> LaunchResult:
    """Run the job that ``spec`` describes, and return when nothing of it is left.

    Raises:
        ConfigError, LaunchError: the job could not be started. Nothing is left running.
        MissingDependencyError: certificates are to be made, but the package for that is not installed here.
        JobFailedError: a signal arrived before any worker was started.
    """

    def say(text: str) -> None:
        around.stderr.write(f"hvdgloo-run: {text}\n")
        around.stderr.flush()

    terminal = spec.views.progress and not (around.quiet or spec.output.verbose) and is_terminal(around.stderr)
    job_observer = JobObserver(spec, say=say, progress=terminal)
    raise_again()  # there is something to be cleaned up from now on
    with job_observer:
        report = _launch(spec, around, job_observer)
        job_observer.conclude(report.outcome, report.headline())
        files = (*report.files, *(f"the report is in {path}" for path in job_observer.written[:1]))
        return replace(report, files=files, unwritten=(*report.unwritten, *job_observer.unwritten))


def _launch(spec: LaunchSpec, around: Surroundings, job_observer: JobObserver) -> LaunchResult:
    """Run a job, and restart it after failures, as often as allowed; see ``launch``."""
    begin = _begin(spec, around)
    restarts: list[Restart] = []
    failed = ""
    interrupts = Interrupts()
    # We handle signals until everything is cleaned up: a second one must not cut that short.
    with passed_on(around.signals, interrupts.came) as signal_came:
        while True:
            began = time.monotonic()
            try:
                report = _attempt(spec, around, job_observer, begin, failed, len(restarts), interrupts, signal_came)
            except JobFailedError:
                raise  # a signal came
            except LaunchError as error:
                if not restarts:
                    raise
                raise LaunchError(f"the job could not be started again: {error}\n{history(restarts)}") from error
            first = report.outcome.first
            over = first is None or report.outcome.interrupted is not None or interrupts.ending is not None
            if over or len(restarts) == spec.max_restarts:
                return replace(report, restarts=tuple(restarts))
            failed = report.failure(whole=False)
            restarts.append(Restart(first_line(failed), time.monotonic() - began))
            if around.results is not None:
                around.results.clear()


def _begin(spec: LaunchSpec, around: Surroundings) -> Callable[[int], Attempt]:
    """Return a function that begins an attempt, of which it gets the number."""
    if spec.elastic is None:
        return partial(FixedJob, spec, around)
    # Jobs of a fixed size do not import what they do not need.
    from hvdgloo.runner.elastic_launch import ElasticJob

    job = ElasticJob(spec, spec.elastic, around)
    return lambda number: job


def _attempt(
    spec: LaunchSpec,
    around: Surroundings,
    job_observer: JobObserver,
    begin: Callable[[int], Attempt],
    failed: str,
    number: int,
    interrupts: Interrupts,
    signal_came: Callable[[], bool],
) -> LaunchResult:
    """Start all workers, and wait for their end. Arguments that are not described here are as for ``launch``.

    Args:
        begin: begins an attempt.
        failed: the failure of the previous attempt; empty for the first.
        number: number of restarts so far.
        interrupts: passes signals on.
        signal_came: tells whether a signal has arrived since its first call.
    """
    job = begin(number)
    with open_console(spec, around, rank_of=job.rank_of) as console:
        if number:
            console.news(f"{failed}\nrestart {number} of {spec.max_restarts}: all workers are started again")
        display = StartDisplay(job.hosts, console, environ=spec.environ, verbose=spec.output.verbose)
        observer = LaunchObserver(console, display, around.results, job_observer)
        required = partial(required_on, spec, job.spawner)
        supervisor = job.supervisor = Supervisor(spec, job.spawner, job.hosts, observer, job, required)
        job_observer.attend(supervisor, f"restart {number}: {first_line(failed)}" if number else "")
        console.on_broken = partial(supervisor.interrupt, signal.SIGPIPE)
        with interrupts.passed_to(supervisor.interrupt), supervisor, around.outside(supervisor.fail_soon):
            job.run(console, observer, display)
            console.finish()
            console.drain(signal_came)
        return job.result(console)


class FixedJob(Attempt):
    """One attempt at a job of a fixed size: all hosts take part to the end, or the job fails.

    Args:
        number: number of restarts so far.

    Raises:
        ConfigError: hosts or outputs cannot be used.
    """

    policy = Verdict

    def __init__(self, spec: LaunchSpec, around: Surroundings, number: int) -> None:
        if number:  # a host that has failed may be on its way back
            spec = replace(spec, reach=replace(spec.reach, wait_for_hosts=spec.reach.wait_for_hosts is not False))
        self._spec = spec
        self._around = around
        self._number = number
        self._hosts: Sequence[HostEntry] = shortlist(spec.hosts, spec.np)
        self.spawner = around.spawner or choose_spawner(self._hosts, spec.reach, fork=around.fork)
        check_outputs(spec, self.spawner, self._hosts)
        check_ports(spec, self.spawner, self._hosts)
        if spec.config.tls_files is not None:
            # The rendezvous server is opened only when all agents are there.
            Tls(*spec.config.tls_files).check_listener()
        self._slots: tuple[Slot, ...] = ()
        self.hosts = host_states(self._hosts, spec)

    def lost(self, visit: Visit, reason: str) -> None:
        self.supervisor.job_observers.host(visit.name, "lost", reason)
        self._fail(visit, f"the agent on host {visit.name} {reason.removeprefix('its agent ')}")

    def dying(self, visit: Visit, reason: str) -> None:
        if not visit.parted:
            self._fail(visit, f"the agent on host {visit.name} ended its workers, because {reason}")

    def _fail(self, visit: Visit, text: str) -> None:
        self.supervisor.fail(Failure(None, visit.name, 1, text))

    def run(self, console: Console, observer: LaunchObserver, display: StartDisplay) -> None:
        spec, hosts, supervisor = self._spec, self._hosts, self.supervisor
        with display:
            hellos = [visit.hello for visit in supervisor.gather()]
            if self._around.spawner is None:
                check_machines(hosts, hellos, spec.reach)
            slots = self._slots = place(hosts, hellos, spec)
            self._hosts = hosts = _hosts_in_use(hosts, slots)
            visits = supervisor.keep({host.name for host in hosts})
            expect(console, spec, len(slots), again=self._number > 0)
            _say_crowded(console, hosts, [visit.hello for visit in visits])
            admission = admit_all(supervisor, spec, visits)
        _say_server(console, spec, admission)
        with closing(admission), open_rendezvous(supervisor, spec, admission.bind, hosts=hosts) as rendezvous:
            admission.serve(rendezvous.port)
            workers = [HostWorkers(spec, self.spawner, supervisor.job_id, visit.agent, admission) for visit in visits]
            _say_threads(console, spec, workers[0].threads(slots[0].local_size))
            for visit, each, host in zip(visits, workers, hosts, strict=True):
                supervisor.begin(visit.agent, each.environment, workers=host.slots or 0)
            for slot in slots:
                frame = workers[slot.host].spawn(
                    slot.rank, slot, workers[0].master, restart=self._number, max_restarts=spec.max_restarts
                )
                supervisor.spawn(visits[slot.host].agent, frame)
            rendezvous.serve()
            if spec.stdin_rank is not None:
                _feed_stdin(supervisor, spec.stdin_rank)
            observer.job_observer.placed(
                0, [PlacedWorker(slot.rank, slot.rank, slot.agent, slot.local_rank) for slot in slots]
            )
            init = _init_watch(spec, slots, rendezvous)
            progress = observer.running(progress_display(spec, observer.job_observer, console))
            with _init_display(spec, init, console) as observer.display, progress:
                supervisor.supervise(init)

    def result(self, console: Console) -> LaunchResult:
        outcome, slots = self.supervisor.outcome, self._slots
        first = outcome.first = blame(outcome, {slot.rank: slot.agent for slot in slots}, console.cause)
        result = LaunchResult(outcome, slots, numbers=tuple(range(len(slots))))
        entries = {host.name: host for host in self._hosts}
        failed = None if first is None else first.rank
        return complete(result, self._spec, self.spawner, console, host=entries.__getitem__, failed=failed)


def _hosts_in_use(hosts: Sequence[HostEntry], slots: Sequence[Slot]) -> tuple[HostEntry, ...]:
    """Return the hosts that have ranks, with the used number of slots."""
    used = Counter(slot.agent for slot in slots)
    return tuple(replace(host, slots=used[host.name]) for host in hosts if used[host.name])


def _say_crowded(console: Console, hosts: Sequence[HostEntry], hellos: Sequence[Hello]) -> None:
    remark = remark_on_load(hosts, [hello.cores for hello in hellos])
    if remark:
        console.notice(remark)


def _say_server(console: Console, spec: LaunchSpec, admission: Admission) -> None:
    if spec.output.verbose and admission.relaying:
        hosts = ", ".join(admission.relaying)
        console.notice(f"the workers on {hosts} reach the rendezvous server through their agent")
    if spec.output.verbose and spec.config.tls_files is not None:
        shown = spec.config.tls_files.certificate
        console.notice(
            "the rendezvous and the control plane are encrypted (TLS 1.3), with "
            + (f"the certificate {shown}" if shown else "certificates that are made for this job alone")
        )


def _say_threads(console: Console, spec: LaunchSpec, threads: Mapping[str, str]) -> None:
    if spec.output.verbose and "OMP_NUM_THREADS" in threads.keys() - spec.environ.keys():
        console.notice(
            f"OMP_NUM_THREADS={threads['OMP_NUM_THREADS']} for each worker, so that they share the host's cores; "
            "set it yourself for another number"
        )


def _init_watch(spec: LaunchSpec, slots: Sequence[Slot], rendezvous: RendezvousHost) -> InitWatch:
    hosts = {slot.rank: slot.agent for slot in slots}
    return InitWatch(rendezvous.arrivals, hosts, timeout=spec.start_timeout, verbose=spec.output.verbose)


def _init_display(spec: LaunchSpec, init: InitWatch, console: Console) -> LiveDisplay:
    now = time.monotonic()
    progress = InitProgress(init.arriving, now, spec.start_timeout)
    lines = Backoff(now, INIT_LINE_AFTER, once=True)
    return LiveDisplay(progress, console, lines, environ=spec.environ, verbose=spec.output.verbose)


def _feed_stdin(supervisor: Supervisor, rank: int) -> None:
    """Pass the launcher's standard input to a worker, the next piece whenever the last one has been accepted."""
    taken = threading.Semaphore(1)
    supervisor.on_stdin_taken = taken.release

    def read() -> None:
        while True:
            taken.acquire()
            try:
                data = os.read(0, CHUNK)
            except OSError:
                data = b""
            supervisor.feed_stdin(rank, data)
            if not data:
                return

    # The thread cannot be joined: only the user's next keystroke would end its wait. As a daemon it ends with the
    # launcher.
    threading.Thread(target=read, name="hvdgloo-stdin", daemon=True).start()
