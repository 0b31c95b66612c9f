"""Marks of what happens often: bounded in number, and none is lost or counted twice."""

from __future__ import annotations

from hvdgloo._observe.marks import MOST, Marks
from hvdgloo._observe.view import Mark


def test_each_is_a_mark_as_long_as_there_are_few() -> None:
    marks = Marks("commit")
    for total in range(1, MOST + 1):
        marks.count(7, total, 1000.0 + 2 * total)
    assert marks.all() == [Mark(1000.0 + 2 * total, "commit") for total in range(1, MOST + 1)]


def test_a_commit_each_second_of_a_day_makes_few_marks_that_stand_for_all_of_them() -> None:
    marks = Marks("commit")
    for second in range(1, 86_401):
        marks.count(7, 3 * second, 1000.0 + second)
        assert marks.all()[-1].at == 1000.0 + second, "the last commit is where it was"
    found = marks.all()
    assert MOST // 2 <= len(found) <= MOST
    assert sum(mark.count for mark in found) == 3 * 86_400
    assert len({mark.count for mark in found[:-1]}) == 1, "marks are evenly spaced"


def test_a_total_without_news_adds_nothing() -> None:
    marks = Marks("commit")
    for at in (1000.0, 1005.0, 1010.0):
        marks.count(7, 2, at)
    assert marks.all() == [Mark(1000.0, "commit", 2)]


def test_commits_that_another_process_made_before_it_became_rank_0_are_not_counted_again() -> None:
    marks = Marks("commit")
    marks.count(7, 50, 1000.0)
    marks.count(8, 50, 1000.2)  # the same commit, as another rank of the next epoch counts it
    assert marks.all() == [Mark(1000.0, "commit", 50)]
    marks.count(8, 52, 1010.0)
    assert marks.all() == [Mark(1000.0, "commit", 50), Mark(1010.0, "commit", 2)]
    marks.count(9, 1, 1020.0)  # a worker that is new
    assert marks.all()[-1] == Mark(1020.0, "commit")
