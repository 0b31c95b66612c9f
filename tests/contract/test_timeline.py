"""The timeline: a file that is valid at every moment, whose phases enclose each other, and ranks on one clock."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._engine.timeline import Timeline
from hvdgloo._job.context import Context
from hvdgloo._observe.merging import incomplete
from hvdgloo.errors import ConfigError, MismatchError
from hvdgloo.runner.cli import trace_merge as merging
from hvdgloo.runner.cli.main import main
from hvdgloo.types import ReduceOp
from tests.support.frameworks import load
from tests.support.world import MakeWorld, World

Events = list[dict[str, Any]]

frontend_of = load("numpy").frontend


def rows_of(path: Path) -> dict[str, Events]:
    """Events by the name of their row."""
    events: Events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows: dict[str, Events] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M":
            rows[names[event["pid"]]].append(event)
    return rows


def spans(events: Events) -> dict[str, tuple[float, float]]:
    return {event["name"]: (event["ts"], event["ts"] + event.get("dur", 0)) for event in events}


def encloses(outer: tuple[float, float], inner: tuple[float, float]) -> bool:
    slack = 0.002  # microseconds are rounded to three places
    return outer[0] - slack <= inner[0] and inner[1] <= outer[1] + slack


def test_an_operation_is_on_disk_within_a_tenth_of_a_second(world: MakeWorld, tmp_path: Path) -> None:
    """The best of some tries, since the machine may be busy; the first event of a batch waits longest."""

    def rank_body(context: Context) -> None:
        path = tmp_path / f"{context.rank}.json"
        context.start_timeline(str(tmp_path / "{rank}.json"))
        frontend = frontend_of(context)
        seconds: list[float] = []
        for number in range(5):
            name = f"try.{number}"
            frontend.allreduce(np.ones(3), name=name)
            ended = time.monotonic()
            while not rows_of(path).get(f"allreduce.{name}") and time.monotonic() < ended + 5:
                pass
            seconds.append(time.monotonic() - ended)
        assert min(seconds) < 0.1, seconds

    world(1).run(rank_body)


def test_phases_enclose_each_other(world: MakeWorld, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"

    def rank_body(context: Context) -> None:
        context.start_timeline(str(path), mark_cycles=True)
        context.start_timeline(str(tmp_path / "other"))  # one is on already
        frontend = frontend_of(context)
        frontend.barrier()  # or rank 1 could be ahead of the trace
        group = [np.ones((300, 2), np.float32), np.ones(5, np.float32)]
        frontend.grouped_allreduce(group, name="pair", op=ReduceOp.SUM)
        frontend.allreduce(np.ones(100_000), name="large")
        frontend.allgather(np.ones((context.rank + 1, 3)), name="rows")
        frontend.broadcast(np.ones(4), 0, name="root")
        frontend.alltoall(np.ones(2), name="all")
        frontend.reducescatter(np.ones(2), name="part")
        frontend.barrier()
        context.engine.timelines.stop()
        context.engine.timelines.stop()
        frontend.allreduce(np.ones(3), name="after")

    backend = world(2)
    backend.run(rank_body)
    assert not (tmp_path / "other").exists()
    rows = rows_of(path)
    assert "ALLREDUCE" not in spans(rows.get("allreduce.after", []))  # rank 1 may have announced it in time
    plane = {"gloo": "GLOO", "local": "LOCAL"}.get(backend.backend, "SHM")
    for name, collective, nbytes in (
        ("grouped_allreduce.pair[0]", "ALLREDUCE", 2400),
        ("grouped_allreduce.pair[1]", "ALLREDUCE", 20),
        ("allreduce.large", "ALLREDUCE", 800_000),
        ("allgather.rows", "ALLGATHER", 72),
        ("broadcast.root", "BROADCAST", 32),
        ("alltoall.all", "ALLTOALL", 16),
        ("reducescatter.part", "REDUCESCATTER", 16),
    ):
        found = spans(rows[name])
        assert encloses(found[f"NEGOTIATE_{collective}"], found["0"]), name
        assert encloses(found[f"NEGOTIATE_{collective}"], found["1"]), name
        assert found[f"NEGOTIATE_{collective}"][1] <= found[collective][0] + 0.002, name
        for inner in ("QUEUE", f"{plane}_{collective}"):
            assert encloses(found[collective], found[inner]), (name, inner)
        (whole,) = (event for event in rows[name] if event["name"] == collective)
        assert whole["args"]["bytes"] == nbytes
    packed = spans(rows["grouped_allreduce.pair[0]"])
    order = ["QUEUE", "MEMCPY_IN_FUSION_BUFFER", f"{plane}_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    if plane == "SHM":  # which packs nothing
        order = ["QUEUE", f"{plane}_ALLREDUCE"]
    assert [packed[name] for name in order] == sorted(packed[name] for name in order)
    assert any(event["name"] == "CYCLE_START" and event["s"] == "g" for event in rows[""])
    (whole,) = (event for event in rows["grouped_allreduce.pair[0]"] if event["name"] == "ALLREDUCE")
    assert whole["args"] == {"dtype": "float32", "shape": [300, 2], "bytes": 2400}


def test_what_travels_with_the_agreement_is_shown_so(tmp_path: Path) -> None:
    def rank_body(context: Context) -> None:
        context.start_timeline(str(tmp_path / "trace"))
        frontend_of(context).allreduce(np.ones(3), name="tiny")
        context.engine.timelines.stop()

    with World(2, "inline") as made:
        made.run(rank_body)
    found = spans(rows_of(tmp_path / "trace")["allreduce.tiny"])
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "INLINE_ALLREDUCE"} <= set(found)


def test_every_rank_writes_its_own_and_merging_puts_them_on_one_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = [0.0, 2.5]  # seconds that rank 0's clock is ahead of each rank's

    def rank_body(context: Context) -> None:
        context.clock_offset = ahead[context.rank]
        context.start_timeline(str(tmp_path / "trace.{rank}.json"))
        frontend_of(context).allreduce(np.ones(50_000), name="x")
        context.engine.timelines.stop()

    with World(2, "local") as made:
        made.run(rank_body)
    files = [str(tmp_path / f"trace.{rank}.json") for rank in range(2)]
    out = tmp_path / "all.json"
    assert main(["timeline", "merge", str(out), *files]) == 0
    assert "events of 2 ranks; open it in ui.perfetto.dev" in capsys.readouterr().out
    rows = rows_of(out)
    starts = [spans(rows[f"rank {rank} allreduce.x"])["ALLREDUCE"][0] for rank in range(2)]
    # The ranks are threads with one clock, so the second's events land where its offset puts them.
    assert abs(starts[1] - starts[0] - 2.5e6) < 1e6
    assert len({event["pid"] for event in json.loads(out.read_text()) if event["ph"] == "X"}) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["merge", "out"], "write hvdgloo-run timeline merge OUT FILE"),
        (["merge", "--help", "x", "y"], "write hvdgloo-run timeline merge OUT FILE"),
        (["merge", "{dir}/out", "{dir}/absent"], "absent cannot be read: No such file"),
        (["merge", "{dir}/out", "{dir}/bad"], "bad is not a timeline written by hvdgloo"),
        (["merge", "{dir}/out", "{dir}/events"], "events is not a timeline written by hvdgloo"),
        (["merge", "{dir}/no/out", "{dir}/good"], "no/out cannot be written"),
        (
            ["merge", "{dir}/good", "{dir}/good", "{dir}/good"],
            "good is the timeline of rank 0, and would be overwritten",
        ),
    ],
)
def test_merging_says_what_is_wrong(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "bad").write_text("[{}]")
    good = {"name": "process_name", "ph": "M", "pid": 0, "args": {"rank": 0, "start_time_since_epoch_in_micros": 1}}
    good = {**good, "args": {**good["args"], "name": ""}}
    (tmp_path / "good").write_text(json.dumps([good]))
    (tmp_path / "events").write_text(json.dumps([good, {"name": "ALLREDUCE", "ph": "X", "ts": 1.0}]))
    with pytest.raises(ConfigError, match=text):
        merging.main([argument.replace("{dir}", str(tmp_path)) for argument in arguments])
    assert json.loads((tmp_path / "good").read_text()) == [good]


def test_merging_again_replaces_what_was_merged(tmp_path: Path) -> None:
    args = {"name": "", "rank": 0, "start_time_since_epoch_in_micros": 1}
    (tmp_path / "trace").write_text(json.dumps([{"name": "process_name", "ph": "M", "pid": 0, "args": args}]))
    for _ in range(2):
        assert merging.merge([str(tmp_path / "trace")], str(tmp_path / "out")) == 2
        assert "2 events of 1 rank;" in merging.main(["merge", str(tmp_path / "out"), str(tmp_path / "trace")])


def test_merging_holds_one_rank_s_trace_at_a_time(tmp_path: Path) -> None:
    ranks, events = 12, 500
    for rank in range(ranks):
        args = {"name": "", "rank": rank, "start_time_since_epoch_in_micros": 1000 - rank}
        trace = [{"name": "process_name", "ph": "M", "pid": 0, "args": args}]
        trace += [{"name": f"X{n}", "ph": "X", "pid": 0, "ts": float(n), "args": {}} for n in range(events)]
        (tmp_path / f"trace.{rank}").write_text(json.dumps(trace))

    def peak(paths: list[str]) -> int:
        tracemalloc.start()
        try:
            assert merging.merge(paths, str(tmp_path / "out")) == 1 + len(paths) * (events + 1)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    paths = [str(tmp_path / f"trace.{rank}") for rank in range(ranks)]
    of_one = peak(paths[:1])
    assert peak(paths) < 3 * of_one
    merged = json.loads((tmp_path / "out").read_text())
    assert {event["pid"] for event in merged} == set(range(ranks + 1))
    assert [event["ts"] for event in merged if event["name"] == "X0"] == [ranks - 1 - rank for rank in range(ranks)]


def test_a_merge_that_fails_leaves_what_was_merged_before(tmp_path: Path) -> None:
    args = {"name": "", "rank": 0, "start_time_since_epoch_in_micros": 1}
    first = {"name": "process_name", "ph": "M", "pid": 0, "args": args}
    (tmp_path / "good").write_text(json.dumps([first]))
    (tmp_path / "late").write_text(json.dumps([{**first, "args": {**args, "rank": 1}}, {"name": "no pid"}]))
    (tmp_path / "out").write_text("before")
    with pytest.raises(ConfigError, match="late is not a timeline"):
        merging.merge([str(tmp_path / "good"), str(tmp_path / "late")], str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["good", "late", "out"]


def test_a_file_that_cannot_be_written_is_refused(world: MakeWorld) -> None:
    context = world(1).contexts[0]
    with pytest.raises(ConfigError, match="the timeline cannot be written to /proc/no/trace"):
        context.start_timeline("/proc/no/trace")


def test_a_write_that_fails_leaves_what_was_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space left, in the middle of an event."""
    timeline = Timeline(str(tmp_path / "trace"), 0, mark_cycles=True)
    write = os.pwrite
    failed = threading.Event()

    def full(descriptor: int, data: bytes, at: int) -> int:
        if len(data) > 10 and not failed.is_set():
            write(descriptor, data[: len(data) // 2], at)
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    timeline.phase("x", "ALLREDUCE", timeline.now(), timeline.now())
    assert failed.wait(10)
    timeline._thread.join(10)
    *whole, last = json.loads((tmp_path / "trace").read_text())
    assert len(whole) == 2
    assert last["name"] == "INCOMPLETE: No space left on device"
    assert incomplete(str(tmp_path / "trace")) == "No space left on device"
    timeline.phase("x", "ALLREDUCE", timeline.now(), timeline.now())
    timeline.cycle(timeline.now())
    assert timeline._queue.empty()  # nothing would take it out
    timeline.close()


def test_a_trace_that_cannot_grow_says_so_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(str(tmp_path / "trace"), 0)
    monkeypatch.setattr(timeline, "_move", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for number in range(2000):
        timeline.phase(f"tensor {number}", "ALLREDUCE", timeline.now(), timeline.now())
    timeline._thread.join(10)
    events = json.loads((tmp_path / "trace").read_text())
    assert len(events) > 300
    assert events[-1]["name"] == f"INCOMPLETE: {incomplete(str(tmp_path / 'trace'))}" != "INCOMPLETE: "


def test_a_trace_that_ends_on_a_full_disk_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the space that was kept free for more stays."""
    timeline = Timeline(str(tmp_path / "trace"), 0)
    timeline.phase("x", "ALLREDUCE", timeline.now(), timeline.now())
    monkeypatch.setattr(timeline, "_move", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    timeline.close()
    assert len(json.loads((tmp_path / "trace").read_text())) == 2 + 3
    assert incomplete(str(tmp_path / "trace")) == ""
    assert incomplete(str(tmp_path / "none")) == ""


def test_no_write_crosses_the_end_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill or a full disk at such a place would leave half an event."""
    write, written = os.pwrite, []

    def noted(descriptor: int, data: bytes, at: int) -> int:
        written.append((at, len(data)))
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", noted)
    timeline = Timeline(str(tmp_path / "trace"), 0)
    for number in range(300):
        timeline.phase(f"tensor {number}", "ALLREDUCE", timeline.now(), timeline.now())
    timeline.close()
    assert len(written) > 10
    assert [(at, size) for at, size in written if at % 4096 + size > 4096] == []
    assert len(json.loads((tmp_path / "trace").read_text())) == 2 + 3 * 300


def test_nothing_is_kept_of_operations_that_rank_0_does_not_execute(tmp_path: Path) -> None:
    def rank_body(context: Context) -> int:
        context.start_timeline(str(tmp_path / "trace"))
        frontend = frontend_of(context)
        others = frontend.add_process_set([1, 2])
        if context.rank:
            for _ in range(5):
                frontend.allreduce(np.ones(2), process_set=others)
        with pytest.raises(MismatchError):
            frontend.allreduce(np.ones(2 + context.rank), name="wrong")
        frontend.barrier()
        timeline = context.engine.timelines._open.get(False)
        return len(timeline._first_arrival) if timeline is not None else 0

    with World(3, "local") as made:
        assert made.run(rank_body) == [0, 0, 0]


def test_sets_and_joins_are_traced_too(tmp_path: Path) -> None:
    def rank_body(context: Context) -> None:
        context.start_timeline(str(tmp_path / "trace"))
        frontend = frontend_of(context)
        frontend.add_process_set(ProcessSet([0]))
        if context.rank == 0:
            frontend.allreduce(np.ones(2), name="alone")
        frontend.join()

    with World(2, "local") as made:
        made.run(rank_body)
    rows = rows_of(tmp_path / "trace")
    assert "ADD_PROCESS_SET" in spans(rows["add_process_set.noname.1"])
    assert "ALLREDUCE" in spans(rows["allreduce.alone"])
