"""Supervision of a job: one connection to each host's agent, one loop, and the visits of its hosts.

The loop never waits for output to be written, for a host, or for a worker. It ends when nothing of the job is left on
any host: every agent has said goodbye, or was lost and then swept up after. ``Agents`` owns the connections, and each
host's state decides about its own; this module handles the job as a whole. What differs between jobs of a fixed size
and elastic ones is decided by its ``Orders``, and by its ``Policy``.

Signals only leave a note and wake the loop, where ``signal_handling`` handles them.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from hvdgloo._net.event_loop import EventLoop
from hvdgloo.errors import HvdglooError, JobFailedError, LaunchError
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol import heartbeat
from hvdgloo.runner.protocol.frames import (
    CHUNK,
    Blob,
    Dying,
    Exited,
    ForeignMpi,
    Frame,
    Leaving,
    Observe,
    Observed,
    Output,
    Require,
    Result,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Stdin,
    StdinTaken,
    Stop,
    Traced,
    TraceSteps,
    Tracing,
)
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.agents import Agents
from hvdgloo.runner.supervise.host_state import HostState, Phase
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.observers import JobObservers, SupervisionObserver
from hvdgloo.runner.supervise.policy import describe_end
from hvdgloo.runner.supervise.signal_handling import SignalHandling
from hvdgloo.runner.supervise.visits import AdmissionControl, Orders, Visit, Visits
from hvdgloo.runner.transport.base import Spawner

ANNOUNCE_AFTER = 1.0
"""Seconds after which the user is told that a finished job waits for workers to end."""

FOREIGN_MPI = (
    "mpi4py sees each of the %d workers alone (MPI.COMM_WORLD has 1 rank): hvdgloo-run starts no MPI job, and the "
    "program does not use hvdgloo. Use hvd.init(), hvd.allreduce() and so on instead of MPI's, or start it with mpirun"
)
"""The notice about workers that use mpi4py instead of hvdgloo."""

_LATE = 1.0  # the most seconds that one turn of the loop counts for, beyond those that it was meant to take


def host_states(hosts: Sequence[HostEntry], spec: LaunchSpec) -> tuple[HostState, ...]:
    """Return the states of a job's hosts before it begins."""
    now = time.monotonic()
    return tuple(HostState(host, now, spec.times.grace_after_failure) for host in hosts)


