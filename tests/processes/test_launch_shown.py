"""Real jobs as others see them: the page's data, the report, traces, and the line on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdgloo.run
from hvdgloo._observe import jobs
from hvdgloo._observe.top import command as top
from hvdgloo._observe.top.source import UnixConnection
from hvdgloo._observe.view import STATES
from hvdgloo.errors import ConfigError, JobFailedError
from tests.support import warm
from tests.support.elastic_launch import Job
from tests.support.launching import Launcher, clean_environment, launcher_in, wait_for
from tests.support.terminal import terminal

PATIENCE = 40.0

STEPS = """
import os, time
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
print("rank", hvd.rank(), "trains", flush=True)
over, until = False, time.monotonic() + 50
while not over:
    hvd.allreduce(np.ones(4, np.float32), name="gradient")
    ended = float(os.path.exists("end") or time.monotonic() > until)
    over = hvd.allreduce(np.array([ended], np.float32), op=hvd.Sum, name="over")[0] > 0
    time.sleep(0.1)  # a trace of as many operations as there could be would be megabytes
"""


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's private directory."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "hvdgloo"


@pytest.fixture
def launcher(private: Path, tmp_path: Path) -> Iterator[Launcher]:
    with launcher_in(tmp_path) as launcher:
        yield launcher


class Shown:
    """The running job of this user, seen from another process."""

    def __init__(self, private: Path) -> None:
        self.file = wait_for(lambda: private.is_dir() and jobs.jobs(str(private)), PATIENCE, "the job's file")[0]

    def ask(self, path: str, body: bytes | None = None) -> Any:
        """Return the page's answer to a request as ``top`` sends it."""
        connection = UnixConnection(self.file.unix, PATIENCE)
        try:
            token = self.file.token if body is None else self.file.control
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 400, data
            return json.loads(data)
        finally:
            connection.close()

    def until(self, condition: Callable[[Any], object], what: str) -> Any:
        """The job's snapshot, once the condition holds for it."""
        found: list[Any] = []

        def holds() -> bool:
            found[:] = [self.ask("/v1/job")]
            return bool(condition(found[0]))

        wait_for(holds, PATIENCE, what)
        return found[0]


def at_work(size: int) -> Callable[[Any], bool]:
    """So many ranks have reported operations."""
    return lambda seen: len(seen["ranks"]["rank"]) == size and min(seen["ranks"]["operations"]) > 0


def end(launcher: Launcher) -> None:
    (launcher.folder / "end").touch()


def test_any_job_can_be_looked_at_and_leaves_nothing_behind(launcher: Launcher, private: Path) -> None:
    process = launcher.start("-np", "2", warm.python(*warm.NUMPY), launcher.script(STEPS))
    shown = Shown(private)
    shown.until(at_work(2), "both ranks at work")
    # Hosts are sampled apart from ranks.
    seen = shown.until(lambda seen: at_work(2)(seen) and seen["hosts"][0]["cores"] > 0, "their host's first sample")
    assert seen["job"]["command"].endswith("worker.py")
    assert [host["name"] for host in seen["hosts"]] == ["localhost"]
    assert seen["hosts"][0]["cores"] == os.cpu_count()
    assert {plane["name"] for plane in seen["planes"]} & {"shared memory", "gloo"}
    end(launcher)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert error == b""
    launcher.assert_nothing_left()
    assert list(private.iterdir()) == []


def test_top_lists_several_jobs_and_shows_the_one_that_is_left(launcher: Launcher, private: Path) -> None:
    script = launcher.script(STEPS)
    killed = launcher.start("-np", "1", warm.python(*warm.NUMPY), script, "first")
    wait_for(lambda: private.is_dir() and len(jobs.jobs(str(private))) == 1, PATIENCE, "the first job's file")
    other = launcher.start("-np", "1", warm.python(*warm.NUMPY), script, "second")
    wait_for(lambda: len(jobs.jobs(str(private))) == 2, PATIENCE, "the second job's file")
    listed = shown_by_top()
    rows = [line.split() for line in listed.splitlines()[2:]]
    assert {(int(row[-4]), row[-1]) for row in rows} == {(killed.pid, "first"), (other.pid, "second")}
    assert shown_by_top(str(killed.pid)).splitlines()[0].endswith("worker.py first")
    killed.kill()
    killed.wait(PATIENCE)
    wait_for(lambda: len(jobs.jobs(str(private))) == 1, PATIENCE, "the killed job's file to be recognised as stale")
    assert shown_by_top().splitlines()[0].endswith("worker.py second")
    end(launcher)
    assert other.wait(PATIENCE) == 0
    wait_for(lambda: not launcher.living(), PATIENCE, "the end of all processes")
    assert [path.name for path in private.iterdir() if path.suffix in (".job", ".sock")] == []


