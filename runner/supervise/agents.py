"""All agents of a job: their commands are started, listened to and ended as each host's state requires.

Of the frames from a host, this module handles those that concern the host: its first answer, its agent's hello, its
goodbye, its end. All others go to the supervisor, once the agent can be used.

Earlier text is held back: a login shell's greetings are shown once the agent can be used, and ssh's own messages not at
all if a line of ours replaces them.

**The second way to clean up a lost host.** The first way is the agent itself, or its watchdog: they notice that the
stream has ended or is silent, and end the workers. That does not help if both were killed, or hang. So another agent is
sent to the host, if the host can still be reached; otherwise only the first way remains.
"""

from __future__ import annotations

import select
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo._net.event_loop import EventLoop
from hvdgloo.errors import HvdglooError, LaunchError
from hvdgloo.runner.job.outcome import describe_loss
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol.frames import (
    LAST_WORDS,
    PROTOCOL,
    Cleared,
    Finish,
    Frame,
    Hello,
    Lacking,
    Noise,
    Require,
    Sweep,
)
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.host_state import Action, Event, HostState, Phase
from hvdgloo.runner.supervise.startup import Startup
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending, other_version, preflight_failure
from hvdgloo.version import __version__

_PIPES = 3  # of each command
_POLL = 0.02  # seconds between polls of a command whose stream has ended


class Job(Protocol):
    """The part of the supervisor that ``Agents`` needs."""

    @property
    def settled(self) -> bool:
        """True if everything that ends from now on ends on request."""

    def shown(self, host: HostState) -> None:
        """Show that a host has reached another step of its start."""

    def notice(self, text: str) -> None:
        """Show a notice to the user."""

    def usable(self, link: AgentLink) -> None:
        """Use an agent that is up, on a host that has everything that workers need."""

    def unusable(self, host: HostState) -> None:
        """Give up a host on which no agent can be used; its ``failure`` has the reason."""

    def received(self, link: AgentLink, frame: Frame) -> None:
        """Process an agent's frame that concerns its workers."""

    def ended(self, link: AgentLink) -> None:
        """Record that an agent has ended in order."""

    def lost(self, host: HostState, link: AgentLink | None, text: str) -> None:
        """Record the loss of a host; ``text`` continues ``the agent on host h1 ...``."""


