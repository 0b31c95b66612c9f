"""Whom to try, again and when: a scripted clock and no processes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.errors import UnusableHostsError
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.supervise.retry_policy import AT_ONCE, ATTEMPTS, SETTLE, Gathering, check_machines
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Retry

DROPPED = Diagnosis(Cause.DROPPED, "it drops the connection", Retry.A_FEW_TIMES)
LATE = Diagnosis(Cause.NOT_THERE, "there is no pod", Retry.UNTIL_THE_DEADLINE)
REFUSED = Diagnosis(Cause.REFUSED, "it refuses the connection")


def hosts(number: int) -> list[HostEntry]:
    return [HostEntry(f"h{index}", 1) for index in range(number)]


def test_all_are_started_at_once_and_it_is_over_when_all_are_ready() -> None:
    a, b = hosts(2)
    gathering = Gathering([a, b], 0.0)
    assert gathering.due(0.0) == [a, b]
    assert gathering.due(0.0) == []
    assert gathering.next == math.inf
    gathering.answered(a)
    gathering.ready(a)
    assert not gathering.over(100.0)
    gathering.ready(b)
    assert gathering.over(0.0)
    assert gathering.error() is None


def test_no_more_than_a_bounded_number_connect_at_the_same_time() -> None:
    many = hosts(AT_ONCE + 3)
    gathering = Gathering(many, 0.0)
    assert gathering.due(0.0) == many[:AT_ONCE]
    assert gathering.due(0.0) == []
    # One that has answered makes room, be it ready or not.
    gathering.answered(many[5])
    assert gathering.next == 0.0
    assert gathering.due(0.0) == [many[AT_ONCE]]
    gathering.failed(many[6], DROPPED, 0.0)
    assert gathering.due(0.0) == [many[AT_ONCE + 1]]


def test_what_may_pass_is_tried_again_after_pauses_that_grow_and_vary() -> None:
    (host,) = hosts(1)
    gathering = Gathering([host], 0.0, random.Random(1))
    now, pauses = 0.0, []
    for _ in range(ATTEMPTS - 1):
        assert gathering.due(now) == [host]
        again = gathering.failed(host, DROPPED, now)
        assert again is not None
        assert gathering.next == again
        assert gathering.due(again - 0.001) == []
        pauses.append(again - now)
        now = again
    assert 0.1 < pauses[0] < 0.4
    assert pauses[4] > 2 * pauses[1]
    assert max(pauses) <= 7.5
    assert len({round(pause / 0.25, 6) for pause in pauses}) == len(pauses)
    assert gathering.due(now) == [host]
    assert gathering.failed(host, DROPPED, now) is None
    error = gathering.error()
    assert error is not None
    assert str(error) == f"host h0 cannot be used: it drops the connection ({ATTEMPTS} attempts)"


def test_pain_17_a_host_that_is_not_there_yet_is_tried_until_the_caller_s_deadline() -> None:
    (host,) = hosts(1)
    gathering = Gathering([host], 0.0)
    now = 0.0
    while now < 600.0:
        assert gathering.due(now) == [host]
        again = gathering.failed(host, LATE, now)
        assert again is not None
        assert again - now <= 7.5
        now = again
        assert not gathering.over(now)
    assert gathering.last_failure(host) == "there is no pod"
    assert gathering.due(now) == [host]
    gathering.ready(host)
    assert gathering.over(now)


def test_pain_15_all_failing_hosts_are_in_one_report_and_no_other_is_started() -> None:
    many = hosts(AT_ONCE + 2)
    gathering = Gathering(many, 0.0)
    gathering.due(0.0)
    gathering.failed(many[0], REFUSED, 1.0)
    assert gathering.due(1.0) == []
    assert not gathering.over(1.5)
    assert gathering.next == 1.0 + SETTLE
    gathering.failed(many[1], Diagnosis(Cause.NAME, "its name cannot be looked up"), 1.5)
    # No retries any more.
    assert gathering.failed(many[2], DROPPED, 1.6) is None
    assert gathering.over(1.0 + SETTLE)
    error = gathering.error()
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


def test_the_report_does_not_wait_once_everybody_has_answered() -> None:
    a, b, c = hosts(3)
    gathering = Gathering([a, b, c], 0.0)
    gathering.due(0.0)
    gathering.answered(a)
    gathering.failed(b, REFUSED, 0.1)
    assert not gathering.over(0.1)
    gathering.ready(a)
    assert not gathering.over(0.1)
    gathering.failed(c, REFUSED, 0.2)
    assert gathering.over(0.2)


def test_a_patient_gathering_goes_on_without_those_that_failed() -> None:
    a, b = hosts(2)
    gathering = Gathering([a, b], 0.0, patient=True)
    gathering.due(0.0)
    gathering.failed(a, REFUSED, 0.1)
    assert not gathering.over(100.0)
    gathering.ready(b)
    assert gathering.over(0.2)


@given(st.lists(st.sampled_from(["ready", "drop", "refuse", "wait"]), min_size=1, max_size=120), st.randoms())
def test_it_always_comes_to_an_end(fates: list[str], chance: random.Random) -> None:
    """Whatever becomes of the commands, every host is started or reported, and never more than allowed at once."""
    many = hosts(len(fates))
    gathering = Gathering(many, 0.0, random.Random(0))
    fate = dict(zip(many, fates, strict=True))
    under_way: set[HostEntry] = set()
    now = 0.0
    while not gathering.over(now) and now < 300:
        under_way.update(gathering.due(now))
        assert len(under_way) <= AT_ONCE
        if under_way:
            host = chance.choice(sorted(under_way, key=str))
            under_way.remove(host)
            if fate[host] == "ready":
                gathering.answered(host)
                gathering.ready(host)
            else:
                gathering.failed(host, {"drop": DROPPED, "refuse": REFUSED, "wait": LATE}[fate[host]], now)
        else:
            assert gathering.next < math.inf
            now = max(now + 0.01, gathering.next)
    if set(fates) == {"ready"}:
        assert gathering.error() is None
    elif "wait" not in fates:
        assert gathering.over(now)
        assert gathering.error() is not None


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