def shown_by_top(*arguments: str) -> str:
    out = io.StringIO()
    assert top.main(arguments, out, os.environ) == 0
    return out.getvalue()


def test_page_shows_output_and_who_has_failed(launcher: Launcher, private: Path) -> None:
    with (launcher.folder / "err").open("wb") as err:
        flags = ("-np", "2", "--page", "--grace-period", "20")
        process = launcher.start(*flags, warm.python(*warm.NUMPY), launcher.script(STEPS), stderr=err)
        shown = Shown(private)
        seen = shown.until(at_work(2), "both ranks at work")
        lines = wait_for(lambda: len(found := shown.ask("/v1/output")) >= 2 and found, PATIENCE, "their output")
        assert {(line["rank"], line["text"]) for line in lines} == {(0, "rank 0 trains"), (1, "rank 1 trains")}
        os.kill(seen["ranks"]["pid"][1], signal.SIGKILL)
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    text = (launcher.folder / "err").read_text()
    assert re.match(r"hvdgloo-run: the job's page is at http://127\.0\.0\.1:\d+/\?token=\S+\n", text), text


def test_report_is_written_after_a_failure_and_the_summary_says_where(launcher: Launcher) -> None:
    script = launcher.script("import os; print('I am', os.environ['RANK']); raise ValueError('no more data')")
    done = launcher.run("-np", "1", "--report", "reports/job.html", script, timeout=PATIENCE)
    assert done.returncode == 1
    what = "the job failed: rank 0 on host localhost exited with status 1: ValueError: no more data"
    lines = done.stderr.splitlines()
    assert f"hvdgloo-run: {what}" in lines
    assert lines[-1] == "hvdgloo-run: the report is in reports/job.html"
    folder = launcher.folder / "reports"
    assert lines[0].endswith(f"--report reports/job.html: there is no directory {folder} yet; the job's end creates it")
    assert "<html" in (launcher.folder / "reports/job.html").read_text()
    recording = json.loads((launcher.folder / "reports/job.json").read_text())
    job = recording["snapshot"]["job"]
    assert (job["state"], job["exit_code"], job["message"]) == ("failed", 1, what)
    assert "I am 0" in [line["text"] for line in recording["lines"]]


LOGS = """
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
for step in range(4):
    hvd.log(loss=step + 10.0 * hvd.rank(), step=step, steps=4, epoch=0, epochs=2, note="half" if step == 2 else None)
hvd.log({"mean/loss": hvd.rank()}, average=True)
hvd.barrier()
"""


