"""Watching over a job: one connection to each host's agent, one loop, and one rule: the first failure stops the rest.

The loop never waits for output to be written, for a host, or for a worker. It ends when every agent has said good-bye,
which it does only once nothing of the job is left on its host; an agent that is lost without one is swept up after.

Signals only leave a note and wake the loop, where ``signals`` knows what they mean.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from hvdgloo.errors import JobFailedError, LaunchError
from hvdgloo.runner.console.progress import MENDS, Step
from hvdgloo.runner.job.outcome import Failure, JobOutcome, describe_loss
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol import heartbeat
from hvdgloo.runner.protocol.frames import (
    CHUNK,
    Blob,
    Bye,
    Credit,
    Dying,
    Exited,
    Finish,
    Frame,
    Hello,
    Lacking,
    Noise,
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
)
from hvdgloo.runner.protocol.heartbeat import Silence
from hvdgloo.runner.supervise.agent_link import Link
from hvdgloo.runner.supervise.cleanup import Sweeping, describe_left
from hvdgloo.runner.supervise.event_loop import Loop
from hvdgloo.runner.supervise.first_failure import Verdict
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.signal_handling import SignalHandling
from hvdgloo.runner.supervise.startup import Starting
from hvdgloo.runner.transport.base import Spawner

END_TIME = 15.0
"""Seconds that an agent has, after everything was killed, to say good-bye before it is killed itself."""

_SILENT = "its host is cut off, switched off or overloaded; if it is merely slow, raise --heartbeat-timeout"
_EXIT_TIME = 1.0  # seconds that a command has to end by itself after its output did
_POLL = 0.02
_LATE = 1.0  # seconds for which one turn of the loop counts at most, beyond those that it was meant to take
_ACKNOWLEDGE = 64 * 1024  # bytes of output for which credit is given at once


class SupervisionObserver(Protocol):
    """Who is told what comes from the workers. None of these may block."""

    def output(self, rank: int, stream: int, data: bytes) -> None: ...
    def result(self, rank: int, data: bytes) -> None: ...
    def notice(self, text: str) -> None: ...
    def step(self, host: str, step: Step, detail: str = "") -> None: ...
    def suspend(self) -> None: ...
    def tick(self) -> float | None: ...
    def culprit(self, rank: int) -> int | None: ...
    @property
    def congested(self) -> bool: ...


class Supervisor:
    """Starts agents, has them start workers, and sees to the end of all of them.

    A context manager: leaving it, in whatever way, ends everything that it started.
    """

    def __init__(
        self, spec: LaunchSpec, spawner: Spawner, hosts: Sequence[HostEntry], job_id: str, observer: SupervisionObserver
    ):
        self.outcome = JobOutcome()
        self._spec = spec
        self._spawner = spawner
        self._job_id = job_id
        self._observer = observer
        self._loop = Loop()
        self._verdict = Verdict(self.outcome, observer.culprit, observer.notice, self._stop_after_failure)
        self._hosts = tuple(hosts)
        self._links: list[Link] = []
        self._starting: Starting | None = None
        self._lost: dict[HostEntry, str] | None = None
        self._last_beat = time.monotonic()
        self._hard_deadline: float | None = None
        self._slept = 0.0
        self._stdin_link: Link | None = None
        self.on_stdin_taken: Callable[[], None] = lambda: None
        self.handlers: dict[type[Frame], Callable[[Link, Any], None]] = {}
        self._init: InitWatch | None = None
        self._signals = SignalHandling(self, spec.grace_after_signal, observer.notice, observer.suspend)
        self._sweeping = Sweeping(spawner, self.selector, job_id, spec.grace_after_failure, observer.notice)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for link in self._links:
            if link.hello is None:
                self._lose(link, "never answered")
        self._run(self._nothing_left, time.monotonic() + END_TIME)
        for link in self._links:
            if not link.gone:
                self._lose(link, "did not end")
            link.close()
        self._run(self._nothing_left)
        self._sweeping.close()
        self._loop.close()

    # The story, as launch tells it.

    def gather(self, required: Callable[[HostEntry], Require]) -> tuple[Hello, ...]:
        """Start an agent on every host, and wait until all are there.

        Args:
            required: what workers will need on a host.

        Raises:
            LaunchError: one did not come before the start timeout, or could not be used.
            JobFailedError: a signal came first.
        """
        starting = self._bring_up(Starting(self, self._spec, self._spawner, self._hosts, required))
        # Whoever has not come yet is no reason, if an agent that had come was lost.
        self._check_agents()
        starting.check(self._links)
        return tuple(link.hello for link in self._links if link.hello is not None)

    def gather_usable(self) -> Mapping[HostEntry, str]:
        """Like ``gather``, but what cannot be used, or is lost later, is left out and not the end of it.

        Returns:
            the hosts that are left out, and why. More may come while this goes on.

        Raises:
            LaunchError: a command that leads to a host could not be executed here.
            JobFailedError: a signal came first.
        """
        self._lost = lost = dict[HostEntry, str]()
        starting = self._bring_up(Starting(self, self._spec, self._spawner, self._hosts, None, patient=True))
        if self.outcome.interrupted is not None:
            raise JobFailedError("interrupted", exit_code=self.outcome.exit_code)
        for link in self._links:
            if link.hello is None:
                self._lose(link, f"has not answered within {self._spec.start_timeout:g} s; {MENDS[link.step]}")
        lost.update(starting.reasons())
        for link in [link for link in self._links if link.gone]:
            link.close()
            self._links.remove(link)
        return lost

    def _bring_up(self, starting: Starting) -> Starting:
        self._starting = starting
        now = time.monotonic()
        starting.start_due(now)
        self._run(lambda: self._verdict.settled or starting.over(time.monotonic()), now + self._spec.start_timeout)
        self._starting = None
        order = {host: position for position, host in enumerate(self._hosts)}
        self._links.sort(key=lambda link: order[link.host])
        return starting

    def converse(self, done: Callable[[], bool], deadline: float) -> None:
        """Go on until ``done`` or the deadline; what agents answer goes to ``handlers``.

        Raises:
            LaunchError: an agent was lost meanwhile.
            JobFailedError: a signal came first.
        """
        self._run(lambda: self._verdict.settled or done(), deadline)
        self._check_agents()

    def keep(self, hosts: Sequence[HostEntry]) -> tuple[tuple[HostEntry, ...], tuple[Hello, ...]]:
        """Go on with these hosts only, and let the other agents go.

        Args:
            hosts: in the order of those that were gathered, with the numbers of workers that they will run.

        Returns:
            the hosts, and what their agents said.
        """
        names = {host.name for host in hosts}
        leaving = [link for link in self._links if link.host.name not in names]
        for link in leaving:
            link.needed = False
            link.finishing = True
            link.channel.send(Finish())
        self._run(
            lambda: self._verdict.settled or all(link.gone for link in leaving),
            time.monotonic() + END_TIME,
        )
        self._check_agents()
        for link in leaving:
            self._lose(link, "did not end")
            link.close()
            self._links.remove(link)
        return tuple(hosts), tuple(link.hello for link in self._links if link.hello is not None)

    def start(self, env: Sequence[Mapping[str, str]], workers: Sequence[Sequence[Spawn]]) -> None:
        """Have each agent start its workers.

        Args:
            env: for each host, what its workers find in their environment.
            workers: for each host, its workers.
        """
        for link, environ, spawns in zip(self._links, env, workers, strict=True):
            link.silence = Silence(self._spec.heartbeat_timeout, time.monotonic())
            link.channel.send(
                Start(
                    self._job_id,
                    environ,
                    self._spec.cwd,
                    self._spec.heartbeat_timeout,
                    self._spec.grace_after_failure,
                    inherit=not self._spawner.is_local(link.host),
                )
            )
            function = memoryview(self._spec.function or b"")
            for position in range(0, len(function), 4 * CHUNK):
                link.channel.send(Blob(bytes(function[position : position + 4 * CHUNK])))
            for spawn in spawns:
                link.ranks.append(spawn.rank)
                link.channel.send(spawn)
                if spawn.stdin:
                    self._stdin_link = link
        self._verdict.started(spawn.rank for spawns in workers for spawn in spawns)

    def supervise(self, init: InitWatch | None = None) -> JobOutcome:
        """Watch until nothing of the job is left.

        Args:
            init: knows which ranks others wait for at start-up.
        """
        self._init = init
        self._run(self._nothing_left)
        return self.outcome

    @property
    def links(self) -> Sequence[Link]:
        """The agents' ends, in order of hosts."""
        return self._links

    @property
    def selector(self) -> selectors.BaseSelector:
        """For sockets that are to be served by the loop; their data is called."""
        return self._loop.selector

    # From other threads and from signal handlers.

    def interrupt(self, signum: int) -> None:
        """Take note of a signal. Safe in a signal handler and in any thread."""
        self._loop.call_soon(partial(self._signals.came, signum))

    def fail_soon(self, failure: Failure) -> None:
        """Like ``fail``, from another thread."""
        self._loop.call_soon(partial(self.fail, failure))

    def feed_stdin(self, rank: int, data: bytes) -> None:
        """Give a worker input; empty at its end. The next piece after ``on_stdin_taken``."""
        self._loop.call_soon(partial(self._send_stdin, rank, data))

    # The loop.

    def _run(self, done: Callable[[], bool], deadline: float | None = None) -> None:
        slept = self._slept
        while not done():
            now = time.monotonic()
            until = None if deadline is None else deadline + self._slept - slept
            if until is not None and now >= until:
                return
            for link in self._links:
                self._watch_writes(link)
            self._turn(self._next(now, until))
            self._give_credit()
            self._keep_time()

    def _turn(self, until: float) -> None:
        """Serve what is there, once.

        Where this process did not run for a while (Ctrl-Z, a debugger, a machine that was frozen), nobody is late
        because of that: what came meanwhile is read before anything is judged.
        """
        begin = time.monotonic()
        self._loop.turn(until)
        now = time.monotonic()
        slept = now - max(begin, until) - _LATE
        if slept <= 0:
            return
        self._slept += slept
        if self._hard_deadline is not None:
            # The agents' own time went on, so that no more than this is left for any of them to do.
            self._hard_deadline = max(self._hard_deadline, now + END_TIME)
        self._loop.turn(now)

    def _next(self, now: float, deadline: float | None) -> float:
        """When there is something to do at the latest."""
        times = [self._last_beat + self._beat_interval, deadline, self._observer.tick(), self._hard_deadline]
        times += [link.silence.deadline for link in self._links if link.hello and not link.gone]
        times += [now + _POLL for link in self._links if link.ended_at is not None and not link.gone]
        times.append(self._sweeping.next)
        if self._init is not None:
            times.append(self._init.next)
        if self._starting is not None:
            times.append(self._starting.next)
        times.append(self._verdict.next)
        if self._observer.congested:
            times.append(now + 0.1)
        return min(when for when in times if when is not None)

    @property
    def _beat_interval(self) -> float:
        return min(self._spec.heartbeat_timeout, heartbeat.FIRST) / heartbeat.STEPS

    def _nothing_left(self) -> bool:
        return all(link.gone for link in self._links) and self._sweeping.over

    def _keep_time(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= self._beat_interval:
            self._last_beat = now
            for link in self._links:
                link.channel.beat()
            self._sweeping.beat()
        self._judge_ended(now)
        for link in self._links:
            if link.gone or link.ended_at is not None:
                continue
            if link.hello and link.silence.over(now):
                self._lose(link, f"has been silent for {link.silence.timeout:g} s: {_SILENT}")
        self._sweeping.keep_time(now)
        self._verdict.keep_time(now)
        if self._hard_deadline is not None and now >= self._hard_deadline:
            self._hard_deadline = None
            for link in self._links:
                if not link.gone:
                    self._lose(link, "did not end its workers")
        self._watch_init(now)
        if self._starting is not None and not self._verdict.settled:
            self._starting.start_due(now)

    def _watch_writes(self, link: Link) -> None:
        wanted = not link.gone and link.channel.pending > 0
        if wanted == link.writes_registered:
            return
        if wanted:
            self.selector.register(link.channel.send_fd, selectors.EVENT_WRITE, link.channel.flush)
        else:
            self.selector.unregister(link.channel.send_fd)
        link.writes_registered = wanted

    # Agents.

    def connect(self, host: HostEntry) -> Link:
        """Start the command for a host, and listen to it."""
        link = Link(host, self._spawner.start(host))
        self._links.append(link)
        self.selector.register(link.channel.receive_fd, selectors.EVENT_READ, partial(self._on_readable, link))
        self.selector.register(link.stream.stderr, selectors.EVENT_READ, partial(self._on_stderr, link))
        return link

    def _judge_ended(self, now: float) -> None:
        """Judge the commands whose streams have ended without a good-bye, once their exit status is there."""
        for link in [link for link in self._links if link.ended_at is not None and not link.gone]:
            status = link.stream.poll()
            if status is None and now < link.ended_at + _EXIT_TIME and not self._verdict.settled:  # type: ignore[operator]
                continue
            self._on_stderr(link)
            if self._starting is None or link.taken:
                self._lose(link, describe_loss(status, bool(link.stderr)))
            else:
                self._starting.ended(link, status, now)

    def drop(self, link: Link) -> None:
        """End a command that has led to no agent that can be used, and forget it."""
        link.gone = True
        self._links.remove(link)
        if link.ended_at is None:
            self.selector.unregister(link.channel.receive_fd)
        self._close_stderr(link)
        self._watch_writes(link)
        link.stream.kill()
        link.close()

    def _on_readable(self, link: Link) -> None:
        if link.gone:
            return  # it was lost while this event waited
        try:
            items = link.channel.receive()
        except LaunchError as error:
            self._lose(link, f"cannot be understood: {error}")
            return
        link.silence.heard(time.monotonic())
        if self._starting is not None and link.step is Step.CONNECTING and link.channel.decoder.opened:
            self._starting.answered(link)
        for item in items:
            if isinstance(item, Noise):
                self._on_lines(link, link.keep(item.data))
            else:
                self._on_frame(link, item)
        if link.channel.ended and not link.gone:
            if link.said_bye:
                self._lose(link, "ended")
            elif link.ended_at is None:
                link.ended_at = time.monotonic()
                self.selector.unregister(link.channel.receive_fd)

    def get_on(self, link: Link, step: Step, detail: str = "") -> None:
        """A host has come to another step of its start."""
        link.step = step
        self._observer.step(link.host.name, step, detail)

    def say(self, link: Link, lines: Sequence[str]) -> None:
        """Show what came from a host."""
        for line in lines:
            self._observer.notice(f"[{link.host.name}] {line}")

    def _on_lines(self, link: Link, lines: Sequence[str]) -> None:
        if self._starting is not None and not link.taken:
            self._starting.hold_back(link, lines)
        else:
            self.say(link, lines)

    def _on_stderr(self, link: Link) -> None:
        while link.stderr_open:
            lines = link.read_stderr()
            if lines is None:
                self._close_stderr(link)
            elif lines:
                self._on_lines(link, lines)
            else:
                return

    def _close_stderr(self, link: Link) -> None:
        if link.stderr_open:
            link.stderr_open = False
            self.selector.unregister(link.stream.stderr)

    def _on_frame(self, link: Link, frame: Frame) -> None:
        if isinstance(frame, Output):
            self._observer.output(frame.rank, frame.stream, frame.data)
            link.owed[frame.rank] = link.owed.get(frame.rank, 0) + len(frame.data)
        elif isinstance(frame, Result):
            self._observer.result(frame.rank, frame.data)
        elif isinstance(frame, Exited):
            self._on_exited(link, frame)
        elif isinstance(frame, SpawnFailed):
            self._verdict.not_started(link.host.name, frame)
            self._finish_if_over()
        elif isinstance(frame, Spawned):
            if self._init is not None:
                self._init.spawned(frame.rank, frame.pid)
            if self._spec.verbose:
                self._observer.notice(f"rank {frame.rank} is process {frame.pid} on {link.host.name}")
        elif isinstance(frame, StdinTaken):
            self.on_stdin_taken()
        elif isinstance(frame, Hello):
            if self._starting is not None:
                self._starting.hello(link, frame)
        elif isinstance(frame, Lacking):
            if self._starting is not None:
                self._starting.lacking(link, frame)
        elif isinstance(frame, Dying):
            if not link.needed:
                return
            reason = f"the agent on host {link.host.name} ended its workers, because {frame.reason}"
            self.fail(Failure(None, link.host.name, 1, reason))
        elif isinstance(frame, Bye):
            link.said_bye = True
            if frame.left:
                self._observer.notice(describe_left(link.host, frame.left))
        elif type(frame) in self.handlers:
            self.handlers[type(frame)](link, frame)

    def _give_credit(self) -> None:
        # Once no worker runs, no more than the pipes' contents can come.
        if self._observer.congested and self._verdict.running:
            return
        for link in self._links:
            for rank, amount in link.owed.items():
                if amount >= _ACKNOWLEDGE:
                    link.channel.send(Credit(rank, amount))
                    link.owed[rank] = 0

    def _check_agents(self) -> None:
        """What may go wrong before any worker is started."""
        if self.outcome.interrupted is not None:
            raise JobFailedError("interrupted before the workers were started", exit_code=self.outcome.exit_code)
        if self.outcome.first is not None:
            raise LaunchError(f"the job could not be started: {self.outcome.first.reason}")

    def _lose(self, link: Link, how: str) -> None:
        """An agent has ended, or counts as ended."""
        if link.gone:
            return
        link.gone = True
        if link.ended_at is None:
            self.selector.unregister(link.channel.receive_fd)
        self._on_stderr(link)
        self._close_stderr(link)
        self._watch_writes(link)
        if link.said_bye:
            return
        link.stream.kill()
        if not link.needed:
            return
        if link.ranks:
            self._sweeping.begin(link.host, time.monotonic())
        self._verdict.gone(link.ranks)
        last = f": {link.stderr[-1]}" if link.stderr else ""
        if self._lost is not None:
            self._lost[link.host] = f"its agent {how}{last}"
            return
        self.fail(Failure(None, link.host.name, 1, f"the agent on host {link.host.name} {how}{last}"))
        self._finish_if_over()

    # Workers.

    def _on_exited(self, link: Link, frame: Exited) -> None:
        self._verdict.gone([frame.rank])
        if self._init is not None:
            self._init.ended(frame.rank, frame.status)
            self._watch_init(time.monotonic())
        self._verdict.exited(link.host.name, frame)
        self._finish_if_over()

    def fail(self, failure: Failure) -> None:
        """The first failure stops the rest; what fails later fails because of it."""
        self._verdict.fail(failure)

    def _stop_after_failure(self) -> None:
        self.stop(signal.SIGTERM, self._spec.grace_after_failure)

    def stop(self, signum: int, grace: float) -> None:
        """End the workers by a signal, and kill what is left after ``grace`` seconds."""
        self._verdict.settled = True
        self._hard_deadline = time.monotonic() + grace + END_TIME
        self.tell_all(Stop(signum, grace))
        self._finish_if_over()

    def kill(self) -> None:
        """End everything now."""
        self._verdict.settled = True
        self._verdict.running.clear()
        self._hard_deadline = time.monotonic() + END_TIME
        self.tell_all(Stop(signal.SIGKILL, 0.0))
        self._finish_if_over()

    @property
    def running(self) -> bool:
        """Whether there are workers that have not ended."""
        return bool(self._verdict.running)

    def tell_all(self, frame: Frame) -> None:
        """Send something to all agents."""
        for link in self._links:
            link.channel.send(frame)

    def flush(self, seconds: float) -> None:
        """Wait until what was sent to agents has left, but not longer than this."""
        links = self._links
        self._run(lambda: not any(link.channel.pending for link in links if not link.gone), time.monotonic() + seconds)

    def _finish_if_over(self) -> None:
        if self._verdict.running:
            return
        for link in self._links:
            if not link.finishing:
                link.finishing = True
                link.channel.send(Finish())

    def _send_stdin(self, rank: int, data: bytes) -> None:
        if self._stdin_link is not None:
            self._stdin_link.channel.send(Stdin(rank, data))

    # Who is missing.

    def _watch_init(self, now: float) -> None:
        """Say who has not called ``hvd.init()`` while others wait in it, and stop where nobody will."""
        if self._init is None or self._verdict.settled:
            return
        text = self._init.report(now)
        if text:
            self._observer.notice(text)
        failure = self._init.verdict()
        if failure is not None:
            self.fail(failure)
