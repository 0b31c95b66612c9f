"""One host's way through a job, whatever happens to it and in whatever order."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hvdgloo.runner.console.progress import NOT_TRIED, Step
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.supervise import host_state
from hvdgloo.runner.supervise.host_state import (
    FINAL,
    STARTING_UP,
    TABLE,
    UNDER_WAY,
    Action,
    Answered,
    Checked,
    Event,
    Farewell,
    Finish,
    GiveUp,
    Greeted,
    HostState,
    IllegalEventError,
    Lost,
    Phase,
    Probe,
    Probed,
    Start,
    StreamEnded,
    SweepFailed,
    Try,
    TryAgain,
)
from hvdgloo.runner.supervise.startup import Startup
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Retry

GRACE = 3.0
DROPPED = Diagnosis(Cause.DROPPED, "it drops the connection", Retry.A_FEW_TIMES)

EVENTS: dict[type[Event], Event] = {
    type(event): event
    for event in (
        Try(), Answered(), Greeted(), Checked("agent"), TryAgain(DROPPED, 1e6), GiveUp(DROPPED), Probe(),
        Probed("10.0.0.7"), Start(5.0), Finish(), Farewell(), StreamEnded(), Lost("is silent"),
        SweepFailed("it does not answer"),
    )
}  # fmt: skip
"""One of each kind."""

UP = (Try(), Answered(), Greeted(), Checked("node1, agent is process 7"))
"""Events of a host until its agent can be used."""

ORDER = list(Step)


class Witness:
    """A recorder of one host's actions: at most one command at a time, and the treatment of each."""

    def __init__(self) -> None:
        self.commands = 0
        self.runs = False
        self.counts: Counter[Action] = Counter()

    def perform(self, actions: tuple[Action, ...]) -> None:
        self.counts.update(actions)
        for action in actions:
            if action in (Action.CONNECT, Action.SWEEP):
                assert not self.runs, f"{action} while another command runs"
                self.runs, self.commands = True, self.commands + 1
            elif action in (Action.DROP, Action.KILL, Action.CLOSE):
                assert self.runs, f"{action}, and there is no command"
                self.runs = False
            elif action in (Action.FINISH, Action.CHECK):
                assert self.runs, f"{action}, and there is no agent to tell it"


class AnyWay(RuleBasedStateMachine):
    """Any event that can happen, at any time: what holds for every host on every way."""

    @initialize(length=st.integers(0, 6))
    def begin(self, length: int) -> None:
        """Some begin further on: by chance alone few would come so far."""
        self.now = 100.0
        self.host = HostState(HostEntry("h1", 2), self.now, GRACE)
        self.witness = Witness()
        self.had_workers = False
        self.shown = [self.host.step]
        for event in (*UP, Start(5.0))[:length]:
            self.take(event)

    def take(self, event: Event) -> None:
        self.witness.perform(self.host.feed(event, self.now))
        self.had_workers = self.had_workers or isinstance(event, Start)
        if isinstance(event, TryAgain):
            self.shown.clear()
        self.shown.append(self.host.step)

    @precondition(lambda self: not self.host.final)
    @rule(choice=st.integers(0, 999), wait=st.floats(0, 4))
    def happen(self, choice: int, wait: float) -> None:
        self.now += wait
        possible = list(TABLE[self.host.phase])
        kind = possible[choice % len(possible)]
        self.take(TryAgain(DROPPED, self.now + 1) if kind is TryAgain else EVENTS[kind])

    @rule(kind=st.sampled_from(list(EVENTS)))
    def refuse(self, kind: type[Event]) -> None:
        """Check that an event missing in the table raises, and changes nothing."""
        before = (self.host.phase, self.host.step, self.host.detail, self.host.deadline)
        if not self.host.accepts(kind):
            with pytest.raises(IllegalEventError, match=f"cannot happen to host h1 while it is {before[0].name}"):
                self.host.feed(EVENTS[kind], self.now)
        assert (self.host.phase, self.host.step, self.host.detail, self.host.deadline) == before

    @rule(wait=st.floats(0, 60))
    def wait(self, wait: float) -> None:
        """Time alone: it is looked at as often as the loop would."""
        end = self.now + wait
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            late = self.host.overdue(self.now)
            if late is not None:
                assert self.host.accepts(type(late)), f"{late} in {self.host.phase}"
                self.take(late)

    @precondition(lambda self: self.host.phase in host_state.WATCHED)
    @rule()
    def hear(self) -> None:
        self.host.heard(self.now)
        assert self.host.overdue(self.now) is None or self.now >= self.host.deadline

    @invariant()
    def there_is_always_a_deadline_while_something_is_waited_for(self) -> None:
        """On a way to the host the start timeout is it, which is the whole start's."""
        if self.host.phase in UNDER_WAY - host_state.JUDGED - host_state.WATCHED:
            assert self.host.starting_up
        else:
            assert (self.host.next < math.inf) is not self.host.final

    @invariant()
    def the_end_leaves_no_command_behind(self) -> None:
        assert not (self.host.final and self.witness.runs)
        assert self.witness.runs is (self.host.phase not in FINAL | {Phase.WAITING})

    @invariant()
    def it_is_swept_once_and_only_where_workers_may_be_left(self) -> None:
        swept = self.witness.counts[Action.SWEEP]
        assert swept <= 1
        assert bool(swept) is (self.host.phase in {*host_state.SECOND, Phase.SWEPT, Phase.UNREACHED})
        assert not swept or self.had_workers
        assert self.witness.counts[Action.TELL] == (self.host.phase is Phase.UNREACHED)

    @invariant()
    def it_is_lost_to_the_job_once(self) -> None:
        lost = {Phase.LOST, Phase.SWEPT, Phase.UNREACHED, *host_state.SECOND}
        assert self.witness.counts[Action.REPORT] == (self.host.phase in lost)

    @invariant()
    def it_is_told_of_the_end_once(self) -> None:
        assert self.witness.counts[Action.FINISH] <= 1

    @invariant()
    def what_is_shown_never_goes_back(self) -> None:
        """Except where a new attempt begins."""
        places = [ORDER.index(step) for step in self.shown]
        assert places == sorted(places)
        assert self.host.since <= self.now


