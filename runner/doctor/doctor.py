"""``hvdgloo-run doctor``: the problems that a job would meet on its hosts, found without starting one.

Agents are started in the same way as for a job, examine their hosts (``agent.facts``), probe each other's addresses,
and end. ``rules`` judges the facts, and ``report`` shows the findings.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

import msgspec

from hvdgloo.errors import ConfigError, JobFailedError, LaunchError
from hvdgloo.rendezvous._host_identity import host_identity
from hvdgloo.runner.agent.facts import Facts, examine
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import StartDisplay
from hvdgloo.runner.doctor.report import all_well, as_json, as_text
from hvdgloo.runner.doctor.rules import (
    Finding,
    Severity,
    Visit,
    addresses_reached,
    compare_clocks,
    diagnose,
    unconnected,
)
from hvdgloo.runner.host_admission import explore
from hvdgloo.runner.host_setup import required_on
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.network.addressing import Reports
from hvdgloo.runner.protocol.frames import Examine, Examined, Hello, Require
from hvdgloo.runner.signals import COMMAND_LINE_SIGNALS, passed_on
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.supervisor import Supervisor, host_states
from hvdgloo.runner.supervise.visits import Orders
from hvdgloo.runner.supervise.visits import Visit as HostVisit
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.select import choose_spawner


def run(
    spec: LaunchSpec, *, stderr: TextIO, width: int = 100, json: bool = False, spawner: Spawner | None = None
) -> tuple[str, bool]:
    """Examine all hosts of a job.

    Args:
        spec: the job; its command may be empty.
        stderr: receives messages in the meantime.
        width: maximum width of the report's lines, in characters.
        json: report as JSON.
        spawner: starts agents; by default chosen from the hosts.

    Returns:
        the report, and whether a job can start.

    Raises:
        JobFailedError: a signal interrupted it.
    """
    spawner = spawner or choose_spawner(spec.hosts, spec.reach)
    round_ = _Round()
    with _agents(spec, spawner, stderr, _LeftOut(round_.problems)) as supervisor:
        visits = supervisor.gather()
        _look_round(supervisor, spec, spawner, visits, round_)
        _try_addresses(supervisor, spec, visits, round_)
    found = [_visit(host, round_) for host in spec.hosts]
    launcher = examine(spec.environ, Require(spec.cwd))
    # A template may lead into several containers that look like one machine, which is allowed.
    one_machine = Severity.WARNING if spec.reach.agent_command else Severity.STOP
    findings = diagnose(found, launcher, spec.cwd, round_.connections, one_machine=one_machine, config=spec.config)
    report = as_json(found, findings) if json else as_text(found, findings, width)
    return report, all_well(findings)


@dataclass
class _Answer:
    """One agent's facts, and this machine's clock at the request and at the answer."""

    hello: Hello
    sent: float
    received: float = 0.0
    examined: Examined | None = None


@dataclass
class _Round:
    """The results so far."""

    problems: dict[HostEntry, str] = field(default_factory=dict)
    answers: dict[HostEntry, _Answer] = field(default_factory=dict)
    addresses: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    connections: list[Finding] = field(default_factory=list)


class _LeftOut(Orders):
    """The orders of an examination, which only leaves out hosts that cannot be used, or are lost.

    Args:
        reasons: filled in.
    """

    patient = True

    def __init__(self, reasons: dict[HostEntry, str]) -> None:
        self._reasons = reasons

    def lost(self, visit: HostVisit, reason: str) -> None:
        """Leave out a host."""
        assert visit.state is not None
        self._reasons[visit.state.host] = reason


@contextmanager
def _agents(spec: LaunchSpec, spawner: Spawner, stderr: TextIO, orders: Orders) -> Iterator[Supervisor]:
    """Provide a supervisor that starts agents, and show their progress."""
    console = Console(stdout=stderr, stderr=stderr)
    try:
        states = host_states(spec.hosts, spec)
        display = StartDisplay(states, console, environ=spec.environ, verbose=spec.output.verbose, doing="looking at")
        observer = _Observer(console, display)
        supervisor = Supervisor(spec, spawner, states, observer, orders)
        console.on_broken = partial(supervisor.interrupt, signal.SIGPIPE)
        with passed_on(COMMAND_LINE_SIGNALS, supervisor.interrupt), supervisor, display:
            yield supervisor
    except JobFailedError as error:
        raise JobFailedError("interrupted", exit_code=error.exit_code) from None
    finally:
        console.close()


class _Observer:
    """An observer that shows the hosts' progress. There are no workers."""

    congested = False

    def __init__(self, console: Console, display: StartDisplay) -> None:
        self.output = console.output
        self.notice = console.notice
        self.news = console.news
        self.culprit = console.culprit
        self.interrupted = console.interrupted
        self.step = display.step
        self.suspend = display.suspend
        self.tick = display.tick

    def result(self, rank: int, data: bytes) -> None:
        raise AssertionError("no task was started")


def _look_round(
    supervisor: Supervisor, spec: LaunchSpec, spawner: Spawner, visits: Sequence[HostVisit], round_: _Round
) -> None:
    """Have each agent examine its host."""

    def on_examined(link: AgentLink, frame: Examined) -> None:
        answer = round_.answers[link.host]
        answer.received, answer.examined = time.time(), frame

    supervisor.handlers[Examined] = on_examined
    for visit in visits:
        link = visit.agent
        round_.answers[link.host] = _Answer(visit.hello, time.time())
        # An agent that waits for a driver or a file system is silent meanwhile.
        link.state.bear(spec.start_timeout, time.monotonic())
        link.channel.send(Examine(**msgspec.structs.asdict(required_on(spec, spawner, link.host))))
    supervisor.run_until(
        lambda: all(visit.parted or round_.answers[visit.agent.host].examined for visit in visits),
        time.monotonic() + spec.start_timeout,
    )


def _try_addresses(supervisor: Supervisor, spec: LaunchSpec, visits: Sequence[HostVisit], round_: _Round) -> None:
    """Have the hosts try to reach each other, as they do before a job on several of them."""
    able = [answer.examined is not None and not answer.examined.facts["lacking"] for answer in round_.answers.values()]
    if len(able) < 2 or not all(able):
        return
    try:
        reports = explore(supervisor, spec, visits)
    except JobFailedError:
        raise
    except (LaunchError, ConfigError) as error:
        round_.connections.append(unconnected(error, [visit.name for visit in visits]))
        return
    here = any(answer.hello.identity == host_identity() for answer in round_.answers.values())
    round_.addresses, found = addresses_reached(_without_launcher(reports) if here else reports)
    round_.connections += found


def _without_launcher(reports: Reports) -> Reports:
    """Leave out the launcher, which is one of the hosts and is shown as such."""
    return Reports(reports.names, reports.candidates, (), reports.answers, reports.unheard)


def _visit(host: HostEntry, round_: _Round) -> Visit:
    answer = round_.answers.get(host)
    slots = host.slots
    if answer is None or answer.examined is None:
        problem, _, remedy = round_.problems.get(host, "its agent did not report what it found").partition("; ")
        return Visit(host.name, slots or 1, problem=problem, remedy=remedy)
    examined = answer.examined
    return Visit(
        host.name,
        slots if slots is not None else max(1, answer.hello.gpus),
        facts=Facts.from_json(examined.facts),
        clock=compare_clocks(answer.sent, examined.asked, examined.answered, answer.received),
        identity=answer.hello.identity,
        addresses=round_.addresses.get(host.name, ()),
    )
