"""The supervisor of an elastic job when events cross, with made-up agents of its hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdgloo.rendezvous._elastic.events import HostLost, Rules, Spawn
from hvdgloo.rendezvous._membership.assignment import Assignment, Member
from hvdgloo.runner import elastic_launch
from hvdgloo.runner.elastic.discovery import FixedHosts
from hvdgloo.runner.elastic_launch import ElasticJob
from hvdgloo.runner.job.spec import ElasticSpec, HostEntry, LaunchSpec, Times
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.runner.supervise.elastic import ElasticSupervisor, Visit
from hvdgloo.runner.supervise.host_state import HostState

PLAN = Assignment(0, (Member("h1/0/1", "h1", 0, 0),))


class Nothing:
    """Takes note of nothing, whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class Command:
    """A command that ends only when it is killed."""

    def __init__(self) -> None:
        self.kills = 0
        self.ends = True
        self.stdin, self.stdout, self.stderr = (
            open(os.devnull, mode)  # noqa: SIM115 - closed with the link
            for mode in ("wb", "rb", "rb")
        )

    def channel(self) -> FrameChannel:
        return FrameChannel(self.stdout.fileno(), self.stdin.fileno())

    def poll(self) -> int | None:
        return -9 if self.kills and self.ends else None

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout: float) -> int:
        return -9


@pytest.fixture
def supervisor() -> Iterator[ElasticSupervisor]:
    spec = LaunchSpec(("true",), (), None, "/", {}, b"s" * 32, times=Times(end_timeout=5.0))
    nothing = cast(Any, Nothing())
    made = ElasticSupervisor(
        spec, nothing, [], "job", nothing, entry=lambda name: HostEntry(name, 1), required=nothing, ranks={}
    )
    made.feed = lambda event: None
    made.admission = nothing
    yield made
    for link in made._agents.links:
        link.close()
    made._loop.close()


def admitted(supervisor: ElasticSupervisor, *events: host_state.Event) -> Visit:
    """The visit of a host that was let in, after such events."""
    state = HostState(HostEntry("h1", 1), 0.0, 3.0)
    for event in (host_state.Try(), host_state.Answered(), host_state.Greeted(), host_state.Checked(), *events):
        state.feed(event, 0.0)
    visit = Visit("h1", 0.0, state, AgentLink(state, cast(Any, Command())), admitted=True)
    supervisor._visits["h1"] = visit
    supervisor._agents.hosts.append(state)
    supervisor._agents._links[state] = cast(AgentLink, visit.link)
    supervisor._agents._numbers[state] = 0
    return visit


def job_of(supervisor: ElasticSupervisor, admission: object) -> ElasticJob:
    """Return the job of a supervisor."""
    around = cast(Any, SimpleNamespace(spawner=SimpleNamespace(is_local=lambda _: True), signals=()))
    elastic = ElasticSpec(Rules(size=1, smallest=1), FixedHosts({"h1": 1}))
    job = ElasticJob(supervisor._spec, elastic, around)
    job._supervisor, job._admission = supervisor, cast(Any, admission)
    return job


@pytest.mark.parametrize("how", ["lost", "let go"])
def test_workers_are_not_told_the_address_of_a_host_that_has_gone(supervisor: ElasticSupervisor, how: str) -> None:
    visit = admitted(supervisor)
    reached = {visit.link: SimpleNamespace(address=SimpleNamespace(address="10.0.0.1"), master_port=5000)}
    admission = SimpleNamespace(reached=reached.__getitem__)
    supervisor.admission = cast(Any, SimpleNamespace(withdraw=reached.pop))
    job = job_of(supervisor, admission)
    assert job._master(PLAN) == ("10.0.0.1", 5000)
    if how == "lost":
        supervisor._lose(visit, "its agent has ended")
    else:
        supervisor._let_go(visit)  # it is not listed
    assert supervisor.visit("h1") is visit, "it stays until nothing is left of it"
    assert job._master(PLAN) is None


def test_a_host_whose_stream_has_just_ended_is_not_let_in(supervisor: ElasticSupervisor) -> None:
    visit = admitted(supervisor, host_state.Probe(), host_state.StreamEnded())
    visit.admitted = False
    supervisor.admit(cast(AgentLink, visit.link), "reached at 10.0.0.1")
    assert not visit.admitted
    assert visit.state is not None
    assert visit.state.phase is host_state.Phase.BROKEN


def test_what_is_to_be_started_after_the_end_has_a_number_all_the_same(supervisor: ElasticSupervisor) -> None:
    supervisor._verdict.settled = True
    supervisor.start_worker(Spawn("h1/0/1", "h1", 0, PLAN))
    supervisor._loop.turn(0.0)
    assert supervisor.workers == {"h1/0/1": 0}
    assert supervisor.visit("h1") is None


