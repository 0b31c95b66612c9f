"""The loss of a peer, distinguished from a pause of this process itself."""

from __future__ import annotations

import math

import pytest

from hvdgloo.runner.protocol.heartbeat import Silence


def look(silence: Silence, start: float, end: float, every: float = 1.0) -> float | None:
    """Look regularly; when it was over, if it was."""
    now = start
    while now <= end:
        if silence.over(now):
            return now
        now += every
    return None


def test_it_is_over_at_the_timeout_and_not_before() -> None:
    silence = Silence(6.0, 100.0)
    assert silence.deadline == 106.0
    assert look(silence, 100.0, 105.5, 0.5) is None
    assert silence.deadline == pytest.approx(106.0)
    assert silence.over(106.0)


def test_whatever_is_heard_begins_it_again() -> None:
    silence = Silence(6.0, 100.0)
    assert look(silence, 100.0, 105.0) is None
    silence.heard(105.0)
    assert silence.deadline == 111.0
    assert look(silence, 105.0, 110.0) is None
    assert silence.over(111.0)


def test_time_in_which_this_process_slept_does_not_count_against_the_other() -> None:
    silence = Silence(6.0, 100.0)
    assert not silence.over(101.0)
    assert not silence.over(160.0), "it slept for a minute: what arrived meanwhile is still to be read"
    assert look(silence, 161.0, 200.0) == 165.0, "but then it is not waited for any longer than before"


def test_where_this_process_gets_a_core_once_in_a_while_the_other_is_waited_for_longer() -> None:
    """At a load of 60, both get to run seldom; and yet a dead peer must be noticed at last."""
    silence = Silence(6.0, 100.0)
    assert look(silence, 103.0, 120.0, 3.0) is None, "three times as late as it meant to"
    assert look(silence, 121.0, 200.0, 3.0) is not None


def test_an_infinite_limit_is_never_reached() -> None:
    silence = Silence(math.inf, 100.0)
    assert silence.deadline == math.inf
    assert look(silence, 101.0, 1000.0, 50.0) is None


def test_what_was_heard_some_time_ago_leaves_the_rest_of_the_limit() -> None:
    silence = Silence(6.0, 100.0)
    assert look(silence, 101.0, 110.0) == 106.0
    silence.heard(106.0, 4.0)
    assert look(silence, 107.0, 120.0) == 108.0
