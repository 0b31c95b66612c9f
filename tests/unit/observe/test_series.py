"""Curves in bounded memory: what is added is found again, coarser the longer the job has run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._observe.series import Recording, brief


def recorded(points: int = 8, *, total: bool = False, curves: int = 64) -> Recording[str]:
    return Recording(100.0, points, total=total, curves=curves)


def test_each_second_has_an_item_and_what_was_not_known_is_none() -> None:
    recording = recorded()
    recording.add(100.5, {"a": 1.0})
    recording.add(101.5, {"a": 2.0, "b": 7.0})
    recording.add(103.5, {"b": 8.0})

    assert recording.width == 1.0
    assert recording.at() == [100.0, 101.0, 102.0, 103.0]
    assert recording.curve("a") == [1.0, 2.0, None, None]
    assert recording.curve("b") == [None, 7.0, None, 8.0]
    assert recording.curve("c") == [None] * 4


def test_what_is_added_within_an_item_becomes_its_mean_or_its_sum() -> None:
    mean, total = recorded(), recorded(total=True)
    for value in (1.0, 2.0, 6.0):
        mean.add(100.2, {"a": value})
        total.add(100.2, {"a": value})

    assert mean.curve("a") == [3.0]
    assert total.totals("a") == [9.0]


def test_when_there_are_too_many_points_each_two_become_one() -> None:
    mean, total = recorded(points=4), recorded(points=4, total=True)
    for second in range(5):
        mean.add(100.0 + second, {"a": float(second)})
        total.add(100.0 + second, {"a": float(second)})

    assert mean.width == total.width == 2.0
    assert mean.at() == [100.0, 102.0, 104.0]
    assert mean.curve("a") == [0.5, 2.5, 4.0]
    assert total.totals("a") == [1.0, 5.0, 4.0]


def test_the_mean_of_an_item_goes_on_after_it_was_merged() -> None:
    recording = recorded(points=2)
    for second, value in enumerate((1.0, 3.0, 10.0, 20.0, 6.0, 6.0, 6.0, 6.0)):
        recording.add(100.0 + second, {"a": value})

    assert recording.width == 4.0
    assert recording.curve("a") == [8.5, 6.0]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=200))
def test_a_total_loses_nothing_however_often_it_is_merged(values: list[float]) -> None:
    recording = recorded(points=6, total=True)
    for second, value in enumerate(values):
        recording.add(100.0 + second, {"a": value})

    assert sum(recording.totals("a")) == pytest.approx(sum(values), rel=0.01, abs=1e-9)
    assert len(recording.totals("a")) <= 6


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=100))
def test_a_mean_stays_within_what_was_added(values: list[float]) -> None:
    recording = recorded(points=6)
    for second, value in enumerate(values):
        recording.add(100.0 + second, {"a": value})

    known = [item for item in recording.curve("a") if item is not None]
    assert len(known) == recording.length
    assert min(values) * 0.999 <= min(known) <= max(known) <= max(values) * 1.001


def test_a_week_takes_no_more_points_than_a_minute() -> None:
    recording = recorded(points=64)
    for minute in range(0, 7 * 24 * 60, 7):
        recording.add(100.0 + 60 * minute, {"a": 1.0})

    assert recording.length <= 64
    assert recording.at()[-1] + recording.width >= 100.0 + 7 * 24 * 3600 - 420 - recording.width
    assert recording.curve("a") == [1.0] * recording.length


def test_time_in_which_nothing_changed_has_the_last_values() -> None:
    mean, total = recorded(), recorded(total=True)
    for recording in (mean, total):
        recording.add(100.0, {"a": 5.0})
        recording.hold(103.0)
        recording.add(104.0, {"a": 1.0})

    assert mean.curve("a") == [5.0, 5.0, 5.0, 5.0, 1.0]
    assert total.totals("a") == [5.0, 0.0, 0.0, 0.0, 1.0]


def test_nothing_is_held_before_something_was_added_and_holding_may_make_the_axis_coarser() -> None:
    recording = recorded(points=4)
    recording.hold(102.0)
    assert recording.curve("a") == [None] * 3

    recording.add(103.0, {"a": 5.0})
    recording.hold(110.0)
    assert recording.width == 4.0
    assert recording.curve("a") == [5.0, 5.0, 5.0]


def test_a_clock_that_was_set_back_adds_to_the_last_item() -> None:
    recording = recorded()
    recording.add(103.0, {"a": 5.0})
    recording.add(50.0, {"a": 7.0})

    assert recording.curve("a") == [None, None, None, 6.0]


def test_readers_are_told_from_which_item_on_there_is_something_new() -> None:
    recording = recorded(points=4)
    recording.add(100.0, {"a": 1.0})
    assert recording.unread() == 0
    recording.add(100.9, {"a": 3.0})
    assert recording.unread() == 0
    recording.add(102.0, {"a": 1.0})
    assert recording.unread() == 0  # item 0 may have changed since
    recording.add(103.0, {"a": 1.0})
    assert recording.unread() == 2
    recording.add(104.0, {"a": 1.0})
    assert recording.width == 2.0
    assert recording.unread() == 0


def test_there_are_no_more_curves_than_allowed() -> None:
    recording = recorded(curves=3)
    recording.add(100.0, {f"plane {n}": 1.0 for n in range(100)})

    assert list(recording) == ["plane 0", "plane 1", "plane 2"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.123456, 0.1235), (123456.0, 123500.0), (math.nan, 0.0), (math.inf, 0.0), (-0.00012344, -0.0001234)],
)
def test_values_have_four_digits(value: float, shown: float) -> None:
    assert brief(value) == shown