def test_report_has_the_numbers_the_progress_and_the_notes_that_the_program_logs(launcher: Launcher) -> None:
    flags = ("-np", "2", "--report", "job.html")
    done = launcher.run(*flags, warm.python(*warm.NUMPY), launcher.script(LOGS), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    snapshot = json.loads((launcher.folder / "job.json").read_text())["snapshot"]
    assert snapshot["job"]["logged"] == {"loss": 3.0, "mean/loss": 0.5}
    progress = {"step": 3, "steps": 4, "epoch": 0, "epochs": 2, "share": 0.5, "remaining": None}
    assert snapshot["job"]["progress"] == progress
    assert [event["text"] for event in snapshot["events"] if event["kind"] == "note"] == ["half"]


ODD = os.fsdecode(b"\xff")
"""Not UTF-8."""


def test_a_command_with_bytes_that_are_not_utf_8_runs_and_is_shown_without_its_secrets(
    launcher: Launcher, private: Path
) -> None:
    flags = ("-np", "2", "--page", "--report", f"{ODD}.html", "--timeline-filename", f"{ODD}.timeline")
    script = launcher.script(STEPS)
    given = (ODD, "--password=hunter2", "--token", "hunter3", "s3://ann:hunter4@bucket")
    process = launcher.start(*flags, warm.python(*warm.NUMPY), script, *given)
    shown = Shown(private)
    seen = shown.until(lambda seen: at_work(2)(seen) and seen["settings"], "both ranks at work")
    masked = f"{script} '\\xff' '--password=***' --token '***' 's3://ann:***@bucket'"
    assert seen["job"]["command"].endswith(masked)
    assert shown.file.command.endswith(masked)
    assert seen["settings"]["timeline.filename"] == "\\xff.timeline"
    with pytest.raises(ConfigError, match=r"--password=\*\*\*"):
        top.find("another", os.environ)
    end(launcher)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    for suffix in ("html", "json"):
        report = launcher.folder / f"{ODD}.{suffix}"
        assert "hunter" not in report.read_text()
        assert report.stat().st_mode & 0o777 == 0o600
    assert b"hunter" not in error


NAMED = """if True:
    import os, socket, sys
    socket.sethostname(b"h\\xff\\x1b")
    os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of its own takes root's rights")
def test_a_host_whose_name_is_not_utf_8_has_jobs_like_any_other(launcher: Launcher) -> None:
    script = launcher.script(
        "import numpy as np, hvdgloo.numpy as hvd; hvd.init(); print(hvd.allreduce(np.ones(1), op=hvd.Sum))"
    )
    wrapper = ["unshare", "--uts", "--", sys.executable, "-c", NAMED]
    done = launcher.run("-np", "2", "--no-prefix", "--log-ranks", "0", script, wrapper=wrapper, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "[2.]\n"), done.stderr


def test_report_of_a_job_that_is_interrupted_says_that_it_was_stopped(launcher: Launcher) -> None:
    script = launcher.script("open('here', 'w').write('1'); import time; time.sleep(60)")
    process = launcher.start("-np", "1", "--report", "job.html", script)
    launcher.file("here")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    shown = json.loads((launcher.folder / "job.json").read_text())["snapshot"]
    job = shown["job"]
    assert (job["state"], job["message"]) == ("stopped", "stopped by SIGINT")
    assert [STATES[state] for state in shown["ranks"]["state"]] == ["ended"]


def test_report_shows_a_host_that_was_left_out_as_such(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time
        import hvdgloo.numpy as hvd
        from hvdgloo import elastic
        hvd.init()
        @elastic.run_fn
        def train(state):
            if hvd.size() == 2 and hvd.rank() == 1:
                os._exit(5)
            while hvd.size() == 2:
                hvd.barrier()
        train(elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0))
        """
    )
    flags = ("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", "--report", "job.html")
    done = launcher.run(*flags, warm.python(*warm.NUMPY), script, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    shown = json.loads((launcher.folder / "job.json").read_text())["snapshot"]
    assert "is left out" in done.stderr
    assert {host["name"]: host["state"] for host in shown["hosts"]}["127.0.0.1"] == "left out"


def test_a_report_that_cannot_be_written_in_the_end_is_a_failure_of_the_launcher(launcher: Launcher) -> None:
    script = launcher.script("import os; os.rmdir('reports'); open('reports', 'w').close()")
    (launcher.folder / "reports").mkdir()
    done = launcher.run("-np", "1", "--report", "reports/job.html", script, timeout=PATIENCE)
    assert done.returncode == 1
    assert (
        "hvdgloo-run: all workers succeeded, but not all could be written: --report reports/job.html: " in done.stderr
    )


def test_report_of_a_job_that_could_not_be_started(launcher: Launcher) -> None:
    done = launcher.run("-H", "no-such-host.invalid:1", "--report", "job.html", "true", timeout=PATIENCE)
    assert done.returncode == 1
    assert "hvdgloo-run: the report is in job.html" in done.stderr
    job = json.loads((launcher.folder / "job.json").read_text())["snapshot"]["job"]
    assert job["state"] == "failed"
    assert "no-such-host.invalid" in job["message"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--report", "."], "--report .: it cannot be written: it is a directory"),
        (["--page-control"], "--page-control needs the page; add --page, or leave it out"),
        (["--page=nonsense:port"], "'nonsense:port': expected ADDR, ADDR:PORT or [ADDR]:PORT"),
        (["--page=192.0.2.1:0"], "192.0.2.1"),
    ],
)
def test_what_cannot_be_shown_is_said_before_anything_starts(launcher: Launcher, flags: list[str], text: str) -> None:
    done = launcher.run("-np", "1", *flags, launcher.script("open('started', 'w')"))
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.extended
def test_a_trace_that_the_page_asks_for_has_all_ranks(launcher: Launcher, private: Path) -> None:
    flags = ("-np", "2", "--page", "--page-control")
    process = launcher.start(*flags, warm.python(*warm.NUMPY), launcher.script(STEPS))
    shown = Shown(private)
    shown.until(at_work(2), "both ranks at work")
    assert shown.ask("/v1/traces", b'{"steps": 3}')["state"] == "tracing"

    def made() -> Any:
        (trace,) = shown.ask("/v1/traces")["traces"]
        return trace if trace["state"] != "tracing" else None

    trace = wait_for(made, PATIENCE, "the trace")
    assert trace["state"] == "ready", trace
    events = shown.ask("/v1/traces/1")
    rows = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0 allreduce.gradient", "rank 1 allreduce.gradient"} <= rows
    end(launcher)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def told(seen: Any) -> list[str]:
    """Return the job's lines about its changes."""
    return [event["text"] for event in seen["events"] if event["kind"] == "elastic" and "went on" in event["text"]]


