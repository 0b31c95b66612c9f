"""The launcher's views of a job: fed by a supervisor that is played here, read as the page reads them."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from hvdgloo._observe import jobs
from hvdgloo._observe.samples import CODEC, Note, Sample, Steps
from hvdgloo._observe.view import STATES, Snapshot
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Views
from hvdgloo.runner.observing.job_observer import JobObserver
from hvdgloo.runner.protocol.frames import Observe, Observed, TraceSteps, Tracing
from hvdgloo.runner.supervise.observers import PlacedWorker
from tests.support.launching import wait_for
from tests.support.threads import Task

EXITED = JobOutcome(Failure(1, "h2", 3, "exited with status 3"))
SEATS = [PlacedWorker(0, 0, "h1", 0), PlacedWorker(1, 1, "h2", 0)]


class Played:
    """A supervisor, as far as those who look at the job need it."""

    def __init__(self) -> None:
        self.job_observers: Any = None
        self.observing: list[Observe] = []
        self.tracing: list[TraceSteps] = []

    def observe_soon(self, frame: Observe) -> None:
        self.observing.append(frame)

    def trace_soon(self, frame: TraceSteps) -> None:
        self.tracing.append(frame)


@pytest.fixture
def folder() -> Iterator[Path]:
    """The user's private directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


