"""An elastic job and its supervisor when events cross, with made-up agents of its hosts."""

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
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.supervisor import Supervisor
from hvdgloo.runner.supervise.visits import Visit

PLAN = Assignment(0, (Member("h1/0/1", "h1", 0, 0),))
HELLO = cast(Any, SimpleNamespace(cores=2, machine_cores=2, port=5000))


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


SPEC = LaunchSpec(("true",), (), None, "/", {}, b"s" * 32, times=Times(end_timeout=5.0))


def elastic_job(spec: LaunchSpec) -> ElasticJob:
    """Return a job that is fed no events."""
    around = cast(Any, SimpleNamespace(spawner=SimpleNamespace(is_local=lambda _: True), signals=()))
    made = ElasticJob(spec, ElasticSpec(Rules(size=1, smallest=1), FixedHosts({"h1": 1})), around)
    made.feed = lambda event: None
    made.on_start = lambda: None
    return made


@pytest.fixture
def job() -> ElasticJob:
    return elastic_job(SPEC)


@pytest.fixture
def supervisor(job: ElasticJob) -> Iterator[Supervisor]:
    nothing = cast(Any, Nothing())
    made = Supervisor(SPEC, nothing, [], nothing, job, nothing)
    made.admission, job.supervisor = nothing, made
    yield made
    for link in made.agents.links:
        link.close()
    made.loop.close()


def admitted(supervisor: Supervisor, *events: host_state.Event) -> Visit:
    """The visit of a host that was let in, after such events."""
    state = HostState(HostEntry("h1", 1), 0.0, 3.0)
    for event in (host_state.Try(), host_state.Answered(), host_state.Greeted(), host_state.Checked(), *events):
        state.feed(event, 0.0)
    visit = Visit("h1", 0.0, state, AgentLink(state, cast(Any, Command())), admitted=True)
    supervisor.visits.current["h1"] = visit
    supervisor.agents.hosts.append(state)
    supervisor.agents._links[state] = visit.agent
    supervisor.agents._numbers[state] = 0
    return visit


@pytest.mark.parametrize("how", ["lost", "let go"])
def test_workers_are_not_told_the_address_of_a_host_that_has_gone(
    supervisor: Supervisor, job: ElasticJob, how: str
) -> None:
    visit = admitted(supervisor)
    visit.agent.hello = HELLO
    reached = {visit.link: SimpleNamespace(address=Address("", "10.0.0.1", 8), master_port=5000)}
    admission = SimpleNamespace(reached=reached.__getitem__, endpoint=lambda _: ("10.0.0.9", 1))
    supervisor.admission = cast(Any, SimpleNamespace(withdraw=reached.pop))
    job._admission = cast(Any, admission)
    assert job._master(PLAN) == ("10.0.0.1", 5000)
    if how == "lost":
        supervisor.lose(visit, "its agent has ended")
    else:
        job._let_go(visit)  # it is not listed
    assert supervisor.visits.current["h1"] is visit, "it stays until nothing is left of it"
    assert job._master(PLAN) is None


def test_a_host_whose_stream_has_just_ended_is_not_let_in(supervisor: Supervisor) -> None:
    visit = admitted(supervisor, host_state.Probe(), host_state.StreamEnded())
    visit.admitted = False
    supervisor.admit(visit.agent, "reached at 10.0.0.1")
    assert not visit.admitted
    assert visit.state is not None
    assert visit.state.phase is host_state.Phase.BROKEN


def test_what_is_to_be_started_after_the_end_has_a_number_all_the_same(supervisor: Supervisor, job: ElasticJob) -> None:
    supervisor.policy.settled = True
    job.start_worker(Spawn("h1/0/1", "h1", 0, PLAN))
    supervisor.loop.turn(0.0)
    assert job.workers == {"h1/0/1": 0}
    assert not supervisor.visits.current


def test_a_command_that_does_not_end_after_a_visit_is_killed(supervisor: Supervisor) -> None:
    visit = admitted(supervisor, host_state.Start(10.0), host_state.Finish(), host_state.Farewell())
    state, command = cast(HostState, visit.state), cast(Any, visit.agent.stream)
    command.ends = False
    assert [supervisor.visits._has_gone(visit, state, now) for now in (100.0, 104.9)] == [False, False]
    assert command.kills == 0
    assert not supervisor.visits._has_gone(visit, state, 105.0)
    assert not supervisor.visits._has_gone(visit, state, 105.1)
    assert command.kills == 1, "it is not killed in each turn"
    command.ends = True
    assert supervisor.visits._has_gone(visit, state, 105.2)
    assert state not in supervisor.agents.hosts


