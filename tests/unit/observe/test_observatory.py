"""The view of a job, from its ranks' and hosts' reports: a snapshot, updates, and nothing that grows for ever."""

from __future__ import annotations

import itertools
import json
import math
import threading
import tracemalloc
from typing import Any

import msgspec
import pytest

from hvdgloo._observe import observatory as observatory_module
from hvdgloo._observe import view
from hvdgloo._observe.observatory import Observatory, Subscription
from hvdgloo._observe.samples import (
    CODEC,
    Early,
    Flow,
    HostSample,
    Missing,
    Note,
    OuterSteps,
    Plane,
    Progress,
    Sample,
    Saves,
    Steps,
)
from tests.support.observed import EVIL, MIB, SimulatedJob
from tests.support.threads import Task

DEADLINE = 30.0


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def watched(clock: Clock | None = None, **more: Any) -> Observatory:
    clock = clock or Clock()
    return Observatory(job="j", command="hvdgloo-run", started=clock.now, versions={}, clock=clock, **more)


def sample(rank: int = 0, size: int = 2, at: float = 1000.0, **more: Any) -> Sample:
    return Sample(**{"rank": rank, "size": size, "epoch": 0, "pid": 7, "at": at, **more})


def state(snapshot: view.Snapshot, rank: int) -> str:
    return view.STATES[snapshot.ranks.state[snapshot.ranks.rank.index(rank)]]


def kinds(snapshot: view.Snapshot) -> list[str]:
    return [event.kind for event in snapshot.events]


