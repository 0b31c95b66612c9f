"""An elastic job's reports of its changes."""

from __future__ import annotations

import pytest

from hvdgloo.rendezvous._elastic.events import Changed
from hvdgloo.rendezvous._elastic.history import MOST, describe_change, summarize
from hvdgloo.rendezvous._membership.assignment import Assignment, Candidate, choose

KILLED = "rank 1 on host h1 (process 77) was killed by signal 9 (SIGKILL)"


def assignment(old: str, new: str = "") -> Assignment:
    """Workers on hosts of these letters: members of the epoch before, in their order, and newcomers."""
    members = [Candidate(f"{host}{rank}", host, rank, rank, (0, rank)) for rank, host in enumerate(old)]
    fresh = [Candidate(f"{host}+{slot}", host, 100 + slot, None, (1, slot)) for slot, host in enumerate(new)]
    return choose(1, members + fresh)


def changed(old: str, new: str = "", why: str = "") -> Changed:
    return Changed(assignment(old, new), why, 0.41)


@pytest.mark.parametrize(
    ("before", "change", "line"),
    [
        ("aabb", changed("abb", why=KILLED), f"{KILLED}; 3 of 4 workers went on after 0.4 s"),
        ("ab", changed("b", why=KILLED), f"{KILLED}; 1 of 2 workers went on after 0.4 s"),
        ("ab", changed("b", "a", KILLED), f"{KILLED}; 1 of 2 workers went on, with 1 new one, after 0.4 s"),
        ("ab", changed("ab", "cc"), "host c was added; 2 workers went on, with 2 new ones, after 0.4 s"),
        ("a", changed("a", "a"), "a new worker was ready; 1 worker went on, with 1 new one, after 0.4 s"),
        ("aab", changed("aa"), "host b was removed; 2 of 3 workers went on after 0.4 s"),
        ("aabc", changed("aa"), "hosts b, c were removed; 2 of 4 workers went on after 0.4 s"),
        (
            "ab",
            changed("a", "cd"),
            "host b was removed and hosts c, d were added; 1 of 2 workers went on, with 2 new ones, after 0.4 s",
        ),
        ("aab", changed("ab"), "the slots of the hosts have changed; 2 of 3 workers went on after 0.4 s"),
        ("ab", changed("ab", why="a link was cut"), "a link was cut; all workers went on after 0.4 s"),
        ("a", changed("a", why="its poll failed"), "its poll failed; the worker went on after 0.4 s"),
        ("ab", changed("", "c", KILLED), f"{KILLED}; 1 worker started again after 0.4 s"),
        (
            "abcdefghijkl",
            changed("a"),
            "hosts b, c, d, e, f, g, h, i and 3 more were removed; 1 of 12 workers went on after 0.4 s",
        ),
    ],
)
def test_a_change_is_a_line(before: str, change: Changed, line: str) -> None:
    assert describe_change(change, changed("", before)) == line


def test_the_summary_has_all_of_them() -> None:
    changes = [(2.0, changed("", "aabb")), (12.5, changed("abb", why=KILLED)), (20.0, changed("abb", "c"))]
    assert summarize(changes).split("\n") == [
        "the workers changed 2 times, in 0.8 s altogether:",
        f"  at 12.1 s: {KILLED}; 3 of 4 workers went on after 0.4 s",
        "  at 19.6 s: host c was added; 3 workers went on, with 1 new one, after 0.4 s",
    ]
    assert summarize(changes[:2]).startswith("the workers changed once, in 0.4 s altogether:\n")
    assert summarize(changes[:1]) == summarize([]) == ""


def test_the_summary_of_a_job_that_always_changes_is_short() -> None:
    changes = [(float(number), changed("ab")) for number in range(200)]
    lines = summarize(changes).split("\n")
    assert len(lines) == MOST + 1
    assert lines[0] == f"the workers changed 199 times, in 81.6 s altogether; the last {MOST} were:"
    assert lines[-1].startswith("  at 198.6 s: ")