TestAnyWay = AnyWay.TestCase


class TestTheTable:
    def test_every_phase_has_a_row_and_can_be_come_to(self) -> None:
        assert set(TABLE) == set(Phase)
        reached = {to.phase for row in TABLE.values() for to in row.values()}
        assert reached | {Phase.WAITING} == set(Phase)
        assert {action for row in TABLE.values() for to in row.values() for action in to.actions} == set(Action)

    def test_every_kind_of_event_is_in_use(self) -> None:
        assert {kind for row in TABLE.values() for kind in row} == set(EVENTS) == set(Event.__subclasses__())

    @pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.name)
    def test_an_end_can_be_come_to_from_everywhere(self, phase: Phase) -> None:
        """By what the supervisor can bring about alone, in at most two words: the job is over, and it has ended."""
        found = {phase}
        for _ in range(3):
            found |= {
                row[kind].phase
                for row in (TABLE[known] for known in found)
                for kind in (Finish, Lost, SweepFailed)
                if kind in row
            }
        assert found & FINAL

    def test_ends_are_what_nothing_follows(self) -> None:
        assert {phase.name for phase in FINAL} == {"FAILED", "ENDED", "LOST", "SWEPT", "UNREACHED"}

    @pytest.mark.parametrize("phase", sorted(STARTING_UP, key=list(Phase).index), ids=lambda phase: phase.name)
    def test_no_host_that_starts_up_outlives_the_job(self, phase: Phase) -> None:
        """An agent that has not come is not waited for when the job is over."""
        after = TABLE[phase][Finish].phase
        assert after is Phase.ENDED or phase is Phase.CHECKING


def started(*events: Event) -> HostState:
    """A host to which these have happened at second 0."""
    host = HostState(HostEntry("h1", 2), 0.0, GRACE)
    for event in events:
        host.feed(event, 0.0)
    return host


