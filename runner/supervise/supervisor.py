"""Supervision of a job: one connection to each host's agent, one loop, and one rule: the first failure stops the rest.

The loop never waits for output to be written, for a host, or for a worker. It ends when nothing of the job is left on
any host: every agent has said goodbye, or was lost and then swept up after. ``Agents`` owns the connections, and each
host's state decides about its own; this module handles the job as a whole.

Signals only leave a note and wake the loop, where ``signal_handling`` handles them.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdgloo._net.event_loop import EventLoop
from hvdgloo.errors import JobFailedError, LaunchError
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
    Hello,
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
from hvdgloo.runner.supervise.first_failure import Verdict
from hvdgloo.runner.supervise.host_state import HostState, Phase
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.observers import JobObservers, NoObservers, SupervisionObserver
from hvdgloo.runner.supervise.policy import Policy, describe_end
from hvdgloo.runner.supervise.signal_handling import SignalHandling
from hvdgloo.runner.supervise.startup import Startup
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

    Attributes:
        job_observers: the observers of the job; must be set before the first host or worker appears.
    """

    def __init__(
        self, spec: LaunchSpec, spawner: Spawner, hosts: Sequence[HostState], job_id: str, observer: SupervisionObserver
    ) -> None:
        self.outcome = JobOutcome(grace=spec.times.grace_after_failure)
        self.job_observers: JobObservers = NoObservers()
        self._spec = spec
        self._spawner = spawner
        self._observer = observer
        self._loop = EventLoop()
        self._verdict = self._policy()
        self._agents = Agents(spec, spawner, hosts, job_id, self._loop, self)
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
            Dying: self._on_dying,
            ForeignMpi: self._on_foreign_mpi,
            **dict.fromkeys((Observed, Tracing, Traced), self._on_observed),
        }

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._run(self._nothing_left, time.monotonic() + self._spec.times.end_timeout)
        self._agents.offer(host_state.Lost("did not end"))
        self._run(self._nothing_left)
        self._agents.close()
        self._loop.close()

    def _policy(self) -> Policy:
        observer = self._observer
        return Verdict(
            self.outcome, observer.notice, self._stop_after_failure, self.notice_unless_over, observer.culprit
        )

    # The steps of a job, in the order in which launch calls them.

    def gather(self, required: Callable[[HostEntry], Require]) -> tuple[Hello, ...]:
        """Start an agent on every host, and wait until all are up.

        Args:
            required: returns a host's requirements.

        Raises:
            LaunchError: an agent did not come up before the start timeout, or could not be used.
            JobFailedError: a signal interrupted the start.
        """
        startup = Startup(self._agents.hosts)
        self._bring_up(startup, required)
        # If an agent that was up was lost, hosts that are not up yet are not the reason.
        self._check_agents()
        startup.check({link.host.name: link.last_words for link in self.links}, self._spec.start_timeout)
        return self._hellos()

    def _bring_up(self, startup: Startup, required: Callable[[HostEntry], Require] | None) -> None:
        deadline = time.monotonic() + self._spec.start_timeout
        with self._agents.starting(startup, required):
            self._run(lambda: self._verdict.settled or startup.over(time.monotonic()), deadline)

    def _hellos(self) -> tuple[Hello, ...]:
        return tuple(link.hello for link in self.links if link.hello is not None)

    def probing(self) -> None:
        """Record that addresses are being probed."""
        self._agents.offer(host_state.Probe())

    def probed(self, details: Sequence[str]) -> None:
        """Record that each host's address has been chosen.

        Args:
            details: details to show, in order of hosts.
        """
        for link, detail in zip(self.links, details, strict=True):
            self._agents.happen(link.state, host_state.Probed(detail))

    def converse(self, done: Callable[[], bool], deadline: float) -> None:
        """Continue until ``done`` or the deadline; agents' answers go to ``handlers``.

        Raises:
            LaunchError: an agent was lost in the meantime.
            JobFailedError: a signal interrupted it.
        """
        self._run(lambda: self._verdict.settled or done(), deadline)
        self._check_agents()

    def keep(self, hosts: Sequence[HostEntry]) -> tuple[tuple[HostEntry, ...], tuple[Hello, ...]]:
        """Continue with these hosts only, and dismiss the other agents.

        Args:
            hosts: in the order in which they were gathered, with the numbers of workers that they will run.

        Returns:
            the hosts, and their agents' hellos.
        """
        names = {host.name for host in hosts}
        leaving = [link for link in self.links if link.host.name not in names]
        states = [link.state for link in leaving]
        self._agents.offer(host_state.Dismiss(), states)
        self._run(
            lambda: self._verdict.settled or all(link.gone for link in leaving),
            time.monotonic() + self._spec.times.end_timeout,
        )
        self._check_agents()
        self._agents.offer(host_state.Lost("did not end"), states)
        self._agents.release(leaving)
        return tuple(hosts), self._hellos()

    def start(self, env: Sequence[Mapping[str, str]], workers: Sequence[Sequence[Spawn]]) -> None:
        """Have each agent start its workers.

        Args:
            env: for each host, the environment that its workers share.
            workers: for each host, its workers.
        """
        for link, environ, spawns in zip(self.links, env, workers, strict=True):
            self._begin(link, environ, workers=len(spawns))
            for spawn in spawns:
                self._spawn(link, spawn)
                if spawn.stdin:
                    self._stdin_link = link

    def _begin(self, link: AgentLink, env: Mapping[str, str], *, elastic: bool = False, workers: int = 0) -> None:
        """Send an agent the common part of all its workers."""
        is_local = self._spawner.is_local(link.host)
        self._agents.happen(link.state, host_state.Start(self._spec.times.host_timeout))
        link.channel.send(
            Start(
                self.id_for(link),
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

    def _spawn(self, link: AgentLink, spawn: Spawn) -> None:
        """Have an agent start a worker."""
        link.workers.append(spawn.number)
        link.channel.send(spawn)
        self._verdict.started(spawn.number)

    def supervise(self, init: InitWatch | None = None) -> JobOutcome:
        """Watch until nothing of the job is left.

        Args:
            init: knows which ranks the others wait for at the start.
        """
        self._verdict.init = init
        self._run(self._nothing_left)
        return self.outcome

    def id_for(self, link: AgentLink) -> str:
        """Return the mark of the processes that an agent starts for the job."""
        return self._agents.id_for(link.state)

    @property
    def links(self) -> Sequence[AgentLink]:
        """The links to all agents, in order of hosts."""
        return self._agents.links

    @property
    def selector(self) -> selectors.BaseSelector:
        """The loop's selector: the data of a registered socket is called when it is ready."""
        return self._loop.selector

    # From other threads and from signal handlers.

    def interrupt(self, signum: int) -> None:
        """Record a signal. Safe in a signal handler and in any thread."""
        self._loop.call_first(partial(self._signals.came, signum))

    def fail_soon(self, failure: Failure) -> None:
        """Fail from another thread."""
        self._loop.call_soon(partial(self.fail, failure))

    def feed_stdin(self, rank: int, data: bytes) -> None:
        """Send input to a worker; empty at its end. The next piece may follow after ``on_stdin_taken``."""
        self._loop.call_soon(partial(self._send_stdin, rank, data))

    def observe_soon(self, frame: Observe) -> None:
        """Have agents that have already started report to the job's new observers."""
        self._loop.call_soon(partial(self._tell_at_work, frame))

    def trace_soon(self, frame: TraceSteps) -> None:
        """Have all workers trace their next steps; the observers get the answers."""
        self._loop.call_soon(partial(self._tell_at_work, frame))

    # The loop.

    def _run(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        slept = self._slept
        while not done():
            now = time.monotonic()
            until = None if deadline is None else deadline + self._slept - slept
            if until is not None and now >= until:
                return
            self._agents.watch_writes()
            self._turn(self._next(now, until))
            self._give_credit()
            self._keep_time()

    def _turn(self, until: float) -> None:
        """Serve the descriptors that are ready, once.

        If this process did not run for a while (Ctrl-Z, a debugger, a frozen machine), no agent is late for that
        reason: data that arrived in the meantime is read before anything is judged.
        """
        begin = time.monotonic()
        self._loop.turn(until)
        now = time.monotonic()
        slept = now - max(begin, until) - _LATE
        if slept <= 0:
            return
        self._slept += slept
        if self._hard_deadline is not None:
            # The agents' own time continued, so that they need no more than this.
            self._hard_deadline = max(self._hard_deadline, now + self._spec.times.end_timeout)
        self._loop.turn(now)

    def _next(self, now: float, deadline: float | None) -> float:
        """Return the latest time at which there is something to do."""
        times = [self._last_beat + self._beat_interval, deadline, self._observer.tick(), self._hard_deadline]
        times += [self._agents.next(now), self._verdict.next]
        times.append(self._announcement[0] if self._announcement is not None else None)
        if self._observer.congested:
            times.append(now + 0.1)
        return min(when for when in times if when is not None)

    @property
    def _beat_interval(self) -> float:
        return min(self._spec.times.launcher_timeout, heartbeat.FIRST) / heartbeat.STEPS

    def _nothing_left(self) -> bool:
        return self._verdict.over and self._agents.all_ended

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= self._beat_interval:
            self._last_beat = now
            self._agents.beat()
        self._agents.keep_time(now)
        self._verdict.keep_time(now)
        if self._hard_deadline is not None and now >= self._hard_deadline:
            self._hard_deadline = None
            self._agents.offer(host_state.Lost("did not end its workers"))
        if self._announcement is not None and now >= self._announcement[0]:
            (_, text), self._announcement = self._announcement, None
            if self.running:
                self._observer.notice(text)
        if not self._verdict.settled:
            self._agents.start_due(now)

    # Called by ``Agents`` and ``SignalHandling``; see ``agents.Job`` and ``signal_handling.Job``.

    @property
    def settled(self) -> bool:
        return self._verdict.settled

    def shown(self, host: HostState) -> None:
        self._observer.step(host)

    def notice(self, text: str) -> None:
        self._observer.notice(text)

    def notice_unless_over(self, text: str) -> None:
        self._announcement = time.monotonic() + ANNOUNCE_AFTER, text

    def interrupted(self) -> None:
        self._observer.interrupted()

    def received(self, link: AgentLink, frame: Frame) -> None:
        if type(frame) in self.handlers:
            self.handlers[type(frame)](link, frame)

    def ended(self, link: AgentLink) -> None:
        if link.workers:
            self._verdict.gone(link.workers)
            self._finish_if_over()

    def lost(self, host: HostState, link: AgentLink | None, text: str) -> None:
        self.job_observers.host(host.name, "lost", f"its agent {text}")
        self._verdict.gone(link.workers if link is not None else ())
        self.fail(Failure(None, host.name, 1, f"the agent on host {host.name} {text}"))
        self._finish_if_over()

    def usable(self, link: AgentLink) -> None:
        """Do nothing: ``gather`` waits for all agents."""

    def unusable(self, host: HostState) -> None:
        """Do nothing: ``gather`` reports all unusable hosts."""

    def _check_agents(self) -> None:
        """Raise an error for a failure before any worker is started."""
        if self.outcome.interrupted is not None:
            raise JobFailedError("interrupted before the workers were started", exit_code=self.outcome.exit_code)
        if self.outcome.first is not None:
            raise LaunchError(f"the job could not be started: {self.outcome.first.reason}")

    # Workers.

    def _on_output(self, link: AgentLink, frame: Output) -> None:
        self._observer.output(frame.number, frame.stream, frame.data)
        link.owe(frame)

    def _on_observed(self, link: AgentLink, frame: Frame) -> None:
        self.job_observers.reported(link.host.name, frame)

    def _on_foreign_mpi(self, link: AgentLink, frame: ForeignMpi) -> None:
        size = sum(len(each.workers) for each in self.links)
        if size > 1 and not self._told_of_mpi:
            self._told_of_mpi = True  # by one host's agent: the others see the same
            self._observer.notice(FOREIGN_MPI % size)

    def _tell_at_work(self, frame: Frame) -> None:
        for link in self.links:
            if link.state.phase is Phase.RUNNING:
                link.channel.send(frame)

    def _on_spawned(self, link: AgentLink, frame: Spawned) -> None:
        self.job_observers.spawned(frame.number, frame.pid)
        self._verdict.spawned(frame.number, frame.pid)
        if self._spec.output.verbose:
            self._observer.notice(f"rank {frame.number} is process {frame.pid} on {link.host.name}")

    def _on_not_spawned(self, link: AgentLink, frame: SpawnFailed) -> None:
        reason = f"could not be started: {frame.reason}"
        self._report_end(frame.number, frame.status, reason)
        self._verdict.not_started(link.host.name, frame)
        self._has_ended(link, frame.number, frame.status, reason)

    def _on_exited(self, link: AgentLink, frame: Exited) -> None:
        reason = describe_end(frame)
        self._report_end(frame.number, frame.status, reason)
        if frame.overdue:
            self.outcome.overdue.append(frame.number)
        self._verdict.exited(link.host.name, frame)
        self._has_ended(link, frame.number, frame.status, reason)

    def _report_end(self, number: int, status: int, reason: str) -> None:
        """Report that a worker has ended, or could not be started. Once the end is decided, workers end on request."""
        self.job_observers.ended(number, status, "" if self._verdict.settled else reason)

    def _has_ended(self, link: AgentLink, number: int, status: int, reason: str) -> None:
        """Continue after the end of a worker, of which the policy knows."""
        self._finish_if_over()

    def _on_dying(self, link: AgentLink, frame: Dying) -> None:
        if link.state.phase is not Phase.DISMISSED:
            reason = f"the agent on host {link.host.name} ended its workers, because {frame.reason}"
            self.fail(Failure(None, link.host.name, 1, reason))

    def _give_credit(self) -> None:
        # Once no worker runs, only the pipes' contents can follow.
        if self._observer.congested and self._verdict.running:
            return
        for link in self.links:
            link.give_credit()

    def _send_stdin(self, rank: int, data: bytes) -> None:
        if self._stdin_link is not None:
            self._stdin_link.channel.send(Stdin(rank, data))

    # The end, also at the request of ``SignalHandling``.

    def fail(self, failure: Failure) -> None:
        """Stop the job at the first failure; later failures are consequences of it."""
        self._verdict.fail(failure)

    def _stop_after_failure(self) -> None:
        self.stop(signal.SIGTERM, self._spec.times.grace_after_failure)

    def stop(self, signum: int, grace: float) -> None:
        self._verdict.settled = True
        self.outcome.grace = grace
        self._hard_deadline = time.monotonic() + grace + self._spec.times.end_timeout
        self.tell_all(Stop(signum, grace))
        self._finish_if_over()

    def kill(self) -> None:
        self._verdict.settled = True
        self._verdict.running.clear()
        self._hard_deadline = time.monotonic() + self._spec.times.end_timeout
        self.tell_all(Stop(signal.SIGKILL, 0.0))
        self._finish_if_over()

    @property
    def running(self) -> bool:
        return bool(self._verdict.running)

    def tell_all(self, frame: Frame) -> None:
        self._agents.tell(frame)

    def flush(self, seconds: float) -> None:
        self._run(
            lambda: not any(link.channel.pending for link in self.links if not link.gone), time.monotonic() + seconds
        )

    def _finish_if_over(self) -> None:
        if self._verdict.over:
            self._agents.offer(host_state.Finish())
