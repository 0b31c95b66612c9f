"""Whom to try, again and when: a scripted clock and no processes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.errors import LaunchError, UnusableHostsError
from hvdgloo.runner.console.progress import REMEDIES, Step
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.supervise.host_state import Answered, Checked, GiveUp, Greeted, HostState, Phase, StreamEnded, Try
from hvdgloo.runner.supervise.startup import AT_ONCE, ATTEMPTS, SETTLE, Startup, check_machines
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Retry

DROPPED = Diagnosis(Cause.DROPPED, "it drops the connection", Retry.A_FEW_TIMES)
LATE = Diagnosis(Cause.NOT_THERE, "there is no pod", Retry.UNTIL_THE_DEADLINE)
REFUSED = Diagnosis(Cause.REFUSED, "it refuses the connection")


class Scene:
    """Hosts that start, as the test says what becomes of their commands."""

    def __init__(self, number: int, chance: random.Random | None = None, *, patient: bool = False) -> None:
        self.hosts = [HostState(HostEntry(f"h{index}", 1), 0.0, 3.0) for index in range(number)]
        self.startup = Startup(self.hosts, chance, patient=patient)

    def start_due(self, now: float) -> Sequence[HostState]:
        """Start what is due; returns the hosts."""
        due = self.startup.due(now)
        for host in due:
            host.feed(Try(), now)
        return due

    def ready(self, host: HostState, now: float = 0.0) -> None:
        """Its agent comes, and can be used."""
        if host.phase is Phase.CONNECTING:
            host.feed(Answered(), now)
        host.feed(Greeted(), now)
        host.feed(Checked(), now)

    def fail(self, host: HostState, diagnosis: Diagnosis, now: float) -> float | None:
        """Its command ends without an agent; returns when it is tried again."""
        host.feed(StreamEnded(), now)
        host.feed(self.startup.judge(host, diagnosis, now), now)
        return host.deadline if host.phase is Phase.WAITING else None

    def error(self) -> LaunchError | None:
        """Return the error that ends the start-up."""
        try:
            self.startup.check({}, 5.0)
        except LaunchError as error:
            return error
        return None


def test_all_are_started_at_once_and_it_is_over_when_all_are_ready() -> None:
    scene = Scene(2)
    a, b = scene.hosts
    assert scene.start_due(0.0) == [a, b]
    assert scene.start_due(0.0) == []
    assert scene.startup.next == math.inf
    scene.ready(a)
    assert not scene.startup.over(100.0)
    scene.ready(b)
    assert scene.startup.over(0.0)
    assert scene.error() is None


def test_no_more_than_a_bounded_number_connect_at_the_same_time() -> None:
    scene = Scene(AT_ONCE + 3)
    assert scene.start_due(0.0) == scene.hosts[:AT_ONCE]
    assert scene.start_due(0.0) == []
    assert scene.startup.next == math.inf
    # One that has answered makes room, be it ready or not.
    scene.hosts[5].feed(Answered(), 0.0)
    assert scene.startup.next == 0.0
    assert scene.start_due(0.0) == [scene.hosts[AT_ONCE]]
    scene.fail(scene.hosts[6], DROPPED, 0.0)
    assert scene.start_due(0.0) == [scene.hosts[AT_ONCE + 1]]


def test_what_may_pass_is_tried_again_after_pauses_that_grow_and_vary() -> None:
    scene = Scene(1, random.Random(1))
    (host,) = scene.hosts
    now, pauses = 0.0, []
    for _ in range(ATTEMPTS - 1):
        assert scene.start_due(now) == [host]
        again = scene.fail(host, DROPPED, now)
        assert again is not None
        assert scene.startup.next == again
        assert scene.start_due(again - 0.001) == []
        pauses.append(again - now)
        now = again
    assert 0.1 < pauses[0] < 0.4
    assert pauses[4] > 2 * pauses[1]
    assert max(pauses) <= 7.5
    assert len({round(pause / 0.25, 6) for pause in pauses}) == len(pauses)
    assert scene.start_due(now) == [host]
    assert scene.fail(host, DROPPED, now) is None
    assert str(scene.error()) == f"host h0 cannot be used: it drops the connection ({ATTEMPTS} attempts)"


def test_pain_17_a_host_that_is_not_there_yet_is_tried_until_the_caller_s_deadline() -> None:
    scene = Scene(1)
    (host,) = scene.hosts
    now = 0.0
    while now < 600.0:
        assert scene.start_due(now) == [host]
        again = scene.fail(host, LATE, now)
        assert again is not None
        assert again - now <= 7.5
        now = again
        assert not scene.startup.over(now)
    assert "h0 (there is no pod): the command that connects to it was tried repeatedly" in str(scene.error())
    assert scene.start_due(now) == [host]
    scene.ready(host)
    assert scene.startup.over(now)


def test_pain_15_all_failing_hosts_are_in_one_report_and_no_other_is_started() -> None:
    scene = Scene(AT_ONCE + 2)
    many = scene.hosts
    scene.start_due(0.0)
    scene.fail(many[0], REFUSED, 1.0)
    assert scene.start_due(1.0) == []
    assert not scene.startup.over(1.5)
    assert scene.startup.next == 1.0 + SETTLE
    scene.fail(many[1], Diagnosis(Cause.NAME, "its name cannot be looked up"), 1.5)
    # No retries any more.
    assert scene.fail(many[2], DROPPED, 1.6) is None
    assert scene.startup.over(1.0 + SETTLE)
    error = scene.error()
    assert isinstance(error, UnusableHostsError)
    assert error.hosts == {
        "h0": "it refuses the connection",
        "h1": "its name cannot be looked up",
        "h2": "it drops the connection",
    }
    lines = str(error).splitlines()
    assert lines[0] == f"3 of {AT_ONCE + 2} hosts cannot be used:"
    assert lines[1:4] == [
        "  h0: it refuses the connection",
        "  h1: its name cannot be looked up",
        "  h2: it drops the connection",
    ]
    assert "not known yet when start-up stopped: h3, h4" in lines[4]
    assert "and 15 more" in lines[4]


def test_the_report_does_not_wait_once_every_host_has_answered() -> None:
    scene = Scene(3)
    a, b, c = scene.hosts
    scene.start_due(0.0)
    a.feed(Answered(), 0.0)
    scene.fail(b, REFUSED, 0.1)
    assert not scene.startup.over(0.1)
    scene.ready(a)
    assert not scene.startup.over(0.1)
    scene.fail(c, REFUSED, 0.2)
    assert scene.startup.over(0.2)


def test_a_patient_start_up_goes_on_without_those_that_failed() -> None:
    scene = Scene(2, patient=True)
    a, b = scene.hosts
    scene.start_due(0.0)
    scene.fail(a, REFUSED, 0.1)
    assert not scene.startup.over(100.0)
    scene.ready(b)
    assert scene.startup.over(0.2)
    assert a.failure == "it refuses the connection"


def test_after_the_start_timeout_each_host_is_named_at_its_step() -> None:
    scene = Scene(AT_ONCE + 1)
    scene.start_due(0.0)
    for host in scene.hosts[2:AT_ONCE]:
        scene.ready(host)
    scene.hosts[1].feed(Answered(), 1.0)
    with pytest.raises(LaunchError) as raised:
        scene.startup.check({"h1": "module load python"}, 5.0)
    first, *steps = str(raised.value).splitlines()
    assert first.startswith("3 hosts ")
    assert steps == [
        f"  connecting: h0, h{AT_ONCE} (not tried yet): {REMEDIES[Step.CONNECTING]}",
        f"  python: h1 (module load python): {REMEDIES[Step.PYTHON]}",
    ]


@given(st.lists(st.sampled_from(["ready", "drop", "refuse", "wait"]), min_size=1, max_size=120), st.randoms())
def test_it_always_comes_to_an_end(fates: list[str], chance: random.Random) -> None:
    """Whatever becomes of the commands, every host is started or reported, and never more than allowed at once."""
    scene = Scene(len(fates), random.Random(0))
    fate = dict(zip((host.name for host in scene.hosts), fates, strict=True))
    under_way: dict[str, HostState] = {}
    now = 0.0
    while not scene.startup.over(now) and now < 300:
        under_way.update({host.name: host for host in scene.start_due(now)})
        assert len(under_way) <= AT_ONCE
        if under_way:
            host = under_way.pop(chance.choice(sorted(under_way)))
            if fate[host.name] == "ready":
                scene.ready(host, now)
            else:
                scene.fail(host, {"drop": DROPPED, "refuse": REFUSED, "wait": LATE}[fate[host.name]], now)
        else:
            assert scene.startup.next < math.inf
            now = max(now + 0.01, scene.startup.next)
    if set(fates) == {"ready"}:
        assert scene.error() is None
    elif "wait" not in fates:
        assert scene.startup.over(now)
        assert isinstance(scene.error(), UnusableHostsError)


def test_what_will_not_pass_is_given_up_at_once() -> None:
    scene = Scene(1)
    scene.start_due(0.0)
    assert scene.startup.judge(scene.hosts[0], REFUSED, 0.0) == GiveUp(REFUSED)


class TestOneMachineUnderTwoNames:
    def hello(self, identity: str) -> Hello:
        return Hello(1, "", "node1.cluster", identity, 1, 1, 0, 20000)

    def test_is_refused_with_both_names(self) -> None:
        with pytest.raises(UnusableHostsError, match=r"b: it is the same machine as a .node1.cluster.; give it once"):
            check_machines(
                [HostEntry("a"), HostEntry("b"), HostEntry("c")],
                [self.hello("1"), self.hello("1"), self.hello("2")],
                Reach(),
            )

    def test_is_a_template_s_own_business(self) -> None:
        check_machines([HostEntry("a"), HostEntry("b")], [self.hello("1")] * 2, Reach(agent_command=("env",)))
