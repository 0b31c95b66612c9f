"""A supervisor's reports to observers of the job, and its requests to agents for them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdgloo.rendezvous._membership.assignment import Assignment, Member
from hvdgloo.runner.attempt import Attempt
from hvdgloo.runner.elastic_launch import ElasticJob
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Times
from hvdgloo.runner.launch import FixedJob
from hvdgloo.runner.protocol.frames import (
    Exited,
    Frame,
    Observe,
    Observed,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Traced,
    TraceSteps,
    Tracing,
)
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.observers import JobObservers, PlacedWorker
from hvdgloo.runner.supervise.supervisor import Supervisor
from hvdgloo.runner.supervise.visits import Visit
from tests.unit.runner.test_elastic_launch import Command, Nothing, elastic_job

SPEC = LaunchSpec(("true",), (HostEntry("h1", 2),), 2, "/", {}, b"s" * 32, times=Times(end_timeout=5.0))


class Onlooker(JobObservers):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.observe: Observe | None = None
        self.told: list[tuple[Any, ...]] = []

    def host(self, name: str, state: str, reason: str = "") -> None:
        self.told.append(("host", name, state, reason))

    def placed(self, epoch: int, workers: Sequence[PlacedWorker]) -> None:
        self.told.append(("placed", epoch, *workers))

    def spawned(self, number: int, pid: int) -> None:
        self.told.append(("spawned", number, pid))

    def ended(self, number: int, status: int | None, reason: str) -> None:
        self.told.append(("ended", number, status, reason))

    def reported(self, host: str, frame: Frame) -> None:
        self.told.append(("reported", host, frame))


class Line:
    """A link's channel: what is sent is kept."""

    receive_fd = send_fd = -1
    pending = 0

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)


def ready(supervisor: Supervisor) -> AgentLink:
    """A host whose agent can be used, in the supervisor's books."""
    state = HostState(SPEC.hosts[0], 0.0, 3.0)
    for event in (host_state.Try(), host_state.Answered(), host_state.Greeted(), host_state.Checked()):
        state.feed(event, 0.0)
    link = AgentLink(state, cast(Any, Command()))
    link.channel = cast(Any, Line())
    agents = supervisor.agents
    supervisor.visits.current[state.name] = Visit(state.name, 0.0, state, link, admitted=True)
    agents.hosts.append(state)
    agents._links[state], agents._numbers[state] = link, 0
    return link


def sent(link: AgentLink) -> list[Frame]:
    return cast(Any, link.channel).sent  # type: ignore[no-any-return]


@pytest.fixture
def onlooker() -> Onlooker:
    return Onlooker()


@pytest.fixture
def job() -> ElasticJob:
    return elastic_job(SPEC)


@contextmanager
def observed(job: Attempt, onlooker: Onlooker) -> Iterator[Supervisor]:
    nothing = cast(Any, Nothing())
    made = Supervisor(SPEC, nothing, [], nothing, job)
    made.admission, job.supervisor = nothing, made
    made.job_observers = onlooker
    yield made
    for link in made.agents.links:
        link.close()
    made.loop.close()


@pytest.fixture
def fixed(onlooker: Onlooker) -> Iterator[Supervisor]:
    around = SimpleNamespace(spawner=Nothing(), fork=False)
    with observed(FixedJob(SPEC, cast(Any, around), 0), onlooker) as made:
        yield made


@pytest.fixture
def elastic(job: ElasticJob, onlooker: Onlooker) -> Iterator[Supervisor]:
    with observed(job, onlooker) as made:
        yield made


def test_agents_are_told_of_those_who_look_with_their_start_or_later(fixed: Supervisor, onlooker: Onlooker) -> None:
    link = ready(fixed)
    fixed.begin(link, {})
    assert [type(frame) for frame in sent(link)] == [Start], "the job is not observed"
    assert onlooker.told == [("host", "h1", "up", "")]
    fixed.observe_soon(Observe(host=True))
    fixed.loop.turn(0.0)
    assert sent(link)[1:] == [Observe(host=True)]
    other = ready(fixed)
    onlooker.observe = Observe(host=False)
    fixed.begin(other, {})
    assert sent(other)[1:] == [Observe(host=False)]


def test_only_agents_at_work_are_asked_for_traces(fixed: Supervisor) -> None:
    at_work, waiting = ready(fixed), ready(fixed)
    fixed.begin(at_work, {})
    fixed.trace_soon(TraceSteps(1, 10))
    fixed.loop.turn(0.0)
    assert sent(at_work)[1:] == [TraceSteps(1, 10)]
    assert sent(waiting) == []


def test_what_becomes_of_workers_is_told(fixed: Supervisor, onlooker: Onlooker) -> None:
    link = ready(fixed)
    fixed.begin(link, {})
    for number in range(4):
        fixed.spawn(link, Spawn(number, ["true"], {}))
    onlooker.told.clear()
    fixed.received(link, Spawned(0, 4711))
    fixed.received(link, Exited(0, 0))
    fixed.received(link, Exited(1, -signal.SIGKILL, "the kernel did it"))
    assert fixed.settled
    fixed.received(link, Exited(2, -signal.SIGTERM))
    fixed.received(link, SpawnFailed(3, "no such file", 127))
    assert onlooker.told == [
        ("spawned", 0, 4711),
        ("ended", 0, 0, "exited with status 0"),
        ("ended", 1, -9, "was killed by signal 9 (SIGKILL); the kernel did it"),
        ("ended", 2, -15, ""),
        ("ended", 3, 127, ""),
    ], "what ends after the first failure was told to, or does not matter any more"


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_a_lost_host_is_told_with_the_reason(kind: str, onlooker: Onlooker, request: pytest.FixtureRequest) -> None:
    supervisor: Supervisor = request.getfixturevalue(kind)
    link = ready(supervisor)
    supervisor.begin(link, {})
    onlooker.told.clear()
    supervisor.lost(link.state, link, "was killed by signal 9 (SIGKILL)")
    assert onlooker.told == [("host", "h1", "lost", "its agent was killed by signal 9 (SIGKILL)")]


def test_what_agents_observe_reaches_the_job_s_observers(fixed: Supervisor, onlooker: Onlooker) -> None:
    link = ready(fixed)
    for frame in (Observed([b"one"]), Tracing(1, 2), Traced(1, 0, b"data", True)):
        fixed.received(link, frame)
        assert onlooker.told.pop() == ("reported", "h1", frame)


def test_ranks_of_an_elastic_job_are_told_with_each_epoch(
    elastic: Supervisor, job: ElasticJob, onlooker: Onlooker
) -> None:
    job.workers.update({"a": 0, "b": 1, "c": 2})
    job._on_placed(Assignment(3, (Member("c", "h2", 0, 0), Member("a", "h1", 1, 1), Member("gone", "h1", 0, 0))))
    assert onlooker.told == [("placed", 3, PlacedWorker(2, 0, "h2", 0), PlacedWorker(0, 1, "h1", 1))]


def test_a_host_of_an_elastic_job_leaves_when_nothing_runs_there_any_more(
    elastic: Supervisor, job: ElasticJob, onlooker: Onlooker
) -> None:
    link = ready(elastic)
    elastic.begin(link, {}, elastic=True)
    elastic.spawn(link, Spawn(0, ["true"], {}))
    job._ids[0] = "a"
    elastic.received(link, Exited(0, 1))
    assert onlooker.told == [
        ("host", "h1", "up", ""),
        ("ended", 0, 1, "exited with status 1"),
        ("host", "h1", "left", ""),
    ]