class TestAWay:
    def test_all_goes_well(self) -> None:
        host = started()
        said: list[tuple[Action, ...]] = []
        shown: list[tuple[Step, str]] = []
        for event in (*UP, Probe(), Probed("reached at 10.0.0.7"), Start(5.0), Finish(), Farewell(), StreamEnded()):
            said.append(host.feed(event, 1.0))
            if not shown or shown[-1] != (host.step, host.detail):
                shown.append((host.step, host.detail))
        assert [action for actions in said for action in actions if action is not Action.SHOW] == [
            Action.CONNECT, Action.CHECK, Action.FINISH, Action.CLOSE,
        ]  # fmt: skip
        assert shown == [
            (Step.CONNECTING, ""),
            (Step.PYTHON, ""),
            (Step.UP, "node1, agent is process 7"),
            (Step.PROBING, ""),
            (Step.READY, "reached at 10.0.0.7"),
        ]
        assert host.phase is Phase.ENDED

    def test_a_further_attempt_is_at_its_step_for_as_long_as_before(self) -> None:
        host = started()
        assert host.detail == NOT_TRIED
        host.feed(Try(), 5.0)
        host.feed(StreamEnded(), 6.0)
        assert host.next == 6.0 + host_state.EXIT_TIME
        assert host.feed(TryAgain(DROPPED, 7.0), 6.5) == (Action.DROP, Action.SHOW)
        assert (host.detail, host.next) == ("it drops the connection", 7.0)
        host.feed(Try(), 7.0)
        assert (host.since, host.detail) == (5.0, "attempt 2, it drops the connection")
        host.feed(Answered(), 8.0)
        assert (host.since, host.detail) == (8.0, "")
        host.feed(GiveUp(Diagnosis(Cause.VERSION, "it has hvdgloo 0.0.1")), 9.0)
        assert host.failure == "it has hvdgloo 0.0.1 (2 attempts)"

    def test_pain_24_a_host_that_falls_silent_with_workers_is_swept(self) -> None:
        host = started(*UP, Start(2.0))
        assert host.overdue(0.3) is None
        times = (0.5 * turn for turn in range(1, 20))
        lost = next(late for now in times if (late := host.overdue(now)) is not None)
        assert isinstance(lost, Lost)
        assert lost.how.startswith("has been silent for 2 s: its host is cut off")
        assert host.feed(lost, 3.0) == (Action.KILL, Action.REPORT, Action.SWEEP)
        host.feed(Answered(), 4.0)
        assert host.deadline == 4.0 + GRACE + host_state.SWEEP_TIME
        assert host.feed(Farewell(), 5.0) == (Action.CLOSE,)
        assert host.phase is Phase.SWEPT

    def test_a_second_agent_has_its_own_deadlines(self) -> None:
        host = started(*UP, Start(5.0), StreamEnded(), Lost("exited with status 1"))
        assert host.overdue(host_state.ANSWER_TIME - 0.1) is None
        assert host.overdue(host_state.ANSWER_TIME) == SweepFailed("it does not answer")
        host.feed(Answered(), 2.0)
        limit = host.deadline
        for tenth in range(21, int(limit * 10)):
            host.heard(tenth / 10)
            assert host.overdue(tenth / 10) is None
        assert host.overdue(limit) == SweepFailed("it did not end in time")

    def test_a_second_agent_may_fall_silent_too(self) -> None:
        host = started(*UP, Start(5.0), Lost("is silent"), Answered())
        late = None
        for turn in range(40):
            late = late or host.overdue(turn / 2)
        assert late == SweepFailed("it has fallen silent")

    @pytest.mark.parametrize(
        ("events", "actions"),
        [
            ((*UP, Finish()), (Action.KILL, Action.REPORT)),
            ((*UP, Start(5.0), Finish()), (Action.KILL, Action.REPORT, Action.SWEEP)),
            ((*UP, Start(5.0), Finish(), Farewell()), (Action.KILL,)),
        ],
        ids=["no workers", "workers", "after its good-bye"],
    )
    def test_what_a_loss_means_depends_on_what_was_there(
        self, events: tuple[Event, ...], actions: tuple[Action, ...]
    ) -> None:
        assert started(*events).feed(Lost("did not end"), 1.0) == actions


@given(st.integers(1, 40), st.lists(st.sampled_from(list(EVENTS)), max_size=400), st.randoms(use_true_random=False))
def test_hosts_of_a_start_together(number: int, kinds: list[type[Event]], chance: random.Random) -> None:
    """Any events at any hosts: each host that waits has a time, and when all has ended each is in exactly one end."""
    hosts = [HostState(HostEntry(f"h{index}", 1), 0.0, GRACE) for index in range(number)]
    startup = Startup(hosts, random.Random(0))
    now = 0.0
    for kind in kinds:
        now += 0.1
        for host in startup.due(now):
            host.feed(Try(), now)
        host = chance.choice(hosts)
        if kind is not Try and host.accepts(kind):
            decided = startup.judge(host, DROPPED, now) if kind in (TryAgain, GiveUp) else EVENTS[kind]
            host.feed(decided, now)
        waits = any(host.phase is Phase.WAITING for host in hosts)
        under_way = any(host.phase in UNDER_WAY for host in hosts)
        assert under_way or not waits or startup.next < math.inf
    for kind in (Finish, Lost, Lost, SweepFailed):
        for host in hosts:
            if host.accepts(kind):
                host.feed(EVENTS[kind], now)
    assert all(host.final for host in hosts)
    assert startup.over(now)