class Reader:
    """Does what the page does: takes a snapshot, and applies updates to it."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.snapshots = self.updates = 0
        self.seen: dict[str, Any] = {}

    def read(self) -> None:
        while True:
            value = self.subscription.next()
            if value is None:
                return
            data = json.loads(view.encode(value))
            if isinstance(value, view.Snapshot):
                self.snapshots += 1
                self.seen = data
            else:
                self.updates += 1
                self._apply(data)

    def _apply(self, data: dict[str, Any]) -> None:
        seen = self.seen
        for name in (
            "job",
            "hosts",
            "planes",
            "stragglers",
            "waits",
            "early",
            "marks",
            "settings",
            "changed",
            "units",
            "output",
        ):
            if data.get(name) is not None:
                seen[name] = data[name]
        seen["events"] = (seen["events"] + (data.get("events") or []))[-500:]
        rows = {row[0]: row for row in zip(*seen["ranks"].values(), strict=True)}
        for row in zip(*(data.get("ranks") or seen["ranks"]).values(), strict=True):
            rows[row[0]] = row
        for rank in data.get("gone") or []:
            del rows[rank]
        ordered = [rows[rank] for rank in sorted(rows)]
        seen["ranks"] = {name: [row[i] for row in ordered] for i, name in enumerate(seen["ranks"])}
        self._curves(seen["series"], data["series"])
        self._heat(seen["heat"], data["heat"])

    def _curves(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        if old["width"] != new["width"]:
            self.seen["series"] = new
            return
        keep = sum(1 for at in old["at"] if not new["at"] or at < new["at"][0])
        for name in new:
            if isinstance(new[name], list):
                old[name] = old[name][:keep] + new[name]
        for kind in ("bytes_per_second", "logged"):
            old[kind] = {
                name: old[kind].get(name, [None] * keep)[:keep] + new[kind].get(name, [None] * len(new["at"]))
                for name in {**old[kind], **new[kind]}
            }

    def _heat(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        if old["width"] != new["width"]:
            self.seen["heat"] = new
            return
        keep = sum(1 for at in old["at"] if not new["at"] or at < new["at"][0])
        rows = {}
        for rank in sorted({*old["rank"], *new["rank"]}):
            before = dict(zip(old["rank"], old["seconds"], strict=True)).get(rank, [0.0] * keep)[:keep]
            after = dict(zip(new["rank"], new["seconds"], strict=True)).get(rank, [0.0] * len(new["at"]))
            rows[rank] = before + after
        old["at"] = old["at"][:keep] + new["at"]
        old["rank"], old["seconds"] = list(rows), list(rows.values())


JOBS: dict[str, dict[str, Any]] = {
    "usual": {"ranks": 4, "hosts": 2},
    "evil": {"ranks": 6, "hosts": 3, "evil": True, "gpus": True},
    "no rank slow": {"ranks": 3, "hosts": 1, "slow": None},
    "logs": {"ranks": 2, "slow": None, "logs": True},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_reader_that_applies_updates_sees_what_a_snapshot_shows(name: str) -> None:
    job = SimulatedJob(**JOBS[name])
    reader = Reader(job.observatory.subscribe())

    def same() -> None:
        reader.read()
        fresh = json.loads(view.encode(job.observatory.snapshot()))
        for part in fresh:
            assert reader.seen[part] == fresh[part], (name, part)

    same()
    for _ in range(20):
        job.advance()
        same()
    job.advance(600)  # the axes become coarser
    reader.read()
    for _ in range(5):
        job.advance(7)
        same()
    job.stall(1)
    job.advance(12)
    same()
    job.resume()
    job.advance(3)
    job.lose(2)
    job.advance(3)
    same()
    job.shrink()
    job.advance(3)
    same()
    job.observatory.ended(1, "rank 0 failed")
    same()
    assert reader.snapshots == 2  # the first one, and one after it had been away for long
    assert reader.updates > 40


def test_the_job_in_one_look() -> None:
    job = SimulatedJob(4, 2, step=0.1, lag=0.1)
    job.advance(30)
    seen = job.observatory.snapshot()

    assert (seen.job.state, seen.job.size, seen.job.steps, seen.job.now) == ("running", 4, 150, job.now)
    assert seen.job.steps_per_second == 5.0
    assert seen.job.step_seconds == 0.2
    assert seen.job.bytes_per_second == pytest.approx(5 * 25 * MIB * 4, rel=0.01)
    assert seen.job.waiting == pytest.approx(3 / 4 * 0.5, rel=0.01)
    assert seen.job.communicating == pytest.approx(0.2, rel=0.01)
    assert seen.job.computing + seen.job.waiting + seen.job.communicating == pytest.approx(1.0, abs=0.001)
    assert [(host.name, host.state, host.cores) for host in seen.hosts] == [("h1", "up", 16), ("h2", "up", 16)]
    assert seen.hosts[0].received == pytest.approx(5 * 25 * MIB, rel=0.01)
    assert seen.hosts[1].stolen == 0.12
    assert (seen.ranks.rank, seen.ranks.host, seen.ranks.local_rank) == ([0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1])
    assert [state(seen, rank) for rank in range(4)] == ["waiting", "waiting", "waiting", "computing"]
    assert seen.ranks.waiting == [0.5, 0.5, 0.5, 0.0]
    assert [(plane.name, plane.why, plane.ranks) for plane in seen.planes] == [
        ("gloo", "hosts h1 and h2", 4),
        ("agreement", "small tensors travel with the negotiation", 4),
    ]
    assert seen.settings == {"params.fusion_threshold_mb": 32.0, "params.cycle_time_ms": 0.0}
    assert seen.stragglers[0].rank == 3
    assert sum(seen.waits) == 150


def test_a_plane_shows_in_how_many_bytes_tensors_crossed_between_hosts_and_the_greatest_error() -> None:
    observatory = watched()
    for rank, wire_error in ((0, 0.0064), (1, 0.0091)):
        flows = [Flow("gloo", 0, 4, 1000, 1.0, 254, wire_error, "int8"), Flow("shm", 1, 4, 1000, 1.0)]
        observatory.observe("h", sample(rank, flows=flows))
    observatory.tick()
    planes = {plane.name: plane.crossed for plane in observatory.snapshot().planes}
    assert planes == {"gloo": "between hosts: 25 % of the bytes (int8), error 0.91 %", "shm": ""}


def test_with_steps_it_is_bytes_a_step() -> None:
    observatory = watched()
    for rank in range(2):
        flow = Flow("gloo", 0, 4, 1_020_000_000, 1.0, 259_000_000, 0.009, "int8")
        observatory.observe("h", sample(rank, flows=[flow], steps=Steps(10, 9.0)))
    observatory.tick()
    (plane,) = observatory.snapshot().planes
    assert plane.crossed == "between hosts: 25.9 MB a step instead of 102 MB (int8), error 0.9 %"


def test_outer_steps_are_marked_by_the_launcher_s_clock() -> None:
    clock = Clock(2000.0)
    observatory = watched(clock)
    subscription = observatory.subscribe()
    for count in (1, 1, 2):  # the second sample has nothing new
        clock.now += 1.0
        outer = OuterSteps(count, 10 * count, 0.1, 8, ended=500.0 + count)
        observatory.observe("h", sample(at=500.0 + count + 0.25, steps=Steps(33, 20.0), outer=outer))
        observatory.tick()
    assert observatory.snapshot().marks == [view.Mark(2000.75, "outer step"), view.Mark(2002.75, "outer step")]
    reader = Reader(subscription)
    reader.read()
    assert [mark["at"] for mark in reader.seen["marks"]] == [2000.75, 2002.75]


def test_what_was_logged_first_is_told_by_the_launcher_s_clock() -> None:
    clock = Clock(2000.0)
    observatory = watched(clock)
    early = Early([498.5, math.inf, 500.0], [{"loss": 2.0}, {"loss": 1.5}, {"loss": math.nan, "forged": 1.0}])
    clock.now = 2001.0
    observatory.observe("h", sample(at=500.5, logged=[("loss", 1.0)], early=early))
    another = Early([501.0], [{"loss": 7.0}])
    observatory.observe("h", sample(at=501.0, pid=8, logged=[("loss", 1.0)], early=another))  # rank 0 of another epoch
    observatory.tick()
    assert observatory.snapshot().early == view.Early([1999.0, 2000.5], {"loss": [2.0, None]})


def test_commits_and_checkpoints_of_rank_0_are_marked() -> None:
    clock = Clock(2000.0)
    observatory = watched(clock)
    for second, commits in enumerate((0, 1, 1, 4)):
        clock.now = 2000.0 + second
        saves = [Saves("commit", commits, clock.now - 0.5)] if commits else []
        observatory.observe("h", sample(at=clock.now, saves=[*saves, Saves("of another version", 1, clock.now)]))
    observatory.observe("h", sample(at=clock.now, saves=[*saves, Saves("checkpoint", 1, clock.now)]))
    observatory.tick()
    assert observatory.snapshot().marks == [
        view.Mark(2000.5, "commit"), view.Mark(2002.5, "commit", 3), view.Mark(2003.0, "checkpoint"),
    ]  # fmt: skip


def test_outer_steps_are_a_sentence_and_metrics() -> None:
    observatory = watched()
    for rank in range(2):
        outer = OuterSteps(4, 408_000_000, 0.3 + 0.6 * rank, 8, ended=997.0 + rank)
        observatory.observe("h", sample(rank, at=1000.0, steps=Steps(33, 20.0), outer=outer))
    observatory.tick()
    assert observatory.snapshot().job.outer == (
        "an outer step every 8 steps, 102 MB each, the last 2 s ago, 3 % of the time"
    )
    observatory.ended(0)
    observatory.tick()
    assert observatory.snapshot().job.outer == "an outer step every 8 steps, 102 MB each, 3 % of the time"
    metrics = pytest.importorskip("hvdgloo._observe.metrics").text(observatory)[0].decode()
    assert 'hvdgloo_outer_steps_total{host="h",rank="1"} 4.0' in metrics
    assert 'hvdgloo_outer_step_bytes_total{host="h",rank="1"} 4.08e+08' in metrics
    assert 'hvdgloo_outer_step_seconds_total{host="h",rank="0"} 0.3' in metrics
    assert 'hvdgloo_outer_step_last_timestamp_seconds{host="h",rank="0"} 997.0' in metrics


def test_there_are_curves_of_the_job_and_of_each_rank() -> None:
    job = SimulatedJob(4, 2, step=0.1, lag=0.1)
    job.advance(30)
    seen = job.observatory.snapshot()
    rank_3 = job.observatory.series(3)

    assert len(seen.series.at) == len(rank_3.at) == 31
    assert seen.series.steps_per_second[-1] == rank_3.steps_per_second[-1] == 5.0
    assert seen.series.waiting[-1] == pytest.approx(0.075, rel=0.01)
    assert rank_3.waiting[-1] == 0.0
    assert rank_3.computing[-1] == pytest.approx(0.16, rel=0.01)
    assert set(seen.series.bytes_per_second) == {"gloo", "agreement"}
    assert seen.series.bytes_per_second["gloo"][-1] == pytest.approx(
        4 * (rank_3.bytes_per_second["gloo"][-1] or 0), rel=0.01
    )
    assert seen.series.memory[-1] == pytest.approx(4 * (rank_3.memory[-1] or 0), rel=0.01)
    with pytest.raises(KeyError):
        job.observatory.series(4)


def test_the_heat_map_shows_who_made_others_wait_and_when() -> None:
    job = SimulatedJob(4, 2, slow=1, lag=0.05)
    job.advance(20)
    job.slow = 2
    job.advance(20)
    heat = job.observatory.snapshot().heat
    rows = dict(zip(heat.rank, heat.seconds, strict=True))

    assert sum(rows[1][:20]) > 5 * sum(rows[1][21:]) > 0
    assert sum(rows[2][21:]) > 5 * sum(rows[2][:20])
    assert sum(map(sum, heat.seconds)) == pytest.approx(40 * 7 * 0.05, rel=0.15)


def test_a_stall_names_the_rank_that_all_others_wait_for_and_shows_its_stack() -> None:
    job = SimulatedJob(4, 2, slow=None)
    job.advance(5)
    job.stall(2, stack='File "train.py", line 7, in forward')
    job.advance(15)
    seen = job.observatory.snapshot()

    assert [state(seen, rank) for rank in range(4)] == ["waiting", "waiting", "stalled", "waiting"]
    assert seen.ranks.detail[0] == "waits for rank 2 (h2): fc.weight"
    assert seen.ranks.detail[2] == "others have waited for it for 15 s: fc.weight"
    assert [(event.kind, event.rank, event.more) for event in seen.events] == [
        ("stall", -1, ""),
        ("stall", 2, 'File "train.py", line 7, in forward'),
    ]
    assert seen.job.steps_per_second == 0.0

    job.resume()
    job.advance(5)
    seen = job.observatory.snapshot()
    assert kinds(seen)[-1] == "stall ended"
    assert state(seen, 2) == "computing"
    assert seen.job.steps_per_second > 0


def test_a_stall_s_report_is_about_the_rank_that_is_missing_and_its_stack_is_told_once() -> None:
    observatory = watched()
    observatory.observe("h", sample(1))
    stack = 'File "train.py", line 7, in forward\n  time.sleep(16)'
    waits = (Missing("x", 2.0, (1,), 1),)
    observatory.observe("h", sample(0, missing=waits))
    indented = stack.replace("\n", "\n    ")
    report = f"Stalled: some ranks wait.\n  x: missing on rank 1\n    {indented}"
    observatory.observe("h", Note(0, 1000.0, "stall", report))
    observatory.observe("h", sample(0, missing=waits, stacks=((1, stack),)))
    observatory.observe("h", sample(0, missing=waits, stacks=((1, "elsewhere"),)))
    observatory.observe("h", Note(0, 1000.0, "stall ended", "it was submitted"))
    observatory.observe("h", sample(0, missing=(Missing("x", 2.0, (1, 0), 2),)))
    observatory.observe("h", Note(0, 1000.0, "stall", "Stalled again."))
    observatory.tick()

    assert [(event.kind, event.rank, event.text) for event in observatory.snapshot().events] == [
        ("stall", 1, "Stalled: some ranks wait."),
        ("stall", 1, "what rank 1 (h) is doing: its Python stacks"),
        ("stall ended", -1, "it was submitted"),
        ("stall", -1, "Stalled again."),
    ]
    assert observatory.snapshot().events[1].more == "elsewhere"


def test_how_long_others_have_waited_goes_on_between_samples() -> None:
    clock = Clock()
    observatory = watched(clock)
    waits = (Missing("x", 8.0, (1,), 1),)
    observatory.observe("h", sample(0, doing="waiting", pending="x", missing=waits))
    observatory.observe("h", sample(1, doing="computing"))
    observatory.tick()
    assert state(observatory.snapshot(), 1) == "computing"
    clock.now += 4.0
    observatory.tick()
    seen = observatory.snapshot()

    assert state(seen, 1) == "stalled"
    assert seen.ranks.detail[1] == "others have waited for it for 12 s: x"


@pytest.mark.parametrize(
    ("missing", "detail"),
    [
        ((1,), "waits for rank 1 (h1): x"),
        ((1, 2), "waits for rank 1 (h1) and rank 2 (h2): x"),
        ((1, 2, 3), "waits for rank 1 (h1), rank 2 (h2) and rank 3 (h2): x"),
        ((), "waits for x"),
        ((1, 2, 3, 1, 2), "waits for 5 ranks: x"),
    ],
)
def test_for_whom_a_rank_waits_is_said_in_words(missing: tuple[int, ...], detail: str) -> None:
    observatory = watched()
    observatory.placed(0, [(rank, f"h{1 + rank // 2}", 0, 0) for rank in range(4)])
    waits = (Missing("x", 2.0, missing, len(missing)),)
    observatory.observe("h1", sample(size=4, doing="waiting", pending="x", missing=waits))
    observatory.tick()

    assert observatory.snapshot().ranks.detail[0] == detail


def test_a_lost_host_takes_its_ranks_with_it() -> None:
    job = SimulatedJob(4, 2)
    job.advance(3)
    job.observatory.host("h2", "lost")
    job.observatory.host("h2", "lost")
    job.observatory.tick()
    seen = job.observatory.snapshot()

    assert [host.state for host in seen.hosts] == ["up", "lost"]
    assert [state(seen, rank) for rank in range(4)] == ["computing", "computing", "lost", "lost"]
    assert seen.ranks.detail[3] == "host h2 is lost"
    assert [event.text for event in seen.events if event.kind == "host"] == ["host h2 is lost"]


def test_a_killed_rank_is_shown_with_its_reason_and_as_an_event() -> None:
    job = SimulatedJob(4, 2)
    job.advance(3)
    job.lose(3)
    job.observatory.worker(3, "failed", "was killed by SIGKILL")
    job.observatory.worker(1, "lost")
    job.advance(2)
    seen = job.observatory.snapshot()

    assert state(seen, 3) == "failed"
    assert seen.ranks.detail[3] == "was killed by SIGKILL"
    assert [(event.rank, event.text) for event in seen.events if event.kind == "failure"] == [
        (3, "rank 3 (h2) was killed by SIGKILL"),
        (1, "rank 1 (h1) is lost"),
    ]
    assert seen.ranks.detail[0] == "waits for fc.weight"


def test_an_elastic_job_goes_on_with_other_ranks() -> None:
    job = SimulatedJob(4, 2, slow=None)
    job.advance(10)
    job.lose(1)
    job.advance(5)
    job.shrink()
    job.advance(10)
    seen = job.observatory.snapshot()

    assert (seen.job.size, seen.job.epoch, seen.ranks.rank) == (3, 1, [0, 1, 2])
    assert "elastic" in kinds(seen)
    assert all(state(seen, rank) == "computing" for rank in range(3))
    assert seen.job.steps == 200  # 10 s and 10 s of 10 each; no rank made any in between


def test_steps_of_an_elastic_job_do_not_begin_again_with_its_newcomers() -> None:
    observatory = watched(least=1, most=4)
    observatory.placed(0, [(0, "h", 0, 7), (1, "h", 1, 8)])
    observatory.observe("h", sample(0, steps=Steps(count=500, seconds=50.0)))
    observatory.observe("h", sample(1, pid=8, steps=Steps(count=3, seconds=0.2)))
    observatory.tick()
    seen = observatory.snapshot().job

    assert (seen.steps, seen.least, seen.most) == (500, 1, 4)
    observatory.placed(1, [(0, "h", 1, 8)])
    observatory.observe("h", sample(0, epoch=1, size=1, pid=8, steps=Steps(count=4, seconds=0.3)))
    observatory.tick()
    assert observatory.snapshot().job.steps == 500


def test_what_a_former_epoch_says_is_not_heard() -> None:
    observatory = watched()
    observatory.placed(3, [(0, "h", 0, 0), (1, "h", 1, 0)])
    observatory.observe("h", sample(0, epoch=2, operations=5))
    observatory.tick()

    assert observatory.snapshot().ranks.operations == [0, 0]


def test_a_host_is_heard_only_about_its_own_ranks() -> None:
    observatory = watched()
    observatory.placed(0, [(0, "h1", 0, 0), (1, "h2", 0, 0)])
    observatory.observe("h2", sample(0, operations=5))
    observatory.observe("h2", sample(2, size=3, operations=5))
    observatory.observe("h3", HostSample(at=1000.0, cores=4, cpu=0.5))
    observatory.observe("h2", Note(0, 1000.0, "warning", "I am rank 0"))
    observatory.observe("h2", Note(1, 1000.0, "warning", "I am rank 1"))
    observatory.tick()
    seen = observatory.snapshot()

    assert seen.ranks.operations == [0, 0]
    assert [host.name for host in seen.hosts] == ["h1", "h2"]
    assert [event.text for event in seen.events] == ["I am rank 1"]


def test_without_a_launcher_ranks_say_themselves_where_they_are() -> None:
    observatory = watched()
    for rank in range(4):
        observatory.observe(f"h{1 + rank // 2}", sample(rank, 4, pid=100 + rank))
    observatory.tick()
    seen = observatory.snapshot()

    assert (seen.job.state, seen.job.size) == ("running", 4)
    assert (seen.ranks.rank, seen.ranks.host, seen.ranks.local_rank) == ([0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1])
    assert seen.ranks.pid == [100, 101, 102, 103]

    observatory.observe("h1", sample(0, 2, epoch=1, pid=100))
    observatory.tick()
    seen = observatory.snapshot()
    assert (seen.job.size, seen.job.epoch, seen.ranks.rank) == (2, 1, [0, 1])


@pytest.mark.parametrize(
    "said",
    [
        sample(5, 2),
        sample(0, 10**9),
        sample(at=math.nan),
        sample(at=math.inf),
        HostSample(at=math.nan, cores=1, cpu=math.nan),
        sample(doing="<script>", steps=Steps(5, math.nan, math.inf, -1.0, math.nan), cpu_seconds=math.nan),
        sample(planes=tuple(Plane(f"p{n}", 0, "cpu", "x" * 10_000) for n in range(5000))),
        HostSample(at=1.0, cores=0, cpu=math.inf, memory=5, memory_total=0),
    ],
    ids=["rank beyond size", "size", "nan", "inf", "host nan", "odd steps", "planes", "host"],
)
def test_what_a_hostile_process_says_does_no_harm(said: Any) -> None:
    clock = Clock()
    observatory = watched(clock)
    observatory.observe("h", sample(1))
    for second in range(4):
        clock.now += 1.0
        if math.isfinite(said.at):
            said = msgspec.structs.replace(said, at=clock.now + second)
        observatory.observe("h", CODEC.decode(CODEC.encode(said)))
        observatory.tick()
    data = view.encode(observatory.snapshot())

    assert len(data) < 256 * 1024
    assert (
        b"null" not in data.replace(b'"exit_code":null,', b"").replace(b'"least":null,"most":null,', b"")
        or (json.loads(data)["series"]["at"])
    )
    ranks = json.loads(data)["ranks"]
    assert all(value is not None for column in ranks.values() for value in column)
    assert len(json.loads(data)["ranks"]["rank"]) <= 2


def test_names_with_markup_stay_what_they_are() -> None:
    job = SimulatedJob(6, 3, evil=True)
    job.advance(20)
    job.stall(1)
    job.advance(15)
    seen = json.loads(view.encode(job.observatory.snapshot()))

    assert {host["name"] for host in seen["hosts"]} == {f"{EVIL[n]}{n}" for n in range(3)}
    assert EVIL[0] in seen["ranks"]["detail"][0]
    assert any(EVIL[1] in line.text for line in job.observatory.lines())


def test_long_texts_are_cut() -> None:
    observatory = watched()
    observatory.placed(0, [(0, "h", 0, 0)])
    observatory.event("warning", "x" * 10**6, more="y" * 10**6)
    observatory.worker(0, "failed", "z" * 10**6)
    observatory.ended(1, "w" * 10**6)

    assert len(view.encode(observatory.snapshot())) < 64 * 1024


def test_a_note_of_several_lines_is_an_event_with_more_to_it() -> None:
    observatory = watched()
    observatory.observe("h", sample(0))
    observatory.observe("h", Note(0, 1000.0, "stall", "ranks 1 are late\n  rank 1: in forward\n  rank 1: in sleep"))
    observatory.observe("h", Note(0, 1000.0, "no such kind", "hm"))
    observatory.observe("h", Note(0, 1000.0, "tuning", "autotune: this is faster"))
    observatory.tick()

    assert [(event.number, event.kind, event.text, event.more) for event in observatory.snapshot().events] == [
        (1, "stall", "ranks 1 are late", "  rank 1: in forward\n  rank 1: in sleep"),
        (2, "warning", "hm", ""),
        (3, "tuning", "autotune: this is faster", ""),
    ]


def test_only_the_last_500_events_are_kept() -> None:
    observatory = watched()
    for number in range(1200):
        observatory.event("warning", str(number))
    observatory.tick()
    events = observatory.snapshot().events

    assert [event.number for event in events] == list(range(701, 1201))


def test_rates_go_to_zero_when_a_rank_falls_silent() -> None:
    job = SimulatedJob(2, 1, slow=None)
    job.advance(10)
    assert job.observatory.snapshot().job.bytes_per_second > 0
    for _ in range(10):
        job.now += 1.0
        job.observatory.tick()
    seen = job.observatory.snapshot()

    assert (seen.job.steps_per_second, seen.job.bytes_per_second, seen.ranks.cpu) == (0.0, 0.0, [0.0, 0.0])
    assert seen.job.step_seconds == 0.1


def test_long_steps_have_a_rate_between_their_ends() -> None:
    clock = Clock()
    observatory = watched(clock)
    for second in range(60):
        clock.now += 1.0
        done = second // 10
        steps = Steps(count=done, seconds=10.0 * max(0, done - 1), waiting=4.0 * max(0, done - 1))
        observatory.observe("h", sample(size=1, at=clock.now, steps=steps, operations=second))
        observatory.tick()
        if second >= 20:
            seen = observatory.snapshot().job
            assert (seen.steps_per_second, seen.step_seconds, seen.waiting) == (0.1, 10.0, 0.4)


def test_totals_that_begin_again_are_another_process() -> None:
    clock = Clock()
    observatory = watched(clock)
    for pid, operations in ((7, 1000), (7, 2000), (9, 10), (9, 20)):
        clock.now += 1.0
        observatory.observe("h", sample(size=1, pid=pid, at=clock.now, operations=operations, bytes=operations * 100))
        observatory.tick()

    seen = observatory.snapshot()
    assert seen.job.bytes_per_second == 1000.0
    assert min(value for value in seen.series.bytes_per_second.get("gloo", [0.0]) if value is not None) >= 0


def test_a_stopped_job_keeps_what_was_seen_of_it() -> None:
    job = SimulatedJob(4, 2)
    job.advance(60)
    before = job.observatory.snapshot()
    job.observatory.output(0, 2, b"Killed")
    for rank in range(4):
        job.observatory.worker(rank, "ended")
    job.advance(2)
    job.observatory.ended(0, "")
    seen = job.observatory.snapshot()

    assert (seen.job.state, seen.job.exit_code) == ("ended", 0)
    assert [straggler.rank for straggler in seen.stragglers] == [3]
    assert seen.job.step_seconds == before.job.step_seconds
    assert seen.job.waiting == before.job.waiting
    assert {state(seen, rank) for rank in range(4)} == {"ended"}
    assert kinds(seen)[-1] == "state"
    assert "Killed" in [line.text for line in job.observatory.lines(0)]


def test_what_is_said_of_a_job_that_is_over_are_the_means_of_all_its_time() -> None:
    job = SimulatedJob(4, 2, slow=None, step=0.1)
    job.advance(20)
    job.step = 0.2
    job.advance(20)
    assert job.observatory.snapshot().job.step_seconds == 0.2
    job.observatory.ended(0)
    curve = job.observatory.snapshot().series.step_seconds
    seen = job.observatory.snapshot()

    # 200 steps of 0.1 s, of which the first one's length is not known, and 100 of 0.2 s
    assert seen.job.step_seconds == pytest.approx(40.0 / 299, rel=0.01)
    assert seen.job.steps_per_second == pytest.approx(299 / 40.0, rel=0.01)
    assert seen.job.bytes_per_second == pytest.approx(4 * 25 * MIB * 290 / 39, rel=0.01)
    assert seen.ranks.step_seconds == [seen.job.step_seconds] * 4
    assert curve[-1] == 0.2
    assert job.observatory._model.still


def test_the_last_words_of_ranks_count_though_they_have_ended() -> None:
    job = SimulatedJob(4, 2)
    job.advance(40)
    job.advance(20, tick=False)
    for rank in range(4):
        job.observatory.worker(rank, "ended")
    job.observatory.ended(0)
    (straggler,) = job.observatory.snapshot().stragglers

    assert (straggler.rank, straggler.of) == (3, 540)


def test_a_straggler_is_no_event_before_it_has_made_fifty_steps_last() -> None:
    job = SimulatedJob(4, 2)
    job.advance(5)
    assert [straggler.rank for straggler in job.observatory.snapshot().stragglers] == [3]
    assert kinds(job.observatory.snapshot()) == []
    job.advance(30)
    assert kinds(job.observatory.snapshot()) == ["straggler"]


def test_a_failed_job_says_why() -> None:
    job = SimulatedJob(2, 1, slow=None)
    job.advance(2)
    job.observatory.ended(9, "rank 1 (h1) was killed by SIGKILL")
    seen = job.observatory.snapshot().job

    assert (seen.state, seen.exit_code, seen.message) == ("failed", 9, "rank 1 (h1) was killed by SIGKILL")


def test_a_program_that_counts_nothing_runs_all_the_same() -> None:
    observatory = watched()
    observatory.placed(0, [(0, "h", 0, 0)])
    observatory.worker(0, "running")
    observatory.tick()
    seen = observatory.snapshot()

    assert seen.job.state == "running"
    assert (seen.job.step_seconds, seen.series.steps_per_second) == (0.0, [])


# Readers.


def test_all_readers_get_the_same_update_and_one_that_is_far_behind_a_snapshot() -> None:
    job = SimulatedJob(2, 1, slow=1)
    job.advance(2)
    one, two, slow = (job.observatory.subscribe() for _ in range(3))
    for reader in (one, two, slow):
        assert isinstance(reader.next(), view.Snapshot)
        assert reader.next() is None
    job.advance()
    update = one.next()
    assert isinstance(update, view.Update)
    assert two.next() is update
    job.advance(200)

    assert isinstance(slow.next(), view.Snapshot)
    assert slow.next() is None
    assert slow.revision == job.observatory.revision


def test_a_reader_goes_on_where_it_was() -> None:
    job = SimulatedJob(2, 1, slow=1)
    job.advance(5)
    known = job.observatory.revision
    job.advance(3)
    again = job.observatory.subscribe(known)

    assert [type(again.next()) for _ in range(4)] == [view.Update, view.Update, view.Update, type(None)]
    assert isinstance(job.observatory.subscribe(10**6).next(), view.Snapshot)
    assert isinstance(job.observatory.subscribe(-5).next(), view.Update | view.Snapshot)


def test_a_reader_waits_no_longer_than_until_there_is_something_new() -> None:
    observatory = watched()
    reader = observatory.subscribe()
    reader.next()
    waiting = Task(lambda: reader.next(DEADLINE))
    observatory.event("warning", "x")
    observatory.tick()
    assert type(waiting.result(DEADLINE)) is view.Update


def test_its_own_thread_tells_what_comes_in_and_sleeps_while_nothing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observatory_module, "_TICK", 0.05)
    ticks = itertools.count()
    ticked = threading.Event()

    class Counted(Observatory):
        def tick(self) -> None:
            super().tick()
            next(ticks)
            ticked.set()

    observatory = Counted(job="j", command="c", started=0.0, versions={})
    with observatory:
        reader = observatory.subscribe()
        reader.next()
        observatory.event("warning", "x")
        assert isinstance(reader.next(DEADLINE), view.Update)
        assert ticked.wait(DEADLINE)
        assert observatory._model.still  # so the thread waits without a deadline
        observatory.event("warning", "y")
        update = reader.next(DEADLINE)
        assert isinstance(update, view.Update)
        assert [event.text for event in update.events or ()] == ["y"]
    assert observatory._thread is None
    assert next(ticks) <= 4


def test_closing_ends_a_reader_that_waits() -> None:
    observatory = watched()
    observatory.start()
    reader = observatory.subscribe()
    first = reader.next()
    got: list[object] = [first]

    def read() -> None:
        while got[-1] is not None:
            got.append(reader.next(DEADLINE * 4))

    thread = threading.Thread(target=read)
    thread.start()
    observatory.close()
    thread.join(DEADLINE)

    assert not thread.is_alive()
    assert observatory.snapshot().job.id == "j"


# Bounds.


def test_days_of_a_job_take_no_more_memory_than_its_first_hour() -> None:
    job = SimulatedJob(4, 2)
    job.advance(600)
    tracemalloc.start()
    try:
        job.advance(20)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(60):  # leaps of 100 minutes, with a second of activity after each
            job.now += 6000.0
            job.advance()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    seen = job.observatory.snapshot()

    assert seen.series.at[-1] - seen.series.at[0] > 4 * 24 * 3600
    assert len(seen.series.at) <= 512
    assert after - before < 2 * MIB


@pytest.mark.extended
def test_a_thousand_ranks_take_a_bounded_amount_of_memory() -> None:
    tracemalloc.start()
    try:
        job = SimulatedJob(1024, 128, slow=700)
        job.advance(2)
        first, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for rank in job.observatory._model._ranks.values():
        rank.recording.hold(job.now + 10_000)  # as after some hours: the longest curves that there can be
    sizes = [
        len(curve) * curve.itemsize
        for rank in job.observatory._model._ranks.values()
        for curve in rank.recording._curves.values()
    ]
    job.advance(1)
    seen = job.observatory.snapshot()

    assert len(seen.ranks.rank) == 1024
    assert first < 100 * MIB
    assert sum(sizes) < 32 * MIB
    assert len(view.encode(seen)) < 2 * MIB


@pytest.mark.parametrize("exit_code", [0, 1])
def test_curves_end_where_the_job_ends_and_do_not_fall_before(exit_code: int) -> None:
    job = SimulatedJob()
    job.advance(20)
    before = job.observatory.snapshot().series
    job.finish(exit_code)
    after = job.observatory.snapshot().series
    assert after == before
    assert min(value for value in after.steps_per_second if value is not None) > 5
    assert state(job.observatory.snapshot(), 2) == "ended"


def test_a_second_without_a_tick_makes_no_hole_in_the_curves() -> None:
    clock = Clock()
    seen = watched(clock)
    for number, passed in enumerate((0.9, 1.95, 2.99, 4.01, 5.05, 6.1)):
        clock.now = 1000.0 + passed
        steps = Steps(count=10 * number + 10, seconds=number + 0.9)
        seen.observe("h1", sample(0, size=1, at=clock.now, steps=steps))
        seen.tick()
    series = seen.snapshot().series
    assert series.at == [1000.0 + second for second in range(7)]
    assert None not in series.steps_per_second
    assert None not in series.memory
    assert None not in seen.series(0).steps_per_second


def test_curves_end_with_the_first_rank_that_fails_unless_the_job_is_elastic() -> None:
    for least, ends in ((None, True), (1, False)):
        clock = Clock()
        seen = watched(clock, least=least)
        seen.placed(0, [(0, "h1", 0, 7), (1, "h1", 1, 8)])
        for second in range(5):
            clock.now += 1
            for rank in range(2):
                steps = Steps(count=10 * second + 10, seconds=second + 0.9)
                seen.observe("h1", sample(rank, at=clock.now, pid=7 + rank, steps=steps))
            seen.tick()
        seen.worker(1, "failed", "exited with status 1")
        length = len(seen.snapshot().series.at)
        for _ in range(6):
            clock.now += 1
            seen.observe("h1", sample(0, at=clock.now, pid=7, steps=Steps(count=50, seconds=4.9), doing="waiting"))
            seen.tick()
        curve = seen.snapshot().series.steps_per_second
        assert (len(curve) == length) == ends
        assert (curve[-1] == 0.0) == (not ends)


def test_of_a_job_of_a_second_there_are_still_its_steps_and_their_time() -> None:
    clock = Clock()
    seen = watched(clock)
    seen.placed(0, [(0, "h1", 0, 7), (1, "h1", 1, 8)])
    clock.now += 1.2
    for rank in range(2):
        steps = Steps(count=41, seconds=0.8, waiting=0.2)
        seen.observe("h1", sample(rank, at=clock.now, pid=7 + rank, steps=steps, doing="ended"))
        seen.worker(rank, "ended")
    seen.ended(0)
    found = seen.snapshot()
    assert (found.job.steps, found.job.step_seconds, found.job.waiting) == (41, 0.02, 0.25)
    assert found.job.steps_per_second == 50
    assert found.ranks.step_seconds == [0.02, 0.02]
    assert found.series.at == []


def test_what_ranks_wait_for_is_known_while_one_of_them_has_waited_for_long() -> None:
    clock = Clock()
    observatory = watched(clock)
    observatory.observe("h1", sample(0, doing="waiting", pending="val_loss", pending_seconds=1.0))
    observatory.observe("h1", sample(1, doing="computing", pending="next", pending_seconds=9.0))
    assert observatory.waiting(5.0) == {}, "one waits for a second, and the other is busy"
    clock.now += 4.5
    assert observatory.subscribe().waiting(5.0) == {0: "val_loss", 1: ""}
    observatory.observe("h1", sample(1, at=1004.5, doing="waiting", pending="next", pending_seconds=13.5))
    assert observatory.waiting(5.0) == {0: "val_loss", 1: "next"}
    observatory.worker(1, "failed", "exited with status 1")
    assert observatory.waiting(5.0) == {0: "val_loss"}
    observatory.observe("h1", sample(0, at=1005.0, operations=1))
    assert observatory.waiting(5.0) == {}


def test_any_text_from_outside_can_be_read_as_json_by_every_reader() -> None:
    """Python keeps bytes of paths, names and arguments that are not UTF-8 in a form that JSON cannot have."""
    odd = "x\udcff\ud800"
    observatory = Observatory(job="j", command=odd, started=1000.0, versions={"torch": odd}, clock=Clock())
    observatory.placed(0, [(0, odd, 0, 7)])
    observatory.starting(odd)
    observatory.event("warning", odd, 0, odd)
    settings = {odd: [odd, {"path": odd}]}
    told = sample(size=1, settings=settings, pending=odd, planes=[Plane(odd, 0, "cpu", odd)], stacks=[(0, odd)])
    for observation in (told, HostSample(1000.0, 2, 0.5), Note(0, 1000.0, "warning", odd)):
        observatory.observe(odd, CODEC.decode(CODEC.encode(observation)))
    observatory.output(0, 1, b"\xff\n")
    observatory.host(odd, "lost")
    observatory.worker(0, "failed", odd)
    observatory.ended(1, odd)

    seen = json.loads(view.encode(observatory.snapshot()))
    spelled = "x\\xff\\ud800"
    assert (seen["job"]["command"], seen["job"]["message"], seen["job"]["versions"]) == (
        spelled,
        spelled,
        {"torch": spelled},
    )
    assert [(host["name"], host["state"]) for host in seen["hosts"]] == [(spelled, "lost")]
    assert seen["settings"] == {spelled: [spelled, {"path": spelled}]}
    assert {event["text"] for event in seen["events"]} > {spelled, f"rank 0 ({spelled}) {spelled}"}
    assert [line.text for line in observatory.lines()] == ["\N{REPLACEMENT CHARACTER}"]


def test_numbers_that_the_program_logs_are_shown_with_their_curves() -> None:
    clock = Clock()
    observatory = watched(clock)
    for step in range(6):
        clock.now += 1
        logged = [("loss", 1.0 / (step + 1)), ("accuracy", 0.5)]
        observatory.observe("h1", sample(0, 2, steps=Steps(count=step), logged=logged))
        observatory.observe("h1", sample(1, 2, logged=[("loss", 77.0)]))  # a rank 1 that claims to be shown
        observatory.tick()
    snapshot = observatory.snapshot()
    assert snapshot.job.logged == {"loss": pytest.approx(1 / 6), "accuracy": 0.5}
    assert snapshot.series.logged["loss"][1:] == [1.0, 0.5, 0.3333, 0.25, 0.2, 0.1667]
    assert snapshot.series.logged["accuracy"][1:] == [0.5] * 6
    assert observatory.series(0).logged == {}

    # What came after the last point, or was one of several values in its second, is where the curve ends.
    observatory.observe("h1", sample(0, 2, steps=Steps(count=7), logged=[("loss", 0.125)]))
    observatory.ended(0)
    assert observatory.snapshot().job.logged["loss"] == 0.125
    assert observatory.snapshot().series.logged["loss"][1:] == [1.0, 0.5, 0.3333, 0.25, 0.2, 0.125]


def test_a_loss_that_is_not_a_number_makes_one_event_and_a_gap() -> None:
    clock = Clock()
    observatory = watched(clock)
    for value in (1.0, math.nan, math.nan, math.inf, 2.0, math.inf):
        clock.now += 1
        observatory.observe("h1", sample(size=1, logged=[("loss", value)], progress=Progress(step=6, epoch=1)))
        observatory.tick()
    snapshot = observatory.snapshot()
    texts = [event.text for event in snapshot.events if event.kind == "warning"]
    assert texts == [
        "loss is not a number (NaN) in epoch 2, step 7",
        "loss is infinite in epoch 2, step 7",
    ]
    assert snapshot.job.logged == {"loss": None}
    assert snapshot.series.logged["loss"][1:] == [1.0, None, None, None, 2.0, None]
    json.loads(view.encode(snapshot))


def test_the_progress_of_a_training_and_what_remains_are_told_until_the_job_is_over() -> None:
    clock = Clock()
    observatory = watched(clock)
    for step in range(31):
        clock.now += 2
        observatory.observe("h1", sample(size=1, steps=Steps(count=step), progress=Progress(step, 100, 0, 2)))
        observatory.tick()
    told = observatory.snapshot().job.progress
    assert told is not None
    assert (told.step, told.steps, told.epoch, told.epochs) == (30, 100, 0, 2)
    assert told.share == 0.155
    assert told.remaining == pytest.approx(2 * (200 - 31))
    observatory.observe("h1", sample(size=1, steps=Steps(count=31)))  # a report without it says nothing about it
    observatory.tick()
    assert observatory.snapshot().job.progress == told
    observatory.ended(1, "out of memory")
    over = observatory.snapshot().job.progress
    assert over is not None
    assert (over.share, over.remaining) == (0.155, None)


def test_a_program_that_logs_ever_new_names_does_not_fill_the_memory() -> None:
    clock = Clock()
    observatory = watched(clock)
    for number in range(0, 500, 10):
        clock.now += 1
        logged = [(f"{n}" * 200, 1.0) for n in range(number, number + 10)]
        observatory.observe("h1", sample(size=1, logged=logged))
        observatory.tick()
    snapshot = observatory.snapshot()
    assert len(snapshot.job.logged) == len(snapshot.series.logged) == 64
    assert max(map(len, snapshot.job.logged)) == 100


def test_a_note_of_the_program_is_an_event() -> None:
    observatory = watched()
    observatory.observe("h1", sample(size=1))
    observatory.observe("h1", Note(0, 1000.0, "note", "saved a checkpoint"))
    observatory.tick()
    assert [(one.kind, one.rank, one.text) for one in observatory.snapshot().events] == [
        ("note", 0, "saved a checkpoint")
    ]


def test_settings_that_differ_from_their_defaults_are_named_with_the_units_of_all() -> None:
    observatory = watched()
    settings = {"params.fusion_threshold_mb": 32.0, "params.cycle_time_ms": 5.0, "params.wire": "int8"}
    observatory.observe("h1", sample(size=1, settings=settings))
    observatory.tick()
    snapshot = observatory.snapshot()
    assert snapshot.changed == ["params.cycle_time_ms", "params.wire"]
    assert [snapshot.units.get(name) for name in settings] == ["MiB", "ms", None]