class Stage:
    """A job that is shown.

    Attributes:
        said: lines that were printed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "hvdgloo"
        self.spec = LaunchSpec(
            ("true",),
            (HostEntry("h1", 1), HostEntry("h2", 1)),
            2,
            "/",
            {"XDG_RUNTIME_DIR": str(folder)},
            b"s" * 32,
        )
        self.said: list[str] = []
        self.supervisor = Played()

    @contextmanager
    def show(self, *, progress: bool = False, **views: Any) -> Iterator[JobObserver]:
        spec = replace(self.spec, views=Views(title="train.py --epochs 90", **views))
        with JobObserver(spec, say=self.said.append, progress=progress) as job_observer:
            job_observer.attend(cast(Any, self.supervisor))
            yield job_observer

    @staticmethod
    def start(job_observer: JobObserver) -> None:
        """Workers on two hosts."""
        job_observer.tick()
        for name in ("h1", "h2"):
            job_observer.host(name, "up")
        job_observer.placed(0, SEATS)
        job_observer.spawned(0, 100)
        job_observer.spawned(1, 200)

    @property
    def job(self) -> jobs.JobFile:
        (file,) = self.folder.glob("*.job")
        return jobs.from_json(file.read_bytes(), jobs.JobFile)

    def ask(self, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, Any]:
        """Ask the job as ``top`` does."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(self.job.unix)
            token = self.job.control or self.job.token
            head = (
                f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            sock.sendall(head.encode() + body)
            data = b""
            while piece := sock.recv(65536):
                data += piece
        answer, _, text = data.partition(b"\r\n\r\n")
        return int(answer.split()[1]), json.loads(text)


@pytest.fixture
def stage(folder: Path) -> Stage:
    return Stage(folder)


def snapshot(job_observer: JobObserver) -> Snapshot:
    """All that there is to see now."""
    observatory = job_observer._observatory
    assert observatory is not None
    observatory.tick()
    return observatory.snapshot()


def states(job_observer: JobObserver) -> list[str]:
    return [STATES[index] for index in snapshot(job_observer).ranks.state]


def sample(rank: int, count: int) -> bytes:
    steps = Steps(count=count, seconds=0.1 * count, last=0.1)
    return CODEC.encode(Sample(rank, 2, 0, 100 * (rank + 1), time.time(), steps=steps, doing="computing"))


def test_a_job_that_is_not_observed_has_a_sleeping_socket_and_no_more(stage: Stage) -> None:
    with stage.show() as job_observer:
        stage.start(job_observer)
        job_observer.output(0, 1, b"one line\n")
        assert job_observer.observe is None
        assert job_observer._observatory is None
        assert stage.job.command == "train.py --epochs 90"
        assert stage.job.pid == os.getpid()
        assert stage.job.address == ""
        assert stage.supervisor.observing == []
        assert job_observer.subscribe() is None
    assert list(stage.folder.iterdir()) == []
    assert stage.said == []


def test_top_wakes_it_and_sees_what_has_happened_before(stage: Stage) -> None:
    with stage.show() as job_observer:
        stage.start(job_observer)
        job_observer.ended(1, -9, "was killed by signal 9 (SIGKILL)")
        status, job = stage.ask("/v1/job")
        assert status == 200
        assert job["job"]["command"] == "train.py --epochs 90"
        assert stage.supervisor.observing == [Observe(host=True)]
        assert job_observer.observe == Observe(host=True), "agents that come later are told with their start"
        assert snapshot(job_observer).ranks.pid == [100, 200]
        assert states(job_observer) == ["starting", "failed"]
        assert [host.name for host in snapshot(job_observer).hosts] == ["h1", "h2"]
        job_observer.output(0, 1, b"a line that is written now\n")
        job_observer.conclude(JobOutcome(Failure(None, "h1", 1, "was lost")), "")
        (line,) = stage.ask("/v1/output")[1]
        assert line["text"] == "a line that is written now"


def test_the_supervisor_goes_on_while_what_is_shown_is_imported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, went_on = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def versions() -> dict[str, str]:
        begun.set()
        in_time.append(went_on.wait(20))
        return {}

    monkeypatch.setattr("hvdgloo.runner.observing.job_observer._versions", versions)
    with stage.show() as job_observer:
        stage.start(job_observer)
        asking = Task(lambda: stage.ask("/v1/job"))
        assert begun.wait(60)
        job_observer.host("h2", "lost")
        went_on.set()
        asking.result()
        assert in_time == [True]
        assert [host.state for host in snapshot(job_observer).hosts] == ["up", "lost"]


def test_what_agents_pass_on_is_seen_and_nonsense_is_passed_over(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        assert job_observer.observe == Observe(host=True)
        stage.start(job_observer)
        job_observer.reported("h1", Observed([b"nonsense", sample(0, 1), CODEC.encode(Note(0, 1.0, "warning", "hot"))]))
        job_observer.reported("h2", Observed([sample(1, 4)]))
        seen = snapshot(job_observer)
        assert seen.ranks.steps == [1, 4]
        assert [event.text for event in seen.events if event.kind == "warning"] == ["hot"]


def test_the_pages_address_is_printed_or_shown_as_a_link(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)):
        (line,) = stage.said
        assert line.startswith("the job's page is at http://127.0.0.1:")
        assert "?token=" in line
        assert stage.job.address.startswith("http://127.0.0.1:")
        assert "token" not in stage.job.address
    links: list[str] = []
    with stage.show(page=("127.0.0.1", 0), show_link=links.append):
        assert len(links) == 1
        assert len(stage.said) == 1, "not printed, too"


def test_a_page_that_cannot_listen_is_an_error_before_anything_starts(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)), stage.show(page=("127.0.0.1", port)):
            raise AssertionError("it has started")
    assert list(stage.folder.glob("*")) == []


def test_without_a_private_folder_the_job_runs_and_top_does_not_find_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    monkeypatch.setattr("hvdgloo._platform.runtime.SHORT", "/nowhere")
    stage.spec = replace(stage.spec, environ={})
    with stage.show() as job_observer:
        stage.start(job_observer)
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        assert stage.said, "the page needs no directory"


def test_for_the_progress_line_hosts_are_not_measured_and_output_is_not_kept(stage: Stage) -> None:
    with stage.show(progress=True) as job_observer:
        assert job_observer.observe == Observe(host=False)
        stage.start(job_observer)
        assert job_observer.subscribe() is None, "no rank has reported anything"
        job_observer.output(0, 1, b"one line\n")
        job_observer.reported("h1", Observed([sample(0, 3)]))
        snapshot(job_observer)
        reader = job_observer.subscribe()
        assert reader is not None
        news = reader.next()
        assert isinstance(news, Snapshot)
        assert news.ranks.steps[0] == 3
        assert news.output == 0