class Supervisor:
    """The supervisor of a job: it starts agents, has them start workers, and makes sure that all of them end.

    A context manager: leaving it, in whatever way, ends everything that it started.

    Args:
        hosts: the hosts that take part from the start. A list follows those that come and go.
        orders: the source of the job's orders.
        required: returns a host's requirements; None if nothing is to be checked.

    Attributes:
        job_observers: the observers of the job; must be set before the first host or worker appears.
        job_id: random, and part of the mark of the processes that agents start for the job.
        loop: the loop, in which other threads may have something done.
        policy: the workers that run, and what follows from their ends.
        visits: the visits of hosts.
        admission: chooses the hosts' addresses; must be set before a host is probed.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        spawner: Spawner,
        hosts: Sequence[HostState],
        observer: SupervisionObserver,
        orders: Orders,
        required: Callable[[HostEntry], Require] | None = None,
    ) -> None:
        self.outcome = JobOutcome(grace=spec.times.grace_after_failure)
        self.job_observers = JobObservers()
        self._spec = spec
        self._spawner = spawner
        self._observer = observer
        self.loop = EventLoop()
        self.policy = orders.policy(self.outcome, observer, self._stop_after_failure, self.notice_unless_over)
        self.job_id = secrets.token_hex(16)
        self.agents = Agents(spec, spawner, hosts, self.job_id, self.loop, self, required, patient=orders.patient)
        self.visits = Visits(spec, self.agents, patient=orders.patient)
        self.admission: AdmissionControl | None = None
        self._orders = orders
        self._last_beat = time.monotonic()
        self._hard_deadline: float | None = None
        self._announcement: tuple[float, str] | None = None
        self._told_of_mpi = False
        self._slept = 0.0
        self._stdin_link: AgentLink | None = None
        self.on_stdin_taken: Callable[[], None] = lambda: None
        self._signals = SignalHandling(self, spec.times.grace_after_signal, observer.suspend)
        self.handlers: dict[type[Frame], Callable[[AgentLink, Any], None]] = {
            Output: self._on_output,
            Result: lambda _, frame: observer.result(frame.number, frame.data),
            Spawned: self._on_spawned,
            SpawnFailed: self._on_not_spawned,
            Exited: self._on_exited,
            StdinTaken: lambda *_: self.on_stdin_taken(),
            Dying: lambda link, frame: orders.dying(self.visits.of(link.state), frame.reason),
            Leaving: lambda link, _: orders.leaving(self.visits.of(link.state)),
            ForeignMpi: self._on_foreign_mpi,
            **dict.fromkeys((Observed, Tracing, Traced), self._on_observed),
        }

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._run(self._nothing_left, time.monotonic() + self._spec.times.end_timeout)
        self.agents.offer(host_state.Lost("did not end"))
        self._run(self._nothing_left)
        self.agents.close()
        self.loop.close()

    # The steps of a job, in the order in which a launch takes them.

    def gather(self) -> list[Visit]:
        """Start an agent on every host, and wait until all are up. If the orders are patient, do without those that
        cannot be used.

        Raises:
            LaunchError: an agent did not come up before the start timeout, or could not be used.
            JobFailedError: a signal interrupted the start.
        """
        startup, timeout = self.agents.start(), self._spec.start_timeout
        deadline = None if startup.patient else time.monotonic() + timeout
        # If an agent that was up is lost, hosts that are not up yet are not the reason.
        self.run_until(lambda: startup.over(time.monotonic()), deadline)
        if not startup.patient:
            startup.check({link.host.name: link.last_words for link in self.agents.links}, timeout)
        return [visit for visit in self.visits.current.values() if not visit.parted]

    def keep(self, names: Container[str]) -> list[Visit]:
        """Continue with these hosts only, whose visits are returned, and let the others go."""
        leaving = [visit for visit in self.visits.current.values() if visit.name not in names]
        for visit in leaving:
            self.let_go(visit)
        self.run_until(lambda: all(visit.over for visit in leaving), time.monotonic() + self._spec.times.end_timeout)
        self.agents.offer(host_state.Lost("did not end"), [visit.state for visit in leaving if visit.state is not None])
        return [visit for visit in self.visits.current.values() if visit.name in names]

    def run_until(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        """Continue until ``done`` or the deadline, before any worker is started.

        Raises:
            LaunchError: an agent was lost in the meantime.
            JobFailedError: a signal interrupted it.
        """
        self._run(lambda: self.settled or done(), deadline)
        if self.outcome.interrupted is not None:
            raise JobFailedError("interrupted before the workers were started", exit_code=self.outcome.exit_code)
        if self.outcome.first is not None:
            raise LaunchError(f"the job could not be started: {self.outcome.first.reason}")

    def begin(self, link: AgentLink, env: Mapping[str, str], *, elastic: bool = False, workers: int = 0) -> None:
        """Send an agent the common part of all its workers."""
        is_local = self._spawner.is_local(link.host)
        self.agents.happen(link.state, host_state.Start(self._spec.times.host_timeout))
        link.channel.send(
            Start(
                self.agents.id_for(link.state),
                env,
                self._spec.directory_on(link.host),
                self._spec.times.host_timeout,
                0.0 if is_local else self._spec.times.launcher_timeout,
                self._spec.times.grace_after_failure,
                inherit=not is_local,
                elastic=elastic,
                workers=workers,
            )
        )
        self.job_observers.host(link.host.name, "up")
        if self.job_observers.observe is not None:
            link.channel.send(self.job_observers.observe)
        function = memoryview(self._spec.function or b"")
        for position in range(0, len(function), 4 * CHUNK):
            link.channel.send(Blob(bytes(function[position : position + 4 * CHUNK])))

    def spawn(self, link: AgentLink, spawn: Spawn) -> None:
        """Have an agent start a worker."""
        link.workers.append(spawn.number)
        link.channel.send(spawn)
        self.policy.started(spawn.number)
        if spawn.stdin:
            self._stdin_link = link

    def supervise(self, init: InitWatch | None = None) -> JobOutcome:
        """Watch until nothing of the job is left.

        Args:
            init: knows which ranks the others wait for at the start.
        """
        self.policy.init = init
        self._run(self._nothing_left)
        return self.outcome

    # From other threads and from signal handlers.

    def interrupt(self, signum: int) -> None:
        """Record a signal. Safe in a signal handler and in any thread."""
        self.loop.call_first(partial(self._signals.came, signum))

    def fail_soon(self, failure: Failure) -> None:
        """Fail from another thread."""
        self.loop.call_soon(partial(self.fail, failure))

    def feed_stdin(self, rank: int, data: bytes) -> None:
        """Send input to a worker; empty at its end. The next piece may follow after ``on_stdin_taken``."""
        self.loop.call_soon(partial(self._send_stdin, rank, data))

    def observe_soon(self, frame: Observe) -> None:
        """Have agents that have already started report to the job's new observers."""
        self.loop.call_soon(partial(self._tell_at_work, frame))

    def trace_soon(self, frame: TraceSteps) -> None:
        """Have all workers trace their next steps; the observers get the answers."""
        self.loop.call_soon(partial(self._tell_at_work, frame))

    # The loop.

    def _run(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        slept = self._slept
        while not done():
            now = time.monotonic()
            until = None if deadline is None else deadline + self._slept - slept
            if until is not None and now >= until:
                return
            self.agents.watch_writes()
            self._turn(self._next(now, until))
            self._give_credit()
            self._keep_time()

    def _turn(self, until: float) -> None:
        """Serve the descriptors that are ready, once.

        If this process did not run for a while (Ctrl-Z, a debugger, a frozen machine), no agent is late for that
        reason: data that arrived in the meantime is read before anything is judged.
        """
        begin = time.monotonic()
        self.loop.turn(until)
        now = time.monotonic()
        slept = now - max(begin, until) - _LATE
        if slept <= 0:
            return
        self._slept += slept
        if self._hard_deadline is not None:
            # The agents' own time continued, so that they need no more than this.
            self._hard_deadline = max(self._hard_deadline, now + self._spec.times.end_timeout)
        self.loop.turn(now)

    def _next(self, now: float, deadline: float | None) -> float:
        """Return the latest time at which there is something to do."""
        times = [self._last_beat + self._beat_interval, deadline, self._observer.tick(), self._hard_deadline]
        times += [self.agents.next(now), self.policy.next, self.visits.next(now)]
        times.append(self._announcement[0] if self._announcement is not None else None)
        times.append(self.admission.next if self.admission is not None else None)
        if self._observer.congested:
            times.append(now + 0.1)
        return min(when for when in times if when is not None)

    @property
    def _beat_interval(self) -> float:
        return min(self._spec.times.launcher_timeout, heartbeat.FIRST) / heartbeat.STEPS

    def _nothing_left(self) -> bool:
        return self.policy.over and self.agents.all_ended

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= self._beat_interval:
            self._last_beat = now
            self.agents.beat()
        self.agents.keep_time(now)
        self.policy.keep_time(now)
        if self._hard_deadline is not None and now >= self._hard_deadline:
            self._hard_deadline = None
            self.agents.offer(host_state.Lost("did not end its workers"))
        if self._announcement is not None and now >= self._announcement[0]:
            (_, text), self._announcement = self._announcement, None
            if self.running:
                self._observer.notice(text)
        if not self.settled:
            self.agents.start_due(now)
            if self.admission is not None:
                self.admission.keep_time(now)
            self._orders.keep_time(now)
            self.visits.keep_time(now)
        self.visits.release(now)

    # Called by ``Agents`` and ``SignalHandling``; see ``agents.Job`` and ``signal_handling.Job``.

    @property
    def settled(self) -> bool:
        return self.policy.settled

    def shown(self, host: HostState) -> None:
        self._observer.step(host)

    def notice(self, text: str) -> None:
        self._observer.notice(text)

    def news(self, text: str) -> None:
        """Show news to the user."""
        self._observer.news(text)

    def notice_unless_over(self, text: str) -> None:
        self._announcement = time.monotonic() + ANNOUNCE_AFTER, text

    def interrupted(self) -> None:
        self._observer.interrupted()

    def received(self, link: AgentLink, frame: Frame) -> None:
        if type(frame) in self.handlers:
            self.handlers[type(frame)](link, frame)

    # Hosts. Called by ``Agents``, by the admission, and by the orders.

    def usable(self, link: AgentLink) -> None:
        visit = self.visits.of(link.state)
        visit.link = link
        if not self.settled:
            self._orders.usable(visit)

    def admit(self, link: AgentLink, detail: str) -> None:
        """Let a host take part: its workers can reach the other hosts' workers."""
        self.agents.offer(host_state.Probed(detail), [link.state])
        if link.state.accepts(host_state.Start):  # otherwise its stream has ended, and it is about to be lost
            visit = self.visits.of(link.state)
            visit.admitted = True
            self._orders.admitted(visit)

    def refuse(self, link: AgentLink, error: HvdglooError) -> None:
        """Refuse a host that cannot take part."""
        self._orders.refused(self.visits.of(link.state), error)

    def let_go(self, visit: Visit) -> None:
        """End a host's part in the job, and its agent, once no worker runs there."""
        self._part(visit)
        if visit.state is not None:
            self.agents.offer(host_state.Finish(), [visit.state])

    def lose(self, visit: Visit, reason: str) -> None:
        """End the part of a host that is lost, or cannot be used."""
        if not visit.parted:
            self._part(visit)
            self._orders.lost(visit, reason)

    def _part(self, visit: Visit) -> None:
        visit.parted, visit.admitted = True, False
        visit.waiting.clear()
        if visit.link is not None and self.admission is not None:
            self.admission.withdraw(visit.link)

    def unusable(self, host: HostState) -> None:
        if self._orders.patient:  # otherwise ``gather`` reports all unusable hosts together
            self.lose(self.visits.of(host), host.failure)

    def lost(self, host: HostState, link: AgentLink | None, text: str) -> None:
        if link is not None:
            self.policy.gone(link.workers)
            link.workers.clear()
        self.lose(self.visits.of(host), f"its agent {text}")
        self._finish_if_over()

    def ended(self, link: AgentLink) -> None:
        self.visits.of(link.state).parted = True
        self.policy.gone(link.workers)
        self._finish_if_over()

    # Workers.

    def _on_output(self, link: AgentLink, frame: Output) -> None:
        self._observer.output(frame.number, frame.stream, frame.data)
        link.owe(frame)

    def _on_observed(self, link: AgentLink, frame: Frame) -> None:
        self.job_observers.reported(link.host.name, frame)

    def _on_foreign_mpi(self, link: AgentLink, frame: ForeignMpi) -> None:
        size = sum(len(each.workers) for each in self.agents.links)
        if size > 1 and not self._told_of_mpi:
            self._told_of_mpi = True  # by one host's agent: the others see the same
            self._observer.notice(FOREIGN_MPI % size)

    def _tell_at_work(self, frame: Frame) -> None:
        for link in self.agents.links:
            if link.state.phase is Phase.RUNNING:
                link.channel.send(frame)

    def _on_spawned(self, link: AgentLink, frame: Spawned) -> None:
        self.job_observers.spawned(frame.number, frame.pid)
        self.policy.spawned(frame.number, frame.pid)
        if self._spec.output.verbose:
            self._observer.notice(f"rank {frame.number} is process {frame.pid} on {link.host.name}")

    def _on_not_spawned(self, link: AgentLink, frame: SpawnFailed) -> None:
        reason = f"could not be started: {frame.reason}"
        self._report_end(frame.number, frame.status, reason)
        self.policy.not_started(link.host.name, frame)
        self._orders.ended(link, frame.number, frame.status, reason)
        self._finish_if_over()

    def _on_exited(self, link: AgentLink, frame: Exited) -> None:
        reason = describe_end(frame)
        self._report_end(frame.number, frame.status, reason)
        if frame.overdue:
            self.outcome.overdue.append(frame.number)
        self.policy.exited(link.host.name, frame)
        self._orders.ended(link, frame.number, frame.status, reason)
        self._finish_if_over()

    def _report_end(self, number: int, status: int, reason: str) -> None:
        """Report that a worker has ended, or could not be started. Once the end is decided, workers end on request."""
        self.job_observers.ended(number, status, "" if self.policy.settled else reason)

    def _give_credit(self) -> None:
        # Once no worker runs, only the pipes' contents can follow.
        if self._observer.congested and self.policy.running:
            return
        for link in self.agents.links:
            link.give_credit()

    def _send_stdin(self, rank: int, data: bytes) -> None:
        if self._stdin_link is not None:
            self._stdin_link.channel.send(Stdin(rank, data))

    # The end, also at the request of ``SignalHandling``.

    def fail(self, failure: Failure) -> None:
        """Stop the job at the first failure; later failures are consequences of it."""
        self.policy.fail(failure)

    def _stop_after_failure(self) -> None:
        self.stop(signal.SIGTERM, self._spec.times.grace_after_failure)

    def stop(self, signum: int, grace: float) -> None:
        self.outcome.grace = grace
        self.settle(grace, Stop(signum, grace))

    def kill(self) -> None:
        self.policy.running.clear()
        self.settle(0.0, Stop(signal.SIGKILL, 0.0))

    def settle(self, grace: float, *orders: Frame) -> None:
        """Decide the end: tell all agents, and give the workers ``grace`` seconds."""
        self.policy.settled = True
        self._hard_deadline = time.monotonic() + grace + self._spec.times.end_timeout
        for frame in orders:
            self.tell_all(frame)
        self._finish_if_over()

    @property
    def running(self) -> bool:
        return bool(self.policy.running)

    def tell_all(self, frame: Frame) -> None:
        self.agents.tell(frame)

    def flush(self, seconds: float) -> None:
        self._run(
            lambda: not any(link.channel.pending for link in self.agents.links if not link.gone),
            time.monotonic() + seconds,
        )

    def _finish_if_over(self) -> None:
        if self.policy.over:
            self.agents.offer(host_state.Finish())