@pytest.mark.extended
def test_changes_of_an_elastic_job_are_seen(launcher: Launcher, private: Path) -> None:
    job = Job(launcher, warm.python(*warm.NUMPY))
    job.start("-np", "2", "--min-np", "1", "--failures-per-host", "99", "--page")
    first = job.members(1, 2)
    shown = Shown(private)
    seen = shown.until(lambda seen: seen["ranks"]["pid"] == [worker.pid for worker in first], "the first epoch")
    assert (seen["job"]["least"], seen["job"]["most"]) == (1, None)
    os.kill(first[1].pid, signal.SIGKILL)
    again = job.members(2, 2)
    pids = [worker.pid for worker in again]
    seen = shown.until(lambda seen: seen["ranks"]["pid"] == pids and told(seen), "the next epoch, and why")
    assert seen["job"]["epoch"] >= 1
    assert "was killed by signal 9 (SIGKILL)" in told(seen)[0]
    assert job.finished() == 0


TRAINS = STEPS.replace("hvd.init()\n", "hvd.init()\nhvd.barrier()\n", 1)


def test_on_a_terminal_a_job_that_hangs_says_what_its_ranks_wait_for(private: Path, tmp_path: Path) -> None:
    """Without that, the screen is empty until the stall report comes, a minute after the job has hung."""
    hangs = """
import os
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(4, np.float32), name="next" if hvd.rank() else "val_loss")
"""
    (tmp_path / "train.py").write_text(hangs)
    command = ("-m", "hvdgloo.runner", "-np", "2", warm.python(*warm.NUMPY), "train.py")
    with terminal(*command, env=clean_environment(), cwd=tmp_path, columns=120) as screen:
        screen.wait_for(r"2 ranks: rank 0 waits for allreduce\.val_loss, rank 1 for allreduce\.next, \S+ s")
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 128 + signal.SIGINT


def test_on_a_terminal_a_line_says_how_far_the_job_is_and_goes_away(private: Path, tmp_path: Path) -> None:
    logs = TRAINS.replace("time.sleep(0.1)", "hvd.log(loss=0.5, epoch=1, epochs=4); time.sleep(0.1)")
    (tmp_path / "worker.py").write_text(logs)
    command = ("-m", "hvdgloo.runner", "-np", "2", warm.python(*warm.NUMPY), "worker.py")
    with terminal(*command, env=clean_environment(), cwd=tmp_path, columns=120) as screen:
        screen.wait_for(r"(?m)^2 ranks, 50 %, epoch 2 of 4, .+/s.*, \d+(\.\d)? s$", PATIENCE)
        (tmp_path / "end").touch()
        assert screen.end(PATIENCE) == 0
        assert not re.search(r"(?m)^2 ranks", screen.text)
        assert "[0]<stdout>:rank 0 trains" in screen.text


@pytest.mark.parametrize("flag", ["--no-progress", "--verbose"])
def test_the_line_can_be_left_out(private: Path, tmp_path: Path, flag: str) -> None:
    (tmp_path / "worker.py").write_text(TRAINS)
    command = ("-m", "hvdgloo.runner", "-np", "2", flag, warm.python(*warm.NUMPY), "worker.py")
    with terminal(*command, env=clean_environment(), cwd=tmp_path, columns=120) as screen:
        screen.wait_for("rank 0 trains", PATIENCE)
        # The job is not observed, so its workers have nowhere to report to.
        assert not list(private.glob("*/agent"))
        (tmp_path / "end").touch()
        assert screen.end(PATIENCE) == 0
        assert b"2 ranks," not in screen.raw


def test_from_python(private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    report = tmp_path / "job.html"

    def work() -> int:
        return 7

    assert hvdgloo.run.run(work, np=1, page=True, report=str(report)) == [7]
    assert "hvdgloo-run: the job's page is at http://127.0.0.1:" in said.getvalue()
    job = json.loads(report.with_suffix(".json").read_text())["snapshot"]["job"]
    assert job["state"] == "ended"
    assert job["command"] == "hvdgloo.run.run(test_from_python.<locals>.work)"

    def fail() -> None:
        os._exit(3)

    with pytest.raises(JobFailedError) as caught:
        hvdgloo.run.run(fail, np=1, report=str(report))
    assert str(caught.value).endswith(f"the report is in {report}")