SLOTS = 300
CROWD = Assignment(0, tuple(Member(f"h1/{slot}/{slot}", "h1", slot, slot) for slot in range(SLOTS)))


def test_the_places_of_many_workers_are_worked_out_once(
    supervisor: Supervisor, job: ElasticJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop starts them all in one turn, and serves nothing else meanwhile."""
    asked: list[int] = []
    places = elastic_launch.places

    def counted(spots: Any) -> Any:
        asked.append(len(spots))
        return places(spots)

    monkeypatch.setattr(elastic_launch, "places", counted)
    visit = admitted(supervisor)
    visit.agent.hello = HELLO
    reached = SimpleNamespace(address=Address("", "10.0.0.1", 8), master_port=5000)
    admission = SimpleNamespace(reached=lambda _: reached, endpoint=lambda _: ("10.0.0.9", 1))
    job._admission = cast(Any, admission)
    frames = [
        job._frame(visit, Spawn(member.worker, "h1", member.slot, CROWD), member.slot) for member in CROWD.members
    ]
    assert [frame.env["HVDGLOO_RANK"] for frame in frames] == [str(rank) for rank in range(SLOTS)]
    assert asked == [SLOTS]
    job._frame(visit, Spawn("h1/0/1", "h1", 0, PLAN), SLOTS)
    assert asked == [SLOTS, 1], "another plan has other places"


TOO_MANY = Assignment(0, tuple(Member(f"h1/{slot}/first", "h1", slot, slot) for slot in range(1000)))


def test_a_host_is_refused_by_what_is_planned_for_it_and_once_only(
    supervisor: Supervisor, job: ElasticJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent may arrive before all orders do; orders that are left are no reason to try the host again."""
    lost: list[str] = []
    job.feed = lambda event: lost.append(cast(HostLost, event).reason)
    visit = admitted(supervisor)
    visit.agent.hello = HELLO
    for member in TOO_MANY.members[:10]:
        job.start_worker(Spawn(member.worker, "h1", member.slot, TOO_MANY))
        supervisor.loop.turn(0.0)
    assert [reason.partition(",")[0] for reason in lost] == ["1000 processes would run on host h1"]
    assert supervisor.visits.current["h1"] is visit
    tried_again: list[Visit] = []
    monkeypatch.setattr(job, "_begin_visit", tried_again.append)
    job.start_worker(Spawn(PLAN.members[0].worker, "h1", 0, PLAN))
    supervisor.loop.turn(0.0)
    assert [visit.name for visit in tried_again] == ["h1"], "a later order is another attempt"


def test_a_signal_comes_before_all_workers_that_are_still_to_be_started(
    supervisor: Supervisor, job: ElasticJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = admitted(supervisor)
    visit.agent.hello = cast(Any, SimpleNamespace(cores=SLOTS, machine_cores=SLOTS))
    monkeypatch.setattr(visit.agent.channel, "send", lambda _: None)
    asked: list[int] = []

    def frame(_: Visit, order: Spawn, number: int) -> Any:
        asked.append(number)
        if len(asked) == 10:
            supervisor.interrupt(signal.SIGTERM)
        return SimpleNamespace(number=number, stdin=False)

    monkeypatch.setattr(job, "_frame", frame)
    for member in CROWD.members:
        job.act(Spawn(member.worker, "h1", member.slot, CROWD))
    supervisor.loop.turn(0.0)
    assert asked == list(range(10))
    assert supervisor.outcome.interrupted == signal.SIGTERM
    assert supervisor.settled


def test_a_discovery_that_hangs_can_be_reported_in_each_turn_while_the_job_runs(
    supervisor: Supervisor, job: ElasticJob
) -> None:
    times: list[float] = []
    job.on_turn = times.append
    supervisor._keep_time()
    assert len(times) == 1
    supervisor.policy.settled = True
    supervisor._keep_time()
    assert len(times) == 1
