"""Two jobs side by side: what became faster or slower, and what differs."""

from __future__ import annotations

import pytest

from hvdgloo._observe.comparison import Row, compare, described
from hvdgloo._observe.view import Job, PlaneUse, Ranks, Snapshot, Straggler

SLOW = Straggler(3, "h2", 0.92, 1000, "steps", 0.0142, [], "rank 3 (h2) was last")


def job(seconds: float = 0.05, *, computing: float = 0.5, waiting: float = 0.3, **fields: object) -> Snapshot:
    """A job of two ranks on two hosts that is over."""
    steps = 100 if seconds else 0
    made = Job(
        command="train.py",
        state="ended",
        size=2,
        started=1000.0,
        now=1020.0,
        steps=steps,
        steps_per_second=1 / seconds if seconds else 0.0,
        step_seconds=seconds,
        computing=computing,
        waiting=waiting,
        communicating=1 - computing - waiting,
    )
    ranks = Ranks(rank=[0, 1], host=[0, 1], steps=[steps] * 2, bytes=[200_000] * 2, cpu=[0.08, 0.1], memory=[10**8] * 2)
    snapshot = Snapshot(job=made, ranks=ranks)
    for name, value in fields.items():
        setattr(snapshot if hasattr(snapshot, name) else made, name, value)
    return snapshot


def row(rows: list[Row], name: str) -> Row:
    (found,) = [row for row in rows if row.name.strip() == name]
    return found


def test_a_faster_job_is_told_with_the_part_that_made_the_difference() -> None:
    found = compare(job(0.05), job(0.03, computing=0.8, waiting=0.05))
    assert found.headline == (
        "The later job is faster: a step takes 40 % less time, 30 ms instead of 50 ms. "
        "Most of the difference is waiting: 13.5 ms less."
    )
    assert row(found.rows, "time of a step") == ("time of a step", "50 ms", "30 ms", "-40 %", "better")
    assert row(found.rows, "waiting")[1:] == ("15 ms", "1.5 ms", "-90 %", "better")
    assert row(found.rows, "computing")[1:] == ("25 ms", "24 ms", "-4.0 %", "better")
    assert not [each for each in found.rows if each.name == "steps per second"], "the same fact, with another figure"


def test_a_slower_job_is_told_likewise() -> None:
    found = compare(job(0.05), job(0.1, computing=0.75, waiting=0.15))
    assert found.headline == (
        "The later job is slower: a step takes 100 % more time, 100 ms instead of 50 ms. "
        "Most of the difference is computing: 50 ms more."
    )
    assert row(found.rows, "time of a step")[3:] == ("+100 %", "worse")
    assert compare(job(0.05), job(0.8)).headline.startswith(
        "The later job is slower: a step takes 16 times as long, 800 ms instead of 50 ms."
    )


def test_a_small_change_is_not_judged() -> None:
    found = compare(job(0.05), job(0.051))
    assert found.headline == "Both jobs are about as fast: a step takes 51 ms instead of 50 ms."
    assert row(found.rows, "time of a step")[1:] == ("50 ms", "51 ms", "+2.0 %", "")


def test_jobs_without_steps_are_compared_as_far_as_they_can_be() -> None:
    found = compare(job(0.0), job(0.05))
    assert found.headline == "Steps were not counted in both jobs, so their speed cannot be compared."
    assert row(found.rows, "time of a step")[1:] == ("-", "50 ms", "", "")
    assert row(found.rows, "processor, of a rank")[1:] == ("9 % of a core", "9 % of a core", "", "")
    assert not [each for each in compare(job(0.0), job(0.0)).rows if "step" in each.name]


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        (0.5, 0.4, ("0.5", "0.4", "-20 %")),
        (0.5, 0.5, ("0.5", "0.5", "")),
        (-2.0, -1.0, ("-2", "-1", "+50 %")),
        (-1.0, 1.0, ("-1", "1", "")),
        (0.0, 1.0, ("0", "1", "")),
        (1e-6, 5.0, ("0.000001", "5", "5,000,000 times")),
        (None, 1.0, ("not finite", "1", "")),
    ],
)
def test_numbers_that_the_programs_logged_are_compared_and_not_judged(
    before: float | None, after: float, texts: tuple[str, str, str]
) -> None:
    found = compare(job(logged={"loss": before}), job(logged={"loss": after, "new": 3.0}))
    assert found.logged == [Row("loss", *texts), Row("new", "-", "3")]


def test_what_differs_is_listed_with_units_and_the_rest_is_not() -> None:
    before = job(
        settings={"params.fusion_threshold_mb": 32.0, "params.cycle_time_ms": 1.0, "params.async": True},
        units={"params.fusion_threshold_mb": "MiB"},
        versions={"torch": "2.12", "python": "3.11"},
        planes=[PlaneUse("gloo", 0, "cpu", "", 2, 1, 1, 1.0)],
    )
    after = job(
        settings={"params.fusion_threshold_mb": 64.0, "params.cycle_time_ms": 1.0, "params.async": False},
        versions={"torch": "2.13", "python": "3.11"},
        planes=[PlaneUse("shared memory", 0, "cpu", "", 2, 1, 1, 1.0)],
    )
    assert compare(before, after).differences == [
        Row("data planes", "gloo", "shared memory"),
        Row("params.fusion_threshold_mb", "32 MiB", "64 MiB"),
        Row("params.async", "on", "off"),
        Row("version of torch", "2.12", "2.13"),
    ]
    assert compare(before, before).differences == []


def test_the_slowest_rank_and_outer_steps_are_side_by_side() -> None:
    found = compare(job(stragglers=[SLOW]), job(outer="an outer step every 8 steps"))
    assert row(found.rows, "slowest rank")[1:3] == ("rank 3 (h2), 14.2 ms in each step", "none stands out")
    assert row(found.rows, "outer steps")[1:3] == ("none", "an outer step every 8 steps")


def test_a_job_is_described_in_a_harmless_line() -> None:
    failed = job(command="train\x1b[2J.py", state="failed", message="rank 1 failed\nat once")
    assert described(job()) == "train.py, 2 ranks on 2 hosts, ended"
    assert described(failed).isprintable()
    assert described(failed).endswith("2 ranks on 2 hosts, failed: rank 1 failed\\nat once")