def test_process_numbers_of_many_workers_are_collected(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        assert snapshot(job_observer).ranks.pid == [0, 0]
        when = job_observer.tick()
        assert when is not None
        wait_for(lambda: time.monotonic() >= when, what="that moment")
        assert job_observer.tick() is None
        assert snapshot(job_observer).ranks.pid == [100, 200]


@pytest.mark.parametrize(
    ("status", "reason", "state"),
    [
        (0, "exited with status 0", "ended"),
        (3, "exited with status 3", "failed"),
        (-15, "", "ended"),
        (None, "", "lost"),
    ],
)
def test_what_has_become_of_a_worker(stage: Stage, status: int | None, reason: str, state: str) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(1, status, reason)
        assert states(job_observer) == ["starting", state]


def test_ranks_of_an_elastic_job_belong_to_the_present_epoch(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(0, -9, "was killed by signal 9 (SIGKILL)")
        job_observer.placed(1, [PlacedWorker(1, 0, "h2", 0), PlacedWorker(7, 1, "h2", 1)])
        job_observer.spawned(7, 700)
        job_observer.output(1, 1, b"I am rank 0 now\n")
        job_observer.conclude(JobOutcome(), "")
        seen = snapshot(job_observer)
        assert (seen.job.epoch, seen.ranks.pid) == (1, [200, 700])
        assert job_observer._observatory is not None
        assert [(line.rank, line.text) for line in job_observer._observatory.lines()] == [(0, "I am rank 0 now")]


def test_a_restart_is_an_event_and_begins_again(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(0, 1, "exited with status 1")
        again = Played()
        job_observer.attend(cast(Any, again), "restart 1: rank 0 exited with status 1")
        assert again.job_observers is job_observer
        job_observer.placed(0, SEATS)
        assert states(job_observer) == ["starting", "starting"]
        assert "restart 1: rank 0 exited with status 1" in [event.text for event in snapshot(job_observer).events]


def test_the_end_is_shown(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.conclude(EXITED, "the job failed: rank 1 exited with status 3")
        job = snapshot(job_observer).job
        assert (job.state, job.exit_code, job.message) == ("failed", 3, "the job failed: rank 1 exited with status 3")


def test_the_cause_has_failed_and_not_those_that_failed_because_of_it(stage: Stage) -> None:
    """Rank 0 lost its peer, said so, and was gone before rank 1, which was still printing its traceback."""
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(0, 1, "exited with status 1")
        job_observer.ended(1, -15, "")
        assert states(job_observer) == ["failed", "ended"], "as far as is known"
        job_observer.conclude(EXITED, "the job failed: rank 1 exited with status 3")
        assert states(job_observer) == ["ended", "failed"]
        assert snapshot(job_observer).ranks.detail == [
            "ended with the job: exited with status 1",
            "the job failed: rank 1 exited with status 3",
        ]


def test_no_rank_has_failed_where_a_host_was_lost(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(0, 1, "exited with status 1")
        job_observer.conclude(JobOutcome(Failure(None, "h2", 1, "was lost")), "the job failed: the agent was lost")
        assert states(job_observer) == ["ended", "ended"]
        assert snapshot(job_observer).job.state == "failed"


def test_a_job_that_is_stopped_by_a_user_has_not_failed(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        job_observer.ended(1, 1, "exited with status 1")
        job_observer.conclude(JobOutcome(interrupted=signal.SIGINT), "stopped by SIGINT")
        job = snapshot(job_observer).job
        assert (job.state, job.exit_code, job.message) == ("stopped", 130, "stopped by SIGINT")
        assert states(job_observer) == ["ended", "ended"]


def test_a_host_that_is_left_out_is_not_up_until_it_is_used_again(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        name = SEATS[1].host
        job_observer.host(name, "left out")
        shown = {host.name: host.state for host in snapshot(job_observer).hosts}
        assert shown[name] == "left out"
        job_observer.placed(1, SEATS)
        assert {host.name: host.state for host in snapshot(job_observer).hosts}[name] == "up"
        job_observer.host(name, "lost", "its agent was killed")
        job_observer.host(name, "left out")
        assert {host.name: host.state for host in snapshot(job_observer).hosts}[name] == "lost"


@pytest.mark.parametrize(
    ("error", "status", "state"),
    [
        (LaunchError("host h2 cannot be reached\nand more"), 1, "failed"),
        (JobFailedError("interrupted", exit_code=143), 143, "stopped"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_a_job_that_could_not_be_started_has_failed_or_was_stopped(
    stage: Stage, error: BaseException, status: int, state: str
) -> None:
    found: list[Any] = []

    def fail() -> None:
        with stage.show(page=("127.0.0.1", 0)) as job_observer:
            found.append(job_observer._observatory)
            raise error

    with pytest.raises(type(error)):
        fail()
    job = found[0].snapshot().job
    assert (job.state, job.exit_code) == (state, status)
    assert "\n" not in job.message


def test_traces_need_a_right_of_their_own(stage: Stage) -> None:
    with stage.show(page=("127.0.0.1", 0)) as job_observer:
        stage.start(job_observer)
        assert stage.ask("/v1/traces", "POST", b'{"steps": 5}')[0] == 403
    with stage.show(page=("127.0.0.1", 0), control=True) as job_observer:
        stage.start(job_observer)
        assert stage.ask("/v1/traces", "POST", b'{"steps": 5}')[0] == 202
        assert stage.supervisor.tracing == [TraceSteps(1, 5)]
        job_observer.reported("h1", Tracing(1, 0))
        job_observer.reported("h2", Tracing(1, 0))
        (trace,) = stage.ask("/v1/traces")[1]["traces"]
        assert trace["state"] == "failed"
        assert "no worker can be asked" in trace["text"]


def test_nothing_is_left_behind(stage: Stage) -> None:
    before = threading.active_count()
    for views in ({}, {"page": ("127.0.0.1", 0), "control": True}):
        with stage.show(**cast(Any, views)) as job_observer:
            stage.start(job_observer)
            stage.ask("/v1/job")
        wait_for(lambda: threading.active_count() <= before, 20, "the end of all threads")
    assert list(stage.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "--report '': it cannot be written: it does not end with the name of a file"),
        ("absent/", "absent/: it cannot be written: it does not end with the name of a file"),
        (".", "--report .: it cannot be written: it is a directory"),
        (
            "/proc/x.html",
            "--report /proc/x.html: it cannot be written: (no file can be made|permission denied) in /proc",
        ),
        ("taken", "taken: it cannot be written: .*taken.json: it is a directory"),
    ],
)
def test_a_report_that_could_not_be_written_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").mkdir()
    spec = LaunchSpec(("true",), [HostEntry("h1", 1)], np=1, cwd="/", secret=b"", environ={}, views=Views(report=path))
    with pytest.raises(ConfigError, match=text), JobObserver(spec, say=print):
        pytest.fail("the job would have begun")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken.json"]


def test_a_report_that_fails_in_any_way_is_said_and_the_job_has_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> list[str]:
        raise ValueError("what was\nnot foreseen")

    monkeypatch.setattr("hvdgloo._observe.page.report.write", fails)
    path = str(tmp_path / "job.html")
    said: list[str] = []
    spec = LaunchSpec(("true",), [HostEntry("h1", 1)], np=1, cwd="/", secret=b"", environ={}, views=Views(report=path))
    with JobObserver(spec, say=said.append) as job_observer:
        job_observer.conclude(JobOutcome(), "")
    assert said == [f"--report {path}: it cannot be written: ValueError: what was\\nnot foreseen"]
    assert job_observer.written == []