class Agents:
    """The launcher's ends of all agents.

    Args:
        hosts: in order; others read the hosts' progress from them. ``add`` and ``forget`` change the list.
        spawner: starts agents.
        loop: the supervisor's.
        required: returns a host's requirements; None if nothing is to be checked.
        patient: True if no failure of a host ends the start.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        spawner: Spawner,
        hosts: Sequence[HostState],
        job_id: str,
        loop: EventLoop,
        job: Job,
        required: Callable[[HostEntry], Require] | None,
        *,
        patient: bool,
    ) -> None:
        self.hosts = hosts if isinstance(hosts, list) else list(hosts)
        self._spec = spec
        self._spawner = spawner
        self._job_id = job_id
        self._loop = loop
        self._selector = loop.selector
        self._job = job
        self._numbers = {host: number for number, host in enumerate(self.hosts)}
        self._next_number = len(self.hosts)
        self._links: dict[HostState, AgentLink] = {}
        self._past: list[AgentLink] = []
        self._startup = Startup(self.hosts, patient=patient)
        self._required = required
        self._perform: dict[Action, Callable[[HostState], None]] = {
            Action.CONNECT: self._connect,
            Action.SHOW: job.shown,
            Action.CHECK: self._check,
            Action.DROP: self._drop,
            Action.FINISH: lambda host: self._links[host].channel.send(Finish()),
            Action.CLOSE: self._close,
            Action.KILL: self._kill,
            Action.REPORT: self._report,
            Action.SWEEP: self._sweep,
            Action.TELL: self._tell_unreached,
        }

    # Called by the supervisor.

    @property
    def links(self) -> list[AgentLink]:
        """The current ends, in order of hosts."""
        return [self._links[host] for host in self.hosts if host in self._links]

    def id_for(self, host: HostState) -> str:
        """Return the mark of the job's processes on a host, by which another agent that is sent there finds them."""
        return f"{self._job_id}.{self._numbers[host]}"

    def link(self, host: HostState) -> AgentLink | None:
        """Return the launcher's end of a host's agent, if there is one."""
        return self._links.get(host)

    def start(self) -> Startup:
        """Start the first agents, and return the start, which goes on with the loop.

        Raises:
            ConfigError: this process cannot have as many open files as all agents need.
        """
        count = len(self.hosts)
        reserve_descriptors(
            _PIPES * count, "this launcher", f"the commands that lead to {count} host{'s' * (count > 1)}"
        )
        self.start_due(time.monotonic())
        return self._startup

    def add(self, host: HostState) -> None:
        """Add a host. If it was here before, nothing of its last visit counts for this one.

        Raises:
            ConfigError: this process cannot have as many open files as all agents need.
        """
        reserve_descriptors(_PIPES, "this launcher", f"the command that leads to {host.name}")
        self._numbers[host] = self._next_number
        self._next_number += 1
        self.hosts.append(host)

    def forget(self, host: HostState) -> None:
        """Release a host whose visit has ended."""
        link = self._links.pop(host, None)
        for past in [past for past in self._past if past.state is host]:
            self._past.remove(past)
            past.close()
        if link is not None:
            link.close()
        self.hosts.remove(host)
        del self._numbers[host]

    @property
    def all_ended(self) -> bool:
        """True if no host has to be waited for any longer."""
        return all(host.final for host in self.hosts)

    def happen(self, host: HostState, event: Event) -> None:
        """Feed an event to a host's state, and carry out the resulting actions.

        Raises:
            IllegalEventError: the event cannot happen now.
            LaunchError: the host's command cannot be executed here.
        """
        for action in host.feed(event, time.monotonic()):
            self._perform[action](host)

    def offer(self, event: Event, hosts: Iterable[HostState] | None = None) -> None:
        """Feed an event to all ``hosts`` (by default to every host) that accept it now."""
        for host in self.hosts if hosts is None else hosts:
            if host.accepts(type(event)):
                self.happen(host, event)

    def tell(self, frame: Frame) -> None:
        """Send a frame to all agents except those that sweep up."""
        for link in self.links:
            if not link.gone:
                link.channel.send(frame)

    def beat(self) -> None:
        """Send heartbeats."""
        for link in self.links:
            if not link.state.final:
                link.channel.beat()

    def watch_writes(self) -> None:
        """Have the loop write what is waiting to be written."""
        for link in self.links:
            self._loop.watch_writes(link.channel, wanted=not link.state.final and link.channel.pending > 0)

    def next(self, now: float) -> float:
        """Return the time at which something must be done if nothing happens until then."""
        times = [host.next for host in self.hosts if host.phase is not Phase.WAITING]
        times += [now + _POLL for host in self.hosts if host.phase in host_state.JUDGED]
        return min([self._startup.next, *times])

    def keep_time(self, now: float) -> None:
        """Judge agents that have ended, or have been silent for too long."""
        for host in self.hosts:
            if host.phase in host_state.JUDGED:
                self._judge(host, self._links[host], now)
            late = host.overdue(now)
            if isinstance(late, host_state.Lost) and self._excused(self._links[host]):
                host.heard(now)
            elif late is not None:
                self.happen(host, late)

    def _excused(self, link: AgentLink) -> bool:
        """Tell whether a silent agent has been kept from running, or has run in the meantime after all."""
        if link.stream.starved():
            return True
        poll = select.poll()
        poll.register(link.channel.receive_fd, select.POLLIN)
        return bool(poll.poll(0))

    def start_due(self, now: float) -> None:
        """Start the commands that are due."""
        for host in self._startup.due(now):
            try:
                self.happen(host, host_state.Try())
            except HvdglooError as error:
                if not self._startup.patient:
                    raise
                self.happen(host, host_state.Lost(f"could not be started: {error}"))

    def close(self) -> None:
        """Release everything, once all agents have ended, or as if they had."""
        self.offer(host_state.SweepFailed("the launcher ends"))
        for link in (*self._past, *self._links.values()):
            link.close()

    # Data from hosts.

    def _on_readable(self, link: AgentLink) -> None:
        if not link.listening:
            return  # it was lost while this event was pending
        host = link.state
        host.heard(time.monotonic())
        try:
            items = link.channel.receive()
        except LaunchError as error:
            self.offer(host_state.Lost(f"cannot be understood: {error}"), [host])
            self.offer(host_state.SweepFailed(str(error)), [host])
            return
        if link.channel.decoder.opened:
            self.offer(host_state.Answered(), [host])
        for item in items:
            if link.listening:
                self._on_item(link, item)
        if link.channel.ended and link.listening:
            self._stop_listening(link)
            self._read_stderr(link)
            self.offer(host_state.SweepFailed(link.last_words or "the connection ended"), [host])
            self.offer(host_state.StreamEnded(), [host])

    def _on_item(self, link: AgentLink, item: Frame | Noise) -> None:
        host = link.state
        if isinstance(item, Noise):
            self._on_lines(link, link.keep(item.data))
        elif isinstance(item, Hello):
            if host.accepts(host_state.Greeted):
                self._greeted(link, item)
        elif isinstance(item, Lacking):
            if host.accepts(host_state.Checked):
                self._checked(link, preflight_failure(item, self._spec.directory_on(link.host)))
        elif isinstance(item, Cleared):
            if item.left:
                self._job.notice(_describe_left(link.host, item.left))
            self.offer(host_state.Farewell(), [host])
        elif host.phase not in host_state.SECOND:
            self._job.received(link, item)

    def _greeted(self, link: AgentLink, hello: Hello) -> None:
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            self._reject(link, Diagnosis(Cause.VERSION, other_version(hello.version, self._spec.reach.python)))
            return
        link.hello = hello
        self.happen(link.state, host_state.Greeted())

    def _checked(self, link: AgentLink, diagnosis: Diagnosis | None) -> None:
        """Proceed after the agent has checked the workers' requirements."""
        if diagnosis is not None:
            self._reject(link, diagnosis)
            return
        assert link.hello is not None
        self._show_held_back(link)
        detail = f"{link.hello.hostname}, agent is process {link.hello.pid}"
        self.happen(link.state, host_state.Checked(detail))
        self._job.usable(link)

    def _reject(self, link: AgentLink, diagnosis: Diagnosis) -> None:
        """Reject an agent whose host cannot be used."""
        link.channel.send(Finish())
        self._unusable(link, diagnosis, time.monotonic())

    def _judge(self, host: HostState, link: AgentLink, now: float) -> None:
        """Judge a command whose stream has ended without a goodbye, once its exit status is known."""
        status = link.stream.poll()
        if status is None and now < host.deadline and not self._job.settled:
            return
        self._read_stderr(link)
        if host.phase is not Phase.FALLEN:
            self.happen(host, host_state.Lost(describe_loss(status, bool(link.stderr))))
        else:
            self._unusable(link, self._spawner.diagnose(host.host, Ending(status, tuple(link.stderr))), now)

    def _unusable(self, link: AgentLink, diagnosis: Diagnosis, now: float) -> None:
        if diagnosis.cause is Cause.OTHER or self._spec.output.verbose:
            self._show_held_back(link)  # the diagnosis tells less
        self.happen(link.state, self._startup.judge(link.state, diagnosis, now))
        if link.state.phase is Phase.FAILED:
            self._job.unusable(link.state)

    def _on_lines(self, link: AgentLink, lines: list[str]) -> None:
        if link.hello is None or link.state.starting_up:
            link.hold_back(lines)
        else:
            self._say(link, lines)

    def _show_held_back(self, link: AgentLink) -> None:
        self._say(link, link.held_back)
        link.held_back.clear()

    def _say(self, link: AgentLink, lines: Iterable[str]) -> None:
        for line in lines:
            if not line.startswith(LAST_WORDS):  # they are part of the message about the agent's loss
                self._job.notice(f"[{link.host.name}] {line}")

    # Actions that a host's state requires.

    def _connect(self, host: HostState) -> None:
        """Start the command for a host, and listen to it."""
        link = AgentLink(host, self._spawner.start(host.host))
        self._links[host] = link
        link.listening = link.stderr_open = True
        self._selector.register(link.channel.receive_fd, selectors.EVENT_READ, partial(self._on_readable, link))
        self._selector.register(link.stream.stderr, selectors.EVENT_READ, partial(self._read_stderr, link))

    def _check(self, host: HostState) -> None:
        link = self._links[host]
        if self._required is None:
            self._checked(link, None)
        else:
            link.channel.send(self._required(host.host))

    def _drop(self, host: HostState) -> None:
        link = self._links.pop(host)
        self._ignore(link)
        link.stream.kill()
        link.close()

    def _close(self, host: HostState) -> None:
        link = self._links[host]
        self._ignore(link)
        self._job.ended(link)

    def _kill(self, host: HostState) -> None:
        link = self._links.get(host)
        if link is not None:  # otherwise its command could not be started
            self._ignore(link)
            link.stream.kill()

    def _report(self, host: HostState) -> None:
        link = self._links.get(host)
        last = f": {link.last_words}" if link is not None and link.last_words else ""
        self._job.lost(host, link, f"{host.reason}{last}")

    def _sweep(self, host: HostState) -> None:
        """Send another agent, to end the processes that the first one may have left."""
        self._past.append(self._links.pop(host))
        try:
            self._connect(host)
        except LaunchError as error:
            self.happen(host, host_state.SweepFailed(str(error)))
            return
        self._links[host].channel.send(Sweep(self.id_for(host), self._spec.times.grace_after_failure))

    def _tell_unreached(self, host: HostState) -> None:
        self._job.notice(
            f"host {host.name} could not be reached a second time to see whether anything of the job is left there "
            f"({host.reason}); unless its agent was killed, it ends its workers by itself"
        )

    # Streams.

    def _ignore(self, link: AgentLink) -> None:
        """Read the last lines of a command, and stop listening to it."""
        self._stop_listening(link)
        self._read_stderr(link)
        self._close_stderr(link)
        self._loop.watch_writes(link.channel, wanted=False)

    def _stop_listening(self, link: AgentLink) -> None:
        if link.listening:
            link.listening = False
            self._selector.unregister(link.channel.receive_fd)

    def _read_stderr(self, link: AgentLink) -> None:
        while link.stderr_open:
            lines = link.read_stderr()
            if lines is None:
                self._close_stderr(link)
            elif lines:
                self._on_lines(link, lines)
            else:
                return

    def _close_stderr(self, link: AgentLink) -> None:
        if link.stderr_open:
            link.stderr_open = False
            self._selector.unregister(link.stream.stderr)


def _describe_left(host: HostEntry, pids: Sequence[int]) -> str:
    """Describe processes that an agent could not end."""
    return (
        f"processes {', '.join(map(str, pids))} on {host.name} cannot be killed: the system keeps them, probably for a "
        "device or file system that does not answer"
    )
