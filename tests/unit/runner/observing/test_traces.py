"""Traces that an observer of a job asks for: of all ranks, merged, whatever becomes of some of them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdgloo._engine.timeline import Timeline
from hvdgloo._observe.trace_control import BusyError, Trace
from hvdgloo.runner.observing import traces as module
from hvdgloo.runner.observing.traces import Traces
from hvdgloo.runner.protocol.frames import Traced, TraceSteps, Tracing
from tests.support.launching import wait_for


class Job:
    """A job on two hosts, of which the supervisor is played here."""

    def __init__(self) -> None:
        self.ordered: list[TraceSteps] = []
        self.told: list[str] = []
        self.hosts = 2
        self.traces = Traces(self._order, self.told.append)

    def _order(self, frame: TraceSteps) -> int:
        if self.hosts:
            self.ordered.append(frame)
        return self.hosts

    def hand_in(self, host: str, rank: int, trace: bytes, number: int = 1) -> None:
        """An agent passes on a rank's trace, in pieces."""
        half = len(trace) // 2
        for data, last in ((trace[:half], False), (trace[half:], False), (b"", True)):
            self.traces.handed_in(host, Traced(number, rank, data, last))

    def outcome(self) -> Trace:
        """The last trace, once it has been made or given up."""
        wait_for(lambda: self.traces.traces()[-1].state != "tracing", 30, "the trace's end")
        return self.traces.traces()[-1]


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.traces.close()
    assert not module.os.path.exists(job.traces._folder)


@pytest.fixture
def written(tmp_path: Path) -> list[bytes]:
    """Return the traces of two ranks."""
    for rank in range(2):
        timeline = Timeline(str(tmp_path / f"{rank}"), rank)
        timeline.phase("tensor", "ALLREDUCE", timeline.now(), timeline.now())
        timeline.close()
    return [(tmp_path / f"{rank}").read_bytes() for rank in range(2)]


def test_the_traces_of_all_ranks_become_one_file(job: Job, written: list[bytes]) -> None:
    assert job.traces.trace(10) == Trace(1, 10, "tracing", "tracing the next 10 steps")
    assert job.ordered == [TraceSteps(1, 10)]
    job.traces.handed_in("h1", Tracing(1, 1))
    job.hand_in("h1", 0, written[0])
    assert job.traces.traces()[0].state == "tracing", "the other host has not said how many to wait for"
    with pytest.raises(BusyError, match="tracing the next 10 steps"):
        job.traces.path(1)
    job.traces.handed_in("h2", Tracing(1, 1))
    job.hand_in("h2", 1, written[1])
    made = job.outcome()
    assert (made.state, made.text) == ("ready", "10 steps of 2 ranks")
    merged = Path(job.traces.path(1)).read_bytes()
    assert made.bytes == len(merged)
    assert {f"rank {rank} tensor" for rank in range(2)} <= {
        event["args"]["name"] for event in json.loads(merged) if event["name"] == "process_name"
    }
    assert job.told == [
        "trace 1: tracing the next 10 steps",
        "trace 1 is ready: 10 steps of 2 ranks",
    ]


def test_a_full_disk_ends_the_trace_and_not_the_job(job: Job, written: list[bytes]) -> None:
    job.traces.trace(10)
    shutil.rmtree(job.traces._folder)  # nothing can be written there
    job.traces.handed_in("h1", Tracing(1, 1))
    job.hand_in("h1", 0, written[0])
    assert job.outcome().state == "failed"
    assert "cannot be kept" in job.outcome().text


def test_what_comes_while_traces_are_merged_is_too_late(
    job: Job, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    merging, go_on = threading.Event(), threading.Event()
    merge = module.merge

    def slow(paths: list[str], out: str) -> int:
        merging.set()
        assert go_on.wait(30)
        return merge(paths, out)

    monkeypatch.setattr(module, "merge", slow)
    job.traces.trace(10)
    job.traces.handed_in("h1", Tracing(1, 1))
    job.traces.handed_in("h2", Tracing(1, 0))
    job.hand_in("h1", 0, written[0])
    assert merging.wait(30)
    assert job.traces.deadline is None
    job.hand_in("h2", 1, written[1])
    go_on.set()
    assert job.outcome().text == "10 steps of 1 rank"
    assert sorted(module.os.listdir(job.traces._folder)) == ["1.json"]


def test_one_at_a_time(job: Job, written: list[bytes]) -> None:
    job.traces.trace(1)
    with pytest.raises(BusyError, match="trace 1 is being made"):
        job.traces.trace(1)
    job.traces.handed_in("h1", Tracing(1, 1))
    job.traces.handed_in("h2", Tracing(1, 0))
    job.hand_in("h1", 0, written[0])
    assert job.outcome().text == "1 step of 1 rank"
    assert job.traces.trace(5).number == 2
    job.hand_in("h1", 0, written[0], number=1)  # late, and not what is waited for
    assert job.traces.traces()[-1].state == "tracing"


def test_a_rank_that_hands_in_nothing_is_left_out_after_a_while(
    job: Job, written: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.traces.trace(10)
    job.traces.handed_in("h1", Tracing(1, 1))
    job.traces.handed_in("h2", Tracing(1, 1))
    job.hand_in("h1", 0, written[0])
    deadline = job.traces.deadline
    assert deadline is not None
    job.traces.tick()
    assert job.traces.traces()[0].state == "tracing"
    monkeypatch.setattr(module.time, "monotonic", lambda: deadline)
    job.traces.tick()
    made = job.outcome()
    assert (made.state, made.text) == ("ready", "10 steps of 1 rank; 1 more did not send theirs")


def test_a_host_that_is_lost_is_not_waited_for(job: Job, written: list[bytes]) -> None:
    job.traces.trace(10)
    job.traces.handed_in("h1", Tracing(1, 1))
    job.hand_in("h1", 0, written[0])
    job.traces.host_lost()
    assert job.outcome().state == "ready"


@pytest.mark.parametrize(
    ("workers", "why"), [(0, "no worker can be asked for a trace"), (2, "no rank sent a trace within 120 s")]
)
def test_without_any_trace_it_has_failed_and_says_why(
    job: Job, workers: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.traces.trace(10)
    job.traces.handed_in("h1", Tracing(1, workers))
    job.traces.handed_in("h2", Tracing(1, 0))
    deadline = job.traces.deadline
    if deadline is not None:
        monkeypatch.setattr(module.time, "monotonic", lambda: deadline)
        job.traces.tick()
    made = job.outcome()
    assert made.state == "failed"
    assert made.text.startswith(why)
    assert job.told[-1] == f"trace 1 has failed: {made.text}"


def test_what_is_no_trace_is_no_reason_to_fail_the_job(job: Job) -> None:
    job.hosts = 1
    job.traces.trace(10)
    job.traces.handed_in("h1", Tracing(1, 1))
    job.hand_in("h1", 0, b"nonsense")
    made = job.outcome()
    assert made.state == "failed"
    assert "cannot be merged" in made.text


def test_before_the_workers_start_there_is_nothing_to_trace(job: Job) -> None:
    job.hosts = 0
    with pytest.raises(BusyError, match="the job is not running"):
        job.traces.trace(10)
    assert job.traces.traces() == []
    with pytest.raises(KeyError):
        job.traces.path(1)


def test_the_jobs_end_ends_a_trace(job: Job) -> None:
    job.traces.trace(10)
    job.traces.close()
    assert job.traces.traces()[0].text == "the job ended before all ranks had traced their steps"