def test_a_command_that_does_not_end_after_a_visit_is_killed(supervisor: ElasticSupervisor) -> None:
    visit = admitted(supervisor, host_state.Start(10.0), host_state.Finish(), host_state.Farewell())
    state, command = cast(HostState, visit.state), cast(Any, cast(AgentLink, visit.link).stream)
    command.ends = False
    assert [supervisor._has_gone(visit, state, now) for now in (100.0, 104.9)] == [False, False]
    assert command.kills == 0
    assert not supervisor._has_gone(visit, state, 105.0)
    assert not supervisor._has_gone(visit, state, 105.1)
    assert command.kills == 1, "it is not killed in each turn"
    command.ends = True
    assert supervisor._has_gone(visit, state, 105.2)
    assert state not in supervisor._agents.hosts


SLOTS = 300
CROWD = Assignment(0, tuple(Member(f"h1/{slot}/{slot}", "h1", slot, slot) for slot in range(SLOTS)))


def test_the_places_of_many_workers_are_worked_out_once(
    supervisor: ElasticSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop starts them all in one turn, and serves nothing else meanwhile."""
    asked: list[int] = []
    places = elastic_launch.places

    def counted(spots: Any) -> Any:
        asked.append(len(spots))
        return places(spots)

    monkeypatch.setattr(elastic_launch, "places", counted)
    visit = admitted(supervisor)
    cast(AgentLink, visit.link).hello = cast(Any, SimpleNamespace(cores=2, machine_cores=2, port=5000))
    reached = SimpleNamespace(address=Address("", "10.0.0.1", 8), master_port=5000)
    job = job_of(supervisor, SimpleNamespace(reached=lambda _: reached, endpoint=lambda _: ("10.0.0.9", 1)))
    frames = [
        job._frame(visit, Spawn(member.worker, "h1", member.slot, CROWD), member.slot) for member in CROWD.members
    ]
    assert [frame.env["HVDGLOO_RANK"] for frame in frames] == [str(rank) for rank in range(SLOTS)]
    assert asked == [SLOTS]
    job._frame(visit, Spawn("h1/0/1", "h1", 0, PLAN), SLOTS)
    assert asked == [SLOTS, 1], "another plan has other places"


TOO_MANY = Assignment(0, tuple(Member(f"h1/{slot}/first", "h1", slot, slot) for slot in range(1000)))


def test_a_host_is_refused_by_what_is_planned_for_it_and_once_only(
    supervisor: ElasticSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may arrive before all orders do; orders that are left are no reason to try the host again."""
    lost: list[str] = []
    supervisor.feed = lambda event: lost.append(cast(HostLost, event).reason)
    visit = admitted(supervisor)
    cast(AgentLink, visit.link).hello = cast(Any, SimpleNamespace(cores=2, machine_cores=2, port=5000))
    for member in TOO_MANY.members[:10]:
        supervisor.start_worker(Spawn(member.worker, "h1", member.slot, TOO_MANY))
        supervisor._loop.turn(0.0)
    assert [reason.partition(",")[0] for reason in lost] == ["1000 processes would run on host h1"]
    assert supervisor.visit("h1") is visit
    tried_again: list[Visit] = []
    monkeypatch.setattr(supervisor, "_begin_visit", tried_again.append)
    supervisor.start_worker(Spawn(PLAN.members[0].worker, "h1", 0, PLAN))
    supervisor._loop.turn(0.0)
    assert [visit.name for visit in tried_again] == ["h1"], "a later order is another attempt"


def test_a_signal_comes_before_all_workers_that_are_still_to_be_started(
    supervisor: ElasticSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = admitted(supervisor)
    cast(AgentLink, visit.link).hello = cast(Any, SimpleNamespace(cores=SLOTS, machine_cores=SLOTS, port=5000))
    monkeypatch.setattr(cast(AgentLink, visit.link).channel, "send", lambda _: None)
    asked: list[int] = []

    def frame(_: Visit, order: Spawn, number: int) -> Any:
        asked.append(number)
        if len(asked) == 10:
            supervisor.interrupt(signal.SIGTERM)
        return SimpleNamespace(number=number)

    supervisor.frame = frame
    for member in CROWD.members:
        supervisor.act(Spawn(member.worker, "h1", member.slot, CROWD))
    supervisor._loop.turn(0.0)
    assert asked == list(range(10))
    assert supervisor.outcome.interrupted == signal.SIGTERM
    assert supervisor.settled


def test_a_discovery_that_hangs_can_be_reported_in_each_turn_while_the_job_runs(supervisor: ElasticSupervisor) -> None:
    times: list[float] = []
    supervisor.on_turn = times.append
    supervisor._keep_time()
    assert len(times) == 1
    supervisor._verdict.settled = True
    supervisor._keep_time()
    assert len(times) == 1
